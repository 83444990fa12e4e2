"""The ledger: what stages report becomes a summary, in memory that does not grow with the run."""

import json
import math
import pickle
from dataclasses import replace

import pytest

from thinwire.engine.reports import Evaluation, StageCosts, Step
from thinwire.run.ledger import Ledger
from thinwire.run.protocol import Ready
from thinwire.schedule import Costs, Links, simulate

FRAME = 1064  # bytes of one frame, header included


def meter(**frames):
    """A meter's snapshot with so many frames sent of each kind."""

    def count(number):
        return {"frames": number, "header_bytes": 64 * number, "payload_bytes": 1000 * number}

    sent = {kind: count(number) for kind, number in frames.items()}
    return {"sent": {**sent, "total": count(sum(frames.values()))}, "received": {"total": count(0)}}


def report(stage, step, seconds, **changes):
    """What one of two stages says of a step of four microbatches."""
    done = 4 * (step + 1)
    passes, end = ("FORWARD", "VERDICT") if stage == 0 else ("BACKWARD", "TALLY")
    kinds = {passes: done, end: step + 1}
    start = 100.0 + 10 * step
    spans = [("compute", "F0", start, start + seconds / 2), ("compute", "norm", start, start),
             ("send", "F0>", start, start + seconds / (4 + 4 * stage))]  # fmt: skip
    usual = {
        "step": step, "loss": 5.0 - 0.01 * step, "lr": 0.1, "grad_norm": 1.0, "committed": True,
        "start": start, "end": start + seconds, "wait": seconds / 8, "spans": spans,
        "costs": StageCosts(seconds / 16, seconds / 16 * (1 + stage), seconds / 16),
        "meters": {"cut-0": meter(**kinds, EVALUATE=7, HELLO=1)}, "measures": {}, "dropped": 0,
    }  # fmt: skip
    return Step(**{**usual, **changes})


def follow(ledger, durations, **changes):
    """File the steps of these durations; `changes` holds a value per step, for all stages."""
    for step, seconds in enumerate(durations):
        own = {key: values[step] for key, values in changes.items()}
        assert ledger.add_step(1, report(1, step, seconds, **own)) is None, "a stage is missing"
        record = ledger.add_step(0, report(0, step, seconds, **own))
        assert record is not None and record.step == step + 1
    return ledger


@pytest.fixture
def make_ledger(make_settings):
    usual = {"link__emulate": True, "link__mbps_up": 8.0, "train__steps": 1000}
    usual |= {"train__eval_every": 0}
    about = [Ready("", "0..1", "cpu"), Ready("", "2..3", "cpu")]
    return lambda **changes: Ledger(make_settings(**{**usual, **changes}), about, first_step=0)


