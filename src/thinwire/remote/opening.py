"""What a host opens: its door, the services behind it, and the ways by which others find them."""

import contextlib
import ipaddress
from dataclasses import dataclass, field
from functools import partial

from thinwire.errors import ConfigError, WireError
from thinwire.remote.authority import AuthorityBook
from thinwire.remote.enrol import ENROL, serve_enrolment
from thinwire.remote.invite import Invite, is_address
from thinwire.remote.relay import is_public, outside_address
from thinwire.run.messages import Way
from thinwire.run.vocabulary import MAX_MESSAGE
from thinwire.wire import Door, Listener, Route, Standby
from thinwire.wire.sockets import address_text, split_address
from thinwire.wire.speed import SERVICE as SPEED
from thinwire.wire.speed import SpeedService

OWN_INVITE_SECONDS = 3600.0  # for peers on this machine, which join at once


@dataclass(frozen=True)
class HostOptions:
    """Where a host is found, and whom it invites."""

    listen: str = "0.0.0.0:0"
    addresses: tuple[str, ...] = ()  # by which others find it; empty: as far as it knows itself
    relay: str = ""
    relay_pass: str = field(default="", repr=False)
    lasts: float = 86_400.0  # seconds for which the invite is good
    machines: int = 0  # that the invite lets in; 0: as many as the run has stages for others
    stages_here: int = 0  # that this machine holds itself
    resume: bool = False  # a run that `train` began in this folder
    mbps: float = 0.0  # between peers that meet at this host, all together; 0: each link apart

    def check(self) -> None:
        """Refuse a wrong address before anything is prepared."""
        for address in self.addresses:
            with_port(address, 1)


class Opened:
    """The open door of a run with its services; what it needs is closed with `stack`."""

    def __init__(
        self,
        book: AuthorityBook,
        options: HostOptions,
        port_before: int,
        stack: contextlib.ExitStack,
    ):
        self._book, self._options = book, options
        self.listener = Listener(book.identity, None, 0, MAX_MESSAGE, who=book.name_of)
        stack.callback(self.listener.close)
        serve_enrolment(self.listener, book)
        door = stack.enter_context(_open_door(options.listen, port_before))
        door.admit_by(book.run_id, book.grant_of, options.mbps)
        self.port, self.cut = door.port, partial(door.cut, book.run_id)
        takes = self.listener.take
        services = {ENROL: takes, "control": takes, SPEED: SpeedService().take}
        for service, take in services.items():
            name = f"{book.run_id}/{service}"
            door.serve(name, take)
            if options.relay:
                route = Route(options.relay, "relayed", options.relay_pass)
                stack.enter_context(Standby(name, route, take, prover=book.identity.prove))
        stated = tuple(with_port(address, door.port) for address in options.addresses)
        host, _ = split_address(options.listen)
        self.addresses = stated or (outside_address(host, door.port),)

    def meeting(self, peer: str) -> list[Way]:
        """Where a peer meets others that it cannot reach: the relay, then the host's door."""
        options, token = self._options, self._book.door_token(peer)
        own = [Way(address, "relayed", token) for address in self.addresses]
        relay = [Way(options.relay, "relayed", options.relay_pass)] if options.relay else []
        return relay + own

    def invite(self, machines: int) -> Invite:
        """An invite for so many others."""
        options = self._options
        return self._book.invite(
            self.addresses, options.relay, options.relay_pass, options.lasts, machines
        )

    def own_invite(self) -> Invite:
        """An invite for peers on this machine: by its inner address, and with a secret apart."""
        host, _ = split_address(self._options.listen)
        inner = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
        return self._book.invite(
            (address_text(inner, self.port),),
            lasts=OWN_INVITE_SECONDS,
            machines=self._options.stages_here,
        )


def who_is_left_out(addresses: tuple[str, ...], relay: str) -> str:
    """Who cannot come by these addresses of a host, and what to do about it; empty for nobody."""
    places = [split_address(address) for address in addresses]
    if relay or any(is_public(host) and host != "localhost" for host, _ in places):
        return ""
    host, port = places[0]
    ways = (
        f"open TCP port {port} of the router to this machine, and add --address with the public "
        "address or name; or use a relay (thinwire relay, and host --relay)"
    )
    if all(one == "localhost" or ipaddress.ip_address(one).is_loopback for one, _ in places):
        return (
            f"only this machine can use the invite: {host} is its own address. For peers in the "
            f"same network, listen on all addresses (--listen 0.0.0.0:{port}). For others, also "
            f"{ways}"
        )
    return f"{host} is an address of this network alone. For peers from outside, {ways}"


def with_port(address: str, port: int) -> str:
    """An address of a host as others write it; without a port it has the door's."""
    for whole in (address, f"{address}:{port}"):
        if is_address(whole):
            return whole
    raise ConfigError(f"--address {address}: write a name or an address, and :PORT if it differs")


def _open_door(listen: str, port_before: int) -> Door:
    """The public port; where any will do, the one that earlier invites name."""
    host, port = split_address(listen)
    if not port and port_before:
        with contextlib.suppress(WireError):  # another program has it by now
            return Door(host, port_before)
    return Door(host, port)
