"""Processes that die or freeze while they train: another goes on, and no bit is different."""

import io
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from thinwire.engine.checkpoint import checkpoints_folder, partial_folder
from thinwire.report import PlainDisplay
from thinwire.settings import Settings
from thinwire.train import train

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="looks at processes through /proc"
)

STEPS = 24
BASE = {
    "pipeline__stages": 4, "train__steps": STEPS, "train__checkpoint_every": 5,
    "train__eval_every": 8, "link__emulate": True, "link__jitter_ms": 5.0,
    "link__latency_ms": 20.0,  # so that processes are not done before they are disturbed
}  # fmt: skip
SUBSPACE = {"boundary__mode": "subspace", "boundary__rank": 6}
Shards = dict[str, bytes]


def processes_of(folder: Path) -> dict[int, int]:
    """The process of each stage of a run, by where it writes its log."""
    found: dict[int, int] = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            log = os.readlink(place / "fd" / "1")
            is_stage = os.readlink(place / "fd" / "0").startswith("socket:")
        except OSError:
            continue
        name = re.fullmatch(r"stage-([\d-]+)\.log", Path(log).name)
        is_forker = b"thinwire.run.processes" in (place / "cmdline").read_bytes()
        if name and is_stage and Path(log).is_relative_to(folder):
            for stage in name[1].split("-"):
                # The process that forks writes to the log of the first, and was there first.
                earlier = found.get(int(stage))
                if earlier is None or (is_forker and int(place.name) > earlier):
                    found[int(stage)] = int(place.name)
    return found


class Disturbing(PlainDisplay):
    """Does something to the processes of stages after some steps, as these are shown; but not
    before those that were lost are back, for what is shown may lag behind what happens.
    """

    def __init__(self, folder: Path, deeds: dict[int, Sequence[int]], number: signal.Signals):
        super().__init__(io.StringIO())
        self.folder, self.deeds, self.number = folder, dict(deeds), number
        self.before = lambda: None
        self._lost = 0

    def step(self, record: Any) -> None:
        super().step(record)
        are_back = self.text().count("trained a step again") == self._lost
        if are_back and self.deeds and record.step >= min(self.deeds):
            stages = self.deeds.pop(min(self.deeds))
            self._lost += len(stages)
            self.before()
            found = processes_of(self.folder)
            for stage in stages:
                os.kill(found[stage], self.number)

    def text(self) -> str:
        return " ".join(self._stream.getvalue().split())


@pytest.fixture
def undisturbed(
    make_settings: Callable[..., Settings], run_in_threads: Callable, tmp_path: Path
) -> Callable[..., Callable[[int], Shards]]:
    """What the stages of an undisturbed run save after each step: weights and all else."""

    def run(**changes: Any) -> Callable[[int], Shards]:
        folder = tmp_path / "undisturbed"
        changes |= {"train__checkpoint_every": 1, "link__emulate": False}
        settings = make_settings(**{**BASE, **changes})
        run_in_threads(settings, folder=folder)
        return lambda step: shards(partial_folder(folder, step))

    return run


def shards(folder: Path) -> Shards:
    found = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    assert found, folder
    return found


def steps_of(run: Path) -> list[int]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row["step"] for row in rows if "grad_norm" in row]


@pytest.fixture
def disturbed(make_settings: Callable[..., Settings], tmp_path: Path) -> Callable[..., Any]:
    """A run with processes to which something happens after these steps."""

    def run(
        deeds: dict[int, Sequence[int]],
        number: signal.Signals = signal.SIGKILL,
        peers: int = 0,
        before: Callable[[], None] = lambda: None,
        **changes: Any,
    ) -> tuple[dict[str, Any], Disturbing]:
        display = Disturbing(tmp_path / "test", deeds, number)
        display.before = before
        summary = train(make_settings(**{**BASE, **changes}), display, peers=peers)
        assert not display.deeds, display.text()
        assert not list(checkpoints_folder(tmp_path / "test").glob(".partial*"))
        assert not (tmp_path / "test" / "scratch").exists()
        return summary, display

    return run


KILLS = [
    pytest.param({1: [1, 2], 6: [0, 1, 2, 3]}, {}, id="neighbours before any checkpoint, then all"),
    pytest.param({5: [0], 7: [3]}, {}, id="the first, then the last", marks=pytest.mark.slow),
    pytest.param(
        {3: [1], 6: [0]},
        {**SUBSPACE, "boundary__basis_update_every": 2, "codec__forward": "int8+aqsgd",
         "codec__backward": "int4+ef", "train__batch": 160, "pipeline__stages": 2},
        id="codecs that remember, a basis that moves",
    ),
    pytest.param(
        {5: [1]},
        {**SUBSPACE, "boundary__anchor": "embedding", "boundary__row_tokens": 20,
         "boundary__row_steps": 5, "codec__rows": "fp64", "pipeline__stages": 3},
        id="rows of the embedding",
        marks=pytest.mark.slow,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("deeds", "changes"), KILLS)
def test_a_run_whose_processes_are_killed_is_the_same_bit_for_bit(
    deeds: dict[int, list[int]],
    changes: dict[str, Any],
    undisturbed: Callable,
    disturbed: Callable,
    tmp_path: Path,
) -> None:
    summary, display = disturbed(deeds, **changes)
    assert shards(tmp_path / "test/checkpoints/step-00000024") == undisturbed(**changes)(STEPS)
    assert steps_of(tmp_path / "test") == [*range(1, STEPS + 1)], "each step once"
    assert [step for step, _ in summary["valid_losses"]] == [0, 8, 16, 24]
    for stages in deeds.values():
        for stage in stages:
            assert f"stage {stage} died at step" in display.text(), display.text()
            assert f"stage {stage} is back after" in display.text()
    assert "no other stage trained a step again" in display.text()


def test_stages_that_share_a_process_are_replaced_together(
    undisturbed: Callable, disturbed: Callable, tmp_path: Path
) -> None:
    _, display = disturbed({5: [3]}, peers=2)
    assert shards(tmp_path / "test/checkpoints/step-00000024") == undisturbed()(STEPS)
    assert steps_of(tmp_path / "test") == [*range(1, STEPS + 1)]
    assert display.text().count("another process takes its place") == 1


def test_a_stage_that_is_frozen_is_replaced(
    undisturbed: Callable, disturbed: Callable, tmp_path: Path
) -> None:
    _, display = disturbed({5: [1]}, signal.SIGSTOP, pipeline__stages=2)
    changes = {"pipeline__stages": 2}
    assert shards(tmp_path / "test/checkpoints/step-00000024") == undisturbed(**changes)(STEPS)
    assert steps_of(tmp_path / "test") == [*range(1, STEPS + 1)]
    assert "stage 1 got stuck at step" in display.text()
    assert re.search(r"stage 1 is back after \d+\.\d s", display.text())


def test_a_run_that_stops_while_its_first_stage_dies_ends_where_all_agreed(
    undisturbed: Callable, disturbed: Callable, tmp_path: Path
) -> None:
    """Whoever takes its place ends the run after the same step, if any stage has heard of that."""

    def ask() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    summary, _ = disturbed({4: [0]}, before=ask, pipeline__stages=2, train__steps=40)
    done = summary["steps"]
    assert summary["interrupted"] and 4 <= done < 40
    saved = shards(tmp_path / f"test/checkpoints/step-{done:08d}")
    changes = {"pipeline__stages": 2, "train__steps": 40}
    assert saved == undisturbed(**changes)(done)
    assert steps_of(tmp_path / "test") == [*range(1, done + 1)]
