"""Cuts through a constrained model lose nothing, and the comparison sees it when they do."""

import dataclasses

import pytest

from thinwire_lab import lossless
from thinwire_lab.experiment import EXPERIMENTS
from thinwire_lab.lossless import BROKEN, EXACT, QUANTITIES, Case
from thinwire_lab.outcome import write_outcome

CASES = [Case(*way) for way in lossless.WAYS]


@pytest.fixture(scope="module")
def pairs():
    """Each model once; nothing below changes a pair."""
    return {case: lossless.Pair(case, lossless.warm_weights(case)) for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_float64_cuts_change_nothing(case, pairs):
    found = lossless.differences(*pairs[case].traces())
    assert found.keys() == QUANTITIES.keys()
    assert max(found.values()) <= EXACT, found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_broken_assumption_shows(case, pairs):
    found = lossless.failures(case, pairs[case])
    assert len(found) == (5 if case.mode == "subspace" else 3)
    mildest = {name: max(sizes.values()) for name, sizes in found.items()}
    assert min(mildest.values()) > BROKEN, mildest


def test_single_precision_is_worse_than_double(pairs):
    """The failing side of the aim: it is not so loose that float32 would reach it."""
    case = Case("subspace", blocks=1, stages=2)
    single = dataclasses.replace(case, precision="fp32")
    pair = lossless.Pair(single, lossless.warm_weights(case))
    found = lossless.differences(*pair.traces())
    assert EXACT < max(found.values()) < 1e-4


def test_the_report_is_written(tmp_path, monkeypatch):
    """The whole experiment with one way to cut, from the run to its files."""
    monkeypatch.setattr(lossless, "WAYS", [("subspace", 1, 2), ("reparam", 1, 2)])
    options = EXPERIMENTS["lossless"].parse("--quick", "--seed", "1", "--device", "cpu")
    outcome = lossless.run(options, print)
    assert outcome.holds and outcome.conclusion.startswith("Holds. With 2, 4 and 8 stages")
    assert {row["dtype"] for row in outcome.rows} == {"float64", "float32", "bfloat16"}
    assert len([row for row in outcome.rows if row["broken"] != "-"]) == 8
    place = write_outcome(outcome, tmp_path)
    assert {path.name for path in place.iterdir()} == {
        "plot.png", "report.md", "result.json", "table.csv",
    }  # fmt: skip
