"""The process of stages: one of them, or several that are neighbours.

Whoever started it, a coordinator or a joined machine, says over the socket on its standard input
what it is to be (an Assignment), and hears there how its stages fare. Stages of one process are
linked in memory: the cut between them is computed as any other, and nothing is sent.
"""

import gc

from thinwire.run.processes import die_with_starter

if __name__ == "__main__":
    die_with_starter()  # before the imports, which take seconds: it may be stopped meanwhile
    gc.disable()  # imports make no garbage, and looking for it takes a fifth of their time

import collections
import os
import platform
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent import futures
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

import thinwire
from thinwire import wire
from thinwire.background import on_daemon_thread
from thinwire.data import Corpus
from thinwire.engine.audit import Audit
from thinwire.engine.reports import Report, ShardFailed, ShardWritten, meters_of
from thinwire.engine.trace import Progress
from thinwire.engine.worker import Worker, remedy
from thinwire.errors import BreachError, ThinwireError, WireError, outward
from thinwire.run import protocol as msg
from thinwire.run.channel import Channel, SocketPipe
from thinwire.run.tokens import FetchedCorpus
from thinwire.run.watch import pulse_seconds
from thinwire.safe_stream import SafeStream
from thinwire.settings import Settings
from thinwire.wire.keys import fingerprint_of

JOIN_SECONDS = 120.0  # for reaching a process that is known to listen
FOR_FOLLOWERS = 256 << 20  # bytes that a log keeps beside what is needed: who follows may be late
MOST_UNSAID = 1024  # reports that a follower keeps at most: a lost stage may owe them


def versions() -> dict[str, str]:
    """What computed a run: reported by every peer and kept in the summary."""
    threads = torch.get_num_threads()
    return {
        "thinwire": thinwire.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": f"{_cpu()} ({torch.backends.cpu.get_cpu_capability()}, {threads} threads)",
    }


def _cpu() -> str:
    """The kind of this machine's CPU: machines of one kind compute the same bits."""
    with suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "CPU part"):
                return value.strip()[:80]
    return platform.processor()


# The cuts between stages of one process: the ends of the stage below and of the one above.
Inner = dict[int, tuple[wire.Pipe, wire.Pipe]]


