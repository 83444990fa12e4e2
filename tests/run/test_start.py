"""A new run starts from the weights of another: other split, precision, boundary, data."""

import json
import sys
from io import StringIO
from typing import Any

import pytest
import torch

from test_train import silent
from thinwire.data import Tokenizer
from thinwire.engine.checkpoint import Checkpoint
from thinwire.engine.feed import Feed
from thinwire.errors import CheckpointError, ConfigError, DataError
from thinwire.inference import Model
from thinwire.report import PlainDisplay
from thinwire.run.start import adopted, make_start, open_origin, open_resume, prepare_data
from thinwire.train import train
from trained import trained

CPU = torch.device("cpu")
Changes = dict[str, Any]
SUBSPACE: Changes = {"boundary__mode": "subspace", "boundary__rank": 6}
REPARAM: Changes = {"boundary__mode": "reparam", "boundary__rank": 6}
MOVED: Changes = {"boundary__basis_update_every": 2}
PROJECTED: Changes = {"boundary__mode": "projected", "boundary__rank": 20}
TABLES: Changes = {**PROJECTED, "boundary__anchor": "per-stage"}
MUON: Changes = {"optim__name": "muon"}


@pytest.fixture
def begin(make_settings, corpus, tmp_path):
    """The first checkpoint of a run that starts from the weights of another."""

    def begin(source, folder, stream=None, **changes):
        settings = make_settings(**changes, train__init_from=str(source))
        display, where = PlainDisplay(stream or StringIO()), tmp_path / folder
        origin = open_origin(settings, display)
        return make_start(origin, adopted(settings, origin.settings), where, corpus, display)

    return begin


def loss_of(place, corpus):
    model = Model(place, "cpu")
    feed = Feed(corpus, model.settings, CPU)
    return model.validate(feed, 0, compressed=True).loss


EXACT: dict[str, tuple[Changes, Changes]] = {
    "dense, other split": ({}, {"pipeline__stages": 4}),
    "subspace, other optimizer": ({**SUBSPACE, **MUON}, SUBSPACE),
    "reparam that moved": ({**REPARAM, **MOVED}, REPARAM),
    "projected, with tables": (TABLES, TABLES),
}
CLOSE: dict[str, tuple[Changes, Changes]] = {
    "subspace to dense": ({**SUBSPACE, **MUON}, {}),
    "reparam to dense, other split": ({**REPARAM, **MOVED}, {"pipeline__stages": 4}),
    "reparam to subspace": ({**REPARAM, **MOVED}, SUBSPACE),
}


@pytest.mark.parametrize(("before", "after"), [*EXACT.values(), *CLOSE.values()],
                         ids=[*EXACT, *CLOSE])  # fmt: skip
def test_a_new_run_begins_where_the_other_ended(
    before, after, begin, make_settings, corpus, tmp_path
):
    source = trained(make_settings(**before, train__steps=3), corpus, tmp_path / "source")
    made = begin(source, "new", **after, run__seed=9)
    assert (made.step, made.versions.weight_version) == (0, 0)
    assert not [name for name in made.names() if name.startswith("optimizer/")]
    was, now = loss_of(source, corpus), loss_of(made.folder, corpus)
    assert now == (was if (before, after) in EXACT.values() else pytest.approx(was, abs=1e-6))
    narrow = {"run__precision": "fp32", "codec__forward": "fp32", "codec__backward": "fp32"}
    rounded = begin(source, "narrow", **after, **narrow)
    name = "model.layers.1.input_layernorm.weight"  # plain in every mode
    ours, theirs = (c.tensors([name])[name] for c in (rounded, Checkpoint.open(source)))
    assert ours.dtype == torch.float32 and torch.equal(ours, theirs.float())


def test_weights_that_mean_the_same_stay_bit_for_bit(begin, make_settings, corpus, tmp_path):
    """Also beside others that are held in the subspace no more."""
    settings = make_settings(**SUBSPACE, pipeline__stages=4, train__steps=3)
    source = trained(settings, corpus, tmp_path / "source")
    made, name = begin(source, "new", **SUBSPACE), "model.layers.0.mlp.down_proj.weight"
    ours, theirs = (c.tensors([name])[name] for c in (made, Checkpoint.open(source)))
    assert torch.equal(ours, theirs)


EMBEDDED: Changes = {**SUBSPACE, "boundary__anchor": "embedding"}
GROWN: dict[str, tuple[Changes, Changes]] = {
    "dense": ({}, {"pipeline__stages": 3}),
    "subspace": (SUBSPACE, SUBSPACE),
    "around the embedding": (EMBEDDED, EMBEDDED),
    "reparam, folded and projected again": (SUBSPACE, REPARAM),
    "tables": (TABLES, TABLES),
}


