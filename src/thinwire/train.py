"""The story of a run, top to bottom: settings in, trained model out.

prepare the data -> start the peers -> lead them, and keep what they report
-> sum up: summary.json, plots, tables
"""

import time
from pathlib import Path
from typing import Any

from thinwire.engine.build import check_devices, choose_device, is_emulated
from thinwire.engine.worker import scratch
from thinwire.report import Display
from thinwire.run.peers import LocalPeers, coordinator_of, lead, neighbours
from thinwire.run.protocol import Assignment
from thinwire.run.record import RunRecord
from thinwire.run.signals import heeding, leave_at_once
from thinwire.run.start import make_start, opened, prepare_data
from thinwire.settings import Settings
from thinwire.wire import Identity


def train(
    settings: Settings,
    display: Display,
    resume: Path | None = None,
    allow_plugins: bool = False,
    peers: int = 0,
) -> dict[str, Any]:
    """Run to the end (or to a Ctrl-C, which drains and checkpoints); returns the summary.

    `allow_plugins`: import plugins that only the checkpoint to resume names. `peers`: in so many
    processes, each with neighbouring stages; 0: one for each stage.
    """
    started = time.monotonic()
    check_devices(settings)
    held = neighbours(settings.pipeline.stages, peers or settings.pipeline.stages)
    if is_emulated(settings.run.precision, choose_device(settings.run.device, 0)):
        display.note(
            "this CPU has no instructions for bf16 and emulates it, which takes a hundred times as "
            'long as fp32 or longer: set run.precision = "fp32"'
        )
    with (
        heeding(leave_at_once),
        opened(settings, display, resume, allow_plugins) as (settings, checkpoint, weights),
    ):
        folder, data = settings.run.folder, prepare_data(settings, display, weights, checkpoint)
        if checkpoint is None and weights is not None:
            checkpoint = make_start(weights, settings, folder, data, display)
        stages, origin = settings.pipeline.stages, checkpoint.folder if checkpoint else None
        source = f", from {origin}" if origin else ""
        where = f"in {peers} processes" if peers else "as processes"
        display.phase("start", f"{stages} stages {where}, links under mutual TLS{source}")
        began = checkpoint.step if checkpoint else 0
        order = Assignment(
            stages=[],
            identity=Identity("", ""),
            settings=settings.to_plain(),
            corpus=str(data.folder.resolve()),
            run_folder=str(folder.resolve()),
            resume=str(origin.resolve()) if origin else "",
        )
        coordinator = coordinator_of(settings, began, held)
        record = RunRecord(settings, folder, data, checkpoint, display)
        with (
            scratch(folder),
            LocalPeers(settings.run.device, order, held, began) as local,
            record.stopping(local.ask_to_stop),
        ):
            lead(coordinator, local, record)
            return record.finish(local.meter.moved_bytes(), coordinator.stop_asked, started)
