"""A compiled stage computes what the plain one does, forward and backward."""

import itertools

import pytest
import torch

from settings_values import narrow
from thinwire.engine.build import StageBuilder


def step(stages, ids_BT):
    z = ids_BT
    for stage in stages:
        z = stage(z, ids_BT)
    loss = stages[-1].loss(z, ids_BT)
    loss.backward()
    named = [item for stage in stages for item in stage.global_parameters().items()]
    return float(loss.detach()), {name: p.grad for name, p in named if p.grad is not None}


@pytest.mark.parametrize(
    "boundary",
    [narrow("reparam"), narrow("projected"), narrow("projected", anchor="per-stage"),
     narrow("projected", anchor="per-stage", table=3)],
    ids=["reparam", "projected", "own tables", "own narrow tables"],
)  # fmt: skip
def test_compiled_equals_plain_also_where_layers_are_recomputed(boundary, make_settings):
    found = []
    for recompute, compiled in itertools.product((False, True), repeat=2):
        settings = make_settings(**boundary, pipeline__recompute=recompute)
        builder = StageBuilder(settings, torch.device("cpu"))
        stages = [builder.build(index) for index in range(2)]
        for stage in stages:
            builder.initialise(stage)
            if compiled:  # traced and differentiated as for a GPU, but no compiler is needed
                stage.compile_layers(backend="aot_eager")
        ids_BT = torch.arange(2 * settings.model.context).view(2, -1) % settings.model.vocab
        found.append(step(stages, ids_BT))
    (loss, gradients), *others = found
    assert any("table" in name for name in gradients) == ("boundary__anchor" in boundary)
    for other_loss, other in others:
        assert other_loss == pytest.approx(loss, rel=1e-12)
        assert other.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(other[name], gradient, rtol=1e-9, atol=1e-12)


def test_compiled_ends_follow_a_basis_that_moves(make_settings):
    settings = make_settings(boundary__mode="subspace", boundary__rank=4, pipeline__stages=2)
    builder = StageBuilder(settings, torch.device("cpu"))
    plain, compiled = builder.build(0), builder.build(0)
    builder.initialise(plain)
    builder.initialise(compiled)
    compiled.compile_layers(backend="aot_eager")
    ids_BT = torch.arange(2 * settings.model.context).view(2, -1) % settings.model.vocab
    before = compiled(ids_BT).detach()
    assert builder.space is not None
    builder.space.move(builder.space.basis_DK.flip(1))
    torch.testing.assert_close(compiled(ids_BT), plain(ids_BT), rtol=1e-9, atol=1e-12)
    assert not torch.allclose(compiled(ids_BT), before)  # what stale coordinates would give
