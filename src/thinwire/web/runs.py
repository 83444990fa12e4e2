"""A run as its page shows it, read from the run's folder: what a copy of the folder shows too.

    metrics.jsonl   steps and validations, read as it grows
    events.jsonl    what happened
    progress.json   a typical step, where time goes, what crosses the cuts
    config.toml     the settings
    epochs.json     who holds which stage
    control.sock    the host or peer that is at work there, if one is

All of it runs on threads of the server, one at a time.
"""

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from thinwire.engine.checkpoint import list_checkpoints, step_of
from thinwire.errors import NotAliveError, ThinwireError
from thinwire.report.metrics import EVENTS_FILE, FILE_NAME, Curves
from thinwire.run.alive import FILE as CONTROL_SOCKET
from thinwire.run.alive import ask
from thinwire.run.formation import read_formation
from thinwire.run.protocol import LinkStatus, PeerStatus, RunProgress, StatusReport
from thinwire.run.record import PROGRESS_FILE, read_progress
from thinwire.run.status import status_from_plain
from thinwire.schedule import simulate
from thinwire.settings import Settings, load_settings
from thinwire.settings.crossing import frame_bytes, network_of
from thinwire.settings.file import recipe_of

MOST_EVENTS = 500
REFRESH_SECONDS = 0.9  # between two looks at the folder
STATUS_SECONDS = 2.0  # for a host to say how it stands
SILENT_SECONDS = 60.0  # without a word, from here on a run is said to be silent
_TAIL = 64  # bytes before the place read last, by which a file is known again


class _Event(msgspec.Struct):
    kind: str
    text: str
    time: float = 0.0


class Tail:
    """Reads the complete lines that were added to a file since the last look."""

    def __init__(self, path: Path):
        self.path = path
        self._place, self._before = 0, b""

    def read(self) -> tuple[bool, Iterator[bytes]]:
        """Whether the file is another one than before or was cut, and the lines that were added:
        then all, or none of a file that is gone.
        """
        try:
            file = self.path.open("rb")
        except OSError:
            is_new, self._place, self._before = self._place > 0, 0, b""
            return is_new, iter(())
        file.seek(max(0, self._place - _TAIL))
        is_new = self._place > 0 and file.read(len(self._before)) != self._before
        if is_new:
            self._place, self._before = 0, b""
        return is_new, self._lines(file)

    def _lines(self, file: Any) -> Iterator[bytes]:
        with file:
            file.seek(self._place)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._place += len(line)
                self._before = (self._before + line)[-_TAIL:]
                yield line


