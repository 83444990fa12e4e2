"""thinwire -> Hugging Face -> thinwire: the same bits."""

import pytest
import torch
from moving import exported, imported

from settings_values import narrow
from thinwire.engine.checkpoint import Checkpoint
from thinwire.engine.conversion import Folded
from thinwire.inference import Model

MODES = {"dense": {}, "qwen2": {"model__qkv_bias": True},
         "qwen3": {"model__qk_norm": True, "model__head_dim": 12}, "subspace": narrow("subspace"),
         "reparam": narrow("reparam")}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_weights_come_back_bit_for_bit(mode, trained, tmp_path):
    place = trained(**MODES[mode])
    exported(place, tmp_path / "theirs", verify=False, shard_bytes=100_000)
    back = imported(tmp_path / "theirs", tmp_path / "back")
    first, second = Checkpoint.open(place), Checkpoint.open(back)
    expected = Folded(first) if mode in ("subspace", "reparam") else first
    tensors = second.tensors(second.names())
    for name, tensor in expected.tensors(second.names()).items():
        assert torch.equal(tensors[name], tensor), name
    for key in ("layers", "dim", "heads", "kv_heads", "ffn", "vocab", "context", "norm_eps"):
        assert getattr(second.settings.model, key) == getattr(first.settings.model, key)
    ours, theirs = (Model(p, "cpu", compression=False) for p in (place, back))
    ids = torch.arange(16)[None] * 17
    with torch.no_grad():
        difference = (ours(ids) - theirs(ids)).abs().max()
    assert difference < 1e-5
    assert theirs.generate("stage ", 6, 0.0, 0, 0) == ours.generate("stage ", 6, 0.0, 0, 0)


def test_an_imported_model_does_not_claim_to_be_trained_here(trained, tmp_path):
    theirs, again = tmp_path / "theirs", tmp_path / "again"
    exported(trained(), theirs, verify=False)
    exported(imported(theirs, tmp_path / "back"), again)
    assert "How it was trained" in (theirs / "README.md").read_text()
    card = (again / "README.md").read_text()
    assert "imported into thinwire from `theirs`" in card and "How it was trained" not in card
    weights = "model.safetensors"
    assert (again / weights).read_bytes() == (theirs / weights).read_bytes()
