"""The stage in which non-finite values first appeared is named, also if it keeps that to itself."""

import math

import pytest
import torch

from settings_values import narrow
from thinwire.engine.trace import is_finite
from thinwire.errors import WireError
from thinwire.run.conduct import first_not_finite


def spoil_forward(worker):
    def spoil(module, inputs, output):
        return output * math.nan if worker.state.step == 1 and module.training else output

    worker.stage.layers[-1].register_forward_hook(spoil)


def spoil_backward(worker):
    """The gradient of the last layer's input: what this stage sends down is NaN too."""

    def spoil(module, inputs, output):
        if output.requires_grad and worker.state.step == 1:
            output.register_hook(lambda gradient: gradient * math.nan)

    worker.stage.layers[0].register_forward_hook(spoil)


def spoil_norms(worker):
    squared_norms = worker.update.squared_norms

    def spoil():
        return [math.nan if worker.state.step == 1 else norm for norm in squared_norms()]

    worker.update.squared_norms = spoil


@pytest.mark.parametrize(("stage", "spoil", "lies", "words"), [
    (0, spoil_forward, False, "stage 0, in its own forward pass"),
    (1, spoil_forward, False, "stage 1, in its own forward pass"),
    (2, spoil_forward, False, "stage 2, in its own forward pass"),
    (1, spoil_forward, True, "stage 2, in the activations that stage 1 sent"),
    (1, spoil_backward, False, "stage 1, in its own backward pass"),
    (1, spoil_backward, True, "stage 0, in the gradient that stage 1 sent"),
    (2, spoil_norms, False, "stage 2, in its own backward pass"),
    (2, spoil_norms, True, "stage 1, in the gradient norms that stage 2 sent"),
])  # fmt: skip
def test_the_first_stage_with_non_finite_values_is_named(
    stage, spoil, lies, words, make_settings, run_in_threads
):
    def prepare(worker):
        if worker.index == stage:
            spoil(worker)
            if lies:
                worker.update.sightings.note = lambda *_: None

    settings = make_settings(pipeline__stages=3, train__steps=3)
    outcome = run_in_threads(settings, prepare_worker=prepare)
    steps = zip(*(outcome.steps(stage) for stage in range(3)), strict=True)
    found = [first_not_finite(reports) for reports in steps]
    assert found == ["", f"non-finite values first appeared in {words}", ""]
    assert [report.committed for report in outcome.steps(0)] == [True, False, True]


def test_a_basis_that_is_not_finite_is_refused_in_its_senders_name(make_settings, run_in_threads):
    """Else the weights of whoever takes it would be lost, and it would seem to be the cause."""

    def prepare(worker):
        if worker.index == 1:
            keeper = worker.update.keeper
            keeper.propose = lambda: keeper.space.basis_DK * math.nan

    settings = make_settings(**narrow("subspace", basis_update_every=2))
    with pytest.raises(WireError, match="stage 1 sent a basis that is not finite after step 2"):
        run_in_threads(settings, prepare_worker=prepare)


def test_finite_values_whose_sum_overflows_are_finite():
    large = torch.full((4,), 3e38)
    assert is_finite(large) and is_finite(torch.zeros(0))
    large[2] = -math.inf
    assert not is_finite(large)
