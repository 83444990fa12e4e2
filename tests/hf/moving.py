"""Checkpoints on their way to Hugging Face's format, and models on their way from it."""

from io import StringIO

import torch

from thinwire.engine.checkpoint import Checkpoint
from thinwire.hf.export import Wanted, export
from thinwire.hf.importer import import_model
from thinwire.report import PlainDisplay

IDS = torch.tensor([[7, 3, 11, 250, 9, 31, 8, 77, 5, 2, 19, 23, 4, 90, 120, 6]])


def exported(place, folder, **wanted):
    """What the user is told of an export."""
    said = StringIO()
    export(Checkpoint.open(place), Wanted(folder, **wanted), PlainDisplay(said))
    return said.getvalue()


def imported(source, target, stages=2, context=0, force=False):
    import_model(str(source), target, stages, context, force)
    return target
