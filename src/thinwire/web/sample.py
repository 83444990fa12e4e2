"""Text from a run under way: at each checkpoint its model continues the same words.

The weights are in the processes of the stages, on several machines perhaps; whole they are in a
checkpoint alone. So another process reads that, at the lowest priority and on one core, and ends
with the run. A run on one machine that has a prompt saves at each validation
(`Settings.saved_at_validations`), so that every text has a validation loss beside it.
"""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

TOKENS = 60
SECONDS = 600.0  # for one text, on a machine that has other work


class Sampler:
    """Tells what the newest checkpoint writes, one text at a time."""

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
        late = threading.Timer(SECONDS, self._process.kill)
        late.start()
        text, errors = self._process.communicate()
        late.cancel()
        if self._process.returncode == 0:
            self._tell("sample", f"step {step}: {text.strip()}")
        elif not self._is_over:
            self._tell("note", f"no text of step {step}: {errors.strip()}")
