"""How long a message occupies a link, and when it is through: the one rule by which the emulator
holds real messages back, and by which the simulator plays schedules.
"""

import math


class Occupancy:
    """One direction of a host's network card: it carries one message after the other, at so many
    megabits (10^6) per second; with 0 nothing ever waits.
    """

    def __init__(self, mbps: float) -> None:
        self.mbps = mbps
        self.busy = 0.0  # seconds of carrying, all messages together
        self._free = -math.inf

    def seconds(self, size: int) -> float:
        """Time that so many bytes take at this rate."""
        return size * 8 / (self.mbps * 1e6) if self.mbps else 0.0

    def carry(self, size: int, first: float, last: float) -> tuple[float, float]:
        """When a message begins to pass and when it has passed, first come, first served.

        Its first byte comes at `first` and its last at `last`: earlier bytes pass while later ones
        are still to come, so a downlink as fast as the sender's uplink adds nothing.
        """
        if not self.mbps:
            return first, last
        taken = self.seconds(size)
        start = max(first, self._free)
        self._free = max(last, start + taken)
        self.busy += taken
        return start, self._free
