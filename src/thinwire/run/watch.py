"""Who is waited for, and since when: no wait of a run is silent, and none is endless.

A stage says now and then what it is doing, and how many pieces of work it has begun (`Progress`).
The coordinator's `Watch` notes when none begins anything new: first it is said, and at last the run
ends with the name of the stage that is stuck. That is for a stage that is frozen, or answers and
does nothing; a broken link or a dead process shows long before. Pulses prove little: a stage that
alone claims to work is stuck too, and so is a run in which all are busy and no step ends. How long
is too long depends on what was seen before.

Nor may a peer speak too often (`Pace`), and nobody is told the same again and again (`Told`).
"""

import time
from collections.abc import Hashable
from dataclasses import dataclass

from thinwire.errors import WireError

NOTICE_SECONDS = 30.0  # without progress before it is said
_USUAL = 10  # a wait may be so many times the longest one that ended well
_SLOW_STEP, _ENDLESS_STEP = 5, 30  # of the longest step so far, before it is said; before the end
_ENDLESS = 10  # ... and at least so many times the patience
_LATE = 3  # a pulse, of the longest time between two so far, before its stage counts as silent
_FROZEN, _LEAST_FROZEN = 4, 20.0  # ... before it counts as frozen; and seconds, at least
_PULSE_SECONDS = 5.0  # between two pulses of a stage, at most
_LEAST_PULSE = 0.05  # ... and at least: more would pass for a flood
AT_ONCE = 500  # messages, before any time has passed
PER_SECOND = 25.0  # a link that breaks and comes back ten times a second makes twenty
TOLD_A_MINUTE = 6  # notes to a person on one and the same thing


def pulse_seconds(patience: float) -> float:
    """How often a stage says what it is doing."""
    return max(_LEAST_PULSE, min(_PULSE_SECONDS, patience / 4)) if patience else _PULSE_SECONDS


@dataclass
class _Seen:
    """What the coordinator knows of one stage; times are of the watch's own clock."""

    begun: int = -1
    doing: str = "has said nothing yet"
    heard: float = 0.0
    advanced: float = 0.0
    gap: float = 0.0  # between two words of it: the longest of late


