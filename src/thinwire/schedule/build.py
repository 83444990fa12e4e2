"""Schedules: what a stage does, in which order: a few numbers from which every action follows.

A schedule lists compute only. Sends and receives follow: a forward needs the activation of the
stage below, a backward the gradient of the stage above, and what a stage computed leaves at once.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from thinwire.errors import ConfigError, ScheduleError
from thinwire.typed import nearest, option


class Kind(Enum):
    """The three things a stage computes."""

    F = "F"  # forward of one microbatch
    B = "B"  # backward of one microbatch
    U = "U"  # update of the weights, once per step


class Action(NamedTuple):
    """One thing that a stage computes; an update has no microbatch."""

    kind: Kind
    microbatch: int = -1

    @property
    def label(self) -> str:
        """As it is printed: `F0`, `B3`, `U`."""
        return self.kind.value if self.kind is Kind.U else f"{self.kind.value}{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """One training step: `held` are the most microbatches that each stage has between their forward
    and their backward. A stage runs so many forwards, then backward and forward in turn, then the
    backwards left over, and its update; with a `delay` of some microbatches steps overlap.
    """

    name: str
    microbatches: int
    held: tuple[int, ...]
    delay: int = 0

    def __post_init__(self) -> None:
        falling = (self.microbatches, *self.held, 1)
        if any(above > below for below, above in itertools.pairwise(falling)):
            raise ScheduleError(
                f"schedule {self.name} cannot run: its stages hold {self.held} of "
                f"{self.microbatches} microbatches. Each needs one, and where a stage holds more "
                "than the one below there is a deadlock: it waits for a forward before it sends "
                "the gradient that the other waits for"
            )

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self.held)

    @property
    def window(self) -> int:
        """The most microbatches that any stage holds: the first."""
        return self.held[0]

    def row(self, stage: int) -> list[Action]:
        """The actions of a stage in a step by itself."""
        return [action for _, action in self.stream(stage, 0, 1)]

    def stream(self, stage: int, first: int, until: int) -> Iterator[tuple[int, Action]]:
        """The actions of steps `first` to `until` - 1, each with its step. With a delay the first
        microbatches of a step do not wait for the backwards of the step before, nor for its update.
        """
        numbers, update = range(self.microbatches), Action(Kind.U)
        coming = deque(itertools.product(range(first, until), numbers))
        room, updated, ended = self.held[stage], first, first

        def advance() -> Iterator[tuple[int, Action]]:
            nonlocal room, updated
            while coming and room:
                step, microbatch = coming[0]
                known = step if microbatch >= self.delay else step - 1
                if known > ended:
                    return  # it needs an update that has backwards to come
                if known > updated:
                    yield updated, update
                    updated += 1
                coming.popleft()
                yield step, Action(Kind.F, microbatch)
                room -= 1

        yield from advance()
        for step, microbatch in itertools.product(range(first, until), numbers):
            yield step, Action(Kind.B, microbatch)
            room += 1
            ended += microbatch == numbers[-1]
            yield from advance()
        yield from ((step, update) for step in range(updated, until))

    def __str__(self) -> str:
        sizes = f"stages={self.stages} microbatches={self.microbatches} window={self.window}"
        rows = ((f"{s}{action.label}" for action in self.row(s)) for s in range(self.stages))
        return "\n".join([f"{self.name} {sizes}", *map(" ".join, rows)])


NAMES = ("gpipe", "1f1b")
OPEN = -1  # a window that is left open
Counts = tuple[int, ...]  # the blocks of each stage


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
        scope="keeping",  # it changes no bit: gradients are summed in one order
    )
    delay: int = option(
        0,
        "microbatches of a step that are computed without the update of the step before: the "
        "pipeline need not drain between steps, and the model learns less from each; 0 = none",
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
    """The schedule of that name; a window beyond what is of use is lowered to that."""
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
    return Schedule(name, microbatches, tuple(held), delay)


def stage_window(stage: int, stages: int, microbatches: int, window: int) -> int:
    """Most microbatches that a stage holds in 1f1b: from `window` on the first on a line to 1."""
    if stages == 1:
        return 1
    above = stages - 1 - stage
    return min(microbatches, 1 + -(-above * (window - 1) // (stages - 1)))


def split_layers(layers: int, config_split: list[int], stages: int) -> list[range]:
    """The layers of each stage; a remainder goes to the middle first, for the ends hold more."""
    if stages > layers:
        raise ConfigError(
            f"pipeline.stages = {stages} but the model has {layers} layers: every stage needs "
            "at least one; use fewer stages or more layers"
        )
    share, remainder = divmod(layers, stages)
    counts = list(config_split) or [share] * stages
    if not config_split:
        for stage in [*range(1, stages - 1), 0, stages - 1][:remainder]:
            counts[stage] += 1
    if len(counts) != stages or min(counts) < 1 or sum(counts) != layers:
        raise ConfigError(
            f"pipeline.split = {counts} must name one layer or more for each of "
            f"{stages} stages (pipeline.stages) and add up to the {layers} of the model"
        )
    ends = itertools.accumulate(counts)
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def deal(
    layers: int, stages: int, least_on_last: int, cost: Callable[[int, range], float]
) -> tuple[float, Counts]:
    """Blocks per stage whose dearest stage is cheapest, and its cost (infinite if none can be), by
    dynamic programming. A stage with more blocks must not be cheaper.
    """
    # Where the stages so far may end: their dearest, and their blocks.
    ends: dict[int, tuple[float, Counts]] = {0: (0.0, ())}
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
