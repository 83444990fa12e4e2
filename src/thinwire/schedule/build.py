"""Schedules: what a stage does, in which order, as data that can be printed, drawn and checked.

A schedule lists compute only. Sends and receives are implied: a forward needs the activation of the
stage below, a backward the gradient of the stage above, and what a stage computed leaves at once
without holding up its next action. Schedules are made here by name, with the split of the layers,
and what cannot run is refused.
"""

import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from thinwire.errors import ConfigError, ScheduleError
from thinwire.typed import nearest, option

NO_MICROBATCH = -1


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

    @property
    def label(self) -> str:
        """The action without its stage: `F0`, `B3`, `U`."""
        return self.kind.value if self.kind is Kind.U else f"{self.kind.value}{self.microbatch}"

    def __str__(self) -> str:
        return f"{self.stage}{self.label}"


@dataclass(frozen=True)
class Schedule:
    """One training step: row s holds the actions of stage s in the order it runs them.

    `window` is the most microbatches that any stage may hold between forward and backward.
    Making one checks nothing, so that a broken one can be drawn; `validate` does. With a `delay`,
    a number of microbatches, rows are those of a step by itself, and `stream` says how one step
    follows on another.
    """

    name: str
    stages: int
    microbatches: int
    window: int
    rows: tuple[tuple[Action, ...], ...]
    delay: int = 0

    def stream(self, stage: int, first: int, until: int) -> Iterator[tuple[int, Action]]:
        """What a stage does from step `first` to the one before `until`: each action's step, and
        the action.

        With delayed updates the first microbatches of a step, `delay` of them, are computed without
        the update of the step before, so they need not wait for its backwards. The others come
        behind that update. So forwards follow on backwards across steps, and a stage holds as many
        microbatches from the first step to the last, if enough are delayed.
        """
        *passes, update = self.rows[stage]
        forwards, backwards = ([a for a in passes if a.kind is kind] for kind in (Kind.F, Kind.B))
        coming = deque((step, action) for step in range(first, until) for action in forwards)
        room, updated, ended = in_flight(self)[stage], first, first

        def advance() -> Iterator[tuple[int, Action]]:
            nonlocal room, updated
            while coming and room:
                step, action = coming[0]
                known = step if action.microbatch >= self.delay else step - 1
                if known > ended:
                    return  # it needs an update that has backwards to come
                if known > updated:
                    yield updated, update
                    updated += 1
                yield coming.popleft()
                room -= 1

        yield from advance()
        for step in range(first, until):
            for action in backwards:
                yield step, action
                room += 1
                ended += action is backwards[-1]
                yield from advance()
        yield from ((step, update) for step in range(updated, until))

    def __str__(self) -> str:
        header = (
            f"{self.name} stages={self.stages} microbatches={self.microbatches} "
            f"window={self.window}"
        )
        return "\n".join([header, *(" ".join(map(str, row)) or "-" for row in self.rows)])

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

    def grid(self) -> str:
        """Draw the schedule with unit times: a row per stage, a column per time slot.

        Actions that never run stand in order behind the last slot, in columns headed `-`.
        """
        slots = self.unit_slots()
        happened = 1 + max((ran[-1] for ran in slots if ran), default=-1)
        left = [len(row) - len(ran) for ran, row in zip(slots, self.rows, strict=True)]
        columns = happened + max(left, default=0)
        width = 2 + max((len(str(action)) for row in self.rows for action in row), default=1)
        title = len(f"stage {len(self.rows) - 1}")
        heads = [str(slot) if slot < happened else "-" for slot in range(columns)]
        lines = [f"{'slot':<{title}}  " + "".join(f"{head:<{width}}" for head in heads)]
        for stage, (ran, row) in enumerate(zip(slots, self.rows, strict=True)):
            cells = ["."] * columns
            for action, column in zip(row, [*ran, *range(happened, columns)], strict=False):
                cells[column] = str(action)
            cells_text = "".join(f"{cell:<{width}}" for cell in cells)
            lines.append(f"{f'stage {stage}':<{title}}  {cells_text}")
        return "\n".join(line.rstrip() for line in lines)


NAMES = ("gpipe", "1f1b")
OPEN = -1  # a window that is left open
Counts = tuple[int, ...]
"""The number of blocks of each stage."""