def test_a_summary_of_known_steps(make_ledger):
    ledger = follow(make_ledger(train__eval_every=0), [9.0, 9.0, 1.0, 2.0, 6.0])
    summary = ledger.summary(30.0)
    tokens = ledger.settings.tokens_per_step
    assert summary["steps"] == 5 and summary["tokens"] == 5 * tokens
    assert summary["step_seconds_median"] == 2.0, "the first two steps only warm up"
    assert summary["tokens_per_s"] == pytest.approx(tokens / 3.0)
    costs = summary["measured_costs"]
    assert costs["forward"] == pytest.approx([3 / 16] * 2)
    assert costs["backward"] == pytest.approx([3 / 16, 6 / 16])
    assert costs["update"] == pytest.approx([3 / 16] * 2)
    assert costs["forward_bytes"] == [FRAME * (4 * 5 + 5) // 20]
    first, second = summary["time_shares"]
    assert first.pop("wait_for").keys() == {"neighbour", "link", "basis", "verdict"}
    shares = {"stage": 0, "compute": 1 / 2, "wait": 1 / 8, "update": 1 / 16, "other": 5 / 16}
    assert first == pytest.approx(shares)
    assert second["compute"] == pytest.approx(3 / 4)
    assert summary["bubble_fraction"] == pytest.approx(1 - (1 / 2 + 3 / 4) / 2 - 1 / 16)
    busy = FRAME * 25 / 5 * 8e-6 / (8.0 * 3.0)
    assert summary["link_utilisation"] == pytest.approx(busy), "by the steps that count"
    (row,) = summary["cuts"]
    assert row["forward_bytes_per_token"] == pytest.approx(FRAME * 25 / (5 * tokens))
    assert (row["forward_codec"], row["backward_codec"]) == ("fp64", "fp64")
    assert row["link_utilisation"] == summary["link_utilisation"]
    assert summary["refused_updates"] == 0 and summary["total_seconds"] == 30.0


def test_speed_leaves_out_first_steps_and_those_that_share_their_time_with_a_validation(
    make_ledger,
):
    """Step 5 follows a validation, and lasts on the first stage until the others have done it."""
    ledger = follow(make_ledger(train__eval_every=4), [9.0, 9.0, 1.0, 2.0, 50.0, 3.0])
    summary, tokens = ledger.summary(100.0), ledger.settings.tokens_per_step
    timed = summary["timed"]
    assert timed == {"steps": 3, "tokens_per_step": tokens, "seconds": 6.0, "which": "steady"}
    assert summary["tokens_per_s"] == timed["steps"] * tokens / timed["seconds"]
    assert summary["step_seconds_median"] == 2.0
    assert ledger.records[-1].tokens_per_s == tokens / 2.0, "what is on display too"


def test_a_resumed_run_tells_its_own_steps_from_those_before(make_settings):
    about = [Ready("", "", "cpu")] * 2
    ledger = Ledger(make_settings(train__steps=24), about, first_step=20)
    empty = ledger.summary(1.0)
    for key in ("tokens_per_s", "final_train_loss", "last_train_loss", "link_utilisation"):
        assert empty[key] is None
    assert empty["cuts"] == [] and empty["space"] is None
    for step in range(20, 24):
        for stage in (0, 1):
            ledger.add_step(stage, report(stage, step, 1.0))
    summary = ledger.summary(9.0)
    assert (summary["steps"], summary["steps_run"]) == (24, 4)
    assert summary["final_train_loss_steps"] == 4, "the mean is over these, not over ten"


def test_a_run_that_was_formed_again_is_summed_up_as_a_whole(make_ledger):
    """Two steps are lost with a peer, and trained again after a wait of 7 s."""
    ledger = make_ledger()
    ledger.add_evaluation(Evaluation(0, 6.0, 1.0))
    follow(ledger, [4.0, 4.0, 1.0, 1.0, 1.0, 1.0])
    ledger.add_evaluation(Evaluation(4, 5.0, 1.0))
    ledger.add_evaluation(Evaluation(6, 9.0, 1.0))
    ledger.go_on([Ready("", "", "cpu")] * 2, 4, waited=7.0)
    assert ledger.done == 4 and ledger.records[-1].step == 4
    ledger.add_evaluation(Evaluation(4, 5.0, 1.0))
    for step in range(4, 8):
        counted = {"FORWARD": 4 * (step - 3)}, {"BACKWARD": 4 * (step - 3)}  # anew from zero
        for stage in (1, 0):
            meters = {"cut-0": meter(**counted[stage])}
            record = ledger.add_step(stage, report(stage, step, 1.0, meters=meters))
    assert record is not None and record.links[0].forward_bytes == 4 * FRAME
    ledger.add_evaluation(Evaluation(8, 3.0, 1.0))
    assert ledger.summary(1.0)["bytes_sent"] is None, "these stages have not finished"
    ledger.add_finished(0, {"cut-0": meter(FORWARD=16, BYE=1)})
    ledger.add_finished(1, {"cut-0": meter(BACKWARD=16, BYE=1)})
    summary = ledger.summary(total_seconds=60.0, start_seconds=10.0)
    assert summary["valid_losses"] == [(0, 6.0), (4, 5.0), (8, 3.0)]
    assert (summary["steps"], summary["steps_run"], summary["epochs"]) == (8, 10, 2)
    assert ledger.first_step == 0
    parts = {"start": 10.0, "training": 16.0, "validation": 5.0, "waiting": 7.0, "other": 22.0}
    assert summary["seconds"] == parts and sum(parts.values()) == summary["total_seconds"]
    assert (summary["timed"]["steps"], summary["timed"]["seconds"]) == (6, 6.0)
    by_kind = summary["bytes_sent"]["by_kind"]
    assert by_kind["FORWARD"] == FRAME * (24 + 16) and by_kind["HELLO"] == 2 * FRAME
    (row,) = summary["cuts"]
    tokens = 10 * ledger.settings.tokens_per_step
    assert row["forward_bytes_per_token"] == FRAME * (24 + 6 + 16) / tokens


def test_an_uplink_carries_what_a_stage_sends_both_ways(make_settings):
    """The display of a step, each cut and the summary say the same of the stage in the middle."""
    links = {"link__emulate": True, "link__mbps_up": 8.0}
    settings = make_settings(pipeline__stages=3, train__eval_every=0, **links)
    up, down = meter(FORWARD=20), meter(BACKWARD=10)
    sent = [{"cut-0": up}, {"cut-0": down, "cut-1": up}, {"cut-1": down}]

    def busy(ledger):
        for stage, meters in enumerate(sent):
            record = ledger.add_step(stage, report(stage, 0, 0.1, meters=meters))
        assert record is not None
        summary = ledger.summary(1.0)
        shown = [link.utilisation for link in record.links]
        assert [cut["link_utilisation"] for cut in summary["cuts"]] == pytest.approx(shown)
        return [*shown, summary["link_utilisation"]]

    about = [Ready("", "", "cpu")] * 3
    share = 30 * FRAME * 8e-6 / (8.0 * 0.1)
    assert busy(Ledger(settings, about, 0)) == pytest.approx([share] * 3)
    hosted = replace(settings, link=replace(settings.link, emulate=False))
    measured = Ledger(hosted, about, 0, links=Links([0.0, 16.0, 1.0], [0.0] * 3, [0.0] * 2))
    last = 10 * FRAME * 8e-6 / 0.1
    assert busy(measured) == pytest.approx([share / 2, last, last]), "the rates of its peers"


def test_waits_are_told_by_what_was_waited_for(make_ledger):
    """Stage 1 waits 3 s for F0: 2 until stage 0 has computed it, 1 for the link."""
    below = [("compute", "F0", 0.0, 2.0), ("wait", "B0", 2.0, 6.0), ("wait", "U", 6.0, 6.5)]
    above = [("wait", "F0", 0.0, 3.0), ("compute", "B0", 3.0, 5.5), ("wait", "basis", 6.0, 6.25)]
    ledger = make_ledger()
    for stage, spans in ((1, above), (0, below)):
        times = {"start": 0.0, "end": 10.0, "wait": 4.5 if stage == 0 else 3.25}
        ledger.add_step(stage, report(stage, 0, 10.0, spans=spans, **times))
    first, second = (row["wait_for"] for row in ledger.summary(1.0)["time_shares"])
    assert first == pytest.approx({"neighbour": 0.35, "link": 0.05, "basis": 0, "verdict": 0.05})
    assert second == pytest.approx({"neighbour": 0.2, "link": 0.1, "basis": 0.025, "verdict": 0})


def test_the_bubble_of_plan_and_summary_is_one_thing(make_settings):
    """A run that goes exactly as simulated has the bubble that was simulated."""
    settings = make_settings(pipeline__microbatches=4, train__eval_every=0)
    costs = Costs([1.0, 1.0], [2.0, 2.0], [0.5, 0.5], [0], [0])
    for cores in (None, 1):
        step = simulate(settings.schedule(), costs, cores=cores)
        ledger = Ledger(settings, [Ready("", "", "cpu")] * 2, first_step=0)
        for stage in (1, 0):
            ours = [s for s in step.spans if s.stage == stage and s.lane == "compute"]
            F, B, U = (sum(s.end - s.start for s in ours if s.label[0] == kind) for kind in "FBU")
            measured = StageCosts(F / 4, B / 4, U)
            ledger.add_step(stage, report(stage, 0, step.step_seconds, costs=measured, spans=[]))
        summary = ledger.summary(1.0)
        assert summary["bubble_fraction"] == pytest.approx(step.bubble_fraction)
    assert summary["simulated_bubble_fraction"] is not None


def test_a_long_run_holds_no_more_than_a_short_one(make_ledger):
    def held(steps):
        return len(pickle.dumps(vars(follow(make_ledger(), [1.0] * steps))))

    # a duration is one number per step; a report has dozens, a trace hundreds
    assert held(400) - held(200) <= 200 * 20
    assert held(16) > held(1) + 15 * 100, "the count sees what a ledger holds"
    assert 10 <= len(follow(make_ledger(), [1.0] * 50).records) < 50


def test_every_byte_that_left_is_counted_by_kind(make_ledger):
    """The last verdict and tally are not in the meters that the last step reports."""
    ledger = follow(make_ledger(), [1.0, 1.0, 1.0])
    ledger.add_finished(0, {"cut-0": meter(FORWARD=12, VERDICT=4, EVALUATE=5, HELLO=1)})
    assert ledger.summary(1.0)["bytes_sent"] is None, "the stages have not finished"
    ledger.add_finished(1, {"cut-0": meter(BACKWARD=12, TALLY=4, HELLO=1)})
    summary = ledger.summary(1.0)
    wanted = {"FORWARD": 12, "VERDICT": 4, "EVALUATE": 5, "HELLO": 2, "BACKWARD": 12, "TALLY": 4}
    by_kind = {kind: FRAME * frames for kind, frames in wanted.items()}
    assert summary["bytes_sent"] == {"by_kind": by_kind, "total": sum(by_kind.values())}
    (row,), tokens = summary["cuts"], 3 * ledger.settings.tokens_per_step
    assert row["forward_bytes_per_token"] == FRAME * 16 / tokens, "of training alone"
    assert summary["measured_costs"]["forward_bytes"] == [FRAME * 16 // 12]


def test_losses_that_are_null_for_not_being_finite_are_listed(make_ledger):
    ledger = follow(make_ledger(), [1.0] * 3, loss=[5.0, math.nan, 4.0])
    assert ledger.summary(1.0)["not_finite"] == ["final_train_loss"], "the mean of all three"
    json.dumps(ledger.summary(1.0))  # it is plain data
    ledger.add_evaluation(Evaluation(3, math.inf, 0.0))
    assert ledger.summary(1.0)["not_finite"] == ["final_train_loss", "final_valid_loss"]
    assert follow(make_ledger(), [1.0]).summary(1.0)["not_finite"] == []
