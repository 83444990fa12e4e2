"""Narrow boundaries in the pipeline: every mode equals one process, exactly resumed, or refused."""

import pytest
import torch
from engine_runs import assert_same_course, built, furthest, total
from plain import moments_of, order_of, update_by_hand
from test_verdict import poison

from settings_values import EXACT, narrow
from thinwire.errors import WireError
from thinwire.model import token_loss
from thinwire.settings.crossing import frame_bytes, wire_shape

MOVING = {
    f"{mode}{name}": narrow(mode, **changes)
    for mode in ("subspace", "reparam", "projected")
    for name, changes in (("", {}), ("-moving", {"basis_update_every": 2}))
}
MODES = {
    **MOVING,
    "projected-narrow-table": narrow("projected", anchor="per-stage", table=3),
    "projected-own-tables": narrow("projected", anchor="per-stage"),
}

EMBEDDING = {
    f"{mode}-embedding": narrow(mode, anchor="embedding", row_tokens=20, row_steps=5)
    for mode in ("subspace", "reparam")
}
"""Whose rows have updates of their own: tests/engine/test_shared_rows.py has the plain loop."""


def plain_training(settings, corpus):
    """One process, one graph: stages chained by autograd, and an Adam written out by hand."""
    torch.set_num_threads(1)
    boundary = settings.boundary
    builder, stages = built(settings)
    parameters = {n: p for stage in stages for n, p in stage.global_parameters().items()}
    axes = {}
    if boundary.mode == "subspace":
        axes = {h.name: h.axis for s in stages for h in s.held_parameters()}
    basis = builder.space.basis_DK
    moments = moments_of(parameters)
    order = order_of(settings, corpus)
    watched = stages[-1].names[-2 - boundary.free_layers]
    losses = []
    for step in range(settings.train.steps):
        gradients: list[torch.Tensor] = []
        if boundary.basis_update_every:
            first = stages[-1].names[0]
            name = watched if boundary.is_constrained else first
            stages[-1].watch_gradient(name, gradients.append)
        total = 0.0
        for m in range(settings.pipeline.microbatches):
            batch = order.microbatch(step, m)
            ids = torch.from_numpy(batch.inputs_BT)
            x = ids
            for stage in stages:
                x = stage(x, ids)
            loss = token_loss(x, torch.from_numpy(batch.targets_BT))
            (loss / settings.pipeline.microbatches).backward()
            total += loss.item() / settings.pipeline.microbatches
        losses.append(total)
        with torch.no_grad():
            inside = basis @ basis.T
            for name, axis in axes.items():
                grad = parameters[name].grad
                parameters[name].grad = inside @ grad if axis == 0 else grad @ inside
            update_by_hand(parameters, moments, axes, settings, step)
            every, is_last_step = boundary.basis_update_every, step + 1 == settings.train.steps
            if every and (step + 1) % every == 0 and not is_last_step:
                move(stages, basis, gradients, boundary.basis_rate, parameters, moments, axes)
    return losses, parameters


def move(stages, basis, gradients, rate, parameters, moments, axes):
    """The Grassmann step from its formula, and everything that follows the basis."""
    flat = torch.cat([g.flatten(0, 1) for g in gradients])
    covariance = flat.T @ flat
    old = basis.clone()
    push = covariance @ old
    energy = float((old * push).sum()) / old.shape[1]
    q, r = torch.linalg.qr(old + rate / energy * (push - old @ (old.T @ push)))
    new = q * torch.sign(r.diagonal())
    basis.copy_(new)
    inside = new @ new.T
    for name, axis in axes.items():
        for tensor in (parameters[name].data, moments[name][0]):
            tensor.copy_(inside @ tensor if axis == 0 else tensor @ inside)
    for stage in stages:
        for name, layer in stage.reparametrised().items():
            for tensor in (parameters[name].data, moments[name][0]):
                turn = new.T @ old
                tensor.copy_(turn @ tensor if layer.axis == 0 else tensor @ turn.T)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stages", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_pipeline_equals_one_process(mode, stages, make_settings, run_in_threads, corpus):
    settings = make_settings(pipeline__stages=stages, **MODES[mode])
    outcome = run_in_threads(settings)
    losses, parameters = plain_training(settings, corpus)
    assert outcome.losses() == pytest.approx(losses, abs=1e-10)
    assert furthest(outcome.weights(), parameters) < 1e-9


@pytest.mark.parametrize("mode", [m for m in (*MOVING, *EMBEDDING) if "projected" not in m])
def test_constrained_modes_do_not_depend_on_the_split(mode, make_settings, run_in_threads):
    """The cut loses nothing: 1, 2 and 4 stages agree to rounding in float64."""
    changes = (MODES | EMBEDDING)[mode] | {"codec__rows": "fp64"}
    runs = []
    for stages in (1, 2, 4):
        settings = make_settings(pipeline__stages=stages, boundary__free_layers=1, **changes)
        runs.append(run_in_threads(settings))
    for other in runs[1:]:
        assert other.losses() == pytest.approx(runs[0].losses(), abs=1e-10)


def test_projected_cuts_lose_something(make_settings, run_in_threads):
    """The failing side: with free weights the number of cuts changes the result."""
    settings = [make_settings(pipeline__stages=n, **MODES["projected"]) for n in (1, 2, 4)]
    runs = [run_in_threads(each) for each in settings]
    assert abs(runs[0].losses()[0] - runs[1].losses()[0]) > 1e-4
    assert abs(runs[1].losses()[0] - runs[2].losses()[0]) > 1e-4


