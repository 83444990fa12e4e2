"""The host's view of the peers that joined: who is there, what each does, and what it is told.

Every peer holds one stream to the host for as long as it is joined. It breaks and comes back; then
the peer says what it is doing, and is told again what it is to do.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import thinwire
from thinwire.errors import BreachError, ThinwireError, WireError, printable
from thinwire.remote.authority import AuthorityBook
from thinwire.remote.messages import (
    LOBBY,
    Arrive,
    AskAlive,
    Declined,
    Dismiss,
    Doing,
    Ended,
    FromHost,
    FromMember,
    Launch,
    Leaving,
    News,
    Prepared,
    TakeSeat,
    Tried,
    TryDoor,
    Vacate,
    lobby_name,
)
from thinwire.run.control import Channel
from thinwire.run.pace import Pace, Told
from thinwire.wire import Listener, Pipe

LOOK_SECONDS = 0.2  # between two looks for peers that were enrolled meanwhile
GOODBYE_SECONDS = 2.0  # for peers to hear that the run is over
ALIVE_SECONDS = 5.0  # for a peer to answer, before another process with its key takes its place
ARRIVAL_SECONDS = 10.0  # for another process to say what it is
MOST_UNTAKEN = 1000  # messages to a peer that wait to be sent: few of them are large


@dataclass(eq=False)
class Guest:
    """A peer that was let in, as the host sees it at the moment; guarded by the lobby's lock."""

    name: str
    channel: Channel | None = None
    arrived: Arrive | None = None  # what it said when its stream was opened; None while it is away
    origin: str = ""  # the host from which its stream comes
    since: float = field(default_factory=time.monotonic)  # that it came or went
    heard: float = field(default_factory=time.monotonic)  # when it last said something
    doing: str = ""
    seat: TakeSeat | None = None
    is_prepared: bool = False
    has_corpus: bool = False
    is_reachable: bool = False  # from outside, when that was last tried
    is_launched: bool = False
    has_ended: bool = False  # the process of its seat
    why_unfit: str = ""  # it declined, or failed; another arrival may change that
    set_aside: str = ""  # why it gets no seat, however often it arrives
    is_leaving: bool = False  # it said so, and may still be here for a moment
    tried: Tried | None = None  # which addresses of the host it reached, since it was last asked
    pace: Pace = field(init=False)  # over all its streams

    def __post_init__(self) -> None:
        self.pace = Pace(f"peer {self.name!r}")

    @property
    def is_unfit(self) -> bool:
        """Whether it could not take the seat that it was last given."""
        return bool(self.why_unfit)

    @property
    def is_here(self) -> bool:
        """Whether its stream is open and it has said what it is."""
        return self.channel is not None and self.arrived is not None


@dataclass(frozen=True)
class Gone:
    """A peer has given up its seat, or lost it, without a word of the process that it ran."""

    epoch: int
    reason: str


Happening = Ended | Leaving | Declined | Gone
"""What concerns the epoch under way."""


