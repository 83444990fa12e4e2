"""Which checkpoints of a run are known to be good, written down beside them.

Weights can be ruined and still be finite, and so can the loss that they give. Only training shows
it: the next step's gradients are not finite, and no stage commits it. So a checkpoint counts as
proven once a step that began with its weights, or with later ones, was committed. The last
checkpoint of a run that ended in good order is taken on trust; it never displaces a proven one.

A loss can also explode and stay finite. So it is written down too which checkpoint has the best
validation: one of its own step, or else the next one.
"""

import dataclasses
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from thinwire.engine.checkpoint import (
    MANIFEST,
    Checkpoint,
    checkpoints_folder,
    list_checkpoints,
    list_checkpoints_at,
    step_of,
)
from thinwire.errors import CheckpointError
from thinwire.folders import replace_file

FILE = "proven.json"


@dataclass(frozen=True)
class Proof:
    """What is known of a run's checkpoints, by the number of updates they hold."""

    step: int = 0  # those of up to so many updates are proven
    ended: int = 0  # the run ended in good order with so many
    best: int | None = None  # that of the best validation, and its loss
    best_loss: float = math.inf

    def covers(self, checkpoint: Path) -> bool:
        """Whether a run may continue from this checkpoint without being told to."""
        return step_of(checkpoint) <= self.step or step_of(checkpoint) == self.ended

    def newest(self, run_folder: Path) -> Path | None:
        """The newest checkpoint that is proven."""
        proven = [p for p in list_checkpoints(run_folder) if step_of(p) <= self.step]
        return proven[-1] if proven else None

    def write(self, run_folder: Path) -> None:
        """Keep this for whoever resumes; in one rename, so that it is never half written."""
        path = checkpoints_folder(run_folder) / FILE
        try:
            known = {key: value for key, value in vars(self).items() if value != math.inf}
            replace_file(path, json.dumps(known).encode())
        except OSError as error:
            raise CheckpointError(
                f"cannot record in {path} which checkpoints are good: {error}"
            ) from error


def read_proof(run_folder: Path) -> Proof | None:
    """What was written; None for a run from before this was kept, or if it cannot be read."""
    try:
        values = json.loads((checkpoints_folder(run_folder) / FILE).read_text(encoding="utf-8"))
        proof = Proof(values["step"], values["ended"])
        best, loss = values.get("best"), values.get("best_loss")
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    if type(best) is int and type(loss) is float:
        proof = dataclasses.replace(proof, best=best, best_loss=loss)
    return proof if type(proof.step) is int and type(proof.ended) is int else None


def begin_proof(run_folder: Path, resumed: Checkpoint | None) -> Proof:
    """What is known when a run begins or goes on: nothing of the course that it leaves."""
    if resumed is None or not resumed.folder.resolve().is_relative_to(run_folder.resolve()):
        return Proof()
    before = read_proof(run_folder)
    if before is None:
        return Proof(resumed.step)
    if before.best is not None and before.best > resumed.step:
        before = Proof(before.step)
    return dataclasses.replace(before, step=min(before.step, resumed.step), ended=0)


def is_proven(checkpoint: Path) -> bool:
    """Whether a checkpoint is good as far as is known; what is older than proofs counts as good."""
    proof = read_proof(checkpoint.resolve().parent.parent)
    try:
        return proof is None or proof.covers(checkpoint)
    except ValueError:  # a copy under another name
        return True


def choose_checkpoint(place: Path) -> tuple[Path, str]:
    """The checkpoint to continue from, given one or a run's folder; and a note on the choice.

    A checkpoint that is named is taken as it is. In a run's folder it is the newest one known to
    be good.
    """
    found = [] if (place / MANIFEST).is_file() else list_checkpoints_at(place)
    if not found or is_proven(found[-1]):
        return place, ""
    unproven = f"no step was trained from {found[-1]} yet, so its weights may be ruined"
    good = [path for path in found if is_proven(path)]
    if not good:
        return place, f"{unproven}; it is used because there is no other"
    return good[-1], (
        f"{unproven}: continuing from {good[-1]}. To use the other, name it: --resume {found[-1]}"
    )


def open_newest(
    place: Path, allow_plugins: bool = False, trusted_plugins: Iterable[str] = ()
) -> tuple[Checkpoint, list[str]]:
    """The checkpoint to continue from, opened and verified; and notes on the choice.

    A checkpoint that is named must open. In a run's folder one that does not is passed over for
    the one before: CheckpointError only if none opens.
    """
    chosen, why = choose_checkpoint(place)
    found = [] if (place / MANIFEST).is_file() else list_checkpoints_at(place)
    newest = found[-1] if found and chosen == place else chosen
    before = sorted((p for p in found if p < newest), key=lambda p: (is_proven(p), p), reverse=True)
    notes, first = [why] if why else [], None
    for path in [newest, *before]:
        try:
            checkpoint = Checkpoint.open(path, allow_plugins, trusted_plugins)
            checkpoint.verify()
        except CheckpointError as error:
            first = first or error
            notes.append(f"{path} is passed over, for it does not open: {error}")
        else:
            return checkpoint, [*notes, f"continuing from {path}"] if first else notes
    assert first is not None, "one was tried"
    raise first
