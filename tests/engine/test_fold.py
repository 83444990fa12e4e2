"""Folded weights compute what the trained model computes; what does not fold says so."""

import pytest
import torch
from engine_runs import CPU

from settings_values import narrow
from thinwire.engine.build import Joined
from thinwire.engine.checkpoint import BASIS, Snapshot, Versions
from thinwire.engine.conversion import Folded, why_not_folded
from thinwire.engine.state import restore_weights
from thinwire.errors import CheckpointError
from trained import trained_chain

NARROW = {mode: narrow(mode) for mode in ("subspace", "reparam")}
MOVES = {"boundary__basis_update_every": 2}
LORA = {"lora__rank": 3, "lora__alpha": 6.0}
HELD = {"boundary__free_layers": 0}
FOLDING = {
    "dense": {},
    "projected-without-cuts": {**narrow("projected", anchor="per-stage"), "pipeline__stages": 1},
    **NARROW,
    **{f"{mode}-moving": {**changes, **MOVES} for mode, changes in NARROW.items()},
    **{f"{mode}-lora": {**changes, **LORA} for mode, changes in {"dense": {}, **NARROW}.items()},
    **{f"{mode}-all-held": {**changes, **HELD} for mode, changes in NARROW.items()},
}
IDS = torch.tensor([[7, 3, 11, 250, 9, 31, 8, 77, 5, 2, 19, 23, 4, 90, 120, 6]])


def state_of(chain):
    tensors = {n: p for stage in chain.stages for n, p in stage.global_parameters().items()}
    for update in chain.updates:
        tensors |= update.keeper.state_tensors() if update.keeper else {}
    return Snapshot(tensors, chain.settings, chain.done, Versions(chain.done, 0))


def logits_of(model):
    with torch.no_grad():
        return model.logits(IDS, compressed=False)


def plain_model(folded):
    """Dense, with these weights."""
    plain = Joined(folded.settings, CPU)
    for stage in plain.stages:
        restore_weights(stage, None, folded)
    return plain


@pytest.mark.parametrize("changes", FOLDING.values(), ids=FOLDING)
def test_folded_weights_compute_what_the_trained_model_computes(changes, make_settings, corpus):
    settings = make_settings(**{"pipeline__stages": 4, "train__steps": 3, **changes})
    chain = trained_chain(settings, corpus)
    folded = Folded(state_of(chain))
    assert folded.settings.boundary.mode == "dense"
    plain = plain_model(folded)
    assert plain.builder.space is None
    assert (logits_of(plain) - logits_of(chain)).abs().max() < 1e-10
    for name, tensor in folded.tensors(folded.names()).items():
        assert tuple(tensor.shape) == folded.shapes[name]


@pytest.mark.parametrize("mode", NARROW)
def test_a_basis_that_has_moved_is_the_one_that_folds(mode, make_settings, corpus):
    chain = trained_chain(make_settings(**NARROW[mode], **MOVES), corpus)
    state = state_of(chain)
    without = {name: t for name, t in state.tensors(state.names()).items() if name != BASIS}
    other = Folded(Snapshot(without, state.settings, state.step, state.versions))
    difference = (logits_of(plain_model(other)) - logits_of(chain)).abs().max()
    # Subspace weights are full matrices already; coordinates mean nothing in another basis.
    assert difference < 1e-10 if mode == "subspace" else difference > 1e-3


@pytest.mark.parametrize(("changes", "part"), [
    ({}, "its cut drops what lies outside 6 of 32 dimensions, which"),
    ({"boundary__anchor": "per-stage"}, "adds a row of a learned token table"),
    ({"pipeline__stages": 4}, "each of its 3 cuts drops"),
])  # fmt: skip
def test_a_projected_model_does_not_fold_and_says_which_recipe_would(changes, part, make_settings):
    settings = make_settings(**narrow("projected"), **changes)
    assert part in why_not_folded(settings)
    with pytest.raises(CheckpointError, match=r"does not fold.*exact32"):
        Folded(Snapshot({}, settings, 0, Versions(0, 0)))


def test_a_tensor_of_another_shape_is_named(make_settings):
    settings = make_settings()
    wrong = Snapshot({"model.norm.weight": torch.ones(3)}, settings, 0, Versions(0, 0))
    with pytest.raises(CheckpointError, match=r"model.norm.weight .*\(3,\).*\(32,\)"):
        Folded(wrong).tensors(["model.norm.weight"])
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        Folded(wrong).tensors(["lm_head.weight"])
