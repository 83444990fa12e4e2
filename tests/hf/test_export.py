"""Exported models are the trained ones: opened by transformers, to 1e-5, and by greedy text."""

import json
import os
import shutil
import sys
from dataclasses import replace

import moving
import pytest
import torch
from moving import IDS
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from settings_values import narrow
from thinwire.cli import main
from thinwire.data import Tokenizer
from thinwire.data.chat import ChatTemplate
from thinwire.engine.checkpoint import Checkpoint
from thinwire.engine.conversion import Folded
from thinwire.errors import CheckpointError, ConfigError, MissingPackageError
from thinwire.hf.export import verify, write_tokenizer
from thinwire.hf.folder import write_json, write_model
from thinwire.hf.modeling import ThinwireForCausalLM
from thinwire.inference import Model

SUBSPACE = narrow("subspace")
FOLDING = {"dense": {}, "subspace": SUBSPACE, "reparam": narrow("reparam"),
           "one-key-head": {"model__kv_heads": 1},
           "heads-of-qwen": {"model__qk_norm": True, "model__head_dim": 12},
           "moving": narrow("reparam", basis_update_every=2)}  # fmt: skip
WITH_CUTS = {
    "moving": narrow("projected", basis_update_every=2),
    "own-tables": narrow("projected", anchor="per-stage"),
    "own-narrow-tables": narrow("projected", anchor="per-stage", table=3),
}


def exported(place, **wanted):
    folder = place.parents[2] / "exported"
    return folder, moving.exported(place, folder, **wanted)


def difference(folder, place, dtype=torch.float32):
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.no_grad():
        ours = Model(place, "cpu", compression=False)(IDS)
        return float((theirs(IDS).logits.float() - ours).abs().max())


@pytest.mark.parametrize("changes", FOLDING.values(), ids=FOLDING)
def test_a_model_that_folds_opens_as_an_ordinary_llama(changes, trained):
    place = trained(**changes)
    folder, said = exported(place)
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    assert kind == ("qwen3" if "model__qk_norm" in changes else "llama")
    assert difference(folder, place) < 1e-5
    assert "the greedy continuation is the same" in said


@pytest.mark.parametrize("changes", WITH_CUTS.values(), ids=WITH_CUTS)
def test_a_model_with_cuts_opens_with_the_registered_class(changes, trained):
    place = trained(**changes)
    folder, said = exported(place)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model) is ThinwireForCausalLM
    assert difference(folder, place) < 1e-5
    assert "exact32" in said and "import thinwire.hf" in said
    how = {"do_sample": False, "max_new_tokens": 8}
    texts = [model.generate(IDS[:, :5], use_cache=cached, **how) for cached in (True, False)]
    assert torch.equal(*texts)


def test_weights_copied_without_folding_are_refused(trained, monkeypatch):
    place = trained(**SUBSPACE)
    folder, _ = exported(place)
    monkeypatch.setattr(Folded, "_read", lambda self, name: self._source.tensor(name))
    checkpoint = Checkpoint.open(place)
    weights = Folded(checkpoint)
    write_model(folder, weights.shapes, torch.float32, weights.tensor, 10**9)
    assert difference(folder, place) > 0.05
    with pytest.raises(CheckpointError, match=r"logits differ by up to [01].*rounding explains"):
        verify(folder, weights, torch.float32, checkpoint, Tokenizer.load(checkpoint.tokenizer))


def test_rounded_weights_are_verified_before_and_after(trained):
    place = trained(**WITH_CUTS["own-tables"])
    folder, said = exported(place, dtype="bf16")
    assert "rounding changes them by at most" in said
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert 1e-5 < difference(folder, place) < 0.1
    assert difference(folder, place, torch.bfloat16) < 0.1


def test_what_is_exported_can_be_used_without_looking_at_it(trained):
    """The command, the card, the tokenizer with fewer entries than the model, a text."""
    place = trained(**SUBSPACE, model__vocab=320)
    folder = place.parents[2] / "my-model"
    main(["export", str(place.parents[1]), "--to", "hf", str(folder)])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert len(tokenizer) < model.config.vocab_size
    assert model.get_input_embeddings().padding_idx is None
    ids = tokenizer("stage link", return_tensors="pt").input_ids
    text = tokenizer.decode(model.generate(ids, do_sample=False, max_new_tokens=5)[0])
    ours = Model(place, "cpu", compression=False)
    assert text == ours.generate("stage link", 5, temperature=0, top_k=0, seed=0)
    card = (folder / "README.md").read_text()
    for part in ("# my-model", "`subspace` of rank 6", "3 of 3", ours.settings.hash, "differ by"):
        assert part in card
    assert str(place.parents[2]) not in card


