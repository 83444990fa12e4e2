"""How fast a peer may speak, and how often a person is told the same."""

import time
from collections import deque
from collections.abc import Hashable

from thinwire.errors import WireError

AT_ONCE = 500  # messages, before any time has passed
PER_SECOND = 25.0  # a link that breaks and comes back ten times a second makes twenty
TOLD_A_MINUTE = 6  # notes to a person on one and the same thing


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
        self._when: dict[Hashable, deque[float]] = {}

    def again(self, what: Hashable, now: float) -> int:
        """How often this was told within a minute, this time included; 0 if it was often enough."""
        when = self._when.setdefault(what, deque())
        while when and when[0] <= now - 60:
            when.popleft()
        if len(when) == TOLD_A_MINUTE:
            return 0
        when.append(now)
        return len(when)
