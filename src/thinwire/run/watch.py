"""Who is waited for, and since when: no wait of a run is silent, and none is endless.

A stage says now and then what it is doing, and how many pieces of work it has begun (`Progress`).
The coordinator's `Watch` notes when no stage begins anything new: first it is said, and at last the
run ends with the name of the stage that is stuck. A link that breaks, or a process that dies, shows
long before; this is for a stage that is frozen, or that answers and does nothing.
"""

from dataclasses import dataclass

NOTICE_SECONDS = 30.0  # without progress before it is said
_USUAL = 10  # a wait may be so many times the longest one that ended well
_PULSE_SECONDS = 5.0  # between two pulses of a stage, at most


def pulse_seconds(patience: float) -> float:
    """How often a stage says what it is doing."""
    return min(_PULSE_SECONDS, patience / 4) if patience else _PULSE_SECONDS


@dataclass
class _Seen:
    """What the coordinator knows of one stage; times are of the watch's own clock."""

    begun: int = -1
    doing: str = "has said nothing yet"
    heard: float = 0.0
    advanced: float = 0.0


class Watch:
    """The coordinator's view of its stages' progress.

    Its clock runs only while the coordinator does: one that was suspended (Ctrl-Z) must not take
    its own absence for that of its stages.
    """

    def __init__(self, stages: int, patience: float) -> None:
        self.tick = max(0.05, min(1.0, pulse_seconds(patience)))
        self.now = 0.0
        self._patience = patience
        self._last_tick: float | None = None
        self._seen = {stage: _Seen() for stage in range(stages)}
        self._is_training = False
        self._longest = 0.0  # wait of the training that ended well
        self._said_at = 0.0  # waits up to here have been told

    def begin_training(self) -> None:
        """The start is over: waits from now on tell how long one may be."""
        self._is_training = True

    def pass_time(self, now: float) -> None:
        """Called at least once a `tick`: what took much longer was not the stages' time."""
        passed = 0.0 if self._last_tick is None else now - self._last_tick
        self.now += min(passed, 3 * self.tick)
        self._last_tick = now

    def heard(self, stage: int, begun: int | None = None, doing: str = "") -> None:
        """A stage has spoken: of its progress, if that is told, or with a result of its work."""
        seen = self._seen.get(stage)
        if seen is None:
            return
        seen.heard = self.now
        if begun is None or begun != seen.begun:
            if self._is_training:
                self._longest = max(self._longest, self._stuck_for())
            seen.advanced = self.now
        if begun is not None:
            seen.begun, seen.doing = begun, doing

    def dismiss(self, stage: int) -> None:
        """A stage has finished: nobody waits for it any more."""
        self._seen.pop(stage, None)

    def complaint(self) -> str:
        """What to tell a person about a long wait, each time that it has doubled; or nothing."""
        stuck = self._stuck_for()
        if stuck < self._notice:
            self._said_at = 0.0
            return ""
        if stuck < 2 * self._said_at:
            return ""
        self._said_at = stuck
        return f"no progress for {stuck:.0f} s: {self._all_stages()}"

    def verdict(self) -> str:
        """Which stage is stuck and what to do, once the patience is at its end; or nothing."""
        stuck = self._stuck_for()
        if not self._patience or stuck < max(self._patience, _USUAL * self._longest):
            return ""
        culprit = self._culprit()
        who = "the stages wait for each other" if culprit is None else f"stage {culprit} is stuck"
        return (
            f"{who}: no progress for {stuck:.0f} s ({self._all_stages()}). If a single piece of "
            f"work may take that long, raise run.patience (now {self._patience:g} s; 0 = wait "
            "forever). Otherwise see the logs, and continue with --resume"
        )

    def doing(self) -> list[str]:
        """What each stage that has not finished says it does, and for how long."""
        lines = []
        for stage, seen in self._seen.items():
            silence = self._silence(seen)
            line = f"stage {stage} {seen.doing}, for {self.now - seen.advanced:.0f} s"
            lines.append(line + (f", silent for {silence:.0f} s" if silence else ""))
        return lines

    @property
    def _notice(self) -> float:
        patient = min(NOTICE_SECONDS, self._patience / 2) if self._patience else NOTICE_SECONDS
        return max(patient, 3 * self._longest)

    def _stuck_for(self) -> float:
        """Seconds since any stage has begun something: while one works, the others may wait."""
        return self.now - max((seen.advanced for seen in self._seen.values()), default=self.now)

    def _culprit(self) -> int | None:
        """Who is silent, else who is at work; None if all say that they wait."""
        silent = [stage for stage, seen in self._seen.items() if self._silence(seen)]
        working = [s for s, seen in self._seen.items() if not seen.doing.startswith("waits")]
        suspects = silent or working
        return min(suspects, key=lambda s: self._seen[s].advanced) if suspects else None

    def _silence(self, seen: _Seen) -> float:
        """Seconds for which a stage has not spoken, if that is out of the ordinary."""
        silence = self.now - seen.heard
        usual = pulse_seconds(self._patience)
        return silence if silence > max(3 * usual, 1.0) else 0.0

    def _all_stages(self) -> str:
        return "; ".join(self.doing())
