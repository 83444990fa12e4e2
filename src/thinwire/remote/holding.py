"""The seat that a joined peer holds: settings of its own machine, what is fetched, the process.

The host says what a stage is as data. Which paths are read and written, on which device it computes
and which plugins are imported, this machine decides.
"""

import copy
import dataclasses
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from thinwire.data import DataConfig, prepare
from thinwire.data.template import TEMPLATES
from thinwire.errors import AdmissionError, ConfigError, DataError, WireError
from thinwire.paths import cache_folder
from thinwire.remote.fetch import fetch_seat
from thinwire.remote.measure import free_disk
from thinwire.remote.messages import TakeSeat
from thinwire.remote.store import most_shard_bytes
from thinwire.run.messages import Assign
from thinwire.run.order import Order
from thinwire.run.spawn import end, last_lines, make_log_folder, spawn
from thinwire.settings import Settings, machine_cores
from thinwire.wire import Identity, Pipe, Routes

FETCH_SECONDS = 600.0  # without a connection, before a seat is given back
SEAT_MARGIN = 2  # a checkpoint of another split may have more of what stages share
_PAUSE_S = 1.0


@dataclass(frozen=True)
class Terms:
    """What the owner of a machine decides about its part in a run."""

    device: str = "auto"
    threads: int = 0  # 0: as the run says, or all cores
    plugins: tuple[str, ...] = ()
    data: Path | None = None  # the corpus, if this machine has it, and what its settings name
    valid_data: Path | None = None
    tokenizer: Path | None = None
    template: Path | None = None


def own_settings(seat: TakeSeat, terms: Terms, free_bytes: int) -> Settings:
    """The settings of a run as this machine uses them; ConfigError says why it cannot.

    Paths of the host stand for nothing here. Those of the tokenizer and of the template stay as
    text: all neighbours agree on them, and nobody opens them (`own_data`). What codecs remember
    takes at most half of the disk: a stage has up to four such memories.
    """
    try:
        asked = Settings.as_asked(copy.deepcopy(seat.settings))
    except ConfigError as error:
        raise ConfigError(
            f"the settings of the run cannot be read here ({error}): install the version of "
            "thinwire that the host has"
        ) from None
    unknown = sorted(set(asked.codec.plugins) - set(terms.plugins))
    if unknown:
        raise ConfigError(
            f"the run uses plugins, which are code: {', '.join(unknown)}. If you trust them, "
            "install them here and join with --allow-plugin NAME for each"
        )
    threads = terms.threads or asked.run.threads or machine_cores()
    run = dataclasses.replace(asked.run, out="runs", device=terms.device, threads=threads)
    link = dataclasses.replace(asked.link, emulate=False, listen="127.0.0.1", port=0)
    memory = max(1, min(asked.codec.memory_mb, free_bytes // 8 >> 20))
    codec = dataclasses.replace(asked.codec, memory_mb=memory)
    data = dataclasses.replace(asked.data, path=_text(terms.data), valid_path="")
    start = "of the host" if asked.train.init_from else ""  # its weights come as a checkpoint
    train = dataclasses.replace(asked.train, init_from=start)
    own = dataclasses.replace(asked, run=run, link=link, codec=codec, data=data, train=train)
    return own.resolved()


def own_data(seat: TakeSeat, settings: Settings, terms: Terms) -> DataConfig:
    """What the corpus is made from on this machine: files that its owner named, and no others."""
    own = {
        "valid_path": (terms.valid_data, "--valid-data"),
        "tokenizer": (terms.tokenizer, "--tokenizer"),
        "template": (terms.template, "--template"),
    }
    asked = seat.settings.get("data", {})
    named = {key for key in own if asked.get(key, "") not in TEMPLATES}
    if missing := [f"data.{key} ({own[key][1]})" for key in sorted(named) if own[key][0] is None]:
        raise DataError(
            f"the run's data is made with files of its host: {', '.join(missing)}. Name the same "
            "files on this machine with these options, or leave out --data: token ids then come "
            "from the host"
        )
    return dataclasses.replace(
        settings.data,
        valid_path=_text(terms.valid_data),
        tokenizer=_text(terms.tokenizer),
        template=_text(terms.template) or settings.data.template,  # a word, as checked
    )


def _text(path: Path | None) -> str:
    return str(path) if path else ""


class Holding:
    """One seat of one epoch, from the word to take it until its process has ended."""

    def __init__(self, seat: TakeSeat, terms: Terms, folder: Path):
        self.seat, self.epoch, self.stage = seat, seat.epoch, seat.stage
        self.settings = own_settings(seat, terms, free_disk(folder))
        self.run_folder = folder / "run"
        self._terms = terms
        self._log = folder / "logs" / f"stage-{seat.stage}.log"
        self.is_prepared = False
        self._corpus: Path | None = None
        self._resume: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def prepare(self, dial_host: Callable[[], Pipe], say: Callable[[str, int, int], None]) -> None:
        """Have all that the stage needs on this machine; takes time, and may be given up."""
        self._corpus = self._own_corpus(say)
        if self.seat.resumes:
            self._resume = self._fetch(dial_host, say)

    @property
    def has_corpus(self) -> bool:
        """Whether the data of the run is on this machine."""
        return self._corpus is not None

    @property
    def is_running(self) -> bool:
        """Whether the process of the stage lives."""
        return self._process is not None and self._process.poll() is None

    def start(self, coordinator: Routes, identity: Identity) -> subprocess.Popen[bytes]:
        """Start the process of the stage, on the thread that also ends it."""
        make_log_folder(self._log.parent)
        assignment = Assign(
            settings=self.settings.to_plain(),
            corpus=str(self._corpus or ""),
            run_folder=str(self.run_folder.resolve()),
            resume=str(self._resume.resolve()) if self._resume else "",
        )
        outage = self.settings.link.outage
        order = Order(
            self.stage, coordinator, identity, self.epoch, outage, assignment, self.has_corpus
        )
        self._process = spawn(order, self._log)
        return self._process

    def stop(self) -> None:
        """End the process at once, if there is one."""
        if self._process is not None:
            end(self._process)

    def last_words(self) -> str:
        """The end of the process's log."""
        return last_lines(self._log, "")

    def _own_corpus(self, say: Callable[[str, int, int], None]) -> Path | None:
        """The folder of the corpus, if it is here and the one that the run is trained on."""
        settings = self.settings
        if self._terms.data is None:
            return None
        config = own_data(self.seat, settings, self._terms)
        data = prepare(config, settings.model.vocab, cache_folder(), say)
        if data.fingerprint != self.seat.corpus:
            raise DataError(
                f"{self._terms.data} is not the data of this run (fingerprint {data.fingerprint}, "
                f"the run's is {self.seat.corpus}): give the same files, and the tokenizer if the "
                "run starts from weights (--tokenizer), or leave out --data"
            )
        return data.folder.resolve()

    def _fetch(self, dial_host: Callable[[], Pipe], say: Callable[[str, int, int], None]) -> Path:
        """Fetch the stage's part of the checkpoint; a lost connection is opened again."""
        moved_at = time.monotonic()

        def tell(done: int, total: int) -> None:
            nonlocal moved_at
            moved_at = time.monotonic()
            say("fetch", done, total)

        while True:
            try:
                return fetch_seat(
                    dial_host(),
                    self.stage,
                    self.run_folder,
                    SEAT_MARGIN * most_shard_bytes(self.settings, self.stage),
                    self._terms.plugins,
                    tell,
                )
            except AdmissionError:
                raise
            except WireError:
                if time.monotonic() > moved_at + FETCH_SECONDS:
                    raise
                time.sleep(_PAUSE_S)
