"""The page of one run or several: fixed files, one stream of what changes, and a host's actions.

    GET  /               the page; its parts under /static/
    GET  /stream         server-sent events: all that is known, then what is new
    GET  /invite/N       the line that lets others join run N, and its QR code     (with the token)
    POST /invite/N       {"machines": 1}: another such line                        (with the token)
    POST /kick/N         {"peer": "ben"}: remove a peer                            (with the token)

What it shows is read from the run's folder, so a copy of the folder shows the same, but for what
the host or peer says that is at work there. Nothing else of a folder can be asked for. What others
wrote is shown as text. This file is imported when somebody looks: what it imports is slow.
"""

import asyncio
import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import segno
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from thinwire.errors import NotAliveError, ThinwireError
from thinwire.report.metrics import EVENTS_FILE, FILE_NAME, Curves
from thinwire.run.alive import ask, ask_status
from thinwire.run.checkpoints import last_checkpoint
from thinwire.run.formation import read_formation
from thinwire.run.protocol import LinkStatus, PeerStatus, RunProgress, StatusReport
from thinwire.run.record import PROGRESS_FILE, read_progress
from thinwire.schedule import simulate
from thinwire.settings import CONFIG, Settings, load_settings
from thinwire.settings.crossing import frame_bytes, network_of
from thinwire.settings.file import recipe_of
from thinwire.web.server import has_token

STATIC = Path(__file__).parent / "static"
TICK_SECONDS = 1.0
MOST_EVENTS = 500
REFRESH_SECONDS = 0.9  # between two looks at the folder
STATUS_SECONDS = 2.0  # for a host to say how it stands
SILENT_SECONDS = 60.0  # without a word, from here on a run is said to be silent
_TAIL = 64  # bytes before the place read last, by which a file is known again


class _Action(msgspec.Struct, forbid_unknown_fields=True):
    """What an owner wants done: a peer removed, or another invite for so many machines."""

    peer: Annotated[str, msgspec.Meta(min_length=1, max_length=63)] | None = None
    machines: Annotated[int, msgspec.Meta(ge=1)] = 1


def make_page(folders: Sequence[Path], is_own: bool = False) -> Starlette:
    """The application that shows these runs. `is_own`: this process runs them."""
    views = [RunView(folder, is_own) for folder in folders]

    async def page(request: Request) -> Response:
        return FileResponse(STATIC / "page.html")

    async def stream(request: Request) -> Response:
        events = _events(views, has_token(request.scope))
        return StreamingResponse(events, media_type="text/event-stream")

    async def act(request: Request) -> Response:
        """Ask the host of a run, for its owner."""
        if not has_token(request.scope):
            text = "only the address with its token may do this: the host's terminal shows it"
            return JSONResponse({"error": text}, 403)
        number, what = request.path_params["run"], request.url.path.split("/")[1]
        if number >= len(views):
            return JSONResponse({"error": "there is no such run"}, 404)
        try:
            asked = None
            if request.method == "POST":
                # Pages of other sites cannot send this type unasked.
                if request.headers.get("content-type", "").partition(";")[0] != "application/json":
                    raise ValueError("the request must be application/json")
                asked = msgspec.json.decode(await request.body(), type=_Action)
            folder = views[number].folder
            return JSONResponse(await asyncio.to_thread(_act, folder, what, asked))
        except (ThinwireError, ValueError) as error:  # what msgspec raises is a ValueError
            return JSONResponse({"error": str(error)}, 400)

    routes = [
        Route("/", page),
        Mount("/static", StaticFiles(directory=STATIC)),
        Route("/stream", stream),
        Route("/invite/{run:int}", act, methods=["GET", "POST"]),
        Route("/kick/{run:int}", act, methods=["POST"]),
    ]
    return Starlette(routes=routes)


def _act(folder: Path, what: str, asked: _Action | None) -> dict[str, Any]:
    if what == "kick":
        return ask(folder, {"ask": "kick", "peer": asked.peer if asked else None})
    line = ""
    if asked is not None:
        line = str(ask(folder, {"ask": "invite", "machines": asked.machines})["text"])
    else:
        ask(folder, {"ask": "status"})  # a run that has ended invites nobody
        with contextlib.suppress(OSError, UnicodeError):
            line = (folder / "authority" / "invite.txt").read_text().strip()
    code = segno.make(line, error="l", micro=False).svg_data_uri(scale=4, border=2) if line else ""
    return {"line": line, "qr": code}


