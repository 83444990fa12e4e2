"""The seat that a joined peer holds: settings of its own machine, what is fetched, the process.

The host says what a stage is as data. Which paths are written, on which device it computes and
which plugins are imported, this machine decides.
"""

import copy
import dataclasses
import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from thinwire.data import prepare
from thinwire.errors import AdmissionError, ConfigError, DataError, WireError
from thinwire.paths import cache_folder
from thinwire.remote.fetch import fetch_seat
from thinwire.remote.messages import TakeSeat
from thinwire.run.messages import Assign
from thinwire.run.order import Order
from thinwire.run.spawn import end, last_lines, make_log_folder, spawn
from thinwire.settings import Settings, machine_cores
from thinwire.wire import Identity, Pipe

FETCH_SECONDS = 600.0  # without a connection, before a seat is given back
_PAUSE_S = 1.0


@dataclass(frozen=True)
class Terms:
    """What the owner of a machine decides about its part in a run."""

    device: str = "auto"
    threads: int = 0  # 0: as the run says, or all cores
    plugins: tuple[str, ...] = ()
    data: Path | None = None  # the corpus, if this machine has it


def own_settings(seat: TakeSeat, terms: Terms) -> Settings:
    """The settings of a run as this machine uses them; ConfigError says why it cannot."""
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
    path = str(terms.data) if terms.data else ""
    data = dataclasses.replace(asked.data, path=path)
    return dataclasses.replace(asked, run=run, link=link, data=data).resolved()


class Holding:
    """One seat of one epoch, from the word to take it until its process has ended."""

    def __init__(self, seat: TakeSeat, terms: Terms, folder: Path):
        self.seat, self.epoch, self.stage = seat, seat.epoch, seat.stage
        self.settings = own_settings(seat, terms)
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

    def start(self, coordinator: str, identity: Identity) -> subprocess.Popen[bytes]:
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

    def renew(self, identity: Identity) -> None:
        """Hand a renewed certificate to the process."""
        if self._process is not None and self._process.stdin is not None and self.is_running:
            line = json.dumps(identity.to_plain()).encode() + b"\n"
            self._process.stdin.write(line)
            self._process.stdin.flush()

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
        data = prepare(settings.data, settings.model.vocab, cache_folder(), say)
        if data.fingerprint != self.seat.corpus:
            raise DataError(
                f"{self._terms.data} is not the data of this run (fingerprint {data.fingerprint}, "
                f"the run's is {self.seat.corpus}): give the same files, or leave out --data"
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
                    self._terms.plugins,
                    tell,
                )
            except AdmissionError:
                raise
            except WireError:
                if time.monotonic() > moved_at + FETCH_SECONDS:
                    raise
                time.sleep(_PAUSE_S)
