"""A run's folder belongs to one run, and to one process at a time."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from thinwire.engine.checkpoint import Checkpoint, list_checkpoints
from thinwire.errors import ConfigError
from thinwire.folders import lock
from thinwire.run.commit import discard_partial


@contextlib.contextmanager
def claim_folder(
    folder: Path, checkpoint: Checkpoint | None, goes_on: bool = False
) -> Iterator[None]:
    """Hold the run's folder: never over another run, never beside a process that trains in it.

    `goes_on`: what the folder holds is this very run.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = (folder / ".lock").open("a")
    except OSError as error:
        raise ConfigError(f"cannot use the run's folder {folder}: {error}") from error
    with held:
        try:
            lock(held.fileno())  # a filesystem without locks is no reason not to train
        except BlockingIOError:
            raise ConfigError(
                f"another process is training in this folder, {folder}: wait for it, stop it, or "
                "choose another name (--set run.name=...)"
            ) from None
        if not goes_on:
            _refuse_other_run(folder, checkpoint)
        discard_partial(folder)
        try:
            yield
        finally:
            discard_partial(folder)


def is_claimed(folder: Path) -> bool:
    """Whether a process holds the folder, as one that trains in it does."""
    try:
        with (folder / ".lock").open() as held:
            lock(held.fileno())
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _refuse_other_run(folder: Path, checkpoint: Checkpoint | None) -> None:
    """A folder that holds a run is for that run alone."""
    record, saved = folder / "metrics.jsonl", list_checkpoints(folder)
    if not saved and not (record.is_file() and record.stat().st_size):
        return
    if checkpoint is None:
        way = "continue it with --resume, or " if saved else ""
        raise ConfigError(
            f"{folder} already holds a run: {way}choose another name (--set run.name=...)"
        )
    if not checkpoint.folder.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(
            f"{folder} already holds a run, but not that of {checkpoint.folder}: resume into that "
            "run's own folder, or choose a new name (--set run.name=...)"
        )