class Watch:
    """The coordinator's view of its stages' progress. Its clock runs only while the coordinator
    does, which may have been suspended (Ctrl-Z). A link or a control stream may be down for
    `outage` seconds: the patience does not end before that.
    """

    def __init__(self, stages: int, patience: float, outage: float = 0.0) -> None:
        self.tick = max(0.05, min(1.0, pulse_seconds(patience)))
        self.now = 0.0
        self._patience = patience
        self._notice = min(NOTICE_SECONDS, patience / 2 or NOTICE_SECONDS)
        self._last_tick: float | None = None
        self._seen = {stage: _Seen() for stage in range(stages)}
        self._outage = outage
        self._down: set[str] = set()  # links and control streams
        self._freed_at = 0.0  # one of them is back, or a stage is done: others begin to wait anew
        self._unheard: set[int] = set()  # stages that are replaced, until they speak
        self._behind: set[int] = set()  # ... and until they have caught up
        self._longest = 0.0  # wait of the training that ended well
        self._longest_alone = 0.0  # ... in which one stage worked and no other
        self._longest_step = 0.0  # time between two results
        self._result_at: float | None = None  # None: the start is not over
        self._said_at = self._step_said_at = 0.0  # waits up to here have been told

    def pass_time(self, now: float) -> None:
        """Called at least once a `tick`: what took much longer was not the stages' time."""
        passed = 0.0 if self._last_tick is None else now - self._last_tick
        self.now += 0.0 if self._unheard else min(passed, 3 * self.tick)
        self._last_tick = now
        if self._behind and self._result_at is not None:
            self._result_at = self.now

    def heard(self, stage: int, begun: int | None = None, doing: str = "") -> None:
        """A stage has spoken: of its progress, if that is told, or with a result of its work."""
        seen = self._seen.get(stage)
        self._unheard.discard(stage)
        if seen is None:
            return
        seen.gap = max(self.now - seen.heard, 0.9 * seen.gap) if seen.heard else 0.0
        seen.heard = self.now
        if begun is None or begun != seen.begun:
            if self._result_at is not None:
                self._longest = max(self._longest, self._stuck_for())
                alone = max((self._alone_for(s) for s in self._seen if s != stage), default=0.0)
                self._longest_alone = max(self._longest_alone, alone)
            seen.advanced = self.now
        if begun is not None:
            seen.begun, seen.doing = begun, doing

    def result(self) -> None:
        """The start is over, or a stage has ended a step or something else that all do together."""
        if self._result_at is not None:
            self._longest_step = max(self._longest_step, self.now - self._result_at)
        self._result_at, self._step_said_at = self.now, 0.0

    def down(self, what: str, is_down: bool) -> None:
        """A link or a control stream is lost, or back."""
        if is_down:
            self._down.add(what)
        elif what in self._down:
            self._down.remove(what)
            self._freed_at = self.now

    def replace(self, stage: int) -> None:
        """Another process is to be this stage. No time counts until it speaks."""
        self._seen[stage] = _Seen(doing="is lost, and waits for a peer", advanced=self.now)
        self._unheard.add(stage)
        self._behind.add(stage)

    def caught_up(self, stage: int) -> None:
        """It has."""
        self._behind.discard(stage)
        self._result_at = self.now

    def dismiss(self, stage: int) -> None:
        """A stage has finished: nobody waits for it any more."""
        self._seen.pop(stage, None)
        self._freed_at = self.now

    def complaint(self) -> str:
        """What to tell a person about a long wait, each time that it has doubled; or nothing."""
        stuck, step, usual = self._stuck_for(), self._in_step_for(), self._longest_step
        if stuck >= max(self._notice, 3 * self._longest):
            if stuck < 2 * self._said_at:
                return ""
            self._said_at = stuck
            return f"no progress for {stuck:.0f} s: {self.doing()}"
        self._said_at = 0.0
        is_slow = usual and step >= max(self._notice, _SLOW_STEP * usual)
        if not is_slow or step < 2 * self._step_said_at:
            return ""
        self._step_said_at = step
        longest = f"the longest so far took {usual:.0f} s"
        return f"no step has ended for {step:.0f} s, and {longest}: {self.doing()}"

    def verdict(self) -> tuple[str, int | None]:
        """What is wrong, once the patience is at its end; and which stage is stuck, if known."""
        if not self._patience:
            return "", None
        stuck, step, culprit = self._stuck_for(), self._in_step_for(), self._culprit()
        alone, worker = max(((self._alone_for(s), s) for s in self._seen), default=(0.0, None))
        endless = _ENDLESS_STEP / _USUAL * self._longest_step
        if stuck >= self._limit(self._longest):
            each_other = "the stages wait for each other"
            who = each_other if culprit is None else f"stage {culprit} is stuck"
            what = f"{who}: no progress for {stuck:.0f} s"
        elif alone >= self._limit(self._longest_alone):
            claim = "it says that it works, and no other stage gets anything to do"
            culprit, what = worker, f"stage {worker} is stuck: for {alone:.0f} s {claim}"
        elif endless and step >= max(self._limit(endless), _ENDLESS * self._patience):
            culprit, what = None, f"no step has ended for {step:.0f} s"
        else:
            return "", None
        text = (
            f"{what} ({self.doing()}). If a single piece of "
            f"work may take that long, raise run.patience (now {self._patience:g} s; 0 = wait "
            "forever). Otherwise see the logs, and continue with --resume"
        )
        return text, culprit

    def frozen(self) -> dict[int, float]:
        """Stages that have fallen silent while others speak, and for how many seconds. Pulses are
        late where a machine is overloaded, which raises what counts as usual; where nobody speaks,
        or the way to a stage is known to be down, silence says nothing.
        """
        usual = {s: self._usual(seen) for s, seen in self._seen.items() if seen.heard}
        silent = {s: self.now - self._seen[s].heard for s in usual}
        if self._result_at is None or not any(silent[s] <= 2 * usual[s] for s in usual):
            return {}
        heard_of = [s for s in usual if f"control-{s}" not in self._down]
        limits = {s: max(_FROZEN * usual[s], _LEAST_FROZEN) for s in heard_of}
        return {s: silent[s] for s in heard_of if silent[s] > limits[s]}

    def doing(self) -> str:
        """What each stage that has not finished says it does, and for how long."""
        lines = []
        for stage, seen in self._seen.items():
            silence = self._silence(seen)
            line = f"stage {stage} {seen.doing}, for {self.now - seen.advanced:.0f} s"
            lines.append(line + (f", silent for {silence:.0f} s" if silence else ""))
        return "; ".join(lines)

    def _limit(self, longest: float) -> float:
        """Seconds that a wait may last, if the longest of its kind so far was that long."""
        # Where a link is down, its own limit comes first, and says more than this one would.
        outage = self._outage + NOTICE_SECONDS if self._down else 0.0
        return max(self._patience, _USUAL * longest, outage)

    def _in_step_for(self) -> float:
        return 0.0 if self._result_at is None or not self._seen else self.now - self._result_at

    def _alone_for(self, stage: int) -> float:
        """Seconds for which this stage alone has begun anything, with all others in earshot."""
        others = [seen for other, seen in self._seen.items() if other != stage]
        is_start = self._result_at is None
        if is_start or not others or self._behind or any(map(self._silence, others)):
            return 0.0
        since = max(seen.advanced for seen in others)
        return max(0.0, self._seen[stage].advanced - since)

    def _stuck_for(self) -> float:
        """Seconds since any stage has begun something: while one works, the others may wait."""
        advanced = max((seen.advanced for seen in self._seen.values()), default=self.now)
        return self.now - max(advanced, self._freed_at)

    def _culprit(self) -> int | None:
        """Who is silent, else who is at work; None if all say that they wait."""
        silent = [stage for stage, seen in self._seen.items() if self._silence(seen)]
        working = [s for s, seen in self._seen.items() if not seen.doing.startswith("waits")]
        suspects = silent or working
        return min(suspects, key=lambda s: self._seen[s].advanced) if suspects else None

    def _silence(self, seen: _Seen) -> float:
        """Seconds for which a stage has not spoken, if that is out of the ordinary."""
        silence = self.now - seen.heard
        return silence if silence > max(_LATE * self._usual(seen), 1.0) else 0.0

    def _usual(self, seen: _Seen) -> float:
        """Seconds between two words of a stage: it may be slow, or far away."""
        return max(pulse_seconds(self._patience), seen.gap)


class Pace:
    """Counts what one peer says of its own accord, as pulses and outages are: from the beginning
    on, for whoever was suspended for a day (Ctrl-Z) hears all at once, and that is no flood.
    """

    def __init__(self, who: str):
        self._who, self._began, self._count = who, time.monotonic(), 0

    def count(self) -> None:
        """One more message; WireError if they are too many for the time that has passed."""
        self._count += 1
        passed = time.monotonic() - self._began
        if self._count > AT_ONCE + PER_SECOND * passed:
            said = f"{self._who} sent {self._count} messages in {passed:.0f} s"
            raise WireError(f"{said}, but at most {PER_SECOND:g} a second are agreed")


class Told:
    """What a person was told of late, so that what happens again does not bury the rest."""

    def __init__(self) -> None:
        self._when: dict[Hashable, list[float]] = {}

    def again(self, what: Hashable, now: float) -> int:
        """How often this was told within a minute, this time included; 0 if it was often enough."""
        recent = [then for then in self._when.get(what, []) if then > now - 60]
        if len(recent) == TOLD_A_MINUTE:
            return 0
        self._when[what] = [*recent, now]
        return len(recent) + 1
