import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusing import refused

from thinwire.data import Order, Validation
from thinwire.data.order import permuted, round_keys
from thinwire.errors import DataError

MASK64 = (1 << 64) - 1
PINNED = [7, 5, 9, 2, 6, 8, 11, 10, 0, 1, 4, 3]


def plain_permuted(index, size, keys):
    """The same permutation in Python's own integers, from its description."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    value = index
    while True:
        left, right = value >> half, value & ((1 << half) - 1)
        for key in keys:
            mixed = right ^ key
            for multiplier in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
                mixed = ((mixed ^ (mixed >> 31)) * multiplier) & MASK64
            left, right = right, left ^ ((mixed >> 32) & ((1 << half) - 1))
        value = (left << half) | right
        if value < size:
            return value


def an_order(tokens=1000, context=10, batch=6, microbatches=3, seed=0):
    return Order(np.arange(tokens, dtype=np.uint16), context, batch, microbatches, seed)


def epochs_of(order, epochs):
    """The windows of the first epochs, in the order in which they are visited."""
    steps = -(-epochs * order.count // order.batch)
    visited = [
        order.microbatch(step, m).examples_B
        for step in range(steps)
        for m in range(order.microbatches)
    ]
    flat = np.concatenate(visited)[: epochs * order.count]
    return list(flat.reshape(epochs, order.count))


@given(size=st.integers(1, 3000), seed=st.integers(-(2**40), 2**70), epoch=st.integers(0, 2**40))
@settings(deadline=None)
def test_every_index_is_hit_exactly_once(size, seed, epoch):
    image = permuted(np.arange(size), size, round_keys(seed, epoch))
    assert np.array_equal(np.sort(image), np.arange(size))


@given(size=st.integers(1, 2**62), data=st.data())
@settings(max_examples=50, deadline=None)
def test_numpy_gives_what_plain_integers_give(size, data):
    index = data.draw(st.integers(0, size - 1))
    keys = round_keys(7, 3)
    image = permuted(np.array([index], dtype=np.uint64), size, keys)
    assert int(image[0]) == plain_permuted(index, size, keys)


def test_the_order_is_pinned():
    """A changed order would silently change every run that is resumed or repeated."""
    assert permuted(np.arange(12), 12, round_keys(0, 0)).tolist() == PINNED


@given(
    windows=st.integers(6, 60),
    microbatches=st.sampled_from([1, 2, 3, 6]),
    seed=st.integers(0, 2**63),
)
@settings(max_examples=40, deadline=None)
def test_each_epoch_visits_every_window_once(windows, microbatches, seed):
    order = an_order(tokens=windows * 10 + 1, microbatches=microbatches, seed=seed)
    assert order.count == windows
    for visited in epochs_of(order, 3):
        assert np.array_equal(np.sort(visited), np.arange(windows))


def test_microbatches_only_cut_the_batch():
    whole, cut = an_order(microbatches=1), an_order(microbatches=3)
    for step in (0, 16, 1000):
        parts = [cut.microbatch(step, m).examples_B for m in range(3)]
        assert np.array_equal(np.concatenate(parts), whole.microbatch(step, 0).examples_B)


def test_inputs_are_the_window_and_targets_follow_by_one():
    batch = an_order().microbatch(3, 1)
    assert batch.inputs_BT.shape == batch.targets_BT.shape == (2, 10)
    for array in (batch.inputs_BT, batch.targets_BT, batch.examples_B):
        assert array.dtype == np.int64
        assert type(array) is np.ndarray
        assert array.flags.writeable and array.flags.c_contiguous
    for inputs_T, targets_T, example in zip(
        batch.inputs_BT, batch.targets_BT, batch.examples_B, strict=True
    ):
        assert inputs_T.tolist() == list(range(example * 10, example * 10 + 10))
        assert targets_T.tolist() == [i + 1 for i in inputs_T]


def test_sizes_that_cannot_be_are_refused():
    assert an_order(tokens=61).count == 6, "the last window has its last target"
    refused(r"60 tokens make 5 windows of 10 tokens, 6 are needed", an_order, tokens=60)
    with pytest.raises(DataError, match=r"10 tokens make 0 windows of 10 tokens.*valid_fraction"):
        Validation(np.arange(10), context=10, batch=1, limit=0)


def windows_of(validation):
    batches = [validation.microbatch(i) for i in range(len(validation))]
    return [window for batch in batches for window in batch.examples_B.tolist()]


@given(windows=st.integers(1, 400), batch=st.integers(1, 20), limit=st.integers(0, 30))
@settings(deadline=None)
def test_validation_windows_are_spread_evenly_over_all_there_are(windows, batch, limit):
    validation = Validation(np.arange(windows * 10 + 1), 10, batch, limit)
    chosen = windows_of(validation)
    assert len(chosen) == len(set(chosen)) == len(validation) * validation.size
    apart = windows / len(chosen)
    ends = [-1 - chosen[0], *chosen, 2 * windows - 1 - chosen[-1]]  # mirrored at both ends
    assert all(apart - 1 <= gap <= apart + 1 for gap in np.diff(ends))


def test_validation_reads_its_windows_in_order_and_always_the_same():
    tokens = np.arange(1001, dtype=np.uint32)
    validation = Validation(tokens, context=10, batch=2, limit=2)
    assert windows_of(validation) == [12, 37, 62, 87]
    assert windows_of(Validation(tokens, 10, 2, 2)) == [12, 37, 62, 87]
    assert validation.microbatch(1).inputs_BT[0].tolist() == list(range(620, 630))
    assert validation.microbatch(1).targets_BT[0].tolist() == list(range(621, 631))


def test_validation_limit_and_small_corpus():
    tokens = np.arange(105, dtype=np.uint32)
    assert len(Validation(tokens, 10, 2, limit=3)) == 3
    assert len(Validation(tokens, 10, 2, limit=99)) == 5
    assert windows_of(Validation(tokens, 10, 2, limit=0)) == list(range(10))
    only = Validation(tokens, 10, 64, limit=3)
    assert (len(only), only.size) == (1, 10)
    assert only.microbatch(0).inputs_BT.shape == (10, 10)
    few = Validation(tokens, context=10, batch=1, limit=2)
    targets = [few.microbatch(i).targets_BT for i in range(2)]
    assert few.total_of_targets(np.arange(105) ** 2) == sum(int((t**2).sum()) for t in targets)
    assert few.target_count == 20
