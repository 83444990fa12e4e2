"""A run that can be watched: its display keeps the story too, and serves the page of its folder."""

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from thinwire.errors import ConfigError
from thinwire.folders import replace_file
from thinwire.report import Display, EvaluationRecord, StepRecord
from thinwire.report.metrics import FILE_NAME, tell
from thinwire.run.signals import heeding, leave_at_once
from thinwire.web.server import WebServer

USUAL_HOST, USUAL_PORT = "127.0.0.1", 4618
OFF = "off"
TOKENS = 60  # of a text that a run under way writes
_KEPT = "authority/web.json"


class _Kept(msgspec.Struct):
    """What a hosted run keeps in its folder: its address stays when it is started again."""

    token: str = ""
    port: int = 0


class Followed(Display, contextlib.AbstractContextManager["Followed"]):
    """Shows a run on a terminal, keeps what happens in its folder, and serves the page of it.
    `listen`: an address, "" for the usual one, "off" for no page. `role`: "train", "host", "join".
    `prompt`: what the model continues at each checkpoint; "" for nothing.
    """

    def __init__(self, shown: Display, listen: str, role: str, prompt: str = ""):
        self._shown, self._listen, self._prompt = shown, listen, prompt
        self._is_host = role == "host"
        self._sampler: Sampler | None = None
        self._held = contextlib.ExitStack()  # its server and its sampler
        self._tell: Callable[[str, str], None] = lambda *said: None  # before there is a folder

    def opened(self, folder: Path) -> None:
        if self._listen != OFF:
            self._serve(folder)
        self._tell = functools.partial(tell, folder)
        self._tell("begin", "started")
        if self._prompt:
            self._sampler = Sampler(self._prompt, folder, self._tell_everybody)
            self._held.callback(self._sampler.close)

    def phase(self, tag: str, text: str) -> None:
        self._shown.phase(tag, text)
        self._tell(tag, text)
        if tag == "save" and self._sampler is not None:
            self._sampler.saved()

    def progress(self, tag: str, done: int, total: int, unit: str) -> None:
        self._shown.progress(tag, done, total, unit)

    def step(self, record: StepRecord) -> None:
        self._shown.step(record)

    def evaluation(self, record: EvaluationRecord) -> None:
        self._shown.evaluation(record)

    def __exit__(self, *raised: object) -> None:
        error = raised[1]
        text = f"failed: {error}" if error is not None else "ended in good order"
        self._tell("end", "stopped by its user" if isinstance(error, KeyboardInterrupt) else text)
        self._held.close()

    def _tell_everybody(self, kind: str, text: str) -> None:
        self._tell(kind, text)
        self.share(kind, text)

    def _serve(self, folder: Path) -> None:
        place, kept, listen = folder / _KEPT, _Kept(), self._listen
        with contextlib.suppress(OSError, ValueError):  # also bytes that are no text
            kept = msgspec.json.decode(place.read_bytes(), type=_Kept) if self._is_host else kept
        usual = f"{USUAL_HOST}:{kept.port or USUAL_PORT}"
        page = functools.partial(_make_page, [folder], is_own=True)
        try:
            server = WebServer(page, listen or usual, kept.token, takes_next_port=not listen)
        except ConfigError as error:
            if listen:
                raise
            self._shown.note(f"no page for the browser: {error}")  # it is a convenience
            return
        if self._is_host:
            with contextlib.suppress(OSError):
                kept = _Kept(server.token, server.port)
                replace_file(place, msgspec.json.encode(kept), private=True)
        self._held.enter_context(server)
        # Elsewhere nobody reads without the token; here it is for what a host alone may do.
        needs_token = self._is_host or not server.is_private
        self._shown.phase("web", server.address_with_token if needs_token else server.address)


def _make_page(folders: list[Path], is_own: bool = False) -> Any:
    from thinwire.web import page  # slow

    return page.make_page(folders, is_own)


class Sampler:
    """Tells what the newest checkpoint writes behind the same words, one text at a time. Another
    process reads it, at the lowest priority and on one core, and ends with the run.
    """

    def __init__(self, prompt: str, folder: Path, tell: Callable[[str, str], None]):
        self._prompt, self._folder, self._tell = prompt, folder, tell
        self._process: subprocess.Popen[str] | None = None
        self._due, self._lock, self._is_over = threading.Event(), threading.Lock(), False
        self.saved = self._due.set
        threading.Thread(target=self._work, name="thinwire sample", daemon=True).start()

    def close(self) -> None:
        """End, with a text that is being written."""
        with self._lock:
            self._is_over = True
            if self._process is not None:
                self._process.kill()
        self._due.set()

    def _work(self) -> None:
        while self._due.wait() and not self._is_over:
            self._due.clear()
            from thinwire.engine.checkpoint import list_checkpoints, step_of  # with torch: slow

            newest = max(list_checkpoints(self._folder), key=step_of)
            kept = newest.with_name(f".sample-{newest.name}")
            try:  # it stays while it is read, also if the run has newer ones by then
                shutil.copytree(newest, kept, copy_function=os.link, dirs_exist_ok=True)
                self._write(kept, step_of(newest))
            except OSError as error:
                self._tell("note", f"no text of step {step_of(newest)}: {error}")
            finally:
                shutil.rmtree(kept, ignore_errors=True)

    def _write(self, checkpoint: Path, step: int) -> None:
        command = [sys.executable, "-P", "-m", "thinwire", "generate", str(checkpoint)]
        command += ["--prompt", self._prompt, "--tokens", str(TOKENS)]
        none, pipe = subprocess.DEVNULL, subprocess.PIPE
        one_core = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self._lock:
            if self._is_over:
                return
            self._process = subprocess.Popen(
                command, stdin=none, stdout=pipe, stderr=pipe, text=True, env=one_core
            )
        os.setpriority(os.PRIO_PROCESS, self._process.pid, 19)
        text, errors = self._process.communicate()
        if self._process.returncode == 0:
            self._tell("sample", f"step {step}: {text.strip()}")
        elif not self._is_over:
            self._tell("note", f"no text of step {step}: {errors.strip()}")


def watch(folders: list[Path], listen: str) -> None:
    """Serve the page of these runs until Ctrl-C."""
    for folder in folders:
        if not any((folder / name).exists() for name in (FILE_NAME, "config.toml", ".lock")):
            which = f"name the folder of one, which has a {FILE_NAME}"
            raise ConfigError(f"{folder} holds no run: {which}")
    place = listen or f"{USUAL_HOST}:{USUAL_PORT}"
    server = WebServer(lambda: _make_page(folders), place, takes_next_port=not listen)
    with server, contextlib.suppress(KeyboardInterrupt), heeding(leave_at_once):
        print(f"watch {', '.join(map(str, folders))} at {server.address_with_token}")
        print("Ctrl-C ends the page, not the run.")
        sys.stdout.flush()
        threading.Event().wait()
