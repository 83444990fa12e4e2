"""AQ-SGD: a memory of every training example, equal on both ends, bounded and kept in a file."""

import math
from itertools import pairwise

import pytest
import tensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.codec import Leg, Place, Surroundings, TensorSpec, spec_of
from thinwire.codec.quantize import Integer
from thinwire.codec.sparse import RandK, TopK
from thinwire.codec.wrappers import AQSGD, ExampleMemory, Zstd
from thinwire.errors import ConfigError
from whole_state import are_equal

CPU = tensors.CPU
EXAMPLES, ROW = 7, (4, 6)
ENOUGH = Surroundings(EXAMPLES, limit_bytes=10**6)
INNERS = {"topk": lambda: TopK(0.2), "randk": lambda: RandK(0.2), "int": lambda: Integer(4),
          "zstd": lambda: Zstd(Integer(4))}  # fmt: skip

seeds = st.integers(0, 2**32)
dtypes = st.sampled_from((torch.float32, torch.float64, torch.bfloat16))
microbatches = st.lists(
    st.tuples(
        st.sampled_from(("train", "evaluate", "spoilt")),
        st.lists(st.integers(0, EXAMPLES - 1), min_size=3, max_size=3),
    ),
    max_size=14,
)
few = settings(deadline=None, max_examples=40)


def normal(seed, dtype=torch.float32):
    return tensors.normal((3, *ROW), seed, dtype)


def at(number, examples, training=True):
    named = None if examples is None else tuple(examples)
    return Place(Leg.FORWARD, number, 0, training=training, examples=named)


class Ends(tensors.Ends):
    """Both ends, with room for all examples."""

    def __init__(self, inner, surroundings=ENOUGH, dtype=torch.float32):
        super().__init__(lambda: AQSGD(INNERS[inner]()))
        for end in (self.sender, self.receiver):
            end.prepare(TensorSpec((3, *ROW), dtype, CPU), surroundings)

    def states(self):
        return [end.state_tensors() for end in (self.sender, self.receiver)]


@few
@given(st.sampled_from(sorted(INNERS)), microbatches, seeds, dtypes)
def test_both_ends_remember_the_same_over_any_traffic(inner, traffic, seed, dtype):
    ends = Ends(inner, dtype=dtype)
    seen: set[int] = set()
    for number, (event, examples) in enumerate(traffic):
        tensor = normal(seed + number, dtype)
        if event == "spoilt":
            tensor.view(-1)[seed % tensor.numel()] = (math.nan, math.inf)[number % 2]
        before = ends.sender.agreement()
        got = ends.send(tensor, at(number, examples, event != "evaluate"))
        assert got.dtype == dtype and got.isfinite().all() == (event != "spoilt")
        assert ends.sender.agreement() == ends.receiver.agreement()
        if event == "train":
            if not seen.issuperset(examples):
                assert torch.equal(got, tensor.to(torch.bfloat16).to(dtype))
            seen.update(examples)
            memory = ends.receiver.state_tensors()["rows"].view(EXAMPLES, *ROW)
            last = {example: row for row, example in enumerate(examples)}
            for example, row in last.items():
                assert torch.equal(memory[example].to(dtype), got[row])
        else:
            assert ends.sender.agreement() == before
    mine, theirs = (
        {name: t for name, t in state.items() if not name.startswith("inner.")}
        for state in ends.states()
    )
    assert are_equal(mine, theirs)
    assert {i for i, flag in enumerate(mine["seen"].tolist()) if flag} == seen


def test_an_example_comes_nearer_with_every_visit():
    ends, tensor = Ends("topk"), normal(5)
    ends.send(normal(0), at(0, [0, 1, 2]))
    errors = []
    for number in range(1, 8):
        ends.send(normal(number), at(number, [3, 4, 5]))
        got = ends.send(tensor, at(number, [2, 0, 1]))
        errors.append(float((got - tensor).norm()))
    assert all(later < earlier for earlier, later in pairwise(errors))
    assert errors[-1] < 0.02 * errors[0]


def test_training_without_examples_is_refused_with_the_reason():
    ends = Ends("topk")
    with pytest.raises(ConfigError, match="do not name the examples"):
        ends.sender.pack(normal(0), at(0, None))
    with pytest.raises(ConfigError, match="do not name the examples"):
        ends.receiver.unpack(bytes(144), spec_of(normal(0)), at(0, None))
    ends.send(normal(0), at(0, None, training=False))
    with pytest.raises(ConfigError, match="one row for each example"):
        AQSGD(TopK(0.2)).prepare(TensorSpec((), torch.float32, CPU), ENOUGH)


# The memory itself


def test_too_little_room_is_refused_with_the_need_and_the_limit(tmp_path):
    need = EXAMPLES * (2 * 24 + 5)
    spec = TensorSpec((3, *ROW), torch.float32, CPU)
    ExampleMemory().prepare(spec, Surroundings(EXAMPLES, limit_bytes=need))
    for folder in (None, tmp_path):
        with pytest.raises(ConfigError, match=rf"{need} bytes at each end.* limit is {need - 1}"):
            ExampleMemory().prepare(spec, Surroundings(EXAMPLES, need - 1, folder))
    codec = AQSGD(TopK(0.2))
    with pytest.raises(ConfigError, match=r"24 numbers for each of 1,000,000 training examples"):
        codec.prepare(spec_of(normal(0)), Surroundings(10**6, limit_bytes=10**7))


def test_a_file_and_the_device_remember_the_same(tmp_path):
    folder = tmp_path / "new" / "folder"
    here, there = Ends("topk"), Ends("topk", Surroundings(EXAMPLES, 10**6, folder))
    for number, examples in enumerate([[0, 1, 2], [2, 1, 0], [4, 1, 6], [6, 4, 2]]):
        tensor, place = normal(number), at(number, examples)
        assert torch.equal(here.send(tensor, place), there.send(tensor, place))
    assert are_equal(here.states()[0], there.states()[0])
    assert here.sender.agreement() == there.sender.agreement()
    assert list(folder.iterdir()) == [], "the file has no name, so nothing is left of it"
