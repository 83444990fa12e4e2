"""Built stages, trained chains and comparisons that many tests of the engine share."""

import torch

from thinwire.engine.build import StageBuilder
from thinwire.engine.feed import Feed
from thinwire.wire import HEADER_BYTES
from thinwire_lab.chain import Chain

CPU = torch.device("cpu")


def built(settings):
    """All stages with their first weights, and what built them."""
    builder = StageBuilder(settings, CPU)
    stages = [builder.build(index) for index in range(settings.pipeline.stages)]
    for stage in stages:
        builder.initialise(stage)
    return builder, stages


def trained_chain(settings, corpus, steps=None):
    """A chain after some of its steps, or all."""
    device = torch.device(settings.run.device)
    chain = Chain(settings, Feed(corpus, settings, device))
    for step in range(settings.train.steps if steps is None else steps):
        chain.train_step(step)
    return chain


def are_equal(first, second):
    """The same names, and the same bits under each."""
    return first.keys() == second.keys() and all(
        torch.equal(t, second[n]) for n, t in first.items()
    )


def furthest(first, second):
    """The largest difference between two sets of weights."""
    assert first.keys() == second.keys()
    return max((first[name] - weight).abs().max().item() for name, weight in second.items())


def assert_same_course(resumed, whole, step=0):
    """From this step on, the losses and the last weights of the other run, bit for bit."""
    assert resumed.losses() == whole.losses()[step:]
    assert are_equal(resumed.weights(), whole.weights())


def total(meter, kind):
    """Bytes that were sent in frames of a kind, headers included."""
    counted = meter["sent"][kind]
    return counted["payload_bytes"] + counted["frames"] * HEADER_BYTES
