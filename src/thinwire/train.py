"""The story of a run, top to bottom: settings in, trained model out.

prepare the data -> start the peers -> lead them, and keep what they report
-> sum up: summary.json, plots, tables
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from thinwire.engine.build import check_devices, choose_device, is_emulated
from thinwire.engine.worker import scratch
from thinwire.report import Display
from thinwire.run.checkpoints import claim_folder
from thinwire.run.conduct import Course
from thinwire.run.coordinator import Coordinator
from thinwire.run.explosion import watch_losses
from thinwire.run.launch import LocalPeers
from thinwire.run.messages import Assign
from thinwire.run.peers import Peers, lead
from thinwire.run.record import RunRecord
from thinwire.run.signals import Interrupted, heeding, leave_at_once
from thinwire.run.start import (
    adopted,
    describe,
    make_start,
    open_origin,
    open_resume,
    prepare_data,
    refuse_other_data,
)
from thinwire.settings import Settings

EMULATED = (
    "this CPU has no instructions for bf16 and emulates it, which takes a hundred times as long as "
    'fp32 or longer: set run.precision = "fp32"'
)


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
    if is_emulated(settings.run.precision, choose_device(settings.run.device, 0)):
        display.note(EMULATED)
    folder = Path(settings.run.out) / settings.run.name
    checkpoint = open_resume(resume, settings, display, allow_plugins) if resume else None
    weights = checkpoint or open_origin(settings, display, allow_plugins)
    if weights is not None:
        settings = adopted(settings, weights.settings)
    with heeding(leave_at_once), claim_folder(folder, checkpoint):
        data = prepare_data(settings, display, weights)
        if checkpoint is not None:
            refuse_other_data(checkpoint, data.fingerprint)
        elif weights is not None:
            checkpoint = make_start(weights, settings, folder, data, display)
        stages, origin = settings.pipeline.stages, checkpoint.folder if checkpoint else None
        source = f", from {origin}" if origin else ""
        display.phase("start", f"{stages} stages as processes, links under mutual TLS{source}")
        assignment = Assign(
            settings=settings.to_plain(),
            corpus=str(data.folder.resolve()),
            run_folder=str(folder.resolve()),
            resume=str(origin.resolve()) if origin else "",
        )
        coordinator = Coordinator(
            stages,
            settings.run.patience,
            assignment,
            outage=settings.link.outage,
            losses=watch_losses(settings, folder, checkpoint),
            course=Course(settings, checkpoint.step if checkpoint else 0, stages),
        )
        record = RunRecord(settings, folder, data, checkpoint, display)
        with (
            scratch(folder),
            LocalPeers(settings, folder) as peers,
            stopping(peers.ask_to_stop, record),
        ):
            peers.start()
            follow(coordinator, peers, record)
            return record.finish(peers.control_bytes(), coordinator.stop_asked, started)


def follow(coordinator: Coordinator, peers: Peers, record: RunRecord) -> None:
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
