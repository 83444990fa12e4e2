"""Questions to a run that is alive on this machine: a unix socket in its folder, a JSON line each.

    {"ask": "status"}                     {"answer": {...}}
    {"ask": "kick", "peer": "ben"}        {"error": "nobody called ben has joined"}

Only the user whose run it is may open the socket. What comes in is data, and bounded.
"""

import contextlib
import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from thinwire.errors import ConfigError, NotAliveError, ThinwireError, WireError, printable

FILE = "control.sock"  # in the folder of a run, or of a peer
LONGEST_LINE = 1 << 20  # bytes; the status of a thousand peers takes less
_REQUEST_S = 5.0  # for a request to arrive, and for its answer to be taken
_AT_A_TIME, _QUEUED = 8, 64

Handler = Callable[[dict[str, Any]], dict[str, Any]]
"""Answers one kind of request; a ThinwireError becomes an answer that says why not."""


class ControlSocket:
    """Answers requests in a folder until it is closed; handlers run on threads of its own."""

    def __init__(self, folder: Path, handlers: Mapping[str, Handler]):
        self.path = folder / FILE
        self._handlers = dict(handlers)
        self._free = threading.Semaphore(_AT_A_TIME)
        self._socket = _bind(self.path)
        threading.Thread(target=self._accept, name="thinwire control", daemon=True).start()

    def close(self) -> None:
        """Answer no more, and remove the socket."""
        self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()

    def __enter__(self) -> "ControlSocket":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            self._free.acquire()
            try:
                caller, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(caller,), daemon=True).start()

    def _serve(self, caller: socket.socket) -> None:
        try:
            with caller, contextlib.suppress(OSError, WireError):
                caller.settimeout(_REQUEST_S)
                _say(caller, self._answer(_hear(caller)))
        finally:
            self._free.release()

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        handler = self._handlers.get(str(request.get("ask")))
        if handler is None:
            known = ", ".join(sorted(self._handlers))
            asked = printable(str(request.get("ask")), 100)
            who = "A host answers kick and invite, a peer answers leave"
            return {"error": f"{asked!r} cannot be asked here; what can: {known}. {who}"}
        try:
            return {"answer": handler(request)}
        except ThinwireError as error:
            return {"error": str(error)}


def ask(folder: Path, request: dict[str, Any], timeout: float = 15.0) -> dict[str, Any]:
    """The answer of the process that is alive in a folder.

    NotAliveError if there is none; a ConfigError has the words in which it refused.
    """
    try:
        with _connected(folder, timeout) as connection:
            _say(connection, request)
            said = _hear(connection)
    except PermissionError:
        raise ConfigError(
            f"{folder} belongs to another user: only who started the run may ask it"
        ) from None
    except TimeoutError:
        raise WireError(
            f"the run in {folder} did not answer within {timeout:g} s: it may be stopped"
        ) from None
    except (OSError, WireError):
        raise NotAliveError(f"no run is alive in {folder}, or it has just ended") from None
    if "error" in said:
        raise ConfigError(printable(str(said["error"])))
    answer = said.get("answer")
    if not isinstance(answer, dict):
        raise WireError(f"the run in {folder} gave an answer that this version does not know")
    return answer


def is_alive(folder: Path) -> bool:
    """Whether a process answers in this folder."""
    try:
        _connected(folder, _REQUEST_S).close()
    except OSError as error:
        return isinstance(error, TimeoutError)  # it has more callers than it can queue
    return True


def _connected(folder: Path, timeout: float) -> socket.socket:
    """A connection; where too many others wait to be heard, it is tried again for a while."""
    deadline = time.monotonic() + timeout
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout)
    try:
        with _short(folder / FILE) as path:
            while True:
                try:
                    connection.connect(path)
                    return connection
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise TimeoutError from None
                    time.sleep(0.05)
    except BaseException:
        connection.close()
        raise


def _bind(path: Path) -> socket.socket:
    """A socket of which only this user may ask; one that a killed process left is replaced."""
    if is_alive(path.parent):
        raise ConfigError(
            f"another process is at work in {path.parent}: wait for it, stop it, or choose another "
            "folder"
        )
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
            path.unlink()
        with _short(path) as short:
            bound.bind(short)
        path.chmod(0o600)  # before it listens, so nobody comes in between
        bound.listen(_QUEUED)
    except OSError as error:
        bound.close()
        raise ConfigError(f"cannot make {path}, by which this run is asked: {error}") from error
    return bound


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


def _say(connection: socket.socket, values: dict[str, Any]) -> None:
    connection.sendall(msgspec.json.encode(values) + b"\n")


def _hear(connection: socket.socket) -> dict[str, Any]:
    line = bytearray()
    while not line.endswith(b"\n"):
        data = connection.recv(1 << 16)
        line += data
        if not data or len(line) > LONGEST_LINE:
            raise WireError("what was said is not a line, or is too long")
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        raise WireError("what was said is not a JSON object") from None