class Lobby:
    """Streams to all enrolled peers. A context manager: leaving it says goodbye to all.

    `on_happening` is called with a peer's name on the threads of streams, and must not wait; so is
    `note`, with what people should know.
    """

    def __init__(
        self,
        listener: Listener,
        book: AuthorityBook,
        cut: Callable[[str], None] = lambda name: None,
    ):
        """`cut` ends all streams of a peer."""
        self.on_happening: Callable[[str, Happening], None] = lambda name, what: None
        self.note: Callable[[str], None] = lambda text: None
        self._told = Told()
        self._listener, self._book = listener, book
        self._cut = cut
        self._guests: dict[str, Guest] = {}
        self._changed = threading.Condition(threading.RLock())
        self._is_over = False
        self._farewell = Dismiss("the host ended; join again when it is back", in_order=True)
        threading.Thread(target=self._look_for_peers, name="thinwire lobby", daemon=True).start()

    def __enter__(self) -> "Lobby":
        return self

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._is_over = True
            channels = [guest.channel for guest in self._guests.values() if guest.channel]
        closing = []
        for channel in channels:
            _tell(channel, self._farewell)
            closing.append(threading.Thread(target=channel.close, daemon=True))
            closing[-1].start()
        deadline = time.monotonic() + GOODBYE_SECONDS
        for thread in closing:
            thread.join(max(0.0, deadline - time.monotonic()))

    def say_farewell(self, reason: str, in_order: bool = True) -> None:
        """What peers will hear when the host ends."""
        self._farewell = Dismiss(reason, in_order)

    def guests(self) -> list[Guest]:
        """All peers that were let in and not kicked, those who are here first, by arrival."""
        with self._changed:
            welcome = [g for g in self._guests.values() if self._book.is_welcome(g.name)]
            return sorted(welcome, key=lambda guest: (not guest.is_here, guest.since))

    def here(self) -> list[Guest]:
        """Those who are here and can take a seat, in order of arrival."""
        here = [guest for guest in self.guests() if guest.is_here]
        return [guest for guest in here if not (guest.is_unfit or guest.is_leaving)]

    def wait(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Wait until something holds that depends on peers; False if it does not in time."""
        with self._changed:
            return self._changed.wait_for(condition, timeout)

    def give_seats(self, seats: dict[str, TakeSeat]) -> None:
        """Tell each of these peers which stage it is to hold."""
        with self._changed:
            for name, guest in self._guests.items():
                guest.seat = seats.get(name)
                guest.is_prepared = guest.is_launched = guest.has_ended = False
                guest.doing = ""
                if guest.seat is not None:
                    self._send(guest, guest.seat)

    def launch(self) -> None:
        """Have all peers with a seat start the processes of their stages."""
        with self._changed:
            for guest in self._guests.values():
                if guest.seat is not None:
                    guest.is_launched = True
                    self._send(guest, Launch(guest.seat.epoch))

    def vacate(self, epoch: int, reason: str) -> None:
        """The epoch is over: whoever has a seat of it ends the process."""
        with self._changed:
            for guest in self._guests.values():
                if guest.seat is not None and guest.seat.epoch == epoch:
                    guest.seat, guest.doing = None, ""
                    self._send(guest, Vacate(epoch, reason))

    def tell_all(self, message: FromHost) -> None:
        """Tell everybody who is here."""
        with self._changed:
            for guest in self._guests.values():
                self._send(guest, message)

    def try_door(self, timeout: float) -> list[Guest]:
        """Have all who are here try to reach the host anew; those who said in time how it went."""
        with self._changed:
            asked = [guest for guest in self._guests.values() if guest.is_here]
            for guest in asked:
                guest.tried = None
                self._send(guest, TryDoor())
            self._changed.wait_for(lambda: all(guest.tried for guest in asked), timeout)
            return [guest for guest in asked if guest.tried]

    def kick(self, name: str) -> list[str]:
        """Let a peer in no more, and have it leave; returns who else came by its invite."""
        others = self._book.kick(name)
        with self._changed:
            guest = self._guests.get(name)
            if guest is None:
                self._cut(name)
                return others
            seat, guest.seat = guest.seat, None
            self._send(guest, Dismiss("the host removed this peer from the run", in_order=False))
            self._lose(guest, guest.channel, lambda: self._cut(name))
        if seat is not None:
            self.on_happening(name, Gone(seat.epoch, "the host removed it from the run"))
        return others

    def mark_unfit(self, name: str, reason: str) -> None:
        """Give a peer no seat until it arrives anew."""
        with self._changed:
            if name in self._guests:
                self._guests[name].why_unfit = self._guests[name].why_unfit or reason

    def set_aside(self, name: str, reason: str) -> None:
        """Give a peer no seat any more, and tell it why."""
        with self._changed:
            if name in self._guests:
                guest = self._guests[name]
                guest.set_aside = guest.why_unfit = reason
                self._tell_unfit(guest)

    def _look_for_peers(self) -> None:
        while not self._is_over:
            for peer in self._book.peers():
                if peer.name not in self._guests and not peer.kicked:
                    with self._changed:
                        self._guests[peer.name] = Guest(peer.name)
                    threading.Thread(target=self._receive, args=(peer.name,), daemon=True).start()
            time.sleep(LOOK_SECONDS)

    def _receive(self, name: str) -> None:
        """Accept one stream of a peer after the other."""
        guest = self._guests[name]
        while not self._is_over:
            try:
                pipe = self._listener.accept(lobby_name(name), None, name)
            except WireError:
                return
            self._attend(guest, pipe)

    def _attend(self, guest: Guest, pipe: Pipe) -> None:
        """Hear a stream of a peer; returns once it is known whether it is the one that counts."""
        settled, lost = threading.Event(), threading.Event()
        origin = pipe.comes_from

        def hear(message: Any) -> None:
            with self._changed:
                counts = guest.channel is channel
            if not counts and isinstance(message, Arrive) and not settled.is_set():
                counts = self._replace(guest, channel, message)
                guest.origin = origin if counts else guest.origin
                settled.set()
                if lost.is_set():  # while the other was asked
                    on_lost()
            if counts:
                self._hear(guest, message)

        def on_lost(error: ThinwireError | None = None) -> None:
            lost.set()
            with self._changed:
                if guest.channel is channel and isinstance(error, BreachError):
                    guest.why_unfit = str(error)
                self._lose(guest, channel)
            settled.set()
            _close(channel)

        with self._changed:  # what it says must not be heard before its stream is known
            channel = Channel(
                pipe,
                lobby_name(guest.name),
                FromMember,
                on_message=hear,
                on_lost=on_lost,
                words=LOBBY,
                on_end=on_lost,
            )
            if guest.channel is None:
                guest.channel, guest.arrived, guest.origin = channel, None, origin
                settled.set()
        if not settled.wait(ARRIVAL_SECONDS + ALIVE_SECONDS):
            on_lost()

    def _replace(self, guest: Guest, channel: Channel, arrived: Arrive) -> bool:
        """Have another stream of a peer count, unless another process holds the one that does.

        A process that dials again knows of a loss that the host may not have noticed. Of another
        process with the same key it knows nothing: the two would take turns for ever.
        """
        with self._changed:
            current, first, asked = guest.channel, guest.arrived, time.monotonic()
            if current is None or first is None or first.process == arrived.process:
                is_alive = False
            else:
                _tell(current, AskAlive())
                self._changed.wait_for(
                    lambda: guest.heard > asked or guest.channel is not current, ALIVE_SECONDS
                )
                is_alive = guest.channel is current and guest.heard > asked
            if not is_alive:
                self._lose(guest, guest.channel)
                guest.channel, guest.arrived = channel, None
                return True
        assert first is not None
        self._refuse_second(guest, channel, first, arrived)
        return False

    def _refuse_second(self, guest: Guest, channel: Channel, first: Arrive, other: Arrive) -> None:
        stays, refused = (one_line(said.place, 100) or "unknown" for said in (first, other))
        reason = (
            f"{guest.name} takes part in this run already ({stays}; this is {refused}): end that "
            "one first, or join as a further peer with another --folder and --name"
        )
        _tell(channel, Dismiss(reason, in_order=False))
        _close(channel)
        if self._told.again(guest.name, time.monotonic()):
            self.note(
                f"two processes join with the key of {guest.name}: {stays} stays, {refused} was "
                "refused"
            )

    def _lose(
        self, guest: Guest, channel: Channel | None, then: Callable[[], None] = lambda: None
    ) -> None:
        """Give up the stream of a peer, once it has what it was told; and then do something."""
        is_its = channel is not None and guest.channel is channel
        if is_its:
            guest.channel, guest.arrived = None, None
            guest.since, guest.doing = time.monotonic(), ""
            self._changed.notify_all()

        def close() -> None:
            if is_its and channel is not None:
                channel.close()
            with contextlib.suppress(ThinwireError):  # all is closed by now
                then()

        threading.Thread(target=close, daemon=True).start()

    def _hear(self, guest: Guest, message: Any) -> None:
        guest.pace.count()
        with self._changed:
            guest.heard = time.monotonic()
            happening = self._note(guest, message)
            self._changed.notify_all()
        if happening is not None:
            self.on_happening(guest.name, happening)

    def _note(self, guest: Guest, message: Any) -> Happening | None:
        """Take in what a peer says; returns what concerns the epoch under way."""
        epoch = guest.seat.epoch if guest.seat else 0
        match message:
            case Arrive():
                guest.arrived, guest.since, guest.is_leaving = message, time.monotonic(), False
                guest.why_unfit = guest.set_aside or _other_version(message.versions)
                return self._welcome(guest, message)
            case Doing(said, text) if said == epoch:
                guest.doing = one_line(text)
            case Prepared(said, has_corpus) if said == epoch:
                guest.is_prepared, guest.has_corpus, guest.doing = True, has_corpus, ""
            case Declined(said, reason) if said == epoch:
                guest.why_unfit, guest.doing = one_line(reason) or "it does not say why", ""
                return Declined(said, guest.why_unfit)
            case Ended(said) if said == epoch:
                guest.has_ended = True
                return message
            case Leaving():
                guest.is_leaving = True
                return message
            case Tried():
                guest.tried = message
        return None

    def _welcome(self, guest: Guest, arrived: Arrive) -> Happening | None:
        """Tell a peer that has come, or come back, what it is to do."""
        if guest.is_unfit:
            self._tell_unfit(guest)
        seat = guest.seat
        if seat is None:
            if arrived.epoch:
                self._send(guest, Vacate(arrived.epoch, "the run was formed again meanwhile"))
        elif arrived.epoch != seat.epoch:
            if guest.is_launched:
                return Gone(seat.epoch, "it was started anew")
            guest.is_prepared = False  # it was started anew, and has to prepare again
            self._send(guest, seat)
        elif guest.is_launched and not arrived.is_running and not guest.has_ended:
            self._send(guest, Launch(seat.epoch))
        return None

    def _tell_unfit(self, guest: Guest) -> None:
        self._send(guest, News(f"this machine gets no seat: {guest.why_unfit}"))

    def _send(self, guest: Guest, message: FromHost) -> None:
        if guest.channel is not None and guest.channel.unsent < MOST_UNTAKEN:
            _tell(guest.channel, message)
        elif guest.channel is not None:
            self._lose(guest, guest.channel)  # it takes nothing: what waits for it would pile up


def _other_version(versions: dict[str, str]) -> str:
    """Why a peer of another version gets no seat; its settings and frames would not be ours."""
    theirs = one_line(versions.get("thinwire", "unknown"), 40)
    if theirs == thinwire.__version__:
        return ""
    return (
        f"it runs thinwire {theirs} and the host {thinwire.__version__}: install the same version "
        "there, and join again"
    )


def one_line(text: str, longest: int = 300) -> str:
    """A peer's words for a line of ours: with line breaks they could pass for other lines."""
    return printable(" ".join(text.split()), longest)


def _close(channel: Channel) -> None:
    """Say goodbye on a stream, without waiting for that."""
    threading.Thread(target=channel.close, daemon=True).start()


def _tell(channel: Channel, message: FromHost) -> None:
    with contextlib.suppress(ThinwireError):  # a stream that is lost comes back, and is told again
        channel.send(message)