@dataclass(frozen=True)
class PipelineConfig:
    """How the layers are spread over stages and in which order microbatches pass them."""

    stages: int = option(4, "number of pipeline stages, one process each", least=1, most=1024)
    split: list[int] = option(  # noqa: RUF009 -- option makes a fresh list each time
        [], "blocks per stage, such as [1, 1, 2]; empty = spread evenly"
    )
    microbatches: int = option(8, "microbatches per training step", least=1, most=4096)
    schedule: str = option("1f1b", "order of forward and backward passes", NAMES)
    window: int = option(
        OPEN,
        "most microbatches in flight on the first stage; more hide delays and take memory; "
        "-1 = twice the stages, or on a host what is fastest within the peers' memory; "
        "0 = the schedule's own: the number of stages for 1f1b, all for gpipe",
        least=0,
        most=10**9,
        auto=OPEN,
        scope="keeping",  # it changes no bit: gradients are summed in one order
    )
    delay: int = option(
        0,
        "microbatches of a step that are computed without the update of the step before: the "
        "pipeline need not drain between steps, and the model learns less from each; 0 = none",
        least=0,
        most=4096,
    )
    recompute: bool = option(
        False, "recompute activations in the backward pass instead of storing them"
    )

    @property
    def overlap(self) -> int:
        """Steps that are under way while the one before has not ended: 0, or 1 with a delay."""
        return min(self.delay, 1)


def build(name: str, stages: int, microbatches: int, window: int = 0, delay: int = 0) -> Schedule:
    """The validated schedule of that name.

    A window beyond what is of use (more than all microbatches, or any with one stage of
    1f1b) is lowered to that, so one setting serves runs of different sizes. An open one follows
    from these sizes alone, so that equal settings give equal runs anywhere.
    """
    if name not in NAMES:
        raise ConfigError(f"pipeline.schedule = {name!r} is not allowed{nearest(name, NAMES)}")
    if min(stages, microbatches) < 1 or window < OPEN:
        sizes = f"pipeline.stages = {stages}, microbatches = {microbatches}, window = {window}"
        raise ConfigError(f"{sizes}: a pipeline has one or more, and a window of {OPEN} or more")
    if window == OPEN:
        window = 2 * stages if name == "1f1b" else 0
    if name == "gpipe":
        if 0 < window < microbatches:
            raise ConfigError(
                f"pipeline.window = {window} with gpipe: gpipe runs all {microbatches} forwards "
                "before the first backward, fewer in flight would be another schedule; "
                'set pipeline.schedule = "1f1b" to use this window, or pipeline.window = 0'
            )
        window = microbatches
        held = [microbatches] * stages
    else:
        if microbatches < stages:
            raise ConfigError(
                f"1f1b with pipeline.microbatches = {microbatches} and pipeline.stages = {stages}: "
                "it needs at least one microbatch per stage, or some stages could never work at "
                f"the same time; raise pipeline.microbatches to {stages} or lower pipeline.stages "
                f'to {microbatches}, or set pipeline.schedule = "gpipe"'
            )
        window = 1 if stages == 1 else min(window or stages, microbatches)
        held = [stage_window(stage, stages, microbatches, window) for stage in range(stages)]
    if delay > microbatches:
        raise ConfigError(
            f"pipeline.delay = {delay} is more than pipeline.microbatches = {microbatches}: a step "
            "has no more to delay"
        )
    rows = tuple(_row(stage, microbatches, held[stage]) for stage in range(stages))
    schedule = Schedule(name, stages, microbatches, window, rows, delay)
    validate(schedule)
    return schedule


