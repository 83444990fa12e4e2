"""A checkpoint in one process: numbers that JSON can hold, errors that name the checkpoint."""

import json
import math

import pytest
import torch
from torch.nn import functional as F

from settings_values import narrow
from test_train import silent
from thinwire.engine.build import Joined
from thinwire.engine.checkpoint import Checkpoint
from thinwire.errors import ConfigError, DataError
from thinwire.inference import Model, Sampling
from thinwire.report.metrics import without_nan


def measured(folder, compression):
    found = Model(folder, "cpu", compression).evaluate(silent())
    assert found["compression"] == ("on" if compression else "off")
    return found["valid_loss"]


def test_compression_on_is_what_training_measured(trained):
    folder, loss = trained(codec__forward="randk(0.5)+ef21", codec__cuts=["1: forward=int4"])
    assert measured(folder, True) == pytest.approx(loss, abs=1e-12)
    assert abs(measured(folder, False) - loss) > 1e-7
    text = Model(folder, "cpu").generate("stage ", 5, temperature=0, top_k=0, seed=0)
    assert text.startswith("stage ") and len(text) > len("stage ")


# Cuts pass tokens one by one, each with a codec of its own.
BY_TOKEN = [
    {"codec__forward": "fp64"},
    {"codec__forward": "int8(group=8)+ef21", **narrow("subspace", rank=12)},
    {"codec__forward": "int8+zstd", **narrow("reparam", rank=12)},
    {"codec__forward": "bf16", **narrow("projected", rank=12, anchor="per-stage", table=5)},
]
SHAPED = {"codec__forward": "fp64", "model__head_dim": 6, "model__qkv_bias": True,
          "model__qk_norm": True,
          "model__rope_scaling": "llama3(factor=8,low=1,high=4,context=8)"}  # fmt: skip


@pytest.mark.parametrize("changes", [*BY_TOKEN, SHAPED])
def test_a_cache_changes_no_logit_and_no_token(changes, trained, monkeypatch):
    """Also when the window is full, twice: the context is 16, and 26 tokens are chosen."""
    folder, _ = trained(**changes)
    model = Model(folder, "cpu")
    assert model.crosses_by_token
    ids = torch.tensor([[7, 3, 11, 250, 9, 31, 8, 77, 5, 2, 19, 23, 4, 90, 120, 6]])
    with torch.no_grad():
        whole = model(ids)
        pasts = [stage.new_past() for stage in model.stages]
        parts = [model(ids[:, :5], 0, pasts)]
        parts += [model(ids[:, at : at + 1], 0, pasts) for at in range(5, 16)]
    # Codecs round to few bits: a last bit before them may become a step behind them.
    tolerance = 1e-10 if changes["codec__forward"] == "fp64" else 1e-2
    assert (torch.cat(parts, 1) - whole).abs().max().item() < tolerance
    for temperature in (0.0, 0.9):
        given = "stage link ", 26, temperature, 0, 3
        text = model.generate(*given)
        with monkeypatch.context() as patch:
            patch.setattr(Model, "crosses_by_token", False)
            assert model.generate(*given) == text and len(text) > len("stage link ")


def test_a_stage_reads_its_own_tensors_only(trained, monkeypatch):
    folder, _ = trained(codec__forward="fp64")
    read: list[set[str]] = []
    whole = Checkpoint.tensors

    def noted(self, names):
        read.append({*names})
        return whole(self, names)

    monkeypatch.setattr(Checkpoint, "tensors", noted)
    Model(folder, "cpu")
    ends = [("model.embed_tokens.weight" in n, "lm_head.weight" in n) for n in read]
    assert ends == [(True, False), (False, False), (False, True)]
    assert not set.intersection(*read)


def test_every_stage_computes_on_its_own_device(make_settings):
    """The meta device stands for another one: what is there is known but for its numbers."""
    here, there = torch.device("cpu"), torch.device("meta")
    devices = [here, there, there]
    settings = make_settings(pipeline__stages=3, codec__forward="int8")
    model = Joined(settings, there, devices=devices)
    found = []

    def noted(stage, given):
        x, ids, _ = given
        found.append([x.device, ids.device, *{p.device for p in stage.parameters()}])

    for stage in model.stages:
        stage.register_forward_pre_hook(noted)
    pasts = [stage.new_past() for stage in model.stages]
    with torch.no_grad():
        for count in (5, 1):
            logits = model.logits(torch.zeros((1, count), dtype=torch.long), True, pasts)
            assert logits.device == there and logits.shape[1] == count
    assert found == [[device] * 3 for device in devices] * 2
    moved = Joined(settings, here)  # by transformers, say
    for stage in moved.stages:
        stage.to(there)
    assert moved.logits(torch.zeros((1, 5), dtype=torch.long, device=there)).device == there


GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("devices", [["cpu"] * 3, pytest.param(["cuda", "cpu", "cuda"], marks=GPU)])
@pytest.mark.parametrize("changes", BY_TOKEN)
def test_stages_are_dealt_out_to_the_devices_of_this_machine(
    devices, changes, trained, monkeypatch, tmp_path
):
    folder, _ = trained(**changes)
    (tmp_path / "other.txt").write_text("stage link " * 40)
    asked = []

    def dealt(wanted, stage):
        asked.append((wanted, stage))
        return torch.device(devices[stage])

    alone = Model(folder, "cpu")
    monkeypatch.setattr("thinwire.inference.model.choose_device", dealt)
    model = Model(folder, "auto")
    assert asked == [("auto", stage) for stage in range(3)]
    given = "stage link ", 20, 0.0, 0, 0
    assert model.generate(*given) == alone.generate(*given)
    for whole, dealt_out in (
        (alone.evaluate(silent()), model.evaluate(silent())),
        (alone.evaluate_text(tmp_path, silent()), model.evaluate_text(tmp_path, silent())),
    ):
        assert dealt_out["valid_loss"] == pytest.approx(whole["valid_loss"], abs=1e-3)


def test_a_codec_that_looks_at_the_whole_window_is_not_cached(trained):
    folder, _ = trained(codec__forward="fp64", codec__cuts=["1: forward=int4(tensor)"])
    model = Model(folder, "cpu")
    assert not model.crosses_by_token and "recomputes the whole window" in model.notes()[0]
    assert Model(folder, "cpu", compression=False).crosses_by_token


def test_text_streams_in_whole_characters(chatting, monkeypatch):
    """The model is made to say these bytes; a character of three bytes is three tokens of it."""
    model = Model(chatting(), "cpu")
    tokenizer = model.tokenizer
    said = tokenizer.encode("né €\U0001f600!")
    assert any("\ufffd" in tokenizer.decode([id]) for id in said), "characters are split"
    left = iter([*said, tokenizer.encode("€")[0]])  # and one that is never completed
    monkeypatch.setattr("thinwire.inference.model.Choice.__call__", lambda self, logits: next(left))
    pieces = list(model.write(model.encode("ab"), len(said) + 1, Sampling(0.0)))
    assert pieces[-1] == "\ufffd"
    assert "".join(pieces[:-1]) == "né €\U0001f600!"
    assert not any("\ufffd" in piece for piece in pieces[:-1])
    assert sum(bool(piece) for piece in pieces[:-1]) > 4, "it comes piece by piece"


def test_an_empty_prompt_begins_a_text_and_one_that_is_no_text_is_refused(chatting):
    model = Model(chatting(), "cpu")
    text = model.generate("", 6, 0.0, 0, 0)
    assert text and "endoftext" not in text
    with pytest.raises(ConfigError, match="not valid Unicode"):
        model.encode("a\udcff")


def test_a_loss_too_high_for_a_perplexity_is_still_a_loss(chatting, tmp_path):
    model = Model(chatting(factor=1e5), "cpu")
    with pytest.raises(DataError, match="no data of its own: name a text with --data"):
        model.evaluate(silent())  # as an imported one
    (tmp_path / "other.txt").write_text("stage link " * 40)
    found = model.evaluate_text(tmp_path / "other.txt", silent())
    assert 710 < found["valid_loss"] < math.inf
    assert found["perplexity"] == math.inf
    assert json.loads(json.dumps(without_nan(found), allow_nan=False))["perplexity"] is None


def plain_loss(model, ids):
    """The definition: window after window of the context, each token once, one mean over all."""
    context, total = model.settings.model.context, 0.0
    for start in range(0, len(ids) - 1, context):
        window = torch.tensor([ids[start : start + context + 1]])
        logits = model(window[:, :-1])[0]
        total += F.cross_entropy(logits, window[0, 1:], reduction="sum").item()
    return total / (len(ids) - 1)


@pytest.mark.parametrize("words", [3, 16, 90, 400])
def test_the_loss_is_that_of_every_token(chatting, tmp_path, words):
    """Texts shorter than a window, of a few windows, of several microbatches."""
    model = Model(chatting(model__context=16), "cpu")
    text = " ".join(f"stage{number % 7} wire" for number in range(words))
    (tmp_path / "other.txt").write_text(text)
    tokenizer = model.tokenizer
    ids = [*tokenizer.encode(text), tokenizer.end_of_text]
    found = model.evaluate_text(tmp_path / "other.txt", silent())
    with torch.no_grad():
        assert found["valid_loss"] == pytest.approx(plain_loss(model, ids), abs=1e-10)
    assert found["tokens"] == len(ids) - 1
    first = len(tokenizer.decode(ids[:1]))  # its first token is predicted by nothing
    bits = found["valid_loss"] / math.log(2) * found["tokens"] / (len(text) - first)
    assert found["bits_per_byte"] == pytest.approx(bits)
    assert found["data"].endswith("other.txt")


def test_documents_are_separated_and_limits_hold(chatting, tmp_path):
    model = Model(chatting(model__context=16), "cpu")
    lines = [f'{{"words": "stage {number} wire"}}' for number in range(200)]
    (tmp_path / "other.jsonl").write_text("\n".join(lines))
    tokenizer = model.tokenizer
    one_by_one = [[*tokenizer.encode(f"stage {n} wire"), tokenizer.end_of_text] for n in range(200)]
    found = model.evaluate_text(tmp_path, silent(), text_key="words")
    assert found["tokens"] == sum(map(len, one_by_one)) - 1
    limited = model.evaluate_text(tmp_path, silent(), 2, "words")
    assert limited["tokens"] == 2 * 8 * 16 and limited["valid_loss"] != found["valid_loss"]
