"""Checkpoints on their way to Hugging Face's format, and models on their way from it."""

from io import StringIO
from pathlib import Path
from typing import Any

import torch

from thinwire.engine.checkpoint import Checkpoint
from thinwire.hf.export import Wanted, export
from thinwire.hf.importer import opened, plan_import, write_import
from thinwire.report import PlainDisplay

IDS = torch.tensor([[7, 3, 11, 250, 9, 31, 8, 77, 5, 2, 19, 23, 4, 90, 120, 6]])


def exported(place: Path, folder: Path, **wanted: Any) -> str:
    """What the user is told of an export."""
    said = StringIO()
    export(Checkpoint.open(place), Wanted(folder, **wanted), PlainDisplay(said))
    return said.getvalue()


def imported(
    source: Path, target: Path, stages: int = 2, context: int = 0, force: bool = False
) -> Path:
    with opened(str(source)) as origin:
        plan = plan_import(origin, stages, context)
        return write_import(plan, target, force, lambda done, total: None)
