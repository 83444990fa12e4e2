"""`thinwire join`: from an invite to a machine's part in a run, to its end.

The process keeps one stream to the host, takes the stages that it is given, fetches what they need
and starts the process that trains them. It outlives that process, and losses of the connection.
One thread decides, doing one thing after another of a queue; others wait for something to happen,
and put there what is to be done about it.

The host says what a stage is as data. Which paths are read and written, on which device it computes
and which plugins are imported, this machine decides (`Terms`).
"""

import contextlib
import copy
import dataclasses
import os
import platform
import queue
import secrets
import shutil
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection
from concurrent import futures
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from thinwire.background import on_daemon_thread
from thinwire.data import DataConfig, prepare
from thinwire.data.chat import TEMPLATES
from thinwire.engine.checkpoint import checkpoints_folder
from thinwire.engine.reports import ShardFailed, ShardWritten
from thinwire.engine.state import most_shard_bytes
from thinwire.engine.worker import scratch_folder
from thinwire.errors import (
    AdmissionError,
    BreachError,
    ConfigError,
    DataError,
    StageError,
    ThinwireError,
    WireError,
    outward,
    printable,
)
from thinwire.folders import claimed
from thinwire.paths import cache_folder, peers_folder
from thinwire.report import Display, EvaluationRecord, StepRecord
from thinwire.report.metrics import FILE_NAME, line_of
from thinwire.run import protocol as msg
from thinwire.run.admission import Invite, identity_in
from thinwire.run.alive import ControlSocket, Handler
from thinwire.run.channel import Channel
from thinwire.run.machine import Machine, free_disk, measure_machine
from thinwire.run.members import SESSION_BYTES
from thinwire.run.peer import versions
from thinwire.run.peers import StagesHere
from thinwire.run.processes import last_lines
from thinwire.run.record import write_progress
from thinwire.run.signals import Interrupted, heeding
from thinwire.run.status import blocks_text
from thinwire.run.transfer import ShardSender, fetch_seat, uplink_share
from thinwire.settings import CONFIG, Settings, machine_cores
from thinwire.typed import to_toml
from thinwire.wire import Door, Identity, LastingPipe, Pipe, Routes, Seen, dial, ping_all
from thinwire.wire.door import Allowance
from thinwire.wire.keys import fingerprint_of
from thinwire.wire.sockets import address_text, raise_descriptor_limit, split_address
from thinwire.wire.speed import measure_link

LINK_SECONDS = 0.5  # of a burst each way, when the way to the host is measured
DIAL_SECONDS = 20.0  # for one attempt to reach the host
STATE_MARGIN = 2  # a checkpoint of another split may have more of what stages share
SAY_SECONDS = 0.5  # between two words on how far stages are prepared
MEND = "Mend that, then end this command (Ctrl-C) and join again"
LOST = "the connection to the host was lost"
WHEN_LEAVING = "once others have its stages, or after this step, with a checkpoint"
_PAUSE_S = 1.0
_OUTAGE_S = 60.0  # of the stream to the host, before what this machine holds is over


@dataclass(frozen=True)
class Terms:
    """What the owner of a machine decides about its part in a run."""

    name: str = ""
    folder: Path | None = None
    listen: str = "0.0.0.0:0"  # its door; empty: accepts nothing from outside
    device: str = "auto"
    threads: int = 0  # 0: as the run says, or all cores
    plugins: tuple[str, ...] = ()
    data: Path | None = None  # the corpus, if this machine has it, and what its settings name
    valid_data: Path | None = None
    tokenizer: Path | None = None
    template: Path | None = None

    def check(self) -> None:
        """Refuse what cannot work before the host hears of this machine."""
        for name in ("data", "valid_data", "tokenizer", "template"):
            option, path = f"--{name.replace('_', '-')}", getattr(self, name)
            if path is not None and not path.exists():
                raise DataError(f"{option} {path}: there is no such file or folder")
            if path is not None and self.data is None:
                raise ConfigError(f"{option} goes with --data: name the run's data too")


