"""Runs that are alive on this machine: which there are, how each stands, and questions to one.

A hosted or joined run answers on a unix socket in its folder, a JSON line each:

    {"ask": "status"}                     {"answer": {...}}
    {"ask": "kick", "peer": "ben"}        {"error": "nobody called ben has joined"}

Only the user whose run it is may open the socket. A run of `thinwire train` answers no questions:
it is known by its lock, and shown by what it has written.
"""

import contextlib
import os
import socket
import socketserver
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import msgspec

from thinwire.errors import ConfigError, NotAliveError, ThinwireError, WireError, printable
from thinwire.folders import is_claimed
from thinwire.paths import peers_folder
from thinwire.report.human import duration
from thinwire.report.metrics import FILE_NAME, last_step
from thinwire.run.checkpoints import last_checkpoint
from thinwire.run.protocol import StatusReport
from thinwire.settings import RunConfig, load_settings

FILE = "control.sock"  # in the folder of a run, or of a peer
LONGEST_LINE = 1 << 20  # bytes; the status of a thousand peers takes less
_REQUEST_S = 5.0  # for a request to arrive, and for its answer to be taken
_RUNS = Path(RunConfig().out)

# Answers one kind of request with an object of JSON, or with a ThinwireError that says why not.
Handler = Callable[[dict[str, Any]], Any]


