"""A compiled stage computes what the plain one does, forward and backward."""

import pytest
import torch

from thinwire.engine.build import StageBuilder


def step(stages, ids_BT):
    z = ids_BT
    for stage in stages:
        z = stage(z, ids_BT)
    loss = stages[-1].loss(z, ids_BT)
    loss.backward()
    named = [item for stage in stages for item in stage.global_parameters().items()]
    return float(loss.detach()), {name: p.grad for name, p in named if p.grad is not None}


@pytest.mark.parametrize("mode", ["reparam", "projected"])
def test_compiled_equals_plain(mode, make_settings):
    settings = make_settings(boundary__mode=mode, boundary__rank=4, pipeline__stages=2)
    builder = StageBuilder(settings, torch.device("cpu"))
    found = []
    for compiled in (False, True):
        stages = [builder.build(index) for index in range(2)]
        for stage in stages:
            builder.initialise(stage)
            if compiled:  # traced and differentiated as for a GPU, but no compiler is needed
                stage.compile_layers(backend="aot_eager")
        ids_BT = torch.arange(2 * settings.model.context).view(2, -1) % settings.model.vocab
        found.append(step(stages, ids_BT))
    (loss, gradients), (compiled_loss, compiled_gradients) = found
    assert compiled_loss == pytest.approx(loss, rel=1e-12)
    assert gradients.keys() == compiled_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(compiled_gradients[name], gradient, rtol=1e-9, atol=1e-12)


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
