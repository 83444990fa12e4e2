"""The host's view of the machines that joined: who is there, what each does, and what it is told.

Every member holds one stream to the host, over connections that may be lost and come back without
loss. One that is opened anew, because a process was started again or was away for too long, begins
with nothing: what its machine held is over.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import thinwire
from thinwire.background import on_daemon_thread
from thinwire.errors import BreachError, ThinwireError, WireError, printable
from thinwire.run import events as ev
from thinwire.run import protocol as msg
from thinwire.run.admission import AuthorityBook
from thinwire.run.channel import Channel
from thinwire.run.machine import Machine
from thinwire.run.watch import Pace, Told
from thinwire.wire import LastingPipe, Listener, Meter, Pipe

GOODBYE_SECONDS = 2.0  # for members to hear that the run is over
ALIVE_SECONDS = 5.0  # for a member to answer, before another process with its key takes its place
MOST_UNTAKEN = 1000  # messages to a member that wait to be sent: few of them are large
MOST_STREAMS = 8  # of one member: one counts, and others begin or may come back
UNKNOWN_GB = 1e6  # memory of a member that does not know its own: it will see
SESSION_BYTES = 16  # by which a member's process says that a connection goes on with its stream


@dataclass(eq=False)
class Member:
    """A machine that was let in, as the host sees it at the moment; guarded by the list's lock."""

    name: str
    channel: Channel | None = None
    hello: msg.Hello | None = None  # None while it is away
    origin: str = ""  # the host from which its stream comes
    since: float = field(default_factory=time.monotonic)  # that it came or went
    heard: float = field(default_factory=time.monotonic)  # when it last said something
    is_down: bool = False  # its connection is lost and may come back
    down_since: float = 0.0
    is_reachable: bool = False  # from outside, when that was last tried
    why_unfit: str = ""  # it declined, or failed; another hello may change that
    set_aside: str = ""  # why it gets no stage, however often it comes
    is_leaving: bool = False  # it said so, and may still be here for a moment
    tried: msg.Tried | None = None  # addresses of the host that it reached when last asked
    pace: Pace = field(init=False)  # over all its streams

    def __post_init__(self) -> None:
        self.pace = Pace(f"peer {self.name!r}")

    @property
    def machine(self) -> Machine:
        """What it has to give, for whoever chooses who holds what."""
        hello = self.hello  # it may leave at any moment: then another is asked
        has = hello.machine if hello is not None else Machine()
        memory = has.memory_gb or UNKNOWN_GB
        return replace(has, name=self.name, memory_gb=memory, reachable=self.is_reachable)

    @property
    def door(self) -> tuple[str, str]:
        """Its address for its own processes, and for others, if there are any."""
        if (hello := self.hello) is None:
            return "", ""
        return hello.door, hello.outside if self.is_reachable else ""

    @property
    def is_here(self) -> bool:
        """Whether its stream is open and it has said what it is."""
        return self.channel is not None and self.hello is not None


Happening = msg.Envelope | ev.Lost | ev.Away | ev.Back
"""What concerns those who train: what a member says of its stages or of itself, and its stream."""


@dataclass(eq=False)
class _Connections:
    """The connections of one stream: the latest, and those that it has not taken up yet."""

    latest: Pipe
    channel: Channel | None = None
    more: "queue.SimpleQueue[Pipe]" = field(default_factory=queue.SimpleQueue)


