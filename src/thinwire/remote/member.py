"""A joined peer: the process that `thinwire join` runs for as long as its machine takes part.

It keeps one stream to the host, takes the seats that it is given, and starts the process of a stage
for each. It outlives those processes, and losses of the connection. One thread decides, reading a
queue of what happens; others only wait for something and put it there.
"""

import contextlib
import os
import platform
import queue
import secrets
import shutil
import subprocess
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from thinwire.errors import StageError, ThinwireError, WireError, outward
from thinwire.remote.holding import Holding, Terms
from thinwire.remote.measure import MachineFigures, as_figures
from thinwire.remote.messages import (
    Arrive,
    Declined,
    Dismiss,
    Doing,
    Ended,
    FromMember,
    Launch,
    Leaving,
    News,
    Prepared,
    ScoreNews,
    StepNews,
    TakeSeat,
    Tried,
    TryDoor,
    Vacate,
    code_of,
    seat_name,
    store_name,
)
from thinwire.remote.pieces import Pace
from thinwire.remote.store import ShardSender
from thinwire.remote.touch import Connected, Lost, Touch
from thinwire.report import Display, EvaluationRecord, StepRecord
from thinwire.run.control import Channel
from thinwire.run.peer import versions
from thinwire.run.signals import Interrupted, heeding
from thinwire.wire import Identity, Routes, ping

SEE_LOG = "its log, on that machine, says more"  # it may quote files, and stays there
SAY_SECONDS = 0.5  # between two words on how far a seat is prepared


@dataclass(frozen=True)
class Place:
    """Where a member is: its folder, its way to the host, and its door, as Arrive has it."""

    folder: Path
    host: Routes  # to the host's streams
    door: str = ""
    outside: str = ""
    admit: Callable[[str], None] = lambda links: None  # those who know this token, at its own door


@dataclass(frozen=True)
class _Progress:
    epoch: int
    what: str
    done: int
    total: int


@dataclass(frozen=True)
class _Ready:
    holding: Holding
    error: ThinwireError | None


@dataclass(frozen=True)
class _Exited:
    holding: Holding
    process: "subprocess.Popen[bytes]"


@dataclass(frozen=True)
class _AskedToLeave:
    pass