def test_ways_of_a_tokenizer_go_along(trained, tmp_path):
    """What stands beside a tokenizer.json: a chat template, its ends, ways of sampling."""
    place = trained(model__qkv_bias=True)
    given = tmp_path / "given"
    given.mkdir()
    text = json.loads((place / "tokenizer.json").read_text())
    text["pre_tokenizer"]["add_prefix_space"] = True
    write_json(given / "tokenizer.json", text)
    asked = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    known = {"tokenizer_class": "GPT2Tokenizer", "chat_template": asked, "pad_token": "!"}
    write_json(given / "tokenizer_config.json", known)
    sampling = {"repetition_penalty": 9.0, "do_sample": True, "eos_token_id": [2, 3]}
    write_json(given / "generation_config.json", sampling)
    folder, said = exported(place, tokenizer=given)
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "qwen2" and config["eos_token_id"] == [2, 3]
    # The class that is named there has rules of its own, which AutoTokenizer would follow.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    assert "open the tokenizer with PreTrainedTokenizerFast" in said
    assert "tokenizer = PreTrainedTokenizerFast." in (folder / "README.md").read_text()
    assert tokenizer.eos_token == "<|endoftext|>" and tokenizer.pad_token == "!"
    messages = [{"role": "user", "content": "stage"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "[stage]"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.generation_config.repetition_penalty == 9.0
    assert difference(folder, place) < 1e-5


def test_what_stands_beside_the_tokenizer_of_a_run_goes_along(trained, tmp_path):
    """A run copies a tokenizer with its template alone, and may have changed the template."""
    checkpoint, kept, beside = Checkpoint.open(trained()), tmp_path / "kept", tmp_path / "beside"
    own, data = Tokenizer.load(checkpoint.tokenizer), checkpoint.settings.data
    data = replace(data, tokenizer=str(beside / "tokenizer.json"))
    how = kept / "tokenizer.json", own, replace(checkpoint.settings, data=data)
    for folder in (kept, beside, tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
    own.save(kept / "tokenizer.json")
    own.save(beside / "tokenizer.json")
    write_json(beside / "generation_config.json", {"top_k": 7, "eos_token_id": 5})
    write_json(beside / "tokenizer_config.json", {"chat_template": "old"})
    write_json(beside / "special_tokens_map.json", {})
    (beside / "chat_template.jinja").write_text("theirs")
    found = write_tokenizer(tmp_path / "one", *how)
    assert found == {"top_k": 7, "eos_token_id": sorted([5, own.end_of_text])}
    assert sorted(p.name for p in (tmp_path / "one").iterdir()) == sorted(os.listdir(beside))
    write_json(kept / "tokenizer_config.json", {"chat_template": "ours"})
    assert write_tokenizer(tmp_path / "two", *how)["top_k"] == 7
    assert ChatTemplate.chosen("", tmp_path / "two" / "tokenizer.json").source == "ours"
    (kept / "chat_template.jinja").write_text("own")
    write_tokenizer(tmp_path / "two", *how)
    assert (tmp_path / "two" / "chat_template.jinja").read_text() == "own"


@pytest.mark.parametrize("boundary", [SUBSPACE, WITH_CUTS["own-tables"]])
def test_adapters_are_merged(boundary, trained):
    place = trained(**boundary, lora__rank=3)
    folder, _ = exported(place)
    assert difference(folder, place) < 1e-5
    assert "LoRA of rank 3" in (folder / "README.md").read_text()


def refused(error, match, place, **wanted):
    parent = place.parents[2]
    before = sorted(parent.rglob("*"))
    with pytest.raises(error, match=match):
        exported(place, **wanted)
    assert sorted(parent.rglob("*")) == before


def test_a_folder_that_exists_is_replaced_only_if_asked(trained):
    place = trained()
    folder = place.parents[2] / "exported"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    refused(ConfigError, "no exported model", place)
    refused(ConfigError, "no exported model", place, replace=True)
    (folder / "thesis.txt").unlink()
    exported(place, verify=False)
    refused(ConfigError, "exists already", place)
    (folder / "left.txt").write_text("over")
    exported(place, verify=False, replace=True)
    assert not (folder / "left.txt").exists() and (folder / "config.json").is_file()
    assert not list(folder.parent.glob(".exported*"))


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(trained, tmp_path):
    refused(CheckpointError, "not finite.*earlier checkpoint", trained(is_ruined=True))
    shutil.rmtree(tmp_path / "run")
    place = trained(with_tokenizer=False)
    refused(CheckpointError, "--tokenizer", place)
    too_large = tmp_path / "tokenizer.json"
    tokens = {f"t{number}": number for number in range(301)}
    model = {"type": "WordLevel", "vocab": tokens, "unk_token": "t0"}
    too_large.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    refused(ConfigError, "301 entries.*300", place, tokenizer=too_large)
    shard = place / "stage-1.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    refused(CheckpointError, "is altered", place)


def test_folders_are_written_without_transformers(trained, monkeypatch):
    place = trained(**WITH_CUTS["own-tables"])
    folder = place.parents[2] / "exported"
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers", None)
        refused(MissingPackageError, r"--no-verify.*thinwire\[hf\]", place)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers", None)
        for name in [name for name in sys.modules if name.startswith("thinwire.hf")]:
            patch.delitem(sys.modules, name)  # they import again what they need
        main(["export", str(place), str(folder), "--no-verify"])
    assert difference(folder, place) < 1e-5