class Members(contextlib.AbstractContextManager["Members"]):
    """Streams to all enrolled machines. A context manager: leaving it says goodbye to all.

    On the threads of streams `on_happening` is called with a member's name, and says whether it
    holds back what the member says of its work: the rest counts, so that no flood goes unseen. So
    is `note`, with what people should know; it must not wait. `cut` ends all streams of a member.
    """

    def __init__(
        self,
        listener: Listener,
        book: AuthorityBook,
        outage: float,
        cut: Callable[[str], None] = lambda name: None,
    ):
        self.on_happening: Callable[[str, Happening], bool] = ignore
        self.note: Callable[[str], None] = lambda text: None
        self.meter = Meter()  # of all streams
        self._told = Told()
        self._listener, self._book = listener, book
        self._outage, self._cut = max(outage, msg.LEAST_OUTAGE_S), cut
        self._members: dict[str, Member] = {}
        self._streams: dict[tuple[str, bytes], _Connections] = {}  # by name, session
        self._changed = threading.Condition(threading.RLock())
        self._farewell = msg.Dismiss("the host ended; join again when it is back", "over")
        book.on_enrolled = self._expect
        for peer in book.peers():
            if not peer.kicked:
                self._expect(peer.name)

    def __exit__(self, *error: object) -> None:
        with self._changed:
            channels = [member.channel for member in self._members.values() if member.channel]
        for channel in channels:
            channel.send(self._farewell)
        closing = [on_daemon_thread("thinwire close", channel.close) for channel in channels]
        futures.wait(closing, GOODBYE_SECONDS)

    def say_farewell(self, reason: str, in_order: bool = True) -> None:
        """What members will hear when the host ends."""
        self._farewell = msg.Dismiss(reason, "over" if in_order else "failed")

    def all(self) -> list[Member]:
        """All machines that were let in and not kicked, those who are here first, by arrival."""
        with self._changed:
            welcome = [m for m in self._members.values() if self._book.is_welcome(m.name)]
            return sorted(welcome, key=lambda member: (not member.is_here, member.since))

    def here(self) -> list[Member]:
        """Those who are here and can hold a stage, in order of arrival."""
        return [member for member in self.up() if not member.why_unfit]

    def up(self) -> list[Member]:
        """Those who are here and stay, whether or not they get a stage."""
        return [m for m in self.all() if m.is_here and not m.is_leaving and not m.is_down]

    def wait_for_others(self, known: list[Member], timeout: float) -> None:
        """Wait until others than these are here, or for so long."""
        with self._changed:
            self._changed.wait_for(lambda: self.here() != known, timeout)

    def tell(
        self, name: str, message: Any, stage: int = msg.OF_NO_STAGE, generation: int = 0
    ) -> bool:
        """Send a message to a member, or to a stage that it holds; False if it is away."""
        with self._changed:
            member = self._members.get(name)
            if member is None or not member.is_here or member.channel is None:
                return False
            if member.channel.unsent >= MOST_UNTAKEN:
                self._lose(member, member.channel, "it takes nothing of what it is told")
                return False
            with contextlib.suppress(WireError):  # what is too large for a message goes untold
                member.channel.send(message, stage, generation)
            return True

    def tell_all(self, message: Any) -> None:
        """Tell everybody who is here."""
        for member in self.all():
            self.tell(member.name, message)

    def try_door(self, timeout: float) -> list[Member]:
        """Have all who are here try to reach the host anew; those who said in time how it went."""
        with self._changed:
            asked = [member for member in self._members.values() if member.is_here]
            for member in asked:
                member.tried = None
                self.tell(member.name, msg.TryDoor())
            self._changed.wait_for(lambda: all(member.tried for member in asked), timeout)
            return [member for member in asked if member.tried]

    def kick(self, name: str) -> list[str]:
        """Let a machine in no more, and have it leave; returns who else came by its invite."""
        others, cut = self._book.kick(name), partial(self._cut, name)
        with self._changed:
            self.tell(name, msg.Dismiss("the host removed this peer from the run", "refused"))
            member = self._members.get(name) or Member(name)
            self._lose(member, member.channel, "the host removed it from the run", then=cut)
        return others

    def set_aside(self, name: str, reason: str, for_good: bool = True) -> None:
        """Give a member no stage any more, or until it comes anew, and tell it why."""
        with self._changed:
            member = self._members.get(name)
            if member is None or (member.why_unfit and not for_good):
                return
            member.why_unfit = reason
            member.set_aside = reason if for_good else member.set_aside
            self._tell_unfit(member)

    def _expect(self, name: str) -> None:
        """A machine is on the list: accept its streams from now on."""
        with self._changed:
            if name not in self._members:
                self._members[name] = Member(name)
                # No futures, here and below: what goes wrong there is told with its traceback.
                threading.Thread(target=self._receive, args=(name,), daemon=True).start()

    def _receive(self, name: str) -> None:
        with contextlib.suppress(WireError):  # the listener is closed
            while True:
                pipe = self._listener.accept(msg.stream_name("peer", name), None, name)
                threading.Thread(target=self._attend, args=(name, pipe), daemon=True).start()

    def _attend(self, name: str, pipe: Pipe) -> None:
        """A connection goes on with the stream that its first words name, or begins another."""
        try:
            session = bytes(pipe.read() or b"")
        except WireError:
            session = b""
        with self._changed:
            known = self._streams.get((name, session))
            streams = sum(member == name for member, _ in self._streams)
            if known is not None:  # its member knows of a loss that the host may not have noticed
                on_daemon_thread("thinwire close", partial(known.latest.close, 0))
                known.latest = pipe
                known.more.put(pipe)
                return
            if len(session) == SESSION_BYTES and streams < MOST_STREAMS:
                connections = self._streams[name, session] = _Connections(pipe)
                self._open(self._members[name], connections)
                return
        pipe.close(0)

    def _open(self, member: Member, connections: _Connections) -> None:
        """With the lock: hear a new stream of a member; it counts from its hello on."""
        first = connections.latest

        def reopen(timeout: float) -> Pipe:
            try:
                return connections.more.get(timeout=timeout)
            except queue.Empty:
                raise WireError(f"{member.name} did not connect again") from None

        def hear(said: msg.Envelope) -> None:
            with self._changed:
                counts = member.channel is channel
            if not counts and isinstance(said.message, msg.Hello) and said.stage == msg.OF_NO_STAGE:
                counts = self._replace(member, channel, said.message)
                member.origin = first.comes_from if counts else member.origin
            if not (counts and self._hear(member, said)):
                member.pace.count()

        def on_over(error: ThinwireError | None) -> None:
            reason, in_breach = str(error or "it ended its stream"), isinstance(error, BreachError)
            with self._changed:
                if member.channel is channel and in_breach:
                    member.why_unfit = reason
                self._lose(member, channel, reason, in_breach)

        def on_outage(what: type[ev.Away | ev.Back], told: Any) -> None:
            with self._changed:  # until the channel is there
                if member.channel is not channel:
                    return
                member.is_down, member.down_since = what is ev.Away, time.monotonic()
            self.on_happening(member.name, what(msg.OF_NO_STAGE, told))

        on_down, on_up = (partial(on_outage, what) for what in (ev.Away, ev.Back))
        pipe = LastingPipe(first, reopen, self._outage, on_down, on_up)
        name = msg.stream_name("peer", member.name)
        channel = Channel(pipe, name, msg.FROM_PEER, hear, on_over, self.meter)
        connections.channel = channel

    def _replace(self, member: Member, channel: Channel, hello: msg.Hello) -> bool:
        """Have another stream of a member count, unless another process holds the one that does."""
        with self._changed:
            current, first, asked = member.channel, member.hello, time.monotonic()
            is_alive = False  # two processes with the same key would take turns for ever
            if current is not None and first is not None and first.process != hello.process:
                current.send(msg.AskAlive())
                self._changed.wait_for(
                    lambda: member.heard > asked or member.channel is not current,
                    0.0 if member.is_down else ALIVE_SECONDS,
                )
                is_alive = member.channel is current and member.heard > asked
            if not is_alive:
                self._lose(member, member.channel, "it was started anew")
                member.channel, member.hello, member.is_down = channel, None, False
                return True
        assert first is not None
        stays, refused = (one_line(said.place, 100) or "unknown" for said in (first, hello))
        reason = (
            f"{member.name} takes part in this run already ({stays}; this is {refused}): end that "
            "one first, or join as a further peer with another --folder and --name"
        )
        channel.send(msg.Dismiss(reason, "refused"))
        with self._changed:
            self._lose(member, channel, reason)
        if self._told.again(member.name, time.monotonic()):
            both = f"two processes join with the key of {member.name}"
            self.note(f"{both}: {stays} stays, {refused} was refused")
        return False

    def _lose(
        self,
        member: Member,
        channel: Channel | None,
        reason: str,
        in_breach: bool = False,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Give up the stream of a member, once it has what it was told; and then do something."""
        if channel is None:
            then()
            return
        self._streams = {key: c for key, c in self._streams.items() if c.channel is not channel}
        is_its = member.channel is channel
        if is_its:
            member.channel, member.hello, member.since = None, None, time.monotonic()
            member.is_down = False
            self._changed.notify_all()

        def close() -> None:
            channel.close()
            then()

        on_daemon_thread("thinwire close", close)
        if is_its:
            self.on_happening(member.name, ev.Lost(msg.OF_NO_STAGE, reason, in_breach))

    def _hear(self, member: Member, said: msg.Envelope) -> bool:
        """Note what a member says of itself; whether those who train hold back what it says."""
        with self._changed:
            member.heard = time.monotonic()
            match said.message if said.stage == msg.OF_NO_STAGE else None:
                case msg.Hello() as hello if member.hello is None:  # the first of its stream
                    member.hello, member.since, member.is_leaving = hello, time.monotonic(), False
                    member.why_unfit = member.set_aside or _other_version(hello.versions)
                    if member.why_unfit:
                        self._tell_unfit(member)
                case msg.Declined(reason):
                    member.why_unfit = one_line(reason) or "it does not say why"
                case msg.Leaving():
                    member.is_leaving = True
                case msg.Tried() as tried:
                    member.tried = tried
            self._changed.notify_all()
        return self.on_happening(member.name, said)

    def _tell_unfit(self, member: Member) -> None:
        self.tell(member.name, msg.News(f"this machine gets no stage: {member.why_unfit}"))


def ignore(name: str, what: Happening) -> bool:
    """For `Members.on_happening` while nobody trains."""
    return False


def _other_version(versions: dict[str, str]) -> str:
    """Why a peer of another version gets no stage; its settings and frames would not be ours."""
    theirs, ours = one_line(versions.get("thinwire", "unknown"), 40), thinwire.__version__
    remedy = "install the same version there, and join again"
    return "" if theirs == ours else f"it runs thinwire {theirs} and the host {ours}: {remedy}"


def one_line(text: str, longest: int = 300) -> str:
    """A peer's words for a line of ours: with line breaks they could pass for other lines."""
    return printable(" ".join(text.split()), longest)
