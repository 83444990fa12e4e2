"""Models of transformers, imported: the same logits and the same text, in any number of stages."""

import copy
import itertools
import json
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from moving import imported
from safetensors.torch import load_file, save_file
from their_models import KINDS, make_folder, saved, tokenizer
from tokenizers.processors import TemplateProcessing

from thinwire.cli import main
from thinwire.engine.checkpoint import Checkpoint
from thinwire.errors import ThinwireError
from thinwire.hf.folder import FolderWeights
from thinwire.hf.importer import opened
from thinwire.inference import Model
from thinwire.inference.model import Sampling
from thinwire.settings import load_settings

PROMPT = "def main"


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_greedy_text_are_those_of_transformers(kind, tmp_path):
    theirs = make_folder(tmp_path / "theirs", kind)
    ids = torch.randint(290, (2, 40), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = theirs(ids).logits
    for stages in (1, 2, 4):
        ours = Model(imported(tmp_path / "theirs", tmp_path / f"in {stages}", stages), "cpu")
        with torch.no_grad():
            found = ours(ids)
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    tokenizer = ours.tokenizer
    prompt = torch.tensor([tokenizer.encode(PROMPT)])
    continued = theirs.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None)
    text = ours.generate(PROMPT, 12, 0.0, 0, 0)
    assert text == tokenizer.decode(continued[0].tolist())


def test_texts_begin_and_end_as_the_files_beside_the_weights_say(tmp_path):
    theirs, backend = saved("llama"), copy.deepcopy(tokenizer()._backend)
    shutil.copytree(theirs, tmp_path / "theirs")
    first, second = 296, 7
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", first)])
    backend.save(str(tmp_path / "theirs" / "tokenizer.json"))
    ours = Model(imported(tmp_path / "theirs", tmp_path / "ours"), "cpu")
    assert ours.encode(PROMPT) == backend.encode(PROMPT).ids == [first, *tokenizer().encode(PROMPT)]
    third = list(itertools.islice(ours.tokens_behind([second], Sampling(0.0)), 3))[2]
    (tmp_path / "theirs" / "generation_config.json").write_text(f'{{"eos_token_id": [0, {third}]}}')
    ours = Model(imported(tmp_path / "theirs", tmp_path / "ends"), "cpu")
    writing = ours.write([second], 20, Sampling(0.0))
    assert [*writing] and writing.count <= 3 and writing.ended_by == "stop"


def test_a_tied_table_may_have_the_name_of_the_head(tmp_path):
    shutil.copytree(saved("tied"), tmp_path / "theirs")
    table = load_file(saved("tied") / "model.safetensors")["model.embed_tokens.weight"]
    change_weights(tmp_path / "theirs", {"model.embed_tokens.weight": None, HEAD: table})
    ours = Model(imported(tmp_path / "theirs", tmp_path / "ours"), "cpu")
    assert torch.equal(ours.stages[0].layers[0].weight, table)


def test_weights_keep_their_bits_and_their_format(tmp_path):
    make_folder(tmp_path / "theirs", "qwen2", dtype=torch.bfloat16)
    target = imported(tmp_path / "theirs", tmp_path / "ours", 2)
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    checkpoint = Checkpoint.open(target)
    checkpoint.verify()
    ours = checkpoint.tensors(checkpoint.names())
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == torch.bfloat16 and torch.equal(ours[name], tensor)
    assert checkpoint.step == 0 and checkpoint.manifest["corpus"] == ""
    stage = Model(target, "cpu").stages[0]
    assert {p.dtype for p in stage.parameters()} == {torch.float32}, "the run's precision"


def test_one_tensor_is_in_memory_at_a_time(tmp_path, monkeypatch):
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0
    read = FolderWeights.read

    def noting(self, name):
        nonlocal most
        tensor = read(self, name)
        alive.add(tensor)
        most = max(most, len(alive))
        return tensor

    monkeypatch.setattr(FolderWeights, "read", noting)
    imported(saved("tied"), tmp_path / "ours")
    assert most == 1


