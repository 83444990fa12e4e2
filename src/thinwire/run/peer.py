"""A peer: the process that holds one stage. Started by a coordinator, lives as long as it does.

The coordinator writes one JSON line to the peer's standard input: which stage it is, where to
dial, and its key (so private keys never touch a disk). When that input closes, the
coordinator is gone and the peer leaves at once: no orphans, whatever happened.
"""

import gc

from thinwire.run.bond import die_with_coordinator

if __name__ == "__main__":
    die_with_coordinator()  # before the imports, which take seconds: it may be stopped meanwhile
    gc.disable()  # imports make no garbage, and looking for it takes a fifth of their time

import json
import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from types import UnionType
from typing import Any, NoReturn, Protocol

import torch

import thinwire
from thinwire.engine.contract import remedy
from thinwire.engine.fetched import FetchedCorpus
from thinwire.engine.progress import Progress
from thinwire.engine.reports import meters_of
from thinwire.engine.worker import Assignment, Worker
from thinwire.errors import ThinwireError, WireError, outward
from thinwire.report.stream import SafeStream
from thinwire.run.control import CONTROL_KEEPALIVE, Channel, lasting_control
from thinwire.run.messages import (
    CONTROL,
    Assign,
    Connect,
    Failed,
    Finished,
    FromCoordinator,
    Hello,
    LinkDown,
    Linked,
    LinkUp,
    Pulse,
    Ready,
    Start,
    Stop,
    Way,
)
from thinwire.run.order import Order, control_name, cut_name, tokens_name
from thinwire.run.vocabulary import MAX_MESSAGE, Vocabulary
from thinwire.run.watch import pulse_seconds
from thinwire.settings import Settings
from thinwire.wire import (
    DEFAULT_KEEPALIVE,
    Keepalive,
    LastingPipe,
    Link,
    Listener,
    Meter,
    Nic,
    Pipe,
    Route,
    Routes,
    Standby,
    dial,
    handshake,
)
from thinwire.wire.keys import fingerprint_of
from thinwire.wire.routes import Kind

JOIN_SECONDS = 120.0  # for reaching a process that is known to listen
_TRACE_PARTS = 12  # of a traceback, sent along in case that the log is lost