async def _events(views: Sequence["RunView"], is_owner: bool) -> AsyncIterator[bytes]:
    """All that a page shows, as server-sent events, until it is closed."""
    seen: list[dict[str, bytes]] = [{} for _ in views]
    hello = {"runs": len(views), "owner": is_owner, "now": time.time()}
    yield _event("hello", 0, msgspec.json.encode(hello))
    while True:
        for number, view in enumerate(views):
            if view.is_stale:
                await asyncio.to_thread(view.refresh)
            for name, body in [*view.sections.items()]:  # a thread may add one
                if seen[number].get(name) is not body:
                    seen[number][name] = body
                    yield _event(name, number, body)
        await asyncio.sleep(TICK_SECONDS)


def _event(kind: str, run: int, body: bytes) -> bytes:
    return f'event: {kind}\ndata: {{"run":{run},"value":'.encode() + body + b"}\n\n"


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
        """Whether the file is another one or was cut, and the lines that were added: then all."""
        try:
            file = self.path.open("rb")
        except OSError:
            return False, iter(())
        file.seek(self._place - len(self._before))
        is_new = file.read(len(self._before)) != self._before
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
    """What is known of one run, by its folder. `is_own`: this process runs it."""

    def __init__(self, folder: Path, is_own: bool = False):
        self.folder, self.is_own = folder, is_own
        self.curves = Curves()
        self.sections: dict[str, bytes] = {}  # parts of the page, each sent whole when it changes
        self.status: StatusReport | None = None
        self._events: list[_Event] = []
        self._metrics, self._story = Tail(folder / FILE_NAME), Tail(folder / EVENTS_FILE)
        self._contents: dict[str, bytes] = {}  # of small files, as they were at the last look
        self._settings: Settings | None = None
        self._lock, self._looked = threading.Lock(), -math.inf

    @property
    def is_stale(self) -> bool:
        """Whether it is time to look again."""
        return time.monotonic() - self._looked >= REFRESH_SECONDS

    def refresh(self) -> None:
        """Look at the folder, unless that was just done; on any thread of the server."""
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
            try:
                self.status = ask_status(self.folder, STATUS_SECONDS)
            except NotAliveError:
                self.status = None
            except ThinwireError:
                pass  # it is busy: what it said last
            changed = [name for name in (CONFIG, PROGRESS_FILE) if self._has_changed(name)]
            if CONFIG in changed:
                self._settings = None
                with contextlib.suppress(ThinwireError):
                    self._settings = load_settings(self.folder, [])  # no plugins, which are code
                recipe = recipe_of(self._settings) if self._settings else ""
                text = self._contents[CONFIG].decode(errors="replace")
                self._show("settings", {"text": text, "recipe": recipe})
            if changed:
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

    def _has_changed(self, name: str) -> bool:
        content, before = b"", self._contents.get(name)
        with contextlib.suppress(OSError):
            content = (self.folder / name).read_bytes()
        self._contents[name] = content
        return content != before

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
        name = settings.run.name if settings else self.folder.resolve().name
        which = name, "", "folder", self._word(heard), heard
        peers = [PeerStatus(name, "", stages) for name, stages in held.items()]
        last = last_checkpoint(self.folder)
        return StatusReport(*which, last_checkpoint=last, peers=peers, links=links)

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
        planned: list[dict[str, Any]] = []
        dense = [0] * (settings.pipeline.stages - 1)  # also where both stages are in one process
        for row in progress.cuts:
            cut, bf16 = row["cut"], row["bf16_bytes_per_token"]
            dense[cut] = bf16 * per_microbatch
            size = sum(frame_bytes(settings, cut)) / per_microbatch
            measured = row["forward_bytes_per_token"] + row["backward_bytes_per_token"]
            found = {"cut": cut, "planned": size, "measured": measured, "dense": 2 * bf16}
            planned.append({**found, "codecs": [row["forward_codec"], row["backward_codec"]]})
        plain = dataclasses.replace(costs, forward_bytes=dense, backward_bytes=dense)
        schedule, links = settings.schedule(), progress.links
        thin, thick = (simulate(schedule, one, links).step_seconds for one in (costs, plain))
        plan = {"planned": planned, "simulated_step_seconds": thin}
        is_known = planned and any(links.mbps_up + links.mbps_down)
        return {**plan, "dense_step_seconds": thick} if is_known else plan
    except (ThinwireError, KeyError, TypeError, IndexError):
        return {}  # a record of other settings