def test_a_tied_head_becomes_a_copy_and_is_told(tmp_path, monkeypatch, capsys):
    """Also from a relative place, and with a context longer than the model knows."""
    make_folder(tmp_path / "their model", "tied")
    monkeypatch.chdir(tmp_path)
    main(["import", "./their model", "--to", "models/ours", "--context", "80"])
    told = capsys.readouterr().out
    assert "imported their model (llama, " in told and "4 blocks in 4 stages, context 80" in told
    assert f"{300 * 32:,} more parameters" in told
    assert "knows 64 positions, and a context of 80 goes beyond" in told
    checkpoint = Checkpoint.open(tmp_path / "models" / "ours")
    both = checkpoint.tensors(["model.embed_tokens.weight", "lm_head.weight"])
    assert torch.equal(*both.values())
    toml = load_settings(Path("models/ours/run.toml"), [])
    assert toml.data.tokenizer == str(tmp_path / "models/ours/tokenizer.json")


def test_the_run_toml_fine_tunes_this_model(tmp_path):
    make_folder(tmp_path / "theirs", "llama3")
    (tmp_path / "theirs" / "chat_template.jinja").write_text("{{ messages }}")
    target = imported(tmp_path / "theirs", tmp_path / 'my "model" #1', context=32)
    assert (target / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (target / "generation_config.json").is_file()
    settings = load_settings(target / "run.toml", [])
    assert settings.model == Checkpoint.open(target).settings.model
    assert settings.model.context == 32 and settings.model.rope_scaling.startswith("llama3(")
    assert settings.train.init_from == str(target)
    assert settings.data.tokenizer == str(target / "tokenizer.json")
    assert (settings.pipeline.stages, settings.boundary.mode) == (2, "dense")
    assert (settings.codec.forward, settings.codec.backward) == ("int8", "int4")
    assert settings.optim.name == "adamw" and 1e-5 <= settings.optim.lr <= 5e-5


def test_an_import_replaces_only_an_import_and_only_by_force(tmp_path):
    make_folder(tmp_path / "theirs", "llama")
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    with pytest.raises(ThinwireError, match="exists and is no imported model"):
        imported(tmp_path / "theirs", other, force=True)
    target = imported(tmp_path / "theirs", tmp_path / "ours", 1)
    with pytest.raises(ThinwireError, match=r"exists already: .* --force"):
        imported(tmp_path / "theirs", target)
    imported(tmp_path / "theirs", target, 2, force=True)
    assert (target / "stage-1.safetensors").is_file()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other", "ours", "theirs"]


NORM, HEAD = "model.norm.weight", "lm_head.weight"


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def change_weights(folder, changes):
    """Exchange, add or (None) drop tensors."""
    path = folder / "model.safetensors"
    tensors = load_file(path) | changes
    save_file({n: t for n, t in tensors.items() if t is not None}, path)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def as_shards(folder, **index):
    (folder / "model.safetensors").rename(folder / "part-1.safetensors")
    names = load_file(folder / "part-1.safetensors")
    places = dict.fromkeys(names, "part-1.safetensors") | index
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


BAD = {
    "architecture": (lambda f: change_config(f, model_type="gpt_neox"), '"gpt_neox" is not supp'),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json: No such file"),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json: Expecting"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has no weights"),
    "pickle": (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
               r"as pickle \(.bin\) only. Reading pickle runs code"),
    "one of two": (lambda f: as_shards(f, other="part-2.safetensors"),
                   "cannot read .*part-2.safetensors: .* missing or truncated"),
    "file elsewhere": (lambda f: as_shards(f, a="../b"), "has no weight_map of tensors"),
    "in two files": (lambda f: (as_shards(f, x="0.safetensors"), save_file(
        {n: torch.ones(32) for n in ("x", NORM)}, f / "0.safetensors")), f"where {NORM} is"),
    "truncated": (lambda f: truncate(f / "model.safetensors"), "missing or truncated"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer.json"),
    "missing tensor": (lambda f: change_weights(f, {NORM: None}), f"lacks 1 tensors, .*{NORM}"),
    "extra tensor": (
        lambda f: change_weights(f, {"model.layers.0.self_attn.o_proj.bias": torch.ones(32)}),
        "also holds 1 tensors, such as .*o_proj.bias",
    ),
    "wrong shape": (lambda f: change_weights(f, {NORM: torch.ones(31)}),
                    rf"{NORM} has shape \(31,\), its config.json asks for \(32,\)"),
    "wrong format": (lambda f: change_weights(f, {NORM: torch.ones(32).to(torch.float8_e4m3fn)}),
                     f"{NORM} is stored as F8_E4M3"),
    "not finite": (lambda f: change_weights(f, {NORM: torch.full((32,), torch.nan)}),
                   f"{NORM} holds values that are not finite"),
    "wrongly tied": (lambda f: change_config(f, tie_word_embeddings=True),
                     "tie_word_embeddings = true, but lm_head.weight differs"),
    "fewer rows than tokens": (
        lambda f: (change_config(f, vocab_size=290), change_weights(f, {
            n: torch.ones(290, 32) for n in ("model.embed_tokens.weight", "lm_head.weight")})),
        "the tokenizer has 300 entries, the embedding 290 rows",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named_and_nothing_is_written(case, tmp_path):
    damage, message = BAD[case]
    folder = shutil.copytree(saved("llama"), tmp_path / "theirs")
    damage(folder)
    with pytest.raises(ThinwireError, match=message):
        imported(folder, tmp_path / "models" / "ours")
    assert list((tmp_path / "models").iterdir() if (tmp_path / "models").exists() else []) == []


@pytest.mark.parametrize(("place", "message"), [
    ("./nowhere", "does not exist: give a folder, a .gguf file or a hub name"),
    ("model.gguf", "does not exist"),
    ("someone/some-model", "cannot read someone/some-model: .* no folder here"),
    ("file.txt", "is a file: give the folder of the model"),
    ("broken.gguf", "not a GGUF file, or truncated"),
    ("empty.gguf", "cannot read empty.gguf: .* but not this one"),
    ("ours", "is a checkpoint of thinwire already"),
])  # fmt: skip
def test_a_place_without_a_model_is_told(place, message, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.txt").write_text("text")
    (tmp_path / "broken.gguf").write_text("<html>404</html>")
    (tmp_path / "empty.gguf").write_bytes(b"GGUF\x03\x00\x00\x00" + bytes(40))
    imported(saved("llama"), tmp_path / "ours")
    with pytest.raises(ThinwireError, match=message), opened(place):
        pass


@pytest.mark.slow
def test_an_imported_model_is_trained_by_its_own_run_toml(tmp_path, text_folder, thinwire):
    make_folder(tmp_path / "theirs", "qwen3", dtype=torch.bfloat16)
    settings = ["train.steps=2", "train.eval_batches=1", f"run.out={tmp_path}/runs"]
    settings += ["data.source=text", f"data.path={text_folder}", "link.emulate=false"]
    commands: list[list[object]] = [
        ["import", "theirs", "--to", "my models/ours", "--stages", "2"],
        ["train", "my models/ours/run.toml", *(w for key in settings for w in ("--set", key))],
        ["export", "runs/ours-tuned", "--to", "hf", "tuned"],
    ]
    for words in commands:
        program = thinwire(*words)
        assert program.wait() == 0, program.text()
    before = load_file(tmp_path / "theirs" / "model.safetensors")
    after = load_file(tmp_path / "tuned" / "model.safetensors")
    moved = [(after[name] - tensor.float()).abs().max().item() for name, tensor in before.items()]
    assert 0 < max(moved) < 1e-3, "two steps at a small rate"