@pytest.mark.parametrize(("before", "after"), GROWN.values(), ids=GROWN)
def test_a_vocabulary_grows_by_rows(before, after, begin, make_settings, corpus, tmp_path):
    """What the model says of old tokens stays; rows of new ones come from names and the seed."""
    source = trained(make_settings(**before, train__steps=3), corpus, tmp_path / "source")
    said = StringIO()
    made = begin(source, "new", said, **after, model__vocab=310)
    assert "model.vocab grows from 300 to 310" in said.getvalue()
    ids_BT = torch.from_numpy(corpus.train[:32].astype("int64")).reshape(2, 16)
    was, now = (Model(place, "cpu")(ids_BT) for place in (source, made.folder))
    assert was.shape[-1] == 300 and torch.allclose(now[..., :300], was, rtol=0, atol=1e-9)
    head = made.tensors(["lm_head.weight"])["lm_head.weight"]
    assert torch.unique(head[300:], dim=0).shape == (10, 32), "the new rows differ"
    again, names = begin(source, "again", **after, model__vocab=310), made.names()
    assert names == again.names()
    assert all(made.tensors([n])[n].equal(again.tensors([n])[n]) for n in names)


def saved_by_an_earlier_release(settings, folder, monkeypatch):
    """A checkpoint whose tokenizer has all of the vocabulary for text."""
    with monkeypatch.context() as earlier:
        earlier.setattr(sys.modules["thinwire.data.prepare"], "RESERVED", ())
        data = prepare_data(settings, silent())
    assert data.tokenizer().vocab_size == settings.model.vocab
    return Checkpoint.open(trained(settings, data, folder))


def test_a_model_trained_on_text_learns_chat(make_settings, tmp_path, monkeypatch):
    """Its tokenizer has the tokens of ChatML. One of an earlier release grows: as the error says"""
    own = make_settings(train__steps=2)
    source = trained(own, prepare_data(own, silent()), tmp_path / "source")
    chats = tmp_path / "chats.jsonl"
    lines = [{"prompt": f"link {i}?", "completion": f"frame {i} of a link"} for i in range(30)]
    chats.write_text("\n".join(map(json.dumps, lines)))

    def begun(source, folder, **changes):
        settings = make_settings(
            **changes, train__init_from=str(source), data__source="chat", data__path=str(chats)
        )
        origin = open_origin(settings, silent())
        data = prepare_data(settings, silent(), origin)
        assert data.tokenizer().id_of("<|im_end|>") in data.train[data.train_learned == 1]
        return make_start(origin, settings, tmp_path / folder, data, silent())

    begun(source, "new")
    old = saved_by_an_earlier_release(own, tmp_path / "old", monkeypatch).folder
    with pytest.raises(DataError, match=r"at least 302 .*--init-from") as caught:
        begun(old, "refused")
    assert "<|im_start|>, <|im_end|>" in str(caught.value)
    grown = begun(old, "grown", model__vocab=302)
    assert Tokenizer.load(grown.tokenizer).vocab_size == 302
    assert grown.tensors(["lm_head.weight"])["lm_head.weight"].shape == (302, 32)


def test_a_run_of_an_earlier_release_keeps_its_tokenizer(make_settings, tmp_path, monkeypatch):
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))
    settings = make_settings(train__steps=2)
    old = saved_by_an_earlier_release(settings, tmp_path / "old", monkeypatch)
    assert prepare_data(settings, silent()).fingerprint != old.manifest["corpus"]
    assert prepare_data(settings, silent(), old).fingerprint == old.manifest["corpus"]


def test_what_a_change_costs_is_said(begin, make_settings, corpus, tmp_path):
    """Free weights do not fit into a subspace; a cut that the weights do not know starts anew; a
    projected model that loses its cuts is told, and never folded.
    """
    source = trained(make_settings(train__steps=4), corpus, tmp_path / "source")
    said = StringIO()
    made = begin(source, "ruined", said, **SUBSPACE)
    assert "% of the weights" in said.getvalue() and "ruins" in said.getvalue()
    assert loss_of(made.folder, corpus) > loss_of(source, corpus)
    tables = begin(source, "narrow", said, **TABLES).folder
    assert "start anew: boundary.model.layers.2.table" in said.getvalue()
    begin(tables, "dense", said, model__context=32)
    assert "later positions are new to it" in said.getvalue()
    assert "was trained with projected cuts" in said.getvalue()
    with pytest.raises(ConfigError, match="cannot become a model"):
        open_origin(make_settings(**SUBSPACE, train__init_from=str(tables)), silent())


