"""What a stage does, in which order, as data that can be printed, read back and drawn.

A schedule lists compute only. Sends and receives are implied: a forward needs the
activation of the stage below, a backward the gradient of the stage above, and what a
stage has computed leaves at once without holding up its next action.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from thinwire.errors import ScheduleError

NO_MICROBATCH = -1
_ACTION = re.compile(r"([0-9]+)(?:([FB])([0-9]+)|U)")
_HEADER = re.compile(r"(\S+) stages=([0-9]+) microbatches=([0-9]+) window=([0-9]+)")
_EMPTY_ROW = "-"


class Kind(Enum):
    """The three things a stage computes."""

    F = "F"  # forward of one microbatch
    B = "B"  # backward of one microbatch
    U = "U"  # update of the weights, once per step


@dataclass(frozen=True)
class Action:
    """One cell of a schedule; prints as `2F0`, `0B3`, and `1U` (an update has no microbatch)."""

    stage: int
    kind: Kind
    microbatch: int = NO_MICROBATCH

    def __post_init__(self) -> None:
        if self.stage < 0:
            raise ScheduleError(f"an action needs a stage of 0 or more, got {self.stage}")
        if self.kind is Kind.U and self.microbatch != NO_MICROBATCH:
            raise ScheduleError(f"an update has no microbatch, got {self.microbatch}")
        if self.kind is not Kind.U and self.microbatch < 0:
            raise ScheduleError(f"{self.kind.name} needs a microbatch, got {self.microbatch}")

    @property
    def label(self) -> str:
        """The action without its stage: `F0`, `B3`, `U`."""
        return self.kind.value if self.kind is Kind.U else f"{self.kind.value}{self.microbatch}"

    def __str__(self) -> str:
        return f"{self.stage}{self.label}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Read what `str` prints."""
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ScheduleError(
                f"cannot read {text!r} as an action; write stage, kind, microbatch "
                "(2F0 forward, 0B3 backward) or stage and U (1U update)"
            )
        stage, kind, microbatch = match.groups()
        if kind is None:
            return cls(int(stage), Kind.U)
        return cls(int(stage), Kind(kind), int(microbatch))


@dataclass(frozen=True)
class Schedule:
    """One training step: row s holds the actions of stage s in the order it runs them.

    `window` is the most microbatches that any stage may hold between forward and backward.
    Making one checks nothing, so that a broken one can be drawn; `validate` does.
    """

    name: str
    stages: int
    microbatches: int
    window: int
    rows: tuple[tuple[Action, ...], ...]

    def __str__(self) -> str:
        header = (
            f"{self.name} stages={self.stages} microbatches={self.microbatches} "
            f"window={self.window}"
        )
        return "\n".join([header, *(" ".join(map(str, row)) or _EMPTY_ROW for row in self.rows)])

    @classmethod
    def parse(cls, text: str) -> "Schedule":
        """Read what `str` prints; blank lines are skipped. Does not validate."""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        match = _HEADER.fullmatch(lines[0]) if lines else None
        if match is None:
            raise ScheduleError(
                f"cannot read {lines[0] if lines else ''!r} as the first line of a schedule; "
                "it looks like: 1f1b stages=4 microbatches=8 window=4"
            )
        rows = []
        for stage, line in enumerate(lines[1:]):
            words = [] if line == _EMPTY_ROW else line.split()
            try:
                rows.append(tuple(Action.parse(word) for word in words))
            except ScheduleError as error:
                raise ScheduleError(f"row of stage {stage}: {error}") from None
        name, stages, microbatches, window = match.groups()
        return cls(name, int(stages), int(microbatches), int(window), tuple(rows))

    def needs(self, action: Action) -> list[Action]:
        """The actions of other stages whose result must have arrived before this one.

        An update needs the last backward of every other stage: a step is committed
        everywhere or nowhere.
        """
        stage, kind = action.stage, action.kind
        if kind is Kind.F:
            return [Action(stage - 1, kind, action.microbatch)] if stage > 0 else []
        if kind is Kind.B:
            return [Action(stage + 1, kind, action.microbatch)] if stage + 1 < self.stages else []
        backwards = ([a for a in row if a.kind is Kind.B] for row in self.rows)
        return [row[-1] for row in backwards if row and row[-1].stage != stage]

    def unit_slots(self) -> list[list[int]]:
        """The time slot of each action when all take one slot and messages take none.

        A row that gets stuck stays shorter than the schedule's row: that is the deadlock.
        """
        slots: list[list[int]] = [[] for _ in self.rows]
        done: set[Action] = set()
        time = 0
        while True:
            started = []
            for ran, row in zip(slots, self.rows, strict=True):
                if len(ran) < len(row) and done.issuperset(self.needs(row[len(ran)])):
                    started.append(row[len(ran)])
                    ran.append(time)
            if not started:
                return slots
            done.update(started)
            time += 1

    def grid(self, marked: Collection[tuple[int, int]] = ()) -> str:
        """Draw the schedule with unit times: a row per stage, a column per time slot.

        `marked` holds (row, position in the row) of the cells to draw as `>2B1<`. Actions
        that never run stand in order behind the last slot, in columns headed `-`.
        """
        slots = self.unit_slots()
        happened = 1 + max((ran[-1] for ran in slots if ran), default=-1)
        stuck = max(
            (len(row) - len(ran) for ran, row in zip(slots, self.rows, strict=True)), default=0
        )
        columns = happened + stuck
        width = max((len(str(action)) for row in self.rows for action in row), default=1)
        title = len(f"stage {len(self.rows) - 1}")
        heads = [str(slot) if slot < happened else "-" for slot in range(columns)]
        lines = [f"{'slot':<{title}} " + "".join(f" {head:<{width}} " for head in heads)]
        for stage, (ran, row) in enumerate(zip(slots, self.rows, strict=True)):
            cells = [f" {'.':<{width}} "] * columns
            never = range(happened, happened + len(row) - len(ran))
            for position, column in enumerate([*ran, *never]):
                text = str(row[position])
                framed = f">{text}<" if (stage, position) in marked else f" {text} "
                cells[column] = f"{framed:<{width + 2}}"
            lines.append(f"{f'stage {stage}':<{title}} " + "".join(cells))
        return "\n".join(line.rstrip() for line in lines)