class Peer:
    """The life of one stage: built, linked to the neighbours, trained, goodbye."""

    def __init__(
        self, order: msg.Assignment, inner: Inner, stage: int, say: Callable[[msg.OfStage], None]
    ):
        self.order, self.identity, self._inner = order, order.identity, inner
        self.stage, self._say = stage, say
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.hear = self._inbox.put
        self._links: dict[int, wire.Link] = {}  # by the neighbouring stage
        self._logged: dict[int, wire.LoggedPipe] = {}  # by cut: where the other end may be replaced
        self._relinks: dict[int, msg.Connect | None] = {}  # by cut: the latest that counts
        self._down_since = 0.0  # of the connection to the stage below
        self._is_new = self.order.began != msg.OF_NO_STEP  # takes the place of one that was lost
        self._listener: wire.Listener | None = None  # for the stage above
        self._routes: wire.Routes | None = None  # to the stage below, on another machine
        # For the stage above, on another machine, and for whoever follows that.
        self._standbys: dict[bool, list[wire.Standby]] = {}
        self._unsaid: collections.deque[Any] = collections.deque(maxlen=MOST_UNSAID)
        self._saying = threading.Lock()
        self._follows = self.order.follows
        self._audit: Audit | None = None  # of the stage that this one follows
        self._progress = Progress()

    def run(self) -> None:
        """The whole life of a stage; errors leave through `fail`."""
        settings = Settings.from_plain(self.order.settings)
        threading.Thread(target=self._pulse, args=(settings.run.patience,), daemon=True).start()
        self._progress.begin("builds its layers")
        data, run_folder = self._data(settings), Path(self.order.run_folder)
        resume = Path(self.order.resume) if self.order.resume else None
        began = self.order.began if self._is_new else None
        place = settings, self.stage, data, run_folder, resume, began
        self._worker = worker = Worker(*place, self._progress)
        self._progress.begin("waits for the other stages to be built")
        if self.stage < worker.last and self.stage not in self._inner:
            most = worker.max_payload() + 64
            self._listener = wire.Listener(self.identity, settings.link.listen, 0, most)
        address = self._listener.address if self._listener else ""
        self.say(msg.Ready(address, worker.stage.describe(), str(worker.device), versions()))
        connect: msg.Connect = self._inbox.get()
        self._progress.begin("waits for its neighbours to link")
        self._join(connect)
        self.say(self._linked())
        start: msg.Start = self._inbox.get()
        self._decide(start)
        if self._follows and settings.train.audit:
            self._audit = Audit((worker.below, worker.above), start.is_alike, self._say)
            for logged in self._logged.values():
                logged.audit = self._audit.hear
        may_leave = threading.Event()
        threading.Thread(target=self._obey, args=(may_leave,), daemon=True).start()
        below, above = self._links.get(self.stage - 1), self._links.get(self.stage + 1)
        worker.run(below, above, self.say)
        logs = self._logged.values()
        known = [(logged.state.decided, logged.state.stops) for logged in logs]
        decided = msg.last_decision([(worker.decided, worker.stops), *known])
        fed = sum(logged.fed_bytes for logged in logs)
        self.say(msg.Finished(meters_of(self._links.values()), fed, *decided))
        self._progress.begin("waits for the other stages to finish")
        may_leave.wait()

    def _linked(self) -> msg.Linked:
        """That this stage is linked, and the last decision that its neighbours know."""
        known = [logged.state.theirs for logged in self._logged.values()]
        heard = [(theirs.decided, theirs.stops) for theirs in known if theirs is not None]
        return msg.Linked(self._way_below(), *msg.last_decision(heard))

    def _decide(self, start: msg.Start) -> None:
        """Note the last known decision of the first stage: it is not made anew."""
        for logged in self._logged.values():
            logged.state.decide(start.decided, start.stops)
        self._worker.decided, self._worker.stops = start.decided, start.stops

    def fail(self, error: BaseException, neighbour: int | None = None) -> None:
        """Say why this stage cannot go on, or link to a neighbour; and who is lost or at fault."""
        known, is_wire = isinstance(error, ThinwireError), isinstance(error, WireError)
        told = str(error) if known else f"{type(error).__name__}: {error}"
        if self.order.host:  # to another machine: nothing of this one's files, which its log has
            told = outward(error)
        lost = {stage for stage, link in self._links.items() if link.other_end_lost}
        at_fault = {stage for stage, link in self._links.items() if link.other_end_at_fault}
        if neighbour is not None:
            (at_fault if isinstance(error, BreachError) else lost).add(neighbour)
        accused = [*lost] if is_wire else []
        self.say(msg.Failed(type(error).__name__, known, told, accused, [*at_fault]))

    def _data(self, settings: Settings) -> Corpus | FetchedCorpus:
        """The corpus: that on the coordinator's machine, where there is none on this one."""
        if self.order.corpus:
            return Corpus.open(Path(self.order.corpus))
        name = msg.stream_name("tokens", self.stage, self.order.generation, self.order.again)
        routes = wire.Routes(self.order.service, self.order.host)
        host = fingerprint_of(self.identity.host)
        call = partial(wire.dial, routes, name, self.identity, host, max_message=msg.MAX_MESSAGE)
        outage = max(settings.link.outage, msg.LEAST_OUTAGE_S)
        pipe = wire.LastingPipe(call(JOIN_SECONDS), call, outage)
        return FetchedCorpus(pipe, settings, self.stage)

    def _join(self, connect: msg.Connect) -> None:
        """Link to the stage below and the stage above."""
        worker = self._worker
        nic = worker.settings.link.nic(seed=worker.settings.run.seed * 1000 + self.stage)
        for neighbour in (self.stage - 1, self.stage + 1):
            if not 0 <= neighbour <= worker.last:
                continue
            cut, is_above = min(self.stage, neighbour), neighbour > self.stage
            meter = wire.Unmetered() if cut in self._inner else wire.Meter()
            if cut in self._inner:
                pipe = self._inner[cut][not is_above]
            else:
                pipe = self._open(neighbour, connect, meter, at_start=not self._is_new)
                pipe = self._logged_pipe(pipe, cut, nic, meter)
            most = worker.max_payload()
            self._links[neighbour] = wire.Link(pipe, meter, f"cut-{cut}", most)

    def _open(
        self, neighbour: int, connect: msg.Connect, meter: wire.Meter, at_start: bool = False
    ) -> wire.Pipe:
        """A pipe to a neighbour that agrees on the contract; connected again if settings allow."""
        worker = self._worker
        cut, key, feeds = min(self.stage, neighbour), connect.seats[neighbour], connect.follower
        name = msg.stream_name("cut", cut, self.order.generation, connect.links[cut])
        name = f"{name}.f{feeds}" if feeds else name
        outage, limit = worker.settings.link.outage, worker.max_payload() + 64
        listener, at_doors = self._listener, f"{connect.run}/{name}.{connect.word}"
        routes = wire.Routes(at_doors, connect.reach) if connect.reach else None

        def connected(timeout: float) -> wire.Pipe:
            if neighbour < self.stage:
                return wire.dial(routes or connect.below, name, self.identity, key, timeout, limit)
            assert listener is not None, "it is opened where there is a stage above elsewhere"
            return listener.accept(name, timeout, key)

        told: tuple[Callable[..., None], ...] = ()
        if neighbour > self.stage:  # it dials, and so knows best when there is a connection
            for standby in self._standbys.get(bool(feeds), ()):
                on_daemon_thread("thinwire close", standby.close)
            assert listener is not None
            self._standbys[bool(feeds)] = [
                wire.Standby(at_doors, route, listener.take) for route in connect.wait
            ]
        elif not feeds:
            told, self._routes = (self._on_down, self._on_up), routes
        pipe = connected(JOIN_SECONDS)
        pipe = wire.LastingPipe(pipe, connected, outage, *told) if outage else pipe
        contract = worker.contract(cut, self.order.generation if self.order.host else 0, at_start)
        wire.handshake(pipe, contract, contract, JOIN_SECONDS, meter, remedy)
        return pipe

    def _on_down(self, reason: str) -> None:
        """The connection to the stage below is lost."""
        self._down_since = self._down_since or time.monotonic()
        self.say(msg.LinkDown(self.stage - 1, reason))

    def _on_up(self, seconds: float) -> None:
        self._down_since = 0.0
        self.say(msg.LinkUp(self.stage - 1, seconds, self._way_below()))

    def _logged_pipe(
        self, pipe: wire.Pipe, cut: int, nic: wire.Nic | None, meter: wire.Meter
    ) -> wire.Pipe:
        """The same pipe with a log of what is sent, so that whoever is at its other end may be
        replaced; or, where this stage is such a replacement, what goes on with the log there.
        """
        worker = self._worker
        most = worker.settings.train.log_mb << 20
        if not most or not worker.settings.link.outage:
            return wire.emulated(pipe, nic)
        keeps = FOR_FOLLOWERS if self.order.host else 0  # of a run on one machine nobody follows
        log = wire.FrameLog(worker.scratch / f"sent-{cut}", most + keeps, keeps)
        state = wire.LinkState(log, worker.state.step, self._is_new, self._follows)
        logged = wire.LoggedPipe(None if self._is_new else pipe, state, nic, meter)
        self._logged[cut] = logged
        if self._follows:
            logged.follow(pipe)
        elif self._is_new:
            logged.go_on(pipe)
        return logged

    def _feed(self, cut: int, connect: msg.Connect) -> None:
        """On a thread of its own: send what is logged to a process that follows a neighbour."""
        neighbour = msg.other_end(cut, self.stage)
        try:
            pipe = self._open(neighbour, connect, wire.Meter())
            try:
                self._logged[cut].feed(pipe, self._worker.settings.train.audit)
            finally:
                pipe.close(0)
        except WireError as error:  # whoever leads sees that it is lost
            print(f"the follower of stage {neighbour} is fed no more: {error}", file=sys.stderr)

    def _take_over(self, connect: msg.Connect) -> None:
        """On a thread of its own: take the place of the stage that this one followed."""
        for cut, logged in self._logged.items():
            self._relinks[cut] = connect
            logged.await_another()
        if all(self._relink(cut, connect) for cut in self._logged):
            self._say(self._linked())

    def _speak_up(self) -> None:
        """From here on it is the stage, and says what the lost one may not have said."""
        self._audit = None
        for logged in self._logged.values():
            logged.audit = None
        with self._saying:
            self._follows = False
            while self._unsaid:
                self._say(self._unsaid.popleft())

    def say(self, message: msg.OfStage) -> None:
        """Tell the coordinator; a stage that follows another keeps its results to itself."""
        with self._saying:  # in order, also while it speaks up
            if self._follows and isinstance(
                message, Report | msg.Finished | msg.LinkDown | msg.LinkUp
            ):
                self._unsaid.append(message)
                if isinstance(message, ShardWritten | ShardFailed):
                    self._say(msg.Follows(message.step))
            else:
                self._say(message)

    def _relink(self, cut: int, connect: msg.Connect) -> bool:
        """On a thread: go on with another process at the end of a cut; False: it said why not."""
        logged, neighbour = self._logged[cut], msg.other_end(cut, self.stage)

        def is_wanted() -> bool:
            return connect is self._relinks[cut]  # else that one is lost too, and another comes

        try:
            pipe = self._open(neighbour, connect, self._links[neighbour].meter)
            if not is_wanted():
                pipe.close(0)
                return False
            if neighbour < self.stage and self._down_since:
                self._on_up(time.monotonic() - self._down_since)
            if number := connect.follower:
                logged.follow(pipe, is_wanted)
                self._say(msg.Linked(follower=number))
            else:
                logged.go_on(pipe, is_wanted)
        except WireError as error:
            if is_wanted():
                self.fail(error, neighbour)
            return False
        return True

    def _way_below(self) -> str:
        route = self._routes.in_use if self._routes else None
        return route.kind if route else ""

    def _pulse(self, patience: float) -> None:
        """Say now and then what this stage is doing."""
        has_log = True
        while True:
            around = (self._links.get(self.stage + side) for side in (-1, 1))
            trips = [link.pipe.round_trip() if link else 0.0 for link in around]
            self.say(msg.Pulse(self._progress.begun, self._progress.doing, *trips))
            troubles = [logged.state.log.trouble for logged in [*self._logged.values()]]
            if has_log and any(troubles):
                has_log = False
                self.say(msg.LogLost(max(troubles)))
            time.sleep(pulse_seconds(patience))

    def _obey(self, may_leave: threading.Event) -> None:
        """Hear what the coordinator says while the stage trains."""
        while True:
            match self._inbox.get():
                case msg.Stop():
                    self._worker.stop_requested.set()
                case msg.Saved(step):
                    for logged in self._logged.values():
                        logged.trim(step)
                    with self._saying:  # the stage has reported all that came before
                        due = [one for one in self._unsaid if getattr(one, "step", step) >= step]
                        self._unsaid = collections.deque(due, MOST_UNSAID)
                    if self._audit is not None:
                        self._say(self._audit.standing())
                case msg.Await(cut) if cut in self._logged:
                    self._relinks[cut] = None
                    self._logged[cut].await_another()
                case msg.Connect(cut=None) as connect:
                    on_daemon_thread("thinwire", partial(self._take_over, connect))
                case msg.Connect(cut=cut) as connect if cut in self._logged:
                    if connect.follower and not self._follows:
                        on_daemon_thread("thinwire feed", partial(self._feed, cut, connect))
                        continue
                    self._relinks[cut] = connect
                    on_daemon_thread("thinwire relink", partial(self._relink, cut, connect))
                case msg.Start() as start:
                    self._decide(start)
                    self._speak_up()
                case msg.Leave():
                    may_leave.set()