class RunView:
    """What is known of one run; `refresh` looks again. `is_own`: this process runs it."""

    def __init__(self, folder: Path, is_own: bool = False):
        self.folder, self.is_own = folder, is_own
        self.curves = Curves()
        self.sections: dict[str, bytes] = {}  # parts of the page, each sent whole when it changes
        self.status: StatusReport | None = None
        self._events: list[_Event] = []
        self._metrics, self._story = Tail(folder / FILE_NAME), Tail(folder / EVENTS_FILE)
        self._marks: dict[str, tuple[int, int]] = {}
        self._settings: Settings | None = None
        self._lock, self._looked = threading.Lock(), -math.inf

    @property
    def is_stale(self) -> bool:
        """Whether it is time to look again."""
        return time.monotonic() - self._looked >= REFRESH_SECONDS

    def refresh(self) -> None:
        """Look at the folder, unless that was just done."""
        with self._lock:
            if not self.is_stale:
                return
            is_new, lines = self._metrics.read()
            self.curves = Curves() if is_new else self.curves
            for line in lines:
                self.curves.add(line)
            self._show("points", self.curves.points())
            is_new, lines = self._story.read()
            self._events = [] if is_new else self._events
            for line in lines:
                with contextlib.suppress(msgspec.MsgspecError):
                    self._events.append(msgspec.json.decode(line, type=_Event))
            del self._events[:-MOST_EVENTS]
            self.status = self._ask()
            is_new = self._read_settings()
            if self._has_changed(PROGRESS_FILE) or is_new:
                progress = read_progress(self.folder)
                plain = msgspec.to_builtins(progress) if progress else {}
                facts = compared(self._settings, progress) if self._settings and progress else {}
                self._show("progress", {**plain, **facts})
            self._show("valid", [dataclasses.astuple(one) for one in self.curves.valid])
            self._show("events", self._events)
            self._show("state", self._state())
            self._looked = time.monotonic()

    def _show(self, name: str, values: Any) -> None:
        body = msgspec.json.encode(values)  # what is no number is null there
        if body != self.sections.get(name):
            self.sections[name] = body

    def _ask(self) -> StatusReport | None:
        if not (self.folder / CONTROL_SOCKET).exists():
            return None
        try:
            return status_from_plain(ask(self.folder, {"ask": "status"}, STATUS_SECONDS))
        except NotAliveError:
            return None
        except ThinwireError:
            return self.status  # it is busy: what it said last

    def _has_changed(self, name: str) -> bool:
        try:
            stat = (self.folder / name).stat()
            mark = stat.st_mtime_ns, stat.st_size
        except OSError:
            mark = 0, 0
        has, self._marks[name] = self._marks.get(name) != mark, mark
        return has

    def _read_settings(self) -> bool:
        if not self._has_changed("config.toml"):
            return False
        text, self._settings = "", None
        with contextlib.suppress(OSError, UnicodeError, ThinwireError):
            text = (self.folder / "config.toml").read_text()
            self._settings = load_settings(self.folder, [])  # without plugins, which are code
        recipe = recipe_of(self._settings) if self._settings else ""
        self._show("settings", {"text": text, "recipe": recipe})
        return True

    def _state(self) -> dict[str, Any]:
        last, moments = self.curves.last, [event.time for event in self._events[-1:]]
        heard = max(0.0, *moments, last.get("time") or 0.0, self.status.time if self.status else 0)
        told = (self.status or self._by_folder(heard)).to_plain()
        times = {"time": heard, "heard": round(heard), "began": self.curves.began}
        links = {"links": told["links"], "crossed": last.get("links", [])}
        return {**told, **last, **times, **links}

    def _by_folder(self, heard: float) -> StatusReport:
        """How a run stands that nobody answers for."""
        settings, seats = self._settings, list[str]()
        with contextlib.suppress(ThinwireError):
            seats = read_formation(self.folder).seats
        count = len(self.curves.last.get("stages", []))
        seats = seats if len(seats) == count else [f"stage {n}" for n in range(count)]
        held = {name: [n for n, one in enumerate(seats) if one == name] for name in seats}
        links = list[LinkStatus]()
        if settings and settings.link.emulate:
            cuts = zip(range(count - 1), network_of(settings).latency_s, strict=False)
            links = [LinkStatus(n, "", "", "emulated", round_trip_ms=2e3 * s) for n, s in cuts]
        return StatusReport(
            run=settings.run.name if settings else self.folder.resolve().name,
            run_id="",
            role="folder",
            state=self._word(heard),
            time=heard,
            last_checkpoint=max(map(step_of, list_checkpoints(self.folder)), default=None),
            peers=[PeerStatus(name, "", stages) for name, stages in held.items()],
            links=links,
        )

    def _word(self, heard: float) -> str:
        about = [event.kind for event in self._events if event.kind in ("begin", "end")]
        has_ended, last = about[-1:] == ["end"], self.curves.last
        step = last.get("step")
        if step and step == last.get("steps") and (has_ended or not about):
            return "complete"
        usual = 20 * (last.get("step_seconds") or 0.0)
        is_silent = not self.is_own and time.time() - heard > max(SILENT_SECONDS, usual)
        doing = "silent" if is_silent else "training" if step else "starting"
        return "ended" if has_ended else doing


def compared(settings: Settings, progress: RunProgress) -> dict[str, Any]:
    """The plan of a run beside what was measured; and its schedule simulated with the measured
    costs, once with the bytes that were sent and once with those of dense cuts.
    """
    per_microbatch, costs = settings.tokens_per_microbatch, progress.measured_costs
    try:
        planned = [
            {
                "cut": row["cut"],
                "planned": sum(frame_bytes(settings, row["cut"])) / per_microbatch,
                "measured": row["forward_bytes_per_token"] + row["backward_bytes_per_token"],
                "dense": 2 * row["bf16_bytes_per_token"],
                "codecs": [row["forward_codec"], row["backward_codec"]],
            }
            for row in progress.cuts
        ]
        dense = [0] * (settings.pipeline.stages - 1)  # also where both stages are in one process
        for row in progress.cuts:
            dense[row["cut"]] = row["bf16_bytes_per_token"] * per_microbatch
        plain = dataclasses.replace(costs, forward_bytes=dense, backward_bytes=dense)
        schedule, links = settings.schedule(), progress.links
        thin, thick = (simulate(schedule, one, links).step_seconds for one in (costs, plain))
        found = {"planned": planned, "simulated_step_seconds": thin}
        is_known = planned and any(links.mbps_up + links.mbps_down)
        return {**found, "dense_step_seconds": thick} if is_known else found
    except (ThinwireError, KeyError, TypeError, IndexError):
        return {}  # a record of other settings