def versions() -> dict[str, str]:
    """What computed a run: reported by every peer and kept in the summary."""
    return {
        "thinwire": thinwire.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


class Linkable(Protocol):
    """A stage that is built: what its links to the neighbours are made from."""

    settings: Settings
    last: int  # the number of the last stage

    def describe(self) -> dict[str, str]:
        """What a display shows of it."""

    def max_payload(self) -> int:
        """The largest payload that a neighbour may send."""

    def contract(self, cut: int, epoch: int = 0) -> dict[str, Any]:
        """What both ends of a cut must agree on before the first frame."""


class Peer:
    """Joins a run as one stage: assignment, links to the neighbours, training, goodbye."""

    hears: UnionType = FromCoordinator
    words: Vocabulary = CONTROL

    def __init__(self, order: Order):
        self.order = order
        self.stage = order.stage
        self.identity = order.identity
        self._links: dict[int, Link] = {}  # by the neighbouring stage
        self._lasting: dict[int, LastingPipe] = {}  # what these go over, if they may be down
        self._listener: Listener | None = None  # for the stage above
        self._routes: Routes | None = None  # to the stage below, on another machine
        self._standbys: list[Standby] = []  # for the stage above, on another machine
        self._progress = Progress()
        self.control = Channel(
            self._report(), f"control of stage {self.stage}", self.hears, words=self.words
        )

    def run(self) -> None:
        """The whole life of a peer; errors leave through `fail`."""
        self.control.send(Hello(self.stage, versions()))
        assignment = self._assignment(self.control.receive(Assign))
        patience = assignment.settings.run.patience
        threading.Thread(target=self._pulse, args=(patience,), daemon=True).start()
        self._progress.begin("builds its layers")
        worker = Worker(assignment, self._progress, self._far_corpus(assignment))
        connect = self._introduce(worker)
        self._link(worker, connect)
        threading.Thread(target=self._obey, args=(worker,), daemon=True).start()
        below, above = self._links.get(self.stage - 1), self._links.get(self.stage + 1)
        worker.run(below, above, self.control.send)
        self._leave()

    def _introduce(self, worker: Linkable) -> Connect:
        """Say that the stage is built, and hear where its neighbours are."""
        self._progress.begin("waits for the other stages to be built")
        if self.stage < worker.last:
            self._listener = Listener(
                self.identity, worker.settings.link.listen, 0, worker.max_payload() + 64
            )
        address = self._listener.address if self._listener else ""
        self.control.send(Ready(address, **worker.describe(), key=self.identity.fingerprint))
        return self.control.receive(Connect)

    def _link(self, worker: Linkable, connect: Connect) -> None:
        """Link to the neighbours, and wait for the start."""
        self._progress.begin("waits for its neighbours to link")
        self._join(worker, connect)
        self.control.send(Linked(self._way_below()))
        self.control.receive(Start)

    def _leave(self) -> None:
        """Say what the links have moved, and goodbye."""
        self.control.send(Finished(meters_of(self._links.values())))
        self.control.close()
        if self._listener:
            self._listener.close()

    def fail(self, error: BaseException) -> None:
        """Tell the coordinator why this stage cannot go on, if it still listens.

        A broken link says more about the neighbour who vanished than about this stage. What goes
        to another machine holds nothing of this one's files: its log has the rest.
        """
        known, is_wire = isinstance(error, ThinwireError), isinstance(error, WireError)
        told, trace = str(error) if known else f"{type(error).__name__}: {error}", ""
        if self.order.epoch:  # to another machine
            told = outward(error)
        elif not known:
            trace = "".join(traceback.format_exception(error)[-_TRACE_PARTS:])
        lost = [stage for stage, link in self._links.items() if link.other_end_lost]
        message = Failed(
            kind=type(error).__name__,
            known=known,
            error=told,
            trace=trace,
            accuses=lost if is_wire else [],
            convicts=[s for s, link in self._links.items() if link.other_end_at_fault],
        )
        try:
            self.control.send(message)
            self.control.close()
        except ThinwireError:
            pass  # the coordinator sees the exit code and the log

    def _report(self) -> Pipe:
        """The control stream to the coordinator."""
        keepalive = DEFAULT_KEEPALIVE if self.order.outage else CONTROL_KEEPALIVE
        return self._call_coordinator(control_name(self.stage, self.order.epoch), keepalive)

    def _call_coordinator(self, name: str, keepalive: Keepalive = DEFAULT_KEEPALIVE) -> Pipe:
        """A stream to the coordinator's process; over the internet it may be down for a while."""
        routes, host = self.order.coordinator, fingerprint_of(self.identity.host)

        def call(timeout: float) -> Pipe:
            return dial(routes, name, self.identity, host, timeout, MAX_MESSAGE, keepalive)

        first = call(JOIN_SECONDS)
        return lasting_control(first, call, self.order.outage)

    def _far_corpus(self, assignment: Assignment) -> FetchedCorpus | None:
        """The corpus on the coordinator's machine, where there is none on this one."""
        if self.order.has_corpus:
            return None
        pipe = self._call_coordinator(tokens_name(self.stage, self.order.epoch))
        return FetchedCorpus(pipe, assignment.settings, self.stage)

    def _assignment(self, assigned: Assign) -> Assignment:
        assigned = self.order.own or assigned
        return Assignment(
            settings=Settings.from_plain(assigned.settings),
            stage=self.stage,
            corpus=Path(assigned.corpus),
            run_folder=Path(assigned.run_folder),
            resume=Path(assigned.resume) if assigned.resume else None,
        )

    def _join(self, worker: Linkable, connect: Connect) -> None:
        """Dial the stage below, accept the stage above, and agree with both on the contract."""
        nic = worker.settings.link.nic(seed=worker.settings.run.seed * 1000 + self.stage)
        below, above = self.stage - 1, self.stage + 1
        if self.stage > 0:
            name, limit = cut_name(below, self.order.epoch), worker.max_payload() + 64
            if connect.reach:
                self._routes = Routes(_at_doors(connect, name), _routes(connect.reach))
            to = self._routes or connect.below

            def call(timeout: float) -> Pipe:
                return dial(to, name, self.identity, connect.seats[below], timeout, limit)

            pipe = self._open(worker, below, call)
            self._links[below] = self._agree(worker, pipe, below, nic)
        if (listener := self._listener) is not None:
            own, dialer = cut_name(self.stage, self.order.epoch), connect.seats[above]
            self._standbys = [
                Standby(_at_doors(connect, own), route, listener.take)
                for route in _routes(connect.wait)
            ]

            def accept(timeout: float) -> Pipe:
                return listener.accept(own, timeout, dialer, is_replaceable=True)

            pipe = self._open(worker, above, accept)
            self._links[above] = self._agree(worker, pipe, self.stage, nic)

    def _open(self, worker: Linkable, neighbour: int, connect: Callable[[float], Pipe]) -> Pipe:
        """A pipe to a neighbour that is connected again when it is lost, if settings allow that."""
        first, outage = connect(JOIN_SECONDS), worker.settings.link.outage
        if not outage:
            return first
        if neighbour > self.stage:  # it dials, and so knows best when there is a connection
            pipe = LastingPipe(first, connect, outage)
        else:
            pipe = LastingPipe(
                first,
                connect,
                outage,
                on_down=lambda reason: self._mention(LinkDown(neighbour, reason)),
                on_up=lambda seconds: self._mention(LinkUp(neighbour, seconds, self._way_below())),
            )
        self._lasting[neighbour] = pipe
        return pipe

    def _way_below(self) -> str:
        route = self._routes.in_use if self._routes else None
        return route.kind if route else ""

    def _mention(self, message: LinkDown | LinkUp) -> None:
        with suppress(WireError):  # the coordinator is gone: that shows elsewhere
            self.control.send(message)

    def _agree(self, worker: Linkable, pipe: Pipe, cut: int, nic: Nic | None) -> Link:
        contract, meter = worker.contract(cut, self.order.epoch), Meter()
        handshake(pipe, contract, contract, JOIN_SECONDS, meter, remedy)
        return Link(pipe, meter, nic, f"cut-{cut}", worker.max_payload())

    def _pulse(self, patience: float) -> None:
        """Say now and then what this stage is doing, for as long as the coordinator listens."""
        while True:
            try:
                self.control.send(Pulse(self._progress.begun, self._doing()))
            except WireError:
                return
            time.sleep(pulse_seconds(patience))

    def _doing(self) -> str:
        """What this stage is doing, and which of its links are down."""
        down = {stage: pipe.down_for() for stage, pipe in [*self._lasting.items()]}
        links = [f"link to stage {s} is down for {t:.0f} s" for s, t in down.items() if t]
        return self._progress.doing + (f" ({', '.join(links)})" if links else "")

    def _obey(self, worker: Worker) -> None:
        """While training, the only message a coordinator sends is to stop after this step."""
        try:
            self.control.receive(Stop)
        except ThinwireError:
            return
        worker.stop_requested.set()


def _at_doors(connect: Connect, name: str) -> str:
    """The name of a link at the doors where its ends meet."""
    return f"{connect.run}/{name}.{connect.word}"


def _routes(ways: list[Way]) -> list[Route]:
    kinds: dict[str, Kind] = {"direct": "direct", "relayed": "relayed"}
    return [Route(way.address, kinds.get(way.kind, "relayed"), way.token) for way in ways]


def _leave_with_whoever_started_it() -> None:
    """Leave when the input ends."""
    sys.stdin.read()
    os._exit(3)


def live_as(kind: type[Peer]) -> NoReturn:
    """The life of a process that is a peer of this kind: its order is on its standard input."""
    gc.freeze()  # what has been imported stays
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the coordinator decides what Ctrl-C means
    # A log on a full disk must not keep the reason of a failure from the coordinator.
    with redirect_stdout(SafeStream(sys.stdout)), redirect_stderr(SafeStream(sys.stderr)):
        code = _live(kind, json.loads(sys.stdin.readline()))
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # transport threads must not keep a finished stage alive


def _live(kind: type[Peer], order: dict[str, Any]) -> int:
    """Be the stage of this order to the end; returns the exit code."""
    living: list[Peer] = []
    threading.Thread(target=_leave_with_whoever_started_it, daemon=True).start()
    try:
        living.append(kind(Order.from_plain(order)))
        living[0].run()
        return 0
    except BaseException as error:
        traceback.print_exc()
        for peer in living:
            peer.fail(error)
        return 1


def main() -> None:
    """Entry point of `python -m thinwire.run.peer`."""
    live_as(Peer)


if __name__ == "__main__":
    main()