def _live(pipe: wire.Pipe) -> int:
    """Be the stages of the order that comes first, to their end; returns the exit code."""
    orders: queue.SimpleQueue[msg.Assignment] = queue.SimpleQueue()
    peers: dict[int, Peer] = {}

    def hear(said: msg.Envelope) -> None:
        if said.stage == msg.OF_NO_STAGE:
            orders.put(said.message)
        else:
            peers[said.stage].hear(said.message)

    def leave(error: ThinwireError | None) -> None:
        os._exit(3)  # whoever started this is gone

    channel = Channel(pipe, "control", msg.FROM_COORDINATOR, hear, leave)
    order = orders.get()
    inner = {stage: wire.memory_pair() for stage in order.stages[:-1]}
    for stage in order.stages:
        say = partial(channel.send, stage=stage, generation=order.generation)
        peers[stage] = Peer(order, inner, stage, say)
    lives = {on_daemon_thread(f"stage {peer.stage}", peer.run): peer for peer in peers.values()}
    code = 0
    for life in futures.as_completed(lives):
        if (error := life.exception()) is not None:
            traceback.print_exception(error)
            lives[life].fail(error)
            code = 1
            break
    channel.close()
    return code


def main() -> None:
    """Entry point of `python -m thinwire.run.peer`."""
    gc.freeze()  # what has been imported stays
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the coordinator decides what Ctrl-C means
    # A log on a full disk must not keep the reason of a failure from the coordinator.
    with redirect_stdout(SafeStream(sys.stdout)), redirect_stderr(SafeStream(sys.stderr)):
        code = _live(SocketPipe(socket.socket(fileno=os.dup(0))))
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # transport threads must not keep a finished stage alive


if __name__ == "__main__":
    main()