class ControlSocket(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """Answers requests in a folder that this process has claimed, on threads, until `close`."""

    daemon_threads, block_on_close, request_queue_size = True, False, 128

    def __init__(self, folder: Path, handlers: Mapping[str, Handler]):
        self.path, self.handlers = folder / FILE, handlers
        super().__init__(str(self.path), _Question, bind_and_activate=False)
        try:
            if self.path.is_socket():  # a killed process has left it
                self.path.unlink()
            with _short(self.path) as self.server_address:
                self.server_bind()
            self.path.chmod(0o600)  # before it listens, so nobody comes in between
            self.server_activate()
        except OSError as error:
            self.server_close()
            what = f"cannot make {self.path}, by which this run is asked"
            raise ConfigError(f"{what}: {error}") from error
        serve = self.serve_forever
        threading.Thread(target=serve, args=(0.1,), name="thinwire control", daemon=True).start()

    def close(self) -> None:
        """Answer no more, and remove the socket."""
        self.path.unlink(missing_ok=True)
        self.shutdown()
        self.server_close()

    def __exit__(self, *error: object) -> None:
        self.close()


class _Question(socketserver.StreamRequestHandler):
    server: ControlSocket
    timeout = _REQUEST_S

    def handle(self) -> None:
        with contextlib.suppress(OSError, WireError):
            _say(self.wfile, _answered(self.server.handlers, _heard(self.rfile)))


def _answered(handlers: Mapping[str, Handler], request: dict[str, Any]) -> dict[str, Any]:
    handler = handlers.get(str(request.get("ask")))
    if handler is None:
        known = ", ".join(sorted(handlers))
        asked = printable(str(request.get("ask")), 100)
        who = "A host answers kick and invite, a peer answers leave"
        return {"error": f"{asked!r} cannot be asked here; what can: {known}. {who}"}
    try:
        return {"answer": handler(request)}
    except ThinwireError as error:
        return {"error": str(error)}


def ask(folder: Path, request: dict[str, Any], timeout: float = 15.0) -> dict[str, Any]:
    """The answer of the process that is alive in a folder; ConfigError says why it refused."""
    try:
        with _connected(folder, timeout) as connection, connection.makefile("rwb") as lines:
            _say(lines, request)
            lines.flush()
            said = _heard(lines)
    except PermissionError:
        whose = f"{folder} belongs to another user"
        raise ConfigError(f"{whose}: only who started the run may ask it") from None
    except TimeoutError:
        silent = f"the run in {folder} did not answer within {timeout:g} s"
        raise WireError(f"{silent}: it may be stopped") from None
    except (OSError, WireError):
        raise NotAliveError(f"no run is alive in {folder}, or it has just ended") from None
    if "error" in said:
        raise ConfigError(printable(str(said["error"])))
    answer = said.get("answer")
    if not isinstance(answer, dict):
        raise WireError(f"the run in {folder} gave an answer that this version does not know")
    return answer


def ask_status(folder: Path, timeout: float = 15.0) -> StatusReport:
    """How the run stands that is alive there; WireError if this version does not know its form."""
    try:
        return msgspec.convert(ask(folder, {"ask": "status"}, timeout), StatusReport)
    except msgspec.ValidationError as error:
        what = f"the run gave its status in a form that this version does not know ({error})"
        raise WireError(f"{what}: use the version that it was started with") from None


def is_alive(folder: Path) -> bool:
    """Whether a process answers in this folder."""
    try:
        with _connected(folder, _REQUEST_S):
            return True
    except OSError as error:
        return isinstance(error, (TimeoutError, BlockingIOError))  # more callers than it can queue


@contextlib.contextmanager
def _connected(folder: Path, timeout: float) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as connection, _short(folder / FILE) as path:
        connection.settimeout(timeout)
        connection.connect(path)
        yield connection


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """A short name of a path: the system takes some hundred bytes at most for a socket's."""
    text = str(path.absolute())
    if len(os.fsencode(text)) < 100:
        yield text
        return
    with tempfile.TemporaryDirectory(prefix="tw-") as folder:
        link = Path(folder) / "f"
        link.symlink_to(path.parent.absolute(), target_is_directory=True)
        yield str(link / path.name)


def _say(lines: BufferedIOBase, values: dict[str, Any]) -> None:
    lines.write(msgspec.json.encode(values) + b"\n")


def _heard(lines: BufferedIOBase) -> dict[str, Any]:
    line = lines.readline(LONGEST_LINE)
    try:
        if not line.endswith(b"\n"):
            raise WireError("what was said is not a line, or is too long")
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        raise WireError("what was said is not a JSON object") from None


# Which runs there are


def alive_reports(given: Path | None) -> list[StatusReport]:
    """How runs stand that are alive: the one in this folder, or all; NotAliveError if none is."""
    given, places = _named(given), [_RUNS, peers_folder()]
    if found := _at_work(given, *places):
        return [*map(_report, found)]
    raise _not_alive([given] if given else places)


def folder_to_ask(given: Path | None, is_host: bool) -> Path:
    """The one folder in which this machine hosts a run, or else is a peer; or NotAliveError."""
    place, other = (_RUNS, peers_folder()) if is_host else (peers_folder(), _RUNS)
    given = _named(given)
    found = _at_work(given, place)
    able = [folder for folder in found if is_alive(folder)]
    if len(able) > 1:
        folders = ", ".join(map(str, able))
        raise ConfigError(f"several runs are alive: name the folder of one, {folders}")
    if able:
        return able[0]
    others = [] if given else _at_work(None, other)
    for folder in filter(is_alive, others):
        hosts = f"no peer of a run: it hosts the one in {folder}. Ctrl-C there stops that"
        joins = f"hosts no run: it is a peer of the run in {folder}; only a host can do this"
        raise NotAliveError(f"this machine {joins if is_host else f'is {hosts}'}")
    if local := found or others:
        raise NotAliveError(f"the run in {local[0]} has no peers: it is a local one, or starts")
    raise _not_alive([given or place])


def hosted_folders() -> list[Path]:
    """The folders of all runs that this machine hosts and that answer."""
    return [folder for folder in _at_work(None, _RUNS) if is_alive(folder)]


def _named(given: Path | None) -> Path | None:
    """The folder that was named: a settings file stands for the run that it starts."""
    return load_settings(given, []).run.folder if given and given.is_file() else given


def _at_work(given: Path | None, *places: Path) -> list[Path]:
    """Of the folder that was named, or all in these places, those in which a process is at work."""
    found = [given] if given else [path for place in places for path in sorted(place.glob("*/"))]
    return [folder for folder in found if is_alive(folder) or is_claimed(folder)]


def _report(folder: Path) -> StatusReport:
    """What a run says of itself; of a local one, what it has written."""
    if is_alive(folder):
        return ask_status(folder)
    step, now, name = last_step(folder), time.time(), folder.resolve().name
    notes = ["this is what the run has written so far; its page, thinwire watch, shows more"]
    if step is not None:
        written = (folder / FILE_NAME).stat().st_mtime
        notes.insert(0, f"its last line was written {duration(now - written)} ago")
    last, state = last_checkpoint(folder), "training" if step else "starting"
    report = StatusReport(name, "", "folder", state, now, last_checkpoint=last, notes=notes)
    return report.after(step)


def _not_alive(places: list[Path]) -> NotAliveError:
    looked = " and ".join(f"{place}/" for place in places)
    return NotAliveError(
        f"no run is alive in {looked}: it has ended, or its folder is elsewhere. Give that of the "
        "run on its host, or that of `join --folder` on a peer"
    )
