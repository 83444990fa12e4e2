"""A run that can be watched: its display also keeps the story, and serves the page.

`thinwire host`, `train` and `join` put it around the display of the terminal. All three show the
folder that the run writes; a joined machine writes there what the host tells it.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError
from thinwire.folders import replace_private_file
from thinwire.report import Display, EvaluationRecord, StepRecord
from thinwire.report.metrics import FILE_NAME, Story
from thinwire.run.signals import heeding, leave_at_once
from thinwire.web.page import make_page
from thinwire.web.server import App, WebServer

DEFAULT_LISTEN = "127.0.0.1:4618"
OFF = "off"
TOKENS = 60  # of a text that a run under way writes
_KEPT = "authority/web.json"  # in a hosted run's folder: its address stays when it is restarted


class Followed(Display):
    """Shows a run on a terminal, keeps what happens in its folder, and serves the page of it.

    `listen`: an address, "" for the usual one, "off" for no page. `role`: "train", "host", "join".
    `prompt`: what the model continues at each checkpoint; "" for nothing.
    """

    def __init__(self, shown: Display, listen: str, role: str, prompt: str = ""):
        self._shown, self._role, self._prompt = shown, role, prompt
        self._sampler: Sampler | None = None
        self._is_usual = listen == ""
        # An address that was asked for is refused before the run begins.
        self._server: WebServer | None = None
        self._listen = listen or DEFAULT_LISTEN
        if listen not in ("", OFF):
            self._server = self._bound(listen)
        self._story: Story | None = None
        self._folder = Path()

    def opened(self, folder: Path) -> None:
        self._folder, self._story = folder, Story(folder)
        self._story.tell("begin", "started")
        if self._prompt:
            self._sampler = Sampler(self._prompt, folder, self._tell_everybody)
        if self._listen != OFF:
            self._serve()

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

    def note(self, text: str) -> None:
        self._shown.note(text)
        self._tell("note", text)

    def close(self) -> None:
        if self._sampler is not None:
            self._sampler.close()
        if self._server is not None:
            self._server.close()

    def __exit__(self, *raised: object) -> None:
        error = raised[1]
        text = f"failed: {error}" if error is not None else "ended in good order"
        self._tell("end", "stopped by its user" if isinstance(error, KeyboardInterrupt) else text)
        self.close()

    def _tell_everybody(self, kind: str, text: str) -> None:
        self._tell(kind, text)
        self.share(kind, text)

    def _tell(self, kind: str, text: str) -> None:
        if self._story is not None:
            self._story.tell(kind, text)

    def _serve(self) -> None:
        kept = self._kept() if self._role == "host" else {}
        try:
            if self._server is None:
                host, _, port = self._listen.rpartition(":")
                self._server = self._bound(f"{host}:{kept.get('port') or port}")
        except ConfigError as error:  # the page is a convenience, the run is not
            self._shown.note(f"no page for the browser: {error}")
            return
        server = self._server
        server.token = str(kept.get("token") or server.token)
        if self._role == "host":
            with contextlib.suppress(OSError):
                values = {"token": server.token, "port": server.port}
                replace_private_file(self._folder / _KEPT, json.dumps(values).encode())
        server.start()
        # Elsewhere nobody reads without the token; here it is for what a host alone may do.
        needs_token = self._role == "host" or not server.is_private
        self._shown.phase("web", server.address_with_token if needs_token else server.address)

    def _bound(self, listen: str) -> WebServer:
        def make_app() -> App:
            return make_page([self._folder], is_own=True)

        return WebServer(make_app, listen, takes_next_port=self._is_usual)

    def _kept(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            values = json.loads((self._folder / _KEPT).read_text())
            return values if isinstance(values, dict) else {}
        return {}


class Sampler:
    """Tells what the newest checkpoint writes, one text at a time: always behind the same words.

    The weights are in the processes of the stages, on several machines perhaps; whole they are in a
    checkpoint alone. So another process reads that, at the lowest priority and on one core, and
    ends with the run. A run on one machine that has a prompt saves at each validation
    (`Settings.saved_at_validations`), so that every text has a validation loss beside it.
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
        words = ["generate", str(checkpoint), "--prompt", self._prompt, "--tokens", str(TOKENS)]
        with self._lock:
            if self._is_over:
                return
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "thinwire.cli", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
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
            raise ConfigError(
                f"{folder} holds no run: name the folder of one, which has a {FILE_NAME}"
            )
    listen, is_usual = listen or DEFAULT_LISTEN, not listen
    server = WebServer(lambda: make_page(folders), listen, takes_next_port=is_usual)
    with server, contextlib.suppress(KeyboardInterrupt), heeding(leave_at_once):
        print(f"watch {', '.join(map(str, folders))} at {server.address_with_token}")
        print("Ctrl-C ends the page, not the run.")
        sys.stdout.flush()
        while True:
            time.sleep(3600)
