"""The low-rank codec: two thin factors, the same product everywhere, a start that stays warm."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import PLACE, normal, round_trip

from thinwire.codec.base import spec_of
from thinwire.codec.lowrank import LowRank
from thinwire.errors import ConfigError

shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)

ranks = st.integers(1, 4)
seeds = st.integers(0, 2**32)
few = settings(deadline=None, max_examples=60)


def relative_error(sent, got):
    return float((sent.double() - got.double()).norm() / sent.double().norm())


@few
@given(st.integers(8, 20), st.integers(8, 20), ranks, seeds, st.integers(-100, 90))
def test_a_matrix_of_that_rank_arrives_whole(rows, columns, rank, seed, exponent):
    sent = normal((rows, rank), seed) @ normal((rank, columns), seed + 1) * 2.0**exponent
    assert relative_error(sent, round_trip(LowRank(rank), sent)) < 2**-6


def test_three_cold_iterations_come_near_the_best_and_warm_ones_nearer():
    left, right = (torch.linalg.qr(normal((64, 64), seed)).Q for seed in (0, 1))
    spectrum = 0.8 ** torch.arange(64.0)
    sent = left @ torch.diag(spectrum) @ right
    best = float(spectrum[8:].norm() / spectrum.norm())
    codec = LowRank(8)
    errors = [relative_error(sent, round_trip(codec, sent)) for _ in range(6)]
    assert best < errors[-1] < errors[0] < 1.1 * best
    assert errors[-1] < 1.01 * best


@pytest.mark.parametrize("shape", [(), (5,), (0, 4), (1, 9), (9, 1), (3, 3), (2, 4, 1, 2)])
def test_a_rank_that_saves_nothing_sends_bf16(shape):
    sent = normal(shape, 0)
    for rank in (2, 100):
        assert torch.equal(round_trip(LowRank(rank), sent), sent.to(torch.bfloat16).float())


@few
@given(st.integers(8, 12), st.integers(8, 12), seeds, st.integers(-20, 100))
def test_the_product_is_exact_in_any_order(rows, columns, seed, exponent):
    """What EF21 relies on: no machine may sum it to other bits."""
    codec = LowRank(3)
    # Rows and columns of all sizes, whose products no float64 could add up without a common grid
    sizes = [10.0 ** -torch.linspace(0, 14, count) for count in (rows, columns)]
    sent = normal((rows, columns), seed) * sizes[0].unsqueeze(1) * sizes[1]
    parts = codec.encode(sent * 2.0**exponent, PLACE)
    got = codec.decode(parts, spec_of(sent), PLACE)
    P, Q = (part.view(-1, 3).double() for part in parts)
    for factor in (P, Q):
        largest = math.nextafter(float(factor.abs().max()), 0)  # rounding may reach a power of two
        steps = factor / 2.0 ** (math.frexp(largest)[1] - 22)
        assert torch.equal(steps, steps.round()) and steps.abs().max() <= 2**22
    for row in range(rows):
        for column in range(columns):
            products = (P[row] * Q[column]).tolist()
            assert float(P[row] @ Q[column]) == math.fsum(products)
            assert got[row, column] == torch.tensor(math.fsum(products)).float()


def test_a_width_that_changes_is_refused():
    codec = LowRank(1)
    round_trip(codec, normal((9, 11), 0))
    round_trip(codec, normal((5, 11), 0))
    with pytest.raises(ConfigError, match=r"Q of shape \(11, 1\).* 12 columns"):
        codec.pack(normal((9, 12), 0), PLACE)


@few
@given(shapes, ranks, seeds, st.sampled_from((torch.float32, torch.float64, torch.bfloat16)))
def test_the_error_is_at_most_the_tensor(shape, rank, seed, dtype):
    sent = normal(shape, seed, dtype)
    got = round_trip(LowRank(rank), sent)
    assert got.shape == sent.shape and got.dtype == dtype
    error = (sent.double() - got.double()).norm()
    assert error <= sent.double().norm() * (1 + 2**-6)
