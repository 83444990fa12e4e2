"""A stage's own token table is added where the stream enters it and taken off where it leaves."""

import pytest
import torch
from engine_runs import built
from torch.nn import functional as F

from settings_values import narrow
from thinwire.model.stage import with_ends

RANK = 6


@pytest.fixture
def projected(make_settings):
    def make(rank=RANK, **changes):
        own = {**narrow("projected", rank=rank, anchor="per-stage"), "pipeline__stages": 3}
        return built(make_settings(**own, model__layers=6, **changes))[1]

    return make


@pytest.fixture
def ids_BT():
    return torch.arange(32).view(2, 16) * 7 % 96


def through(stages, ids_BT):
    x = ids_BT
    for stage in stages:
        x = stage(x, ids_BT)
    return x


def fill_tables(stages):
    torch.manual_seed(0)
    tables = [stage.incoming.table for stage in stages[1:]]
    for table in tables:
        table.data.normal_()
    return tables


def test_the_stream_is_what_a_plain_loop_makes_of_it(projected, ids_BT):
    stages = projected()
    tables = fill_tables(stages)
    embedding, *blocks = stages[0].layers
    basis_DK = stages[0].outgoing.basis_DK
    own = [embedding.weight, *tables]
    layers = [blocks, *(list(stage.layers) for stage in stages[1:])]

    z = torch.zeros(2, 16, RANK, dtype=torch.float64)
    for stage, (table, run) in enumerate(zip(own, layers, strict=True)):
        known = F.embedding(ids_BT, table)
        x = z @ basis_DK.T + known
        for layer in run:
            x = layer(x)
        if stage < 2:
            z = (x - known) @ basis_DK
    expected = torch.autograd.grad(x.square().mean(), own)

    logits = through(stages, ids_BT)
    torch.testing.assert_close(logits, x, rtol=0, atol=1e-12)
    found = torch.autograd.grad(logits.square().mean(), own)
    for gradient, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-12)


def test_nothing_that_all_stages_know_crosses(projected, ids_BT):
    """Where no block writes, the coordinates are zero; a block's writing crosses."""
    stages = projected()
    fill_tables(stages)
    z = stages[0](ids_BT, ids_BT)
    assert bool(z.any())
    for stage in stages:
        for name, parameter in stage.global_parameters().items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.data.zero_()
    z = ids_BT
    for stage in stages[:-1]:
        z = stage(z, ids_BT)
        assert not bool(z.any())


def test_at_full_rank_with_one_table_for_all_it_is_the_dense_model(
    projected, make_settings, ids_BT
):
    _, dense = built(make_settings(pipeline__stages=3, model__layers=6))
    stages = projected(rank=32)
    expected = through(dense, ids_BT)
    assert (through(stages, ids_BT) - expected).abs().max() > 1e-3, "tables still differ"
    for stage in stages[1:]:
        stage.incoming.table.data.copy_(stages[0].layers[0].weight.data)
    assert (through(stages, ids_BT) - expected).abs().max() < 1e-12


def gradients_at_cuts(stages, ids_BT, weights_BT):
    """What goes back over each cut, lowest first, where tokens weigh as given in the loss."""
    x, cuts = ids_BT, []
    for stage in stages:
        x = stage(x, ids_BT)
        if stage is not stages[-1]:
            cuts.append(x)
    return list(torch.autograd.grad((x.square().mean(-1) * weights_BT).sum(), cuts))


def bounded(gradient_BTK, bound):
    """By a plain loop over tokens; and how many the bound has met."""
    rows = list(gradient_BTK.flatten(0, 1))
    norms = [float(row.norm()) for row in rows]
    counted = [norm for norm in norms if norm > 0]
    most = bound * sum(counted) / len(counted)
    kept = [
        row * (most / norm) if norm > most else row for row, norm in zip(rows, norms, strict=True)
    ]
    return torch.stack(kept).view_as(gradient_BTK), sum(norm > most for norm in norms)


def bounded_by_hand(stages, ids_BT, weights_BT, everywhere):
    """What goes back over both cuts if it is bounded behind each layer, or at cuts alone, from the
    loss down; and how many tokens the bound has met.
    """
    x, calls = stages[0](ids_BT).detach(), []
    for stage in stages[1:]:
        known = None
        for index, layer in enumerate(stage.layers):
            incoming = stage.incoming if index == 0 else None
            outgoing = stage.outgoing if index == len(stage.layers) - 1 else None
            given = x.requires_grad_()
            x, known = with_ends(layer, incoming, outgoing, given, ids_BT, known)
            calls.append((given, x, index == 0))
            x, known = x.detach(), None if known is None else known.detach()
    last = calls[-1][1]
    (gradient,) = torch.autograd.grad((last.square().mean(-1) * weights_BT).sum(), last)
    found, met = [], 0
    for given, made, is_cut in reversed(calls):
        (gradient,) = torch.autograd.grad(made, given, gradient)
        if is_cut or everywhere:
            gradient, many = bounded(gradient, 2.0)
            met += many
        found += [gradient] if is_cut else []
    return found[::-1], met


def test_a_bound_is_what_a_plain_loop_over_layers_and_tokens_makes_of_the_gradient(
    projected, ids_BT
):
    """One token has most of the loss, and four have none: at both cuts, in float64."""
    weights_BT = torch.ones(2, 16, dtype=torch.float64)
    weights_BT[1, 5], weights_BT[0, 12:] = 1e4, 0  # no token sees what comes behind it
    free, bound = projected(), projected(boundary__bound=2.0)
    for stages in (free, bound):
        fill_tables(stages)
    wanted, met = bounded_by_hand(free, ids_BT, weights_BT, everywhere=True)
    assert met > 2

    found = gradients_at_cuts(bound, ids_BT, weights_BT)
    assert [int((gradient.norm(dim=-1) > 0).sum()) for gradient in found] == [28, 28]
    for gradient, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-15)
    at_cuts, _ = bounded_by_hand(free, ids_BT, weights_BT, everywhere=False)
    for others in (gradients_at_cuts(free, ids_BT, weights_BT), at_cuts):
        for gradient, expected in zip(others, wanted, strict=True):
            assert (gradient - expected).abs().max() > 1e-3 * expected.abs().max(), "they differ"


def test_a_bound_hides_no_gradient_that_is_not_finite(projected, ids_BT):
    stages = projected(boundary__bound=2.0)
    weights_BT = torch.ones(2, 16, dtype=torch.float64)
    weights_BT[1, 5] = torch.inf
    for gradient in gradients_at_cuts(stages, ids_BT, weights_BT):
        assert not bool(torch.isfinite(gradient).all())
