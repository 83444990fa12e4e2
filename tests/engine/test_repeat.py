"""The same settings and seed give the same weights, bit for bit, on one kind of machine."""

import pytest
import torch

from trained import trained_chain
from whole_state import are_equal

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("forward", "backward", "mode"),
    [("bf16", "bf16", "dense"), ("int8", "int4", "subspace"),
     ("topk(0.2)+ef21", "topk(0.2)+ef", "projected")],
)  # fmt: skip
def test_a_training_repeats_bit_for_bit(make_settings, corpus, forward, backward, mode, device):
    def trained(seed):
        boundary = {"boundary__mode": mode, "boundary__rank": 0 if mode == "dense" else 8}
        run = {"run__precision": "bf16", "run__device": device, "run__seed": seed}
        codecs = {"codec__forward": forward, "codec__backward": backward}
        chain = trained_chain(make_settings(**boundary, **run, **codecs), corpus)
        weights = enumerate(p for stage in chain.stages for p in stage.parameters())
        return {str(number): p.detach().cpu() for number, p in weights}

    first = trained(seed=0)
    assert are_equal(first, trained(seed=0)) and not are_equal(first, trained(seed=1))