@pytest.mark.parametrize("mode", [*MODES, *EMBEDDING])
def test_resume_is_bitwise_across_a_move(mode, make_settings, saved_run, resumed):
    """Checkpoints before, at and after a move of the basis, gathered gradients included; so are
    those of rows that are not due yet.
    """
    changes = {**(MODES | EMBEDDING)[mode], **EXACT, "train__checkpoint_every": 1}
    if "moving" in mode:
        changes["boundary__basis_update_every"] = 3
    settings = make_settings(train__steps=7, **changes)
    whole, saved = saved_run(settings)
    for step in (2, 3, 4):
        assert_same_course(resumed(settings, saved[step]), whole, step)


def test_each_cut_sends_its_rank_as_planned(make_settings, run_in_threads):
    settings = make_settings(pipeline__stages=4, train__eval_batches=1, **MODES["projected"])
    outcome = run_in_threads(settings)
    microbatches = settings.train.steps * settings.pipeline.microbatches
    for cut in range(3):
        assert wire_shape(settings)[-1] == 6
        out, back = frame_bytes(settings, cut)
        up, down = (outcome.steps(stage)[-1].meters[f"cut-{cut}"] for stage in (cut, cut + 1))
        assert total(up, "FORWARD") == microbatches * out
        assert total(down, "BACKWARD") == microbatches * back


def test_moves_are_measured_and_versioned(make_settings, run_in_threads):
    settings = make_settings(pipeline__stages=4, train__steps=5, **MODES["subspace-moving"])
    outcome = run_in_threads(settings)
    moved = [r.measures for r in outcome.steps(-1) if "energy_before" in r.measures]
    assert len(moved) == 2
    for measures in moved:
        assert measures["energy_after"] > measures["energy_before"]
        assert measures["largest_angle"] > 0 and measures["orthonormality_error"] < 1e-12
    assert [w.builder.space.version for w in outcome.workers] == [2] * 4
    bases = [w.builder.space.basis_DK for w in outcome.workers]
    assert all(torch.equal(b, bases[0]) for b in bases)
    sent = outcome.steps(1)[-1].meters["cut-0"]["sent"]
    assert sent["BASIS"]["payload_bytes"] == 2 * 8 * 32 * 6  # two moves of 32 x 6 in float64


def test_a_stage_with_another_basis_version_is_refused(make_settings, run_in_threads):
    def stale(worker):
        worker.builder.space.version = worker.index

    with pytest.raises(WireError, match=r"basis version 0, but this stage is at .* version 1"):
        run_in_threads(make_settings(**MODES["subspace"]), prepare_worker=stale)


def test_a_move_of_a_refused_step_is_neither_made_nor_reported(make_settings, run_in_threads):
    settings = make_settings(train__steps=3, **MODES["subspace-moving"])
    outcome = run_in_threads(settings, prepare_worker=poison(0, {1}))
    assert [w.builder.space.version for w in outcome.workers] == [0, 0]
    assert not any("energy_after" in report.measures for report in outcome.steps(-1))


@pytest.mark.parametrize("mode", [mode for mode in MODES if "moving" in mode])
def test_a_run_that_ends_at_a_move_goes_on_as_the_longer_run(
    mode, make_settings, saved_run, resumed
):
    """Four steps end where the second move is due: seven steps make it, and so does who goes on."""
    changes = {**MODES[mode], **EXACT, "optim__schedule": "constant", "train__checkpoint_every": 1}
    longer = make_settings(train__steps=7, **changes)
    whole, _ = saved_run(longer, "whole")
    ended, saved = saved_run(make_settings(train__steps=4, **changes), "ended")
    assert [w.builder.space.version for w in ended.workers] == [1, 1], "the last was not made"
    extended = resumed(longer, saved[4])
    assert_same_course(extended, whole, 4)
    for first, second in zip(extended.workers, whole.workers, strict=True):
        assert torch.equal(first.builder.space.basis_DK, second.builder.space.basis_DK)
        assert first.builder.space.version == second.builder.space.version == 3
    reported, moves = ([r.measures for r in run.steps(-1)] for run in (extended, whole))
    assert reported[0]["energy_after"] == moves[3]["energy_after"], "the move that was left"


@pytest.mark.parametrize("codec", ["fp64", "int8+ef21"])
@pytest.mark.parametrize("mode", [mode for mode in MODES if "moving" in mode])
def test_the_jump_of_a_move_is_that_of_the_same_batch(
    mode, codec, make_settings, run_in_threads, tmp_path
):
    """A run that ends where the move is due validates before it, and a longer run after it."""
    changes = {**MODES[mode], "pipeline__stages": 3, "codec__forward": codec,
               "optim__schedule": "constant", "train__eval_batches": 1}  # fmt: skip
    before = run_in_threads(make_settings(train__steps=2, **changes), folder=tmp_path / "before")
    longer = make_settings(train__steps=3, train__eval_every=2, **changes)
    after = run_in_threads(longer, folder=tmp_path / "after")
    moved = [r.measures for r in after.steps(-1) if "loss_jump" in r.measures]
    assert len(moved) == 1 and "energy_after" in moved[0]
    assert moved[0]["loss_jump"] == after.valid_losses()[1] - before.valid_losses()[-1] != 0.0
    sent = after.steps(0)[-1].meters["cut-0"]["sent"]
    assert sent["PROBE"]["frames"] == 2
