"""How two neighbouring stages on other machines reach each other.

The stage below accepts, so it waits at doors; the one above dials. A link is direct where either
end has a door that can be reached, and goes by the relay or the host's door where neither has.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from thinwire.errors import WireError
from thinwire.remote.lobby import Guest
from thinwire.remote.messages import Arrive
from thinwire.run.messages import Connect, Way
from thinwire.wire import Route, ping
from thinwire.wire.background import on_daemon_thread

PROBE_SECONDS = 3.0


@dataclass(frozen=True)
class DoorOf:
    """A peer's door: its address for the peer's own processes, and for others if it is open."""

    own: str = ""
    outside: str = ""  # probed


@dataclass(frozen=True)
class Ways:
    """The doors of an epoch: of each seat, and where all can meet."""

    run: str
    token: str = field(repr=False)  # at the doors of its peers
    doors: list[DoorOf]
    meeting: list[list[Way]] = field(repr=False)  # of each seat: the relay, and the host's own door
    keys: list[str] = field(default_factory=list)  # fingerprints, of each seat
    word: str = field(default_factory=lambda: secrets.token_hex(8), repr=False)  # of this epoch

    def connect(self, stage: int, told: Connect) -> Connect:
        """The word to connect, for a stage whose neighbours are on other machines."""
        reach, wait = [], []
        if stage > 0:
            below, own = self.doors[stage - 1], self.doors[stage]
            reach = [*self._direct(below.outside, own.own), *self.meeting[stage]]
        if stage + 1 < len(self.doors):
            own, above = self.doors[stage], self.doors[stage + 1]
            wait = [*self._direct(own.own, above.outside), *self.meeting[stage]]
        return replace(told, seats=self.keys, run=self.run, word=self.word, reach=reach, wait=wait)

    def _direct(self, *addresses: str) -> list[Way]:
        return [Way(address, "direct", self.token) for address in addresses if address]


def token_of_links(epoch: int) -> str:
    """A token for the doors of the peers that hold the seats of this epoch; no other has it."""
    return f"epoch/{epoch}.{secrets.token_hex(16)}"


def probe_all(guests: list[Guest | None], run: str, token_of: Callable[[str], str]) -> list[DoorOf]:
    """The doors of several peers, tried at once; one that is away has none."""

    def look(guest: Guest | None) -> DoorOf:
        if guest is None or guest.arrived is None:
            return DoorOf()
        return probe(guest.arrived, guest.origin, run, token_of(guest.name))

    probing = [on_daemon_thread("thinwire probe", partial(look, guest)) for guest in guests]
    return [one.result() for one in probing]


def probe(arrived: Arrive, origin: str, run: str, token: str) -> DoorOf:
    """A peer's door as others find it: tried, not believed.

    Only where the peer's own stream comes from, its `origin`: a host is no means to look around.
    """
    if not origin or arrived.outside.rpartition(":")[0].strip("[]") != origin:
        return DoorOf(arrived.door)
    try:
        ping(Route(arrived.outside, "direct", token), f"{run}/control", PROBE_SECONDS)
    except WireError:
        return DoorOf(arrived.door)
    return DoorOf(arrived.door, arrived.outside)
