"""The story of a run, top to bottom: settings in, trained model out.

prepare the data -> start the peers -> lead them, and keep what they report
-> sum up: summary.json, plots, tables
"""

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch

from thinwire.data import Corpus, ImageSet, prepare, prepare_images
from thinwire.engine.build import check_devices, parameter_count
from thinwire.engine.feed import Data, Feed
from thinwire.engine.worker import scratch_folder
from thinwire.paths import cache_folder
from thinwire.report import Display
from thinwire.run.claim import claim_folder
from thinwire.run.coordinator import Coordinator
from thinwire.run.launch import LocalPeers, lead
from thinwire.run.messages import Assign
from thinwire.run.record import RunRecord
from thinwire.run.resume import open_resume, refuse_other_data
from thinwire.run.signals import Interrupted, heeding, leave_at_once
from thinwire.settings import Settings
from thinwire.settings.remarks import remarks
from thinwire.typed import to_plain

DataT = TypeVar("DataT", Corpus, ImageSet)


def train(
    settings: Settings,
    display: Display,
    resume: Path | None = None,
    allow_plugins: bool = False,
) -> dict[str, Any]:
    """Run to the end (or to a Ctrl-C, which drains and checkpoints); returns the summary.

    `allow_plugins`: import plugins that only the checkpoint to resume names.
    """
    started = time.monotonic()
    for line in describe(settings):
        display.phase("config", line)
    check_devices(settings)
    folder = Path(settings.run.out) / settings.run.name
    checkpoint = open_resume(resume, settings, display, allow_plugins) if resume else None
    with heeding(leave_at_once), claim_folder(folder, checkpoint):
        data = prepare_data(settings, display)
        if checkpoint is not None:
            refuse_other_data(checkpoint, data.fingerprint)
        stages, origin = settings.pipeline.stages, checkpoint.folder if checkpoint else None
        source = f", from {origin}" if origin else ""
        display.phase("start", f"{stages} stages as processes, links under mutual TLS{source}")
        assignment = Assign(
            settings=settings.to_plain(),
            corpus=str(data.folder.resolve()),
            run_folder=str(folder.resolve()),
            resume=str(origin.resolve()) if origin else "",
        )
        coordinator = Coordinator(stages, settings.run.patience, assignment)
        record = RunRecord(settings, folder, data, checkpoint, display)
        with (
            _scratch(folder),
            LocalPeers(settings, folder) as peers,
            stopping(peers.ask_to_stop, record),
        ):
            peers.start()
            follow(coordinator, peers, record)
            return record.finish(peers.control_bytes(), coordinator.stop_asked, started)


def follow(coordinator: Coordinator, peers: LocalPeers, record: RunRecord) -> None:
    """Lead the peers to the end of the run, and keep what they report."""
    try:
        lead(coordinator, peers, record.carry_out)
    finally:
        record.close()


@contextlib.contextmanager
def stopping(ask_to_stop: Callable[[], None], record: RunRecord) -> Iterator[None]:
    """First Ctrl-C: ask the run to end. Second: leave at once, whatever this process is doing.

    Once the stages are done only results are left to write: a signal costs no more than the plots.
    """
    asked = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if record.is_over:
            record.hurry()
            return
        if asked:
            raise Interrupted
        asked = True
        ask_to_stop()

    with heeding(on_signal):
        yield


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[None]:
    """The scratch of the run's codecs: empty when it starts, gone when its stages are."""
    shutil.rmtree(scratch_folder(folder), ignore_errors=True)
    try:
        yield
    finally:
        shutil.rmtree(scratch_folder(folder), ignore_errors=True)


def describe(settings: Settings) -> list[str]:
    """What a run is, in a line or two: its size, and the settings that are not at their defaults.

    All settings, resolved, stand in the run's config.toml.
    """
    count, stages = parameter_count(settings), settings.pipeline.stages
    first = (
        f"{settings.run.name}: {count:,} parameters in {stages} stages, "
        f"{settings.train.steps} steps of {settings.tokens_per_step:,} {settings.unit}s, "
        f"hash {settings.hash}"
    )
    asked, defaults = settings.relaxed().to_plain(), to_plain(Settings())
    changed = [
        f"{section}.{key} = {value}"
        for section, keys in asked.items()
        for key, value in keys.items()
        if value != defaults[section][key] and (section, key) != ("run", "name")
    ]
    own = [f"set: {', '.join(changed)}"] if changed else []
    return [first, *own, *(f"note: {remark}" for remark in remarks(settings))]


def prepare_data(settings: Settings, display: Display) -> Data:
    """The data of these settings, from the cache if it was prepared before."""
    if not settings.model.sees_images:
        return prepare_corpus(settings, display)
    images = prepare_images(settings.data.path, cache_folder(), _progress(display))
    return _announced(images, settings, display)


def prepare_corpus(settings: Settings, display: Display) -> Corpus:
    """The tokenised corpus of these settings, from the cache if it was prepared before."""
    corpus = prepare(settings.data, settings.model.vocab, cache_folder(), _progress(display))
    return _announced(corpus, settings, display)


def _progress(display: Display) -> Callable[[str, int, int], None]:
    return lambda phase, done, total: display.progress(phase, done, total, "B")


def _announced(data: DataT, settings: Settings, display: Display) -> DataT:
    display.phase("data", data.summary())
    for note in data.notes:
        display.note(note)
    Feed(data, settings, torch.device("cpu"))  # too little of it is refused here, not later
    return data
