"""thinwire -> Hugging Face -> thinwire: the same bits."""

from io import StringIO
from typing import Any

import pytest
import torch

from thinwire.engine.checkpoint import Checkpoint
from thinwire.engine.conversion import Folded
from thinwire.hf.export import Wanted, export
from thinwire.hf.importer import opened, plan_import, write_import
from thinwire.inference import Model
from thinwire.report import PlainDisplay

MODES = {
    "dense": {},
    "qwen2": {"model__qkv_bias": True},
    "qwen3": {"model__qk_norm": True, "model__head_dim": 12},
    "subspace": {"boundary__mode": "subspace", "boundary__rank": 6},
    "reparam": {"boundary__mode": "reparam", "boundary__rank": 6},
}


@pytest.mark.parametrize("mode", MODES)
def test_weights_come_back_bit_for_bit(mode, trained, tmp_path):
    changes: dict[str, Any] = MODES[mode]
    place = trained(**changes)
    wanted = Wanted(tmp_path / "theirs", verify=False, shard_bytes=100_000)
    export(Checkpoint.open(place), wanted, PlainDisplay(StringIO()))
    with opened(str(wanted.folder)) as origin:
        plan = plan_import(origin, stages=2)
        back = write_import(plan, tmp_path / "back", False, lambda done, total: None)
    first, second = Checkpoint.open(place), Checkpoint.open(back)
    expected = Folded(first) if "boundary__mode" in changes else first
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
    wanted = Wanted(tmp_path / "theirs", verify=False)
    export(Checkpoint.open(trained()), wanted, PlainDisplay(StringIO()))
    with opened(str(wanted.folder)) as origin:
        back = write_import(plan_import(origin, 2), tmp_path / "back", False, lambda *_: None)
    again = Wanted(tmp_path / "again")
    export(Checkpoint.open(back), again, PlainDisplay(StringIO()))
    assert "How it was trained" in (wanted.folder / "README.md").read_text()
    card = (again.folder / "README.md").read_text()
    assert "imported into thinwire from `theirs`" in card and "How it was trained" not in card
    weights = "model.safetensors"
    assert (again.folder / weights).read_bytes() == (wanted.folder / weights).read_bytes()
