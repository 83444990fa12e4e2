"""Text from a run under way: at each checkpoint its model continues the same words.

The weights are in the processes of the stages, on several machines perhaps; whole they are in a
checkpoint alone. So another process reads that, at the lowest priority and on one core, and ends
with the run.
"""

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

from thinwire.errors import ThinwireError
from thinwire.report.story import Story

TOKENS = 60
SECONDS = 600.0  # for one text, on a machine that has other work


class Sampler:
    """Tells the story what the newest checkpoint writes, one text at a time."""

    def __init__(self, prompt: str, folder: Path, story: Story):
        self._prompt, self._folder, self._story = prompt, folder, story
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None
        self._lock, self._is_over = threading.Lock(), False

    def saved(self) -> None:
        """A checkpoint was saved; nothing is done about it while an earlier one still writes."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._write, name="thinwire sample", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End a text that is being written."""
        with self._lock:
            self._is_over = True
            if self._process is not None and self._process.poll() is None:
                self._process.kill()

    def _write(self) -> None:
        from thinwire.engine.checkpoint import list_checkpoints, step_of  # with torch: slow

        with contextlib.suppress(ThinwireError, OSError, subprocess.TimeoutExpired):
            newest = max(list_checkpoints(self._folder), key=step_of)
            words = ["generate", str(newest), "--prompt", self._prompt, "--tokens", str(TOKENS)]
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
            try:
                text, errors = self._process.communicate(timeout=SECONDS)
            finally:
                self._process.kill()
            if self._process.returncode == 0:
                self._story.tell("sample", f"step {step_of(newest)}: {text.strip()}")
            elif not self._is_over:
                self._story.tell("note", f"no text of step {step_of(newest)}: {errors.strip()}")
