"""Weights & Biases beside TensorBoard: the same scalars, under an account of the user's own.

It is a convenience on top, so nothing that happens to it may end a run: what fails is told once,
and the run goes on without it.
"""

import contextlib
import secrets
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from thinwire.lazy import needs

ID_FILE = "wandb-id"  # in the folder of a run: one that is resumed continues its curves
INIT_SECONDS = 30
LAST_SECONDS = 60.0  # to upload what is left, at the end of a run


class WandbLog:
    """One run of a project on Weights & Biases, or none once something has failed."""

    def __init__(
        self,
        project: str,
        name: str,
        folder: Path,
        config: dict[str, Any],
        on_lost: Callable[[str], None],
    ):
        self._on_lost = on_lost
        self._run: Any = None
        with self._trying():
            wandb = needs("wandb", "wandb", f'run.wandb = "{project}"')
            self._run = wandb.init(
                project=project,
                name=name,
                id=_run_id(folder),
                resume="allow",
                dir=str(folder),
                config=config,
                settings=_settings(wandb),
            )
            # Not wandb's own counter, which refuses to go back, as a resumed run may.
            self._run.define_metric("*", step_metric="step")

    def add(self, scalars: Mapping[str, float], step: int) -> None:
        """Log what was measured after so many steps."""
        with self._trying():
            if self._run is not None:
                self._run.log({**scalars, "step": step})

    def close(self) -> None:
        """Upload what is left, within a minute. May be called twice."""
        run, self._run = self._run, None
        if run is None:
            return

        def finish() -> None:
            with self._trying():
                run.finish()

        thread = threading.Thread(target=finish, name="wandb", daemon=True)
        thread.start()
        thread.join(LAST_SECONDS)
        if thread.is_alive():
            self._on_lost(
                f"Weights & Biases did not take the last metrics within {LAST_SECONDS:g} s; "
                "`wandb sync` uploads them later"
            )

    @contextlib.contextmanager
    def _trying(self) -> Any:
        try:
            yield
        except Exception as error:  # the package has many of its own, and they may change
            self._run = None
            self._on_lost(f"nothing is logged to Weights & Biases, the run continues: {error}")


def _settings(wandb: Any) -> Any:
    """Quiet, and without questions: a run may have no terminal, or a display of its own on it."""
    is_online = wandb.setup().settings.mode == "online"  # by the environment and wandb's own files
    if is_online and not wandb.login(prompt=False):
        raise ValueError(
            "you are not logged in: run `wandb login`, or set WANDB_MODE=offline and upload with "
            "`wandb sync` later"
        )
    return wandb.Settings(console="off", silent=True, init_timeout=INIT_SECONDS)


def _run_id(folder: Path) -> str:
    """The run's id there: drawn once, and kept in its folder."""
    path = folder / ID_FILE
    if not path.is_file():
        path.write_text(secrets.token_hex(8) + "\n")
    return path.read_text().strip()
