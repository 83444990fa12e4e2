"""An exported adapter is what was trained: peft puts it beside the plain model, to 1e-5."""

import dataclasses
import json
import shutil

import pytest
import torch
from moving import IDS
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

from settings_values import narrow
from thinwire.cli import main
from thinwire.engine.checkpoint import Checkpoint, Snapshot, Versions
from thinwire.engine.conversion import Folded
from thinwire.hf.shape import config_of
from thinwire.inference import Model
from thinwire.model import LoraConfig
from thinwire.model.layers import is_adapter

LORA = {"lora__rank": 3, "lora__alpha": 6.0, "optim__lr": 0.05}
MODES = {
    "dense": {"lora__targets": ["q_proj", "o_proj", "down_proj"]},
    "subspace": narrow("subspace"),
    "reparam": narrow("reparam"),
}


def base_of(checkpoint):
    """The model that the run would have started from, in transformers."""
    settings = dataclasses.replace(checkpoint.settings, lora=LoraConfig())
    names = {name for name in checkpoint.names() if not is_adapter(name)}
    folded = Folded(Snapshot(checkpoint.tensors(names), settings, 0, Versions(0, 0)))
    plain = config_of(settings.model)
    config = AutoConfig.for_model(plain.pop("model_type"), **plain)
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(folded.tensors(folded.names()))
    return model.eval()


@pytest.mark.parametrize("changes", MODES.values(), ids=MODES)
def test_peft_opens_it(changes, trained, tmp_path):
    place, folder = trained(**{**LORA, **changes}), tmp_path / "adapter"
    main(["export", str(place), "--adapter", str(folder), "--base", "models/base"])
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "models/base" and config["r"] == 3
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors"]
    base = base_of(Checkpoint.open(place))
    with torch.no_grad():
        ours = Model(place, "cpu", compression=False)(IDS)
        before = base(IDS).logits
        theirs = PeftModel.from_pretrained(base, folder)(IDS).logits
    assert (theirs - ours).abs().max() < 1e-5
    assert (before - ours).abs().max() > 1e-3, "the adapters do something"


@pytest.mark.parametrize("changes", MODES.values(), ids=MODES)
def test_a_base_that_it_was_not_trained_beside_is_refused(changes, trained, tmp_path, command):
    """A rounded one is taken; one of another time is not, nor one with the adapters in it."""
    place, base, folder = trained(**{**LORA, **changes}), tmp_path / "base", tmp_path / "adapter"
    own = base_of(Checkpoint.open(place))
    own.bfloat16().save_pretrained(base)
    assert command("export", place, folder, "--adapter", "--base", base)[0] == 0
    merged = tmp_path / "merged"
    assert command("export", place, merged, "--no-verify")[0] == 0
    with torch.no_grad():
        own.model.norm.weight.mul_(1.25)
    own.save_pretrained(base)
    for other, name in ((merged, "_proj.weight"), (base, "model.norm.weight")):
        code, _, said = command("export", place, folder, "--adapter", "--force", "--base", other)
        assert code == 2 and f"do not fit {other}: model." in said and name in said, said


def test_what_has_no_adapter_of_its_own_is_refused(trained, tmp_path, command):
    folder = tmp_path / "adapter"

    def refused(place, *options):
        code, _, said = command("export", place, folder, *options)
        assert code == 2
        return said

    with_cuts = trained(**LORA, **narrow("projected"), pipeline__stages=2)
    assert "were trained together with its cuts" in refused(with_cuts, "--adapter")
    shutil.rmtree(tmp_path / "run")
    plain = trained(pipeline__stages=1)
    assert "has no adapters (lora.rank = 0)" in refused(plain, "--adapter")
    assert "--base has no effect without --adapter" in refused(plain, "--base", "x")
    assert not folder.exists()
    folder.mkdir()
    (folder / "mine.txt").write_text("kept")
    assert "is no exported model" in refused(plain, "--adapter", "--force")
    assert (folder / "mine.txt").read_text() == "kept"
