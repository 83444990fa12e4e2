"""The same settings and seed give the same weights, bit for bit, on one kind of machine."""

import pytest
import torch
from torch import Tensor

from thinwire.data import Corpus
from thinwire.engine.feed import Feed
from thinwire.settings import Settings
from thinwire_lab.chain import Chain

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]


def trained(settings: Settings, corpus: Corpus) -> list[Tensor]:
    """The weights after a few steps."""
    chain = Chain(settings, Feed(corpus, settings, torch.device(settings.run.device)))
    for step in range(settings.train.steps):
        chain.train_step(step)
    return [p.detach().cpu() for stage in chain.stages for p in stage.parameters()]


def are_equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("forward", "backward", "mode"),
    [
        ("bf16", "bf16", "dense"),
        ("int8", "int4", "subspace"),
        ("topk(0.2)+ef21", "topk(0.2)+ef", "projected"),
    ],
)
def test_a_training_repeats_bit_for_bit(make_settings, corpus, forward, backward, mode, device):
    def settings(seed):
        return make_settings(
            run__precision="bf16",
            run__device=device,
            run__seed=seed,
            codec__forward=forward,
            codec__backward=backward,
            boundary__mode=mode,
            boundary__rank=0 if mode == "dense" else 8,
        )

    first = trained(settings(seed=0), corpus)
    assert are_equal(first, trained(settings(seed=0), corpus))
    assert not are_equal(first, trained(settings(seed=1), corpus))