def join(invite: Invite, terms: Terms, display: Display) -> str:
    """Take part in the run of an invite; returns in a sentence how that ended."""
    terms.check()
    raise_descriptor_limit()
    folder = terms.folder or peers_folder() / invite.run_id
    advice = "stop it, or join as a further peer with --folder and --name"
    with claimed(folder, advice, private=True):
        display.opened(folder)
        display.phase("join", f"run {invite.run_name!r}, of which this machine keeps {folder}")
        try:
            identity = identity_in(folder, invite.to_service("enrol"), invite, terms.name)
        except AdmissionError:
            raise
        except WireError as error:
            raise WireError(
                f"cannot reach the host of run {invite.run_name!r}: {error}; `thinwire doctor` "
                "with the same invite looks for the cause"
            ) from None
        display.phase("join", f"enrolled as {identity.name}")
        host, listen = invite.to_service("control", identity.door_token), terms.listen
        with Door(*split_address(listen)) if listen else contextlib.nullcontext() as door:
            addresses = _addresses(door, listen, host)
            machine = _measured(terms, folder, host, invite.run_id, identity, display)
            joined = JoinedPeer(folder, host, identity, terms, machine, display, door, addresses)
            with ControlSocket(folder, joined.handlers(invite)):
                return joined.run()


def _addresses(door: Door | None, listen: str, host: Routes) -> tuple[str, str]:
    """The door's address for this machine's own processes, and the one by which others may try."""
    if door is None:
        return "", ""
    if split_address(listen)[0] not in ("0.0.0.0", "::", ""):
        return door.address, door.address
    answers = ping_all(host.routes, host.name).values()  # which say where it sees this machine
    seen = [split_address(one.address)[0] for one in answers if isinstance(one, Seen)]
    outside = address_text(seen[0], door.port) if seen else ""
    return address_text("127.0.0.1", door.port), outside


def _measured(
    terms: Terms, folder: Path, host: Routes, run_id: str, identity: Identity, display: Display
) -> Machine:
    """What this machine can give; what a host that cannot be reached now must say is left open."""
    whom, settings = fingerprint_of(identity.host), None
    with contextlib.suppress(WireError, ValueError, ConfigError):  # of which a Hold will say more
        limits = DIAL_SECONDS, msg.MAX_MESSAGE
        stream = dial(host, msg.SETTINGS, identity, whom, *limits, tries_again=False)
        with contextlib.closing(stream):
            asked = msgspec.json.decode(stream.read() or b"", type=dict[str, Any])
        settings = own_settings(asked, terms, free_disk(folder))
    machine = measure_machine(terms.device, folder, settings)
    try:
        link = measure_link(host.routes, run_id, LINK_SECONDS)
        up, down, latency_ms = link.mbps_up, link.mbps_down, link.round_trip_s / 2 * 1e3
        machine = dataclasses.replace(machine, mbps_up=up, mbps_down=down, latency_ms=latency_ms)
    except WireError as error:
        display.note(str(error))
    display.phase("join", f"this machine: {machine.describe()}")
    return machine