def stage_window(stage: int, stages: int, microbatches: int, window: int) -> int:
    """Most microbatches that 1f1b holds on a stage: `window` on the first, 1 on the last.

    In between it falls on a straight line. It never grows from one stage to the next,
    and that is why no window can deadlock: when a stage waits for a gradient, the stage
    above has been sent every forward it wants to run before that gradient.
    """
    if stages == 1:
        return 1
    above = stages - 1 - stage
    return min(microbatches, 1 + -(-above * (window - 1) // (stages - 1)))


def split_layers(layers: int, config_split: list[int], stages: int) -> list[range]:
    """The contiguous block of layers of each stage.

    An uneven remainder goes to the middle stages first, then to the first stage and last
    to the last one: the ends also hold the embedding and the (dearer) head with the loss.
    """
    if stages > layers:
        raise ConfigError(
            f"pipeline.stages = {stages} but the model has {layers} layers: every stage needs "
            "at least one; use fewer stages or more layers"
        )
    counts = list(config_split)
    if counts:
        if len(counts) != stages:
            raise ConfigError(
                f"pipeline.split = {counts} names {len(counts)} stages but "
                f"pipeline.stages = {stages}; give one number per stage, or none"
            )
        if min(counts) < 1:
            raise ConfigError(f"pipeline.split = {counts}: every stage needs at least one layer")
        if sum(counts) != layers:
            raise ConfigError(
                f"pipeline.split = {counts} adds up to {sum(counts)} but the model has "
                f"{layers} layers"
            )
    else:
        share, remainder = divmod(layers, stages)
        counts = [share] * stages
        for stage in [*range(1, stages - 1), 0, stages - 1][:remainder]:
            counts[stage] += 1
    starts = [sum(counts[:stage]) for stage in range(stages)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def deal(
    layers: int, stages: int, least_on_last: int, cost: Callable[[int, range], float]
) -> tuple[float, Counts]:
    """Blocks per stage whose dearest stage is cheapest, and its cost (infinite if none can be).

    A stage with more blocks must not be cheaper. By dynamic programming over the stages: exact,
    also where blocks differ.
    """
    ends: dict[int, tuple[float, Counts]] = {
        0: (0.0, ())
    }  # where the stages so far may end: their dearest, and their blocks
    for stage in range(stages):
        after = stages - stage - 1  # stages still to come, with one block each at least
        room = layers - (after - 1 + least_on_last if after else 0)
        new: dict[int, tuple[float, Counts]] = {}
        for stop in range(stage + 1, room + 1) if after else [layers]:
            found: tuple[float, Counts] = (math.inf, ())
            for start in sorted(ends, reverse=True):
                if start >= stop or (not after and stop - start < least_on_last):
                    continue
                dearest, counts = ends[start]
                here = cost(stage, range(start, stop))
                if here >= found[0] and found[1]:
                    break  # with still more blocks it would be dearer yet
                worst = max(dearest, here)
                if worst < found[0] or not found[1]:
                    found = (worst, (*counts, stop - start))
            if found[1]:
                new[stop] = found
        ends = new
    return ends[layers]


def in_flight(schedule: Schedule) -> list[int]:
    """Peak number of microbatches each stage holds, read off its row.

    A microbatch is held from its forward to its backward. Frames that wait at the door are not
    counted.
    """
    changes = {Kind.F: 1, Kind.B: -1, Kind.U: 0}
    held = (itertools.accumulate(changes[action.kind] for action in row) for row in schedule.rows)
    return [max(counts, default=0) for counts in held]


def validate(schedule: Schedule) -> None:
    """Raise ScheduleError, with the grid, if it cannot run.

    First each row on its own (every action once, in an order a stage can follow), then
    all rows together with unit times, where the only thing left to go wrong is a deadlock.
    """
    if len(schedule.rows) != schedule.stages:
        raise ScheduleError(
            f"{schedule.name} says stages={schedule.stages} but has {len(schedule.rows)} rows"
        )
    faults = (_fault(schedule, stage, held) for stage, held in enumerate(in_flight(schedule)))
    why = next(filter(None, faults), "")
    for stage, ran in enumerate(schedule.unit_slots() if not why else []):
        if len(ran) < len(schedule.rows[stage]):
            action = schedule.rows[stage][len(ran)]
            needs = ", ".join(map(str, schedule.needs(action)))
            why += f"\n  deadlock: stage {stage} at {action} waits for {needs}"
    if why:
        raise ScheduleError(f"schedule {schedule.name} cannot run: {why}\n{schedule.grid()}")


def _fault(schedule: Schedule, stage: int, held: int) -> str:
    """What is wrong with a row by itself; empty if nothing is."""
    row, numbers = schedule.rows[stage], range(schedule.microbatches)
    expected = [Action(stage, kind, m) for kind in (Kind.F, Kind.B) for m in numbers]
    expected.append(Action(stage, Kind.U))
    there, wanted = Counter(row), Counter(expected)
    for action in (*expected, *row):
        if there[action] != wanted[action]:
            times = f"{there[action]} times, and must be there {wanted[action]} times"
            return f"{action} is in the row of stage {stage} {times}"
    if row[-1].kind is not Kind.U:
        return f"{row[-1]} comes after the update, which must be the last of its row"
    if held > schedule.window:
        return f"stage {stage} would hold {held} microbatches, window={schedule.window}"
    backwards = [action.microbatch for action in row if action.kind is Kind.B]
    if backwards != sorted(backwards):  # gradients are always summed in the same order
        return f"the backwards of stage {stage} do not run in the order of microbatches"
    places = {action: place for place, action in enumerate(row)}
    early = [m for m in backwards if places[Action(stage, Kind.B, m)]
             < places[Action(stage, Kind.F, m)]]  # fmt: skip
    return f"{stage}B{early[0]} comes before its own forward" if early else ""


def _row(stage: int, microbatches: int, held: int) -> tuple[Action, ...]:
    """`held` forwards, then backward and forward in turn, then the backwards left over."""
    actions = [Action(stage, Kind.F, m) for m in range(held)]
    for m in range(microbatches):
        actions.append(Action(stage, Kind.B, m))
        if m + held < microbatches:
            actions.append(Action(stage, Kind.F, m + held))
    return (*actions, Action(stage, Kind.U))
