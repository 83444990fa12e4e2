"""A loss that explodes and stays finite is seen; noise, warm-ups and overfitting are not that."""

import dataclasses
import json
import random
from pathlib import Path

from leading import step

from thinwire.engine.reports import Evaluation
from thinwire.run.ledger import LATEST, STRETCH, LossWatch

LOGS = Path(__file__).parents[2] / "lab" / "src" / "thinwire_lab" / "logs"


def trained(losses, watch):
    """What is said of these losses of training steps."""
    reports = (dataclasses.replace(step(1, n), loss=loss) for n, loss in enumerate(losses))
    return [said for report in reports if (said := watch.hear(report))]


def validated(losses, watch):
    reports = (Evaluation(n, loss, 1.0) for n, loss in enumerate(losses))
    return [said for report in reports if (said := watch.hear(report))]


def curves():
    """The validations of all runs in the logs on which docs/results.md rests."""
    lines = [json.loads(line) for path in LOGS.glob("*.jsonl") for line in path.open()]
    kept = [line.get("curve") or line.get("figures", {}).get("curve") for line in lines]
    return [[loss for _, loss in curve] for curve in kept if curve]


def test_no_alarm_on_the_validations_of_real_runs():
    assert len(curves()) > 100
    for curve in curves():
        watch = LossWatch()
        for loss in curve:  # as if the training loss were that of the validation before
            assert validated([loss], watch) + trained([loss], watch) == [], curve


def test_noise_warm_ups_and_spikes_are_no_explosion():
    draw = random.Random(0)
    spread = [draw.choice([0.1, 0.1, 0.1, 4.0, 5.0]) for _ in range(2000)]  # easy and hard examples
    falling = [10.8 - 7 * min(1.0, n / 300) + draw.gauss(0, 0.5) for n in range(1000)]
    warming = [2.0 + 2 * min(n, 60 - n) / 60 for n in range(60)] + falling[300:]
    spikes = [30.0 if n % 50 < 4 else 3.0 for n in range(1000)]
    for losses in (spread, falling, warming, spikes):
        assert trained(losses, LossWatch()) == []


def test_a_slow_rise_is_seen_and_so_is_the_way_back():
    watch = LossWatch()
    rise = [3.0] * (STRETCH + LATEST) + [3.0 + n / 100 for n in range(500)]
    (alarm,) = trained(rise, watch)
    assert alarm == watch.explosion and alarm.startswith("the loss has exploded by step ")
    assert trained([3.0] * LATEST, watch) == ["the loss is back to where it was, at step 9"]
    assert not watch.explosion


def test_validations_count_against_the_best_also_that_of_before():
    watch = LossWatch(best=3.4)  # a run that goes on
    assert validated([10.6], watch) == [], "it is not known yet what training says"
    (alarm,) = trained([10.5], watch)
    assert "that of validation is 10.6, and was 3.4" in alarm
    assert validated([3.6], watch) and not watch.explosion


def test_overfitting_and_what_is_not_finite_are_no_explosion():
    watch = LossWatch()
    for training, validation in ((2.0, 1.5), (0.5, 2.0), (0.1, 3.5), (float("nan"), float("inf"))):
        assert trained([training] * LATEST, watch) + validated([validation], watch) == []