def own_settings(asked_plain: dict[str, Any], terms: Terms, free_bytes: int) -> Settings:
    """The settings of a run as this machine uses them; ConfigError says why it cannot.

    Paths of the host stand for nothing here. Those of the tokenizer and of the template stay as
    text: all neighbours agree on them, and nobody opens them (`own_data`). What codecs remember
    takes at most half of the disk: a stage has up to four such memories.
    """
    try:
        asked = Settings.as_asked(copy.deepcopy(asked_plain))
    except ConfigError as error:
        raise ConfigError(
            f"the settings of the run cannot be read here ({error}): install the version of "
            "thinwire that the host has"
        ) from None
    if unknown := sorted(set(asked.codec.plugins) - set(terms.plugins)):
        raise ConfigError(
            f"the run uses plugins, which are code: {', '.join(unknown)}. If you trust them, "
            "install them here and join with --allow-plugin NAME for each"
        )
    threads = terms.threads or asked.run.threads or machine_cores()
    memory = max(1, min(asked.codec.memory_mb, free_bytes // 8 >> 20))
    start = "of the host" if asked.train.init_from else ""  # its weights come as a checkpoint
    change = dataclasses.replace
    return change(
        asked,
        run=change(asked.run, out="runs", device=terms.device, threads=threads),
        link=change(asked.link, emulate=False, listen="127.0.0.1"),
        codec=change(asked.codec, memory_mb=memory),
        data=change(asked.data, path=str(terms.data or ""), valid_path=""),
        train=change(asked.train, init_from=start),
    ).resolved()


def own_data(asked: dict[str, Any], settings: Settings, terms: Terms) -> DataConfig:
    """What the corpus is made from on this machine: files that its owner named, and no others."""
    own = {
        "valid_path": terms.valid_data,
        "tokenizer": terms.tokenizer,
        "template": terms.template,
    }
    named = [key for key in own if asked.get("data", {}).get(key, "") not in TEMPLATES]
    if missing := [f"data.{key}" for key in named if own[key] is None]:
        raise DataError(
            f"the run's data is made with files of its host: {', '.join(missing)}. Name the same "
            "files on this machine (--valid-data, --tokenizer, --template), or leave out --data: "
            "token ids then come from the host"
        )
    return dataclasses.replace(
        settings.data,
        valid_path=str(terms.valid_data or ""),
        tokenizer=str(terms.tokenizer or ""),
        template=str(terms.template or settings.data.template),  # a word, as checked
    )


Say = Callable[[str, int, int], None]  # what is under way, and how many bytes of how many are here
# By run and first stage: one at a time fetches their state, into the same files.
_FETCHING: defaultdict[tuple[Path, int], threading.Lock] = defaultdict(threading.Lock)


class Holding:
    """Stages of one generation on this machine, to the end of their process."""

    def __init__(self, hold: msg.Hold, generation: int, terms: Terms, folder: Path):
        self.hold, self.generation, self.stages = hold, generation, hold.stages
        self.settings = own_settings(hold.settings, terms, free_disk(folder))
        if not self.stages or not set(self.stages) <= set(range(self.settings.pipeline.stages)):
            raise ConfigError(f"the host gives stages that the run does not have: {self.stages}")
        self.run_folder = folder / "run"
        self._terms, self._logs = terms, folder / "logs"
        self.here: StagesHere  # from `begin` on
        self._source: Pipe | None = None  # of what is fetched
        self._is_stopped = False

    @property
    def is_running(self) -> bool:
        """Whether the process of the stages lives, and is these stages."""
        return self.here.has_begun and self.here.process.poll() is None

    def prepare(
        self, dial_host: Callable[[str], Pipe], identity: Identity, host: Routes, say: Say
    ) -> msg.Assignment:
        """Have all that the stages need on this machine, which takes time."""
        corpus = self._own_corpus(say)
        resume = self._fetch(dial_host, say) if self.hold.resumes else None
        return msg.Assignment(
            stages=self.stages,
            identity=identity,
            settings=self.settings.to_plain(),
            corpus=str(corpus or ""),
            run_folder=str(self.run_folder.resolve()),
            resume=str(resume.resolve()) if resume else "",
            began=self.hold.began,
            generation=self.generation,
            again=self.hold.again,
            follows=self.hold.follows,
            service=host.name,
            host=[*host.routes],
        )

    def begin(self) -> None:
        """Start the process, which gets its order later."""
        self.here = StagesHere(self.stages, self._logs)

    def stop(self) -> None:
        """End the process at once, and fetch nothing more: others may write the same files."""
        self._is_stopped = True
        if self._source is not None:
            on_daemon_thread("thinwire close", partial(self._source.close, 0))
        self.here.end()

    def _own_corpus(self, say: Say) -> Path | None:
        """The folder of the corpus, if it is here and the one that the run is trained on."""
        if self._terms.data is None:
            return None
        config = own_data(self.hold.settings, self.settings, self._terms)
        data = prepare(config, self.settings.model.vocab, cache_folder(), say)
        if data.fingerprint != self.hold.corpus:
            raise DataError(
                f"{self._terms.data} is not the data of this run (fingerprint {data.fingerprint}, "
                f"the run's is {self.hold.corpus}): give the same files, and the tokenizer if the "
                "run starts from weights (--tokenizer), or leave out --data"
            )
        return data.folder.resolve()

    def _fetch(self, dial_host: Callable[[str], Pipe], say: Say) -> Path:
        """Fetch the stages' part of the checkpoint; a lost connection is opened again."""
        name = msg.stream_name("state", self.stages[0], self.generation, self.hold.again)
        most = STATE_MARGIN * sum(most_shard_bytes(self.settings, stage) for stage in self.stages)
        plugins, tell = self._terms.plugins, partial(say, "fetch")
        while not self._is_stopped:
            try:
                self._source = pipe = dial_host(name)
                with _FETCHING[self.run_folder, self.stages[0]]:
                    if self._is_stopped:
                        pipe.close(0)
                        break
                    return fetch_seat(pipe, self.stages, self.run_folder, most, plugins, tell)
            except (AdmissionError, BreachError):
                raise
            except WireError:
                time.sleep(_PAUSE_S)
        raise WireError("these stages were taken away meanwhile")


class JoinedPeer:
    """A machine's part in a run, to its end."""

    def __init__(
        self,
        folder: Path,
        host: Routes,
        identity: Identity,
        terms: Terms,
        machine: Machine,
        display: Display,
        door: Door | None = None,
        addresses: tuple[str, str] = ("", ""),
    ):
        """`host`: the ways to its streams. `addresses`: of the door, as in Hello."""
        self._folder, self._host, self._terms, self.identity = folder, host, terms, identity
        self._door, self._addresses = door, addresses
        self.machine, self._display = machine, display
        self.news: StepRecord | None = None  # the latest step of the run
        # How the run stands, until the host says so.
        status = "", "", "member", "waiting", time.time()
        self.report = msg.StatusReport(*status, waiting_for="a stage", waiting_since=time.time())
        self._holdings: list[Holding] = []  # of one generation, each with a process of its own
        self._due: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._admit()
        self._channel: Channel | None = None
        self._is_leaving, self._is_over, self._farewell = False, False, ""
        self._lost_at: float | None = None  # since when the host cannot be reached
        self._pace = Allowance(0, burst_s=0)  # of shards on their way to the host
        self._shards = ShardSender(folder / "run", self._pace)
        self._serves_shards = False
        self._process = secrets.token_hex(8)

    def run(self) -> str:
        """Take part until the run is over or this peer leaves; returns why, in a sentence."""
        self._begin(self._keep_in_touch)
        try:
            with heeding(self._on_signal):
                while not self._is_over:
                    self._due.get()()
        finally:
            self._is_over = True
            self._let_go()
            self._shards.close()
            if self._channel is not None:
                self._channel.close()
        self._clean_up()
        return self._farewell

    def handlers(self, invite: Invite) -> dict[str, Handler]:
        """Its answers, for a `ControlSocket`."""

        def leave(request: dict[str, Any]) -> dict[str, Any]:
            self.leave()
            return {"text": f"this peer leaves the run {WHEN_LEAVING}"}

        return {"status": lambda request: self._status(invite), "leave": leave}

    def _status(self, invite: Invite) -> msg.StatusReport:
        """What the host tells everybody, and what this peer knows better."""
        holdings, lost_at = self._holdings, self._lost_at  # other threads may change them
        now, name, held = time.time(), self.identity.name, holdings[0] if holdings else None
        doing = "waiting for a stage"
        if held is not None:
            doing = "training" if held.is_running else "prepares its stage"
            doing = "stands by" if held.hold.follows else doing
        stages = sorted(stage for one in holdings for stage in one.stages)
        blocks = blocks_text(held.settings, stages) if held else ""
        is_open = bool(self._addresses[1])
        machine = dataclasses.replace(self.machine, name=name, reachable=is_open)
        itself = msg.PeerStatus(name, doing, stages, blocks, is_this_machine=True, machine=machine)
        wait = {}
        if lost_at is not None:
            since = now - (time.monotonic() - lost_at)
            host = "the host, which cannot be reached"
            wait = {"state": "waiting", "waiting_for": host, "waiting_since": since}
        return msgspec.structs.replace(
            self.report,
            run=invite.run_name,
            run_id=invite.run_id,
            role="member",
            time=now,
            epoch=held.generation if held else self.report.epoch,
            peers=[itself, *(peer for peer in self.report.peers if peer.name != name)],
            **wait,
        ).after(self.news)

    def leave(self) -> None:
        """Leave after this step, with a checkpoint; safe on any thread and in a signal handler."""
        self._due.put(self._leave)

    # Its stream to the host

    def _dial(self, name: str, timeout: float = DIAL_SECONDS, tries_again: bool = True) -> Pipe:
        """A stream of this name to the host."""
        whom, most = fingerprint_of(self.identity.host), msg.MAX_MESSAGE
        return dial(self._host, name, self.identity, whom, timeout, most, tries_again)

    def _keep_in_touch(self) -> None:
        """On a thread of its own: have a stream to the host, again and again."""
        while not self._is_over:
            try:
                self._attend(os.urandom(SESSION_BYTES))
            except AdmissionError as error:
                self._due.put(partial(_fail, error))
                return
            except WireError as error:
                reason = f"the host cannot be reached: {error}"
                self._due.put(partial(self._on_lost, None, reason))
            time.sleep(_PAUSE_S / 2)

    def _attend(self, session: bytes) -> None:
        """Open a stream and pass on what the host says until it is over."""
        lost = threading.Event()

        def connect(timeout: float) -> Pipe:
            pipe = self._dial(msg.stream_name("peer", self.identity.name), timeout)
            pipe.write(session)  # which stream this goes on with
            return pipe

        def hear(said: msg.Envelope) -> None:
            if isinstance(said.message, msg.AskAlive):  # at once, whatever this peer does
                channel.send(msg.Alive())
            else:
                self._due.put(partial(self._on_message, said))

        pipe = LastingPipe(
            connect(DIAL_SECONDS),
            connect,
            _OUTAGE_S,
            on_down=lambda why: self._due.put(partial(self._note_loss, f"{LOST} ({why})")),
            on_up=lambda seconds: self._due.put(partial(self._on_connected, channel)),
        )
        channel = Channel(pipe, "host", msg.FROM_COORDINATOR, hear, lambda error: lost.set())
        place = f"process {os.getpid()} on {platform.node() or 'a machine'}"
        hello = msg.Hello(versions(), self.machine, *self._addresses, self._process, place)
        channel.send(hello)
        self._due.put(partial(self._on_connected, channel))
        lost.wait()
        self._due.put(partial(self._on_lost, channel, LOST))

    def _say(self, message: msg.OfPeer | msg.OfStage, *about: int) -> None:
        channel = self._channel
        if channel is not None:
            channel.send(message, *about)

    def _say_of(self, holding: Holding, stage: int, message: msg.OfStage) -> None:
        """Pass on what a stage says, but no path of this machine; on any thread."""
        if isinstance(message, ShardFailed):
            self._display.note(f"{message.error}. {MEND}")
            error = f"stage {stage} cannot write its part; its machine says why"
            message = dataclasses.replace(message, error=error)
        if holding in self._holdings:
            self._say(message, stage, holding.generation, holding.hold.again)
        if isinstance(message, ShardWritten | msg.Follows):  # also of one that stands by
            self._shards.remove_spare()

    # What happens

    def _on_message(self, said: msg.Envelope) -> None:
        message, stage, generation, _ = said
        if stage != msg.OF_NO_STAGE:
            is_connect = isinstance(message, msg.Connect) and message.cut is None
            for held in self._holdings:
                is_its = held.generation == generation and stage in held.stages
                if is_its and held.here.has_begun:
                    if is_connect and not message.follower:  # it takes a place, if it stood by
                        held.hold = dataclasses.replace(held.hold, follows=False)
                    held.here.channel.send(message, stage)
            return
        match message:
            case msg.Hold():
                self._hold(message, generation)
            case msg.Release(stages=stages):
                self._let_go(generation, stages)
                if self._is_leaving and not self._holdings:
                    self._end("left the run")
            case msg.TryDoor():
                self._begin(self._try_door)
            case msg.Dismiss(reason, "over"):
                self._end(printable(reason))
            case msg.Dismiss(reason, why):
                raise (AdmissionError if why == "refused" else StageError)(printable(reason))
            case msg.News(text, kind):
                self._display.phase(printable(kind, 10), printable(text))
            case StepRecord():
                self.news = message
                self._display.step(message)
            case EvaluationRecord():
                self._display.evaluation(message)
                self._keep("evaluation", message)
            case msg.RunNews():
                self._on_run_news(message)

    def _on_run_news(self, news: msg.RunNews) -> None:
        """Have this machine's folder hold what the host's does, for whoever looks at it."""
        known, self.report = self.report.step, news.report.arrived(time.time())
        if news.step is not None and news.step.step != known:
            self._keep("step", news.step)
        with contextlib.suppress(OSError):
            if news.progress is not None:
                write_progress(self._folder, news.progress)

    def _keep(self, kind: str, record: StepRecord | EvaluationRecord) -> None:
        """Write down what the host has told, as the host itself does."""
        with contextlib.suppress(OSError), (self._folder / FILE_NAME).open("a") as file:
            file.write(line_of(kind, dataclasses.asdict(record)))

    def _on_connected(self, channel: Channel) -> None:
        self._channel = channel
        if self._lost_at is not None:
            away = time.monotonic() - self._lost_at
            self._display.phase("join", f"the host is back after {away:.0f} s")
            self._lost_at = None
        if self._is_leaving:
            self._say(msg.Leaving())

    def _note_loss(self, reason: str) -> None:
        if self._lost_at is None:
            self._lost_at = time.monotonic()
            self._display.note(f"{reason}; trying again until it is back (Ctrl-C to leave)")

    def _on_lost(self, channel: Channel | None, reason: str) -> None:
        """The stream is over, or none could be opened: what this machine held others have."""
        if channel is not None and channel is not self._channel:
            return
        if self._channel is not None:
            self._begin(self._channel.close)
            self._channel = None
            self._let_go()
        self._note_loss(reason)
        if self._is_leaving:
            self._end("left the run")

    def _hold(self, hold: msg.Hold, generation: int) -> None:
        if any(held.generation != generation for held in self._holdings):
            self._let_go()
        self._let_go(generation, hold.stages)
        try:
            holding = Holding(hold, generation, self._terms, self._folder)
            holding.begin()
        except ThinwireError as error:
            self._decline(generation, hold, error)
            return
        self._holdings.append(holding)
        self.report = msgspec.structs.replace(self.report, state="starting", waiting_for="")
        with contextlib.suppress(OSError):
            text = to_toml(holding.settings.relaxed(), holding.settings)
            (self._folder / CONFIG).write_text(text)
        if not self._serves_shards:  # from here on: before, another process may be this peer
            self._serves_shards = True
            # Once in a while: as long as it stands by, the host asks for nothing.
            name = msg.stream_name("store", self.identity.name)
            dial_store = partial(self._dial, name, tries_again=False)
            self._begin(self._shards.keep_serving, dial_store)
        self._admit(hold.links)
        split = holding.settings.split()
        blocks = sum(len(split[stage]) for stage in hold.stages)
        which = f"stage {hold.stages[0]}" if len(hold.stages) == 1 else f"stages {hold.stages}"
        which = f"{'stands by for ' if hold.follows else ''}{which} of {len(split)}"
        size = f"{blocks} block{'s' if blocks > 1 else ''}"
        self._display.phase("seat", f"{which} ({size}), epoch {generation}")
        said = 0.0

        def say(what: str, done: int, total: int) -> None:
            nonlocal said
            if done == total or time.monotonic() > said + SAY_SECONDS:
                said = time.monotonic()
                self._due.put(partial(self._on_progress, holding, what, done, total))

        prepare = partial(holding.prepare, self._dial, self.identity, self._host, say)
        preparing = on_daemon_thread("thinwire prepare", prepare)
        then = partial(self._on_prepared, holding)
        preparing.add_done_callback(lambda done: self._due.put(partial(then, done)))

    def _on_progress(self, held: Holding, what: str, done: int, total: int) -> None:
        if held in self._holdings:
            self._display.progress(what, done, total, "B")
            for stage in held.stages:
                self._say_of(held, stage, msg.Pulse(done, f"{what}: {done:,} of {total:,} bytes"))

    def _on_prepared(self, held: Holding, prepared: "futures.Future[msg.Assignment]") -> None:
        if held not in self._holdings:
            return  # it was taken away meanwhile
        if (error := prepared.exception()) is not None:
            if not isinstance(error, ThinwireError):  # the host waits for an answer all the same
                traceback.print_exception(error)
                named = type(error).__name__
                error = StageError(f"an unexpected {named}, which its terminal explains")
            self._decline(held.generation, held.hold, error)
            return
        folder = held.run_folder
        own = {f"{stage}" for holding in self._holdings for stage in holding.stages}
        states = checkpoints_folder(folder).glob("step-*-*")
        for path in [*states, *scratch_folder(folder).glob("stage-*")]:
            if path.name.rpartition("-")[2] not in own:  # others hold that stage now
                shutil.rmtree(path, ignore_errors=True)
        share = held.settings.link.shard_share  # of the uplink; 0 Mbit/s: not measured
        self._pace.mbps = uplink_share(share * self.machine.mbps_up)

        def on_exit(stages: list[int], code: int) -> None:
            self._due.put(partial(self._on_exit, held, stages, code))

        held.here.begin(prepared.result(), partial(self._say_of, held), on_exit)

    def _decline(self, generation: int, hold: msg.Hold, error: ThinwireError) -> None:
        self._display.note(f"this machine cannot hold its stage: {error}. {MEND}")
        declined = msg.Declined(outward(error), hold.stages)
        self._say(declined, msg.OF_NO_STAGE, generation, hold.again)
        self._let_go(generation, hold.stages)

    def _on_exit(self, held: Holding, stages: list[int], code: int) -> None:
        if held not in self._holdings:
            return
        if not any(one.is_running for one in self._holdings):
            self._pace.mbps = 0  # nothing else needs the uplink now
        if code:
            log, which = held.here.log, ", ".join(map(str, held.stages))
            said = last_lines(log).splitlines()[-1].lstrip(" |")
            where = f"its log is in {log.parent}"
            self._display.note(f"the process of stage {which} ended: {said}\n{where}")
        words = "its log, on that machine, says more" if code else ""  # it may quote files
        for stage in stages:
            self._say_of(held, stage, msg.Ended.by(code, words))

    def _let_go(self, generation: int | None = None, stages: Collection[int] = ()) -> None:
        """End what this machine does for the run, or for these stages of a generation."""
        gone = [
            held
            for held in self._holdings
            if generation in (None, held.generation)
            and (not stages or not set(stages).isdisjoint(held.stages))
        ]
        self._holdings = [held for held in self._holdings if held not in gone]
        for held in gone:
            held.stop()
        if gone and not self._holdings:
            self._pace.mbps = 0
            self._admit()

    def _admit(self, *links: str) -> None:
        """Let those who know this token in at our door, beside the host, which knows our own."""
        if self._door is not None:
            run, _, _ = self._host.name.partition("/")
            self._door.admit(run, self.identity.door_token, *filter(None, links))

    def _try_door(self) -> None:
        """On a thread of its own: look by which addresses this machine reaches the host."""
        direct = [route for route in self._host.routes if route.kind == "direct"]
        found = ping_all(direct, self._host.name).items()
        tried = {way.address: "" if isinstance(seen, Seen) else str(seen) for way, seen in found}
        self._due.put(partial(self._say, msg.Tried(tried)))

    def _leave(self) -> None:
        self._is_leaving = True
        self._say(msg.Leaving())
        processes = [held.here.process for held in self._holdings if held.here.has_begun]
        is_needed = any(process.poll() in (None, 0) for process in processes)
        if self._channel is None or self._lost_at is not None or not is_needed:
            self._end("left the run")
        else:
            self._display.note(f"leaving {WHEN_LEAVING}; press Ctrl-C again to leave now")

    def _end(self, reason: str) -> None:
        self._farewell, self._is_over = reason, True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_leaving:
            raise Interrupted
        self.leave()

    def _begin(self, target: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=target, args=arguments, daemon=True).start()

    def _clean_up(self) -> None:
        """Remove this machine's part of the run, unless it can make a return cheap."""
        part = self._folder / "run"
        if self._is_leaving or (self.news and self.news.step == self.news.steps):
            shutil.rmtree(part, ignore_errors=True)
        elif part.exists():
            self._display.note(f"{part} stays, so that a return is cheap; else delete it")


def _fail(error: ThinwireError) -> None:
    raise error