def test_what_does_not_fit_is_refused_before_anything_is_written(make_settings, corpus, tmp_path):
    source = trained(make_settings(train__steps=2), corpus, tmp_path / "source")

    def refused(error, match, **changes):
        settings = make_settings(**{"train__init_from": str(source), **changes})
        with pytest.raises(error, match=match):
            train(settings, silent())
        assert not (tmp_path / "test").exists()

    shape = r"model.layers = 4 \(not 6\), model.ffn = 48 \(not 64\)"
    refused(ConfigError, shape, model__layers=6, model__ffn=64)
    refused(ConfigError, r"model.vocab = 300 \(not 290\).* may only grow", model__vocab=290)
    refused(CheckpointError, "no such folder", train__init_from=str(tmp_path / "nothing"))
    other = tmp_path / "other.json"
    Tokenizer.train(["other words entirely"], 290).save(other)
    refused(DataError, "has another vocabulary", data__tokenizer=str(other))
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    refused(CheckpointError, "thinwire import", train__init_from=str(tmp_path / "hf"))
    with (source / "stage-1.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")
    refused(CheckpointError, "is altered or missing", train__init_from=str(source.parent))
    (source / "tokenizer.json").unlink()
    refused(CheckpointError, "altered")


def test_adapters_start_beside_the_weights_of_another_run(begin, make_settings, corpus, tmp_path):
    """And never beside random ones; a run that starts from adapted weights has them merged."""
    lora: Changes = {"lora__rank": 3, "optim__lr": 0.05}
    source = trained(make_settings(), corpus, tmp_path / "source")
    with pytest.raises(ConfigError, match="which would stay random"):
        open_origin(make_settings(**lora), silent())
    said = StringIO()
    made = begin(source, "made", said, **lora)
    assert loss_of(made.folder, corpus) == loss_of(source, corpus)
    adapted = trained(make_settings(**lora), corpus, tmp_path / "adapted")
    merged = begin(adapted, "merged", pipeline__stages=3)
    assert not any("lora" in name for name in merged.names())
    assert loss_of(merged.folder, corpus) == pytest.approx(loss_of(adapted, corpus), abs=1e-10)
    again = begin(adapted, "again", **{**lora, "lora__alpha": 4.0})
    assert loss_of(again.folder, corpus) == pytest.approx(loss_of(adapted, corpus), abs=1e-10)
    # Folding merges them, so they must not come along as well.
    held = trained(make_settings(**lora, **SUBSPACE), corpus, tmp_path / "held")
    folded = begin(held, "folded", **lora)
    assert loss_of(folded.folder, corpus) == pytest.approx(loss_of(held, corpus), abs=1e-10)


def test_a_run_on_other_text_in_processes(make_settings, corpus, tmp_path, monkeypatch):
    """The tokenizer comes along; the record says where; a resume needs the origin no more."""
    source = trained(make_settings(train__steps=2), corpus, tmp_path / "source")
    other = tmp_path / "other"
    other.mkdir()
    for number in range(30):
        (other / f"{number}.txt").write_text(f"another text {number} of numbers and links\n" * 9)
    changes = {"train__init_from": str(source.parent.parent), "data__path": str(other)}
    changes["pipeline__stages"] = 1  # one process
    summary = train(make_settings(**changes, train__steps=2), silent())
    assert (summary["first_step"], summary["steps"]) == (0, 2)
    run, seal = tmp_path / "test", json.loads((source / "manifest.json").read_text())
    origin = {"path": str(source), "step": 2, "manifest_sha256": seal["manifest_sha256"]}
    assert summary["origin"] == origin
    assert seal["manifest_sha256"] in (run / "config.toml").read_text()
    tokenizers = [c.tokenizer for c in (Checkpoint.open(run), Checkpoint.open(source))]
    assert tokenizers[0].read_bytes() == tokenizers[1].read_bytes()

    source.rename(source.with_name("gone"))
    again = make_settings(**changes, train__steps=3)
    resumed = open_resume(run, again, silent())
    assert resumed.step == 2 and resumed.manifest["origin"] == origin
    data = prepare_data(again, silent(), resumed)
    assert data.fingerprint == resumed.manifest["corpus"], "with the tokenizer that came along"
    unsaid = {"data__path": str(other), "pipeline__stages": 1, "train__steps": 3}
    assert open_resume(run, make_settings(**unsaid), silent()).step == 2
    for embed_std in (1.0, 0.02):  # nor what came along from there
        own = adopted(make_settings(**unsaid, model__embed_std=embed_std), resumed.settings)
        assert own.to_plain()["train"]["init_from"] == str(source.parent.parent)
        assert own.model.embed_std == resumed.settings.model.embed_std
    elsewhere = make_settings(**unsaid, train__init_from="runs/another")
    with pytest.raises(ConfigError, match=r"train\.init_from"):
        open_resume(run, elsewhere, silent())
