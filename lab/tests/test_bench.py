"""The cases of the benchmark are runs that can be made, and its plain loop is timed."""

from pathlib import Path

import pytest

from thinwire_lab import bench, bench_page


def test_every_case_can_be_run(tmp_path: Path) -> None:
    for name, values in bench.CASES["slow_links"].items():
        settings = bench.settings_of(str(tmp_path), name, values)
        assert settings.pipeline.stages == 4 and settings.link.emulate
        assert (settings.link.mbps_up, settings.train.steps) == (80, 30)
    runtime = bench.settings_of(str(tmp_path), "plain", bench.CASES["runtime"])
    assert not runtime.link.emulate and runtime.train.steps == 6


def test_turns_with_pages_are_compared_with_those_around_them() -> None:
    """A machine that slows down evenly decides nothing; pages that cost a tenth show."""
    drift = [100.0 - turn for turn in range(7)]
    assert bench_page.change([{"tokens/s": rate} for rate in drift]) == pytest.approx([0, 0, 0])
    slower = [rate * (0.9 if turn % 2 else 1.0) for turn, rate in enumerate(drift)]
    assert bench_page.change([{"tokens/s": rate} for rate in slower]) == pytest.approx([-0.1] * 3)


def test_open_pages_are_measured(tmp_path: Path) -> None:
    rows = bench_page.run_bench(pages=2, seconds=3.0, repeats=1, folder=tmp_path)
    assert [row["pages"] for row in rows] == [0, 2, 0] and all(row["steps"] for row in rows)
