"""Built stages, a request to stop and comparisons that many tests of the engine share."""

import torch

from thinwire.engine.build import StageBuilder
from thinwire.wire import HEADER_BYTES
from whole_state import are_equal

CPU = torch.device("cpu")


def built(settings):
    """All stages with their first weights, and what built them."""
    builder = StageBuilder(settings, CPU)
    stages = [builder.build(index) for index in range(settings.pipeline.stages)]
    for stage in stages:
        builder.initialise(stage)
    return builder, stages


def furthest(first, second):
    """The largest difference between two sets of weights."""
    assert first.keys() == second.keys()
    return max((first[name] - weight).abs().max().item() for name, weight in second.items())


def stop_in_the_first_step(worker):
    """Ask a run to stop while its first step is under way, and not before: it is then its last."""
    next(worker.stage.parameters()).register_hook(lambda _: worker.stop_requested.set())


def assert_same_course(resumed, whole, step=0):
    """From this step on, the losses and the last weights of the other run, bit for bit."""
    assert resumed.losses() == whole.losses()[step:]
    assert are_equal(resumed.weights(), whole.weights())


def total(meter, kind):
    """Bytes that were sent in frames of a kind, headers included."""
    counted = meter["sent"][kind]
    return counted["payload_bytes"] + counted["frames"] * HEADER_BYTES
