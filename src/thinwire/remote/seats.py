"""Who holds which stage: chosen when a run is formed, and kept across restarts of the host."""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from thinwire.errors import ConfigError
from thinwire.folders import replace_file
from thinwire.schedule import OPEN
from thinwire.settings import Settings
from thinwire.typed import from_plain

FILE = "epochs.json"
FAILURES, ABSENCES = 3, 10  # of one peer without net progress, before it gets no seat any more


@dataclass(frozen=True)
class Formation:
    """One forming of a run: its number, the peer of each stage, the blocks of each stage, and the
    microbatches in flight.
    """

    epoch: int = 0
    seats: list[str] = field(default_factory=list)
    split: list[int] = field(default_factory=list)  # empty: as the settings say
    port: int = 0  # of the host's door
    window: int = OPEN  # as the settings say, unless they leave it open

    def applied(self, settings: Settings) -> Settings:
        """The settings with what was chosen for these peers."""
        pipeline = settings.pipeline
        if self.split:
            pipeline = dataclasses.replace(pipeline, split=self.split)
        if pipeline.window == OPEN:
            pipeline = dataclasses.replace(pipeline, window=self.window)
        changed = pipeline != settings.pipeline
        return dataclasses.replace(settings, pipeline=pipeline) if changed else settings

    def stage_of(self, peer: str) -> int:
        """The stage that a peer holds."""
        return self.seats.index(peer)


def read_formation(run_folder: Path) -> Formation:
    """The latest forming of a run; that of a run that was never formed has the number 0."""
    path = run_folder / FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return from_plain(Formation, values, FILE)
    except FileNotFoundError:
        return Formation()
    except (OSError, ValueError, ConfigError) as error:
        raise ConfigError(
            f"cannot read {path}, which says how often this run was formed: {error}"
        ) from None


def write_formation(run_folder: Path, formation: Formation) -> None:
    """Keep a forming, before any peer hears of it: no number is ever used twice."""
    path = run_folder / FILE
    try:
        replace_file(path, json.dumps(asdict(formation), indent=1).encode())
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error


def is_hosted(run_folder: Path) -> bool:
    """Whether a folder holds a run that was hosted before."""
    return (run_folder / FILE).is_file()


def fill_seats(before: list[str], stages: int, present: Iterable[str]) -> list[str] | None:
    """A peer for each stage: those of before keep theirs, the others come in order of arrival.

    None while there are too few.
    """
    waiting = [peer for peer in present if peer not in before]
    there = set(present)
    seats = [peer if peer in there else "" for peer in before] or [""] * stages
    for stage, peer in enumerate(seats):
        if not peer:
            if not waiting:
                return None
            seats[stage] = waiting.pop(0)
    return seats


class Failures:
    """How often each peer ended an epoch since the run last made net progress.

    Progress is a later checkpoint than any before: steps that are trained again are none. Whoever
    was lost or could not take its seat may try more often than one whose stage failed.
    """

    def __init__(self) -> None:
        self._furthest = 0
        self._counts: Counter[tuple[str, bool]] = Counter()

    def start_from(self, step: int) -> None:
        """An epoch starts from a checkpoint of this step."""
        if step > self._furthest:
            self._furthest = step
            self._counts.clear()

    def count(self, peer: str, is_absence: bool = False) -> int:
        """One more failure of a peer; their number once they are too many, 0 before."""
        self._counts[peer, is_absence] += 1
        count = self._counts[peer, is_absence]
        return count if count >= (ABSENCES if is_absence else FAILURES) else 0