class Member:
    """A peer's part in a run, to its end."""

    def __init__(
        self,
        place: Place,
        identity: Identity,
        terms: Terms,
        machine: MachineFigures,
        display: Display,
    ):
        self._place, self._terms = place, terms
        self.machine, self._display = machine, display
        self.news: StepNews | None = None  # the latest step of the run
        self.seatless_since = time.time()
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._touch = Touch(place.host, identity, self._events.put)
        place.admit("")
        self._channel: Channel | None = None
        self._holding: Holding | None = None
        self._ended: Ended | None = None  # of the seat that is held, if its process has ended
        self._is_leaving = self._is_over = False
        self._farewell = ""
        self._lost_at: float | None = None  # since when the host cannot be reached
        self._launch_due = 0  # the epoch whose process may start
        self._pace = Pace()  # of shards on their way to the host
        self._shards = ShardSender(place.folder / "run", self._pace)
        self._serves_shards = False
        self._process = secrets.token_hex(8)

    def run(self) -> str:
        """Take part until the run is over or this peer leaves; returns why, in a sentence."""
        self._begin(self._touch.keep)
        self._begin(self._shards.keep_room)
        try:
            with heeding(self._on_signal):
                while not self._is_over:
                    self._on(self._events.get())
        finally:
            self._is_over = True
            self._touch.end()
            self._give_up_seat()
            self._shards.close()
            if self._channel is not None:
                self._channel.close()
        self._clean_up()
        return self._farewell

    def _clean_up(self) -> None:
        """Remove this machine's part of the run, unless it can make a return cheap."""
        part = self._place.folder / "run"
        if self._is_leaving or (self.news and self.news.step == self.news.steps):
            shutil.rmtree(part, ignore_errors=True)
        elif part.exists():
            self._display.note(f"{part} stays, so that a return is cheap; else delete it")

    @property
    def identity(self) -> Identity:
        """Who this peer is in the run."""
        return self._touch.identity

    @property
    def held(self) -> Holding | None:
        """The seat that this peer has at the moment."""
        return self._holding

    @property
    def is_open(self) -> bool:
        """Whether it has a door that others may try."""
        return bool(self._place.outside)

    @property
    def away_for(self) -> float | None:
        """Seconds for which the host cannot be reached; None while it can."""
        lost_at = self._lost_at
        return None if lost_at is None else time.monotonic() - lost_at

    def leave(self) -> None:
        """Leave after this step, with a checkpoint; safe on any thread and in a signal handler."""
        self._events.put(_AskedToLeave())

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_leaving:
            raise Interrupted
        self.leave()

    def _begin(self, target: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=target, args=arguments, daemon=True).start()

    def _say(self, message: FromMember) -> None:
        if self._channel is not None:
            with contextlib.suppress(ThinwireError):  # it is said again when the stream is back
                self._channel.send(message)

    def _on(self, event: Any) -> None:
        match event:
            case Connected(channel):
                self._arrive(channel)
            case Lost():
                self._on_lost(event)
            case TakeSeat():
                self._take(event)
            case _Progress(epoch, what, done, total):
                self._display.progress(what, done, total, "B")
                self._say(Doing(epoch, f"{what}: {done:,} of {total:,} bytes"))
            case _Ready():
                self._on_ready(event)
            case Launch(epoch):
                self._launch(epoch)
            case _Exited():
                self._on_exit(event)
            case Vacate(epoch, reason):
                self._vacate(epoch, reason)
            case TryDoor():
                self._begin(self._try_door)
            case Tried():
                self._say(event)
            case Dismiss(reason, in_order):
                self._end(reason, in_order)
            case _AskedToLeave():
                self._leave()
            case ThinwireError():
                raise event
            case _:
                self._show(event)

    def _show(self, news: News | StepNews | ScoreNews) -> None:
        match news:
            case News(text):
                self._display.phase("host", text)
            case StepNews():
                self.news = news
                self._display.step(StepRecord(**vars(news), stages=[], links=[]))
            case ScoreNews():
                self._display.evaluation(EvaluationRecord(**vars(news)))

    def _try_door(self) -> None:
        """On a thread of its own: look by which addresses this machine reaches the host."""
        way, answers = self._place.host, {}
        for route in way.routes:
            if route.kind == "direct":
                try:
                    ping(route, way.name)
                    answers[route.address] = ""
                except WireError as error:
                    answers[route.address] = str(error)
        self._events.put(Tried(answers))

    def _arrive(self, channel: Channel) -> None:
        self._channel = channel
        held = self._holding
        if self._lost_at is not None:
            away = time.monotonic() - self._lost_at
            self._display.phase("join", f"the host is back after {away:.0f} s")
            self._lost_at = None
        self._say(
            Arrive(
                versions(),
                self.machine.device,
                as_figures(self.machine),
                self._place.door,
                self._place.outside,
                held.epoch if held else 0,
                held.stage if held else 0,
                held.is_running if held else False,
                self._process,
                f"process {os.getpid()} on {platform.node() or 'a machine'}",
            )
        )
        if self._ended is not None:
            self._say(self._ended)
        if self._is_leaving:
            self._say(Leaving())

    def _on_lost(self, lost: Lost) -> None:
        if lost.channel is not None and lost.channel is not self._channel:
            return
        if self._channel is not None:
            self._begin(self._channel.close)
            self._channel = None
        if self._lost_at is None:
            self._lost_at = time.monotonic()
            self._display.note(f"{lost.reason}; trying again until it is back (Ctrl-C to leave)")
        if self._is_leaving and not (self._holding and self._holding.is_running):
            self._end("left the run", in_order=True)

    def _take(self, seat: TakeSeat) -> None:
        if self._holding is not None and self._holding.epoch == seat.epoch:
            return  # told twice
        self._give_up_seat()
        try:
            holding = Holding(seat, self._terms, self._place.folder)
        except ThinwireError as error:
            self._decline(seat.epoch, error)
            return
        self._holding = holding
        self._serve_shards()
        self._place.admit(seat.links)
        blocks = holding.settings.split()[seat.stage]
        self._display.phase(
            "seat",
            f"stage {seat.stage} of {holding.settings.pipeline.stages} "
            f"({len(blocks)} block{'s' if len(blocks) > 1 else ''}), epoch {seat.epoch}",
        )
        self._begin(self._prepare, holding)

    def _serve_shards(self) -> None:
        """From the first seat on: before, another process may be this peer (AskAlive)."""
        if not self._serves_shards:
            self._serves_shards = True
            name = store_name(self.identity.name)
            self._begin(self._shards.keep_serving, lambda: self._touch.dial(name))

    def _prepare(self, holding: Holding) -> None:
        """On a thread of its own: fetch what the seat needs."""

        said = 0.0

        def say(what: str, done: int, total: int) -> None:
            nonlocal said
            if done == total or time.monotonic() > said + SAY_SECONDS:
                said = time.monotonic()
                self._events.put(_Progress(holding.epoch, what, done, total))

        name = seat_name(holding.stage, holding.epoch)
        try:
            holding.prepare(lambda: self._touch.dial(name), say)
        except ThinwireError as error:
            self._events.put(_Ready(holding, error))
        except Exception as error:  # the host waits for an answer, whatever went wrong here
            traceback.print_exc()
            unexpected = f"an unexpected {type(error).__name__}, which its terminal explains"
            self._events.put(_Ready(holding, StageError(unexpected)))
        else:
            self._events.put(_Ready(holding, None))

    def _on_ready(self, ready: _Ready) -> None:
        if ready.holding is not self._holding:
            return  # the seat was taken away meanwhile
        if ready.error is not None:
            self._decline(ready.holding.epoch, ready.error)
            return
        ready.holding.is_prepared = True
        self._say(Prepared(ready.holding.epoch, ready.holding.has_corpus))
        if self._launch_due == ready.holding.epoch:
            self._launch(self._launch_due)

    def _decline(self, epoch: int, error: ThinwireError) -> None:
        self._display.note(
            f"this machine cannot take the seat: {error}. Mend that, then end this command "
            "(Ctrl-C) and join again"
        )
        self._say(Declined(epoch, outward(error)))
        self._give_up_seat()

    def _launch(self, epoch: int) -> None:
        held = self._holding
        self._launch_due = epoch
        if held is None or held.epoch != epoch or held.is_running or self._ended is not None:
            return
        if not held.is_prepared:
            return  # it starts as soon as it is
        share = held.settings.link.shard_share  # of the uplink; 0 Mbit/s: not measured
        mbps_up = self.machine.link.mbps_up if self.machine.link else 0.0
        self._pace.change(share * mbps_up * 1e6 / 8)
        try:
            process = held.start(self._place.host, self.identity)
        except ThinwireError as error:
            self._decline(epoch, error)
            return
        self._begin(
            lambda: self._events.put(_Exited(held, process)) if process.wait() is not None else None
        )

    def _on_exit(self, exited: _Exited) -> None:
        if exited.holding is not self._holding:
            return
        self._pace.change(0)  # nothing else needs the uplink now
        code = exited.process.returncode
        words = exited.holding.last_words() if code != 0 else ""
        if words:
            said = words.splitlines()[-1].lstrip(" |")
            stage, logs = exited.holding.stage, self._place.folder / "logs"
            self._display.note(f"the process of stage {stage} ended: {said}\nits log is in {logs}")
        self._ended = Ended(exited.holding.epoch, code_of(code), "" if code == 0 else SEE_LOG)
        self._say(self._ended)

    def _vacate(self, epoch: int, reason: str) -> None:
        if self._holding is not None and self._holding.epoch == epoch:
            self._give_up_seat()
        if self._is_leaving:
            self._end("left the run", in_order=True)

    def _give_up_seat(self) -> None:
        self._pace.change(0)
        held, self._holding, self._ended = self._holding, None, None
        self.seatless_since = time.time()
        if held is not None:
            held.stop()
            self._place.admit("")

    def _leave(self) -> None:
        self._is_leaving = True
        self._say(Leaving())
        is_done = self._ended is not None and self._ended.code == 0
        if self._holding is not None and self._channel is not None and is_done:
            self._display.note(
                "leaving as soon as the host has this machine's part of the last checkpoint; "
                "press Ctrl-C again to leave now"
            )
            return
        if self._holding is None or self._channel is None or not self._holding.is_running:
            self._end("left the run", in_order=True)
            return
        self._display.note(
            "leaving after this step, with a checkpoint; press Ctrl-C again to leave now"
        )

    def _end(self, reason: str, in_order: bool) -> None:
        if not in_order:
            raise StageError(reason)
        self._farewell, self._is_over = reason, True
