"""Who holds which stage: placed when a run is formed, and kept across restarts of the host."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import msgspec

from thinwire.errors import ConfigError
from thinwire.folders import replace_file
from thinwire.run.machine import Machine
from thinwire.run.placement import StageFigures
from thinwire.schedule import OPEN
from thinwire.settings import Settings

FORMATION_FILE = "epochs.json"
FAILURES, ABSENCES = 3, 10  # of one member without net progress, before it gets no stage any more
FOLLOWED_SECONDS, SPARE_SECONDS, NEIGHBOUR_SECONDS = 1.5, 3.0, 8.0
"""For which a member may be away before another takes its stages: one that follows them loses
nothing by it, one that holds nothing a little, one that holds stages is slower with more."""


@dataclass(frozen=True)
class Formation:
    """A placement: its generation, and who holds each stage."""

    epoch: int = 0
    seats: list[str] = field(default_factory=list)  # the member of each stage
    split: list[int] = field(default_factory=list)  # blocks of each; empty: as the settings say
    port: int = 0  # of the host's door
    window: int = OPEN  # microbatches in flight, where the settings leave it open

    def applied(self, settings: Settings) -> Settings:
        """The settings with what was chosen for these members."""
        own = settings.pipeline
        window = self.window if own.window == OPEN else own.window
        chosen = dataclasses.replace(own, split=self.split or own.split, window=window)
        return dataclasses.replace(settings, pipeline=chosen) if chosen != own else settings

    def held_by(self, name: str) -> list[int]:
        """The stages that a member holds."""
        return [stage for stage, holder in enumerate(self.seats) if holder == name]

    def groups(self) -> list[list[int]]:
        """The stages that one process holds when a generation begins: neighbours of one member."""
        runs = itertools.groupby(range(len(self.seats)), key=lambda stage: self.seats[stage])
        return [list(stages) for _, stages in runs]

    def given(self, stages: list[int], name: str) -> "Formation":
        """The same with another holder of these stages."""
        seats = [name if s in stages else holder for s, holder in enumerate(self.seats)]
        return dataclasses.replace(self, seats=seats)

    def members(self) -> list[str]:
        """Those who hold stages, in the order of these."""
        return list(dict.fromkeys(self.seats))


def stage_names(stages: Sequence[int]) -> str:
    """Stages in words."""
    return f"stage {', '.join(map(str, stages))}"


def read_formation(run_folder: Path) -> Formation:
    """The latest placement of a run; that of a run that was never formed has the number 0."""
    path = run_folder / FORMATION_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Formation)
    except FileNotFoundError:
        return Formation()
    except (OSError, ValueError) as error:
        what = f"cannot read {path}, which says how often this run was formed: {error}"
        raise ConfigError(what) from None


def write_formation(run_folder: Path, formation: Formation) -> None:
    """Keep a placement, before any member hears of it: no number is ever used twice."""
    path = run_folder / FORMATION_FILE
    try:
        replace_file(path, msgspec.json.format(msgspec.json.encode(formation), indent=1))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error


def fill_seats(before: list[str], present: list[str], least: int) -> list[str] | None:
    """A member for each stage, of those who are present: those of before keep theirs, and others
    take what was held by who is gone, or half of what somebody holds. With fewer than before, but
    at `least` so many, a neighbour holds more. None while there are too few.
    """
    waiting = [name for name in present if name not in before]
    replaced = {
        name: waiting.pop(0) for name in dict.fromkeys(before) if name not in present and waiting
    }
    seats = [replaced.get(name, name) for name in before]
    there = {name for name in seats if name in present}
    if not there or len(there) + len(waiting) < least:
        return None
    for stage, name in enumerate(seats):  # stages of one member stay neighbours
        if name not in there:
            below = seats[stage - 1] if stage else ""
            above = next((n for n in seats[stage:] if n in there), "")
            seats[stage] = below or above
    for name in waiting:
        crowded = max(seats, key=seats.count)
        held = [stage for stage, holder in enumerate(seats) if holder == crowded]
        for stage in held[(len(held) + 1) // 2 :]:
            seats[stage] = name
    return seats


def next_holder(
    stages: list[int], seats: list[str], here: list[Machine], settings: Settings
) -> str | None:
    """Who takes stages that are lost, of machines that are here with the memory, if there is one:
    whoever had them, then one that holds nothing, a neighbour, the one with most memory left.
    """
    if not here:
        return None
    figures, split = StageFigures(settings, here), settings.split()
    beside = [seats[s] for s in (stages[0] - 1, stages[-1] + 1) if 0 <= s < len(seats)]
    able: dict[str, tuple[bool, bool, bool, float]] = {}  # what speaks for each
    for number, (name, memory) in enumerate((m.name, m.memory_gb) for m in here):
        held = {s for s, holder in enumerate(seats) if holder == name} | {*stages}
        needed = sum(figures.fullness(number, stage, split[stage]) for stage in held)
        left = 1 - needed if memory else 0.0  # the share of its memory that is free then
        if left >= 0:
            able[name] = name == seats[stages[0]], name not in seats, name in beside, left
    return max(able, key=able.__getitem__, default=None)


@dataclass(frozen=True)
class Placing:
    """Who holds stages and who stands by for which, at a moment; and what follows for others."""

    settings: Settings
    groups: list[list[int]]  # the stages that share a process
    seats: list[str]  # who holds each stage
    standbys: dict[tuple[int, ...], str]  # by the groups that they follow
    here: list[Machine]  # that can hold stages

    @cached_property
    def followed(self) -> dict[int, str]:
        """Who follows each stage that somebody follows."""
        return {stage: name for group, name in self.standbys.items() for stage in group}

    @property
    def _counted(self) -> list[str]:
        """By whose memory each stage is to be counted: who follows it may have to hold it."""
        return [self.followed.get(stage, holder) for stage, holder in enumerate(self.seats)]

    def followed_by(self, name: str) -> list[list[int]]:
        """The groups of stages that a member follows, each by a process of its own."""
        return [list(group) for group, who in self.standbys.items() if who == name]

    def holder(self, stages: list[int]) -> str | None:
        """Who is to hold lost stages; None: nobody can."""
        follower = self.standbys.get(tuple(stages))  # has some of their state at least
        if any(machine.name == follower for machine in self.here):
            return follower
        return next_holder(stages, self.seats, self.here, self.settings)

    def displaced(self, stages: list[int], name: str) -> list[list[int]]:
        """What a member follows no more once it holds these: them, or all for lack of memory."""
        own = [machine for machine in self.here if machine.name == name]
        has_room = next_holder(stages, self._counted, own, self.settings) is not None
        return [group for group in self.followed_by(name) if group == stages or not has_room]

    def next_standby(self) -> tuple[list[int], str | None]:
        """Stages to be followed, if some machine holds nothing, and by whom; None: nobody can."""
        left = [group for group in self.groups if tuple(group) not in self.standbys]
        if not left or all(machine.name in self.seats for machine in self.here):
            return [], None
        rates = {machine.name: machine.tflops for machine in self.here}
        holders = [self.seats[group[0]] for group in self.groups]
        names = [self.seats[group[0]] for group in left]  # of several groups first, then weak ones
        turns = [(-holders.count(name), rates.get(name, 0.0)) for name in names]
        stages = left[turns.index(min(turns))]
        return stages, self.follower(stages)

    def follower(self, stages: list[int]) -> str | None:
        """Who is to stand by for stages, of those that hold nothing: with the memory for all that
        it follows, and if it follows others, as fast as the slowest stage's holder with all.
        """
        settings, blocks = self.settings, self.settings.split()
        figures = StageFigures(settings, self.here)
        rates = {m.name: m.flops_per_s(settings.run.precision) for m in self.here}
        seats = [(stage, rates[name]) for stage, name in enumerate(self.seats) if rates.get(name)]
        slowest = max((figures.work(blocks[stage]) / rate for stage, rate in seats), default=0.0)

        def keeps_up(name: str) -> bool:
            own = [stage for group in self.followed_by(name) for stage in group]
            work = sum(figures.work(blocks[stage]) for stage in [*own, *stages])
            return not own or work <= rates[name] * slowest

        able = [m for m in self.here if m.name not in self.seats and keeps_up(m.name)]
        return next_holder(stages, self._counted, able, settings)

    def next_move(self) -> tuple[list[int], str, str] | None:
        """Stages of the member that holds most groups, it, and who is to hold them: a follower."""
        holders = [self.seats[stages[0]] for stages in self.groups]
        crowded = max(holders, key=holders.count)
        for stages in self.groups if holders.count(crowded) > 1 else ():
            name = self.standbys.get(tuple(stages), "")
            if self.seats[stages[0]] == crowded and name and name not in self.seats:
                return stages, crowded, name
        return None

    def next_share(self) -> str | None:
        """Who can take some stages of a process that holds all; for that the run is formed anew."""
        for machine in [machine for machine in self.here if machine.name not in self.seats]:
            seats = fill_seats(self.seats, [*self.seats, machine.name], 1) or []
            own = [stage for stage, name in enumerate(seats) if name == machine.name]
            if own and next_holder(own, self.seats, [machine], self.settings):
                return machine.name
        return None

    def patience(self, held: list[int]) -> float | None:
        """Seconds for which a holder may be away before another gets its stages, if any can."""
        if (name := next_holder(held, self.seats, self.here, self.settings)) is None:
            return None
        if self.followed.keys() >= {*held}:
            return FOLLOWED_SECONDS
        return NEIGHBOUR_SECONDS if name in self.seats else SPARE_SECONDS


class Failures:
    """How often each member ended a generation since a later checkpoint than before was made."""

    def __init__(self) -> None:
        self._furthest = 0
        self._counts: Counter[tuple[str, bool]] = Counter()

    def start_from(self, step: int) -> None:
        """A generation starts from a checkpoint of this step."""
        if step > self._furthest:
            self._furthest = step
            self._counts.clear()

    def count(self, peer: str, is_absence: bool = False) -> int:
        """One more failure of a member; their number once they are too many, 0 before."""
        self._counts[peer, is_absence] += 1
        count = self._counts[peer, is_absence]
        return count if count >= (ABSENCES if is_absence else FAILURES) else 0


def lacking_peers(least: int, here: list[str], unfit: dict[str, str]) -> str:
    """For how many a run waits; and who is there but gets no stage, with the reason."""
    missing = max(1, least - len(here))
    there = f"; here: {', '.join(here)}" if here else ""
    others = "".join(f"; {name} gets no stage: {why}" for name, why in unfit.items() if why)
    return f"waiting for {missing} more peer{'s' if missing != 1 else ''}{there}{others}"


def fitting(before: Formation, settings: Settings) -> Formation:
    """The forming of before, as far as it fits the settings: its seats, if their number does."""
    if len(before.seats) in (0, settings.pipeline.stages):
        return dataclasses.replace(before, split=settings.pipeline.split or before.split)
    return dataclasses.replace(before, seats=[], split=[], window=OPEN)
