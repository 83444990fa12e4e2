"""The checkpoints of a run under way: completed or dropped, proven, pruned.

Stages write their parts into a hidden folder (engine/checkpoint.py). Once all have written and
agree, the manifest is added and the folder gets its name in one rename. What is removed is first
renamed to a hidden name, so a folder called `step-` is always whole.
"""

import contextlib
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from thinwire.data import Corpus, Tokenizer
from thinwire.data.chat import CONFIG, ChatTemplate
from thinwire.engine.checkpoint import (
    FORMAT,
    MANIFEST,
    TOKENIZER,
    Checkpoint,
    Shard,
    checkpoints_folder,
    list_checkpoints,
    partial_folder,
    sealed,
    sha256_of,
    step_of,
)
from thinwire.engine.reports import ShardWritten
from thinwire.engine.worker import PATIENCE
from thinwire.errors import CheckpointError, StageError
from thinwire.folders import discard_replacements, next_free_name, put_in_place, write_file
from thinwire.report import Display
from thinwire.run.proof import Proof, begin_proof, is_proven
from thinwire.settings import Settings

ORIGIN = "origin"
"""What a manifest says of the weights that its run started from, if it did."""


def origin_in(checkpoint: Checkpoint | None) -> dict[str, Any]:
    """What a checkpoint says of the weights that its run started from, under its name."""
    origin = checkpoint.manifest.get(ORIGIN) if checkpoint is not None else None
    return {ORIGIN: origin} if isinstance(origin, dict) else {}


class Checkpoints:
    """Completes the checkpoints of one run; a full disk costs a checkpoint, not the training."""

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        data: Corpus,
        resumed: Checkpoint | None,
        display: Display,
    ):
        self.latest: Path | None = None
        self.failed: dict[int, str] = {}  # why there is no checkpoint of a step
        self._settings = settings
        self._folder = folder
        self._data = data
        self._resumed = resumed
        self._display = display
        self._proof, self._proof_is_due = Proof(), False
        self._validations: dict[int, float] = {}  # losses, by step

    def begin(self) -> None:
        """Training begins: later checkpoints are set aside and prove nothing."""
        if self._resumed is not None:
            for moved in set_aside_later(self._folder, self._resumed.step):
                self._display.note(
                    f"a later checkpoint, which this run does not continue, is kept as {moved}"
                )
        self._proof = begin_proof(self._folder, self._resumed)
        self._proof.write(self._folder)
        self._proof_is_due = bool(list_checkpoints(self._folder))

    def complete(self, step: int, parts: list[ShardWritten]) -> None:
        """Make a checkpoint of the parts of all stages."""
        facts = {
            "settings": self._settings.to_plain(),
            "config_hash": self._settings.hash,
            "corpus": self._data.fingerprint,
            "codec_memory": {cut: legs for p in parts for cut, legs in p.agreements.items()},
            **vars(parts[0].versions),
            **origin_in(self._resumed),
        }
        shards = [part.shard for part in parts]
        try:
            data = self._data
            self.latest = commit(
                self._folder, step, shards, facts, data.tokenizer(), data.template()
            )
        except CheckpointError as error:
            self.drop(step, str(error))
            return
        self._choose_best()
        self._settle()
        self._display.phase("save", f"checkpoint of step {step} in {self.latest}")

    def drop(self, step: int, error: str) -> None:
        """Remove what there is of a checkpoint that cannot be completed."""
        discard_partial(self._folder, step)
        if error:
            self.failed[step] = error
            self._display.note(
                f"checkpoint of step {step} not written, training continues: {error}"
            )

    def prove(self, step: int) -> None:
        """Weights after `step` updates have trained: checkpoints up to there are good."""
        self._proof = replace(self._proof, step=max(step, self._proof.step))
        if self._proof_is_due:
            self._settle()

    def doubt(self) -> None:
        """The loss has exploded: nothing after the best validation counts as good."""
        if self.best() is not None:
            self._proof = replace(self._proof, step=min(self._proof.step, self._proof.best or 0))
            self._settle()

    def validated(self, step: int, loss: float) -> None:
        """A validation of the weights after `step` updates."""
        if math.isfinite(loss):
            self._validations[step] = loss
            if self._choose_best():
                self._settle()

    def end(self, step: int) -> None:
        """The run ended in good order after `step` updates."""
        self._write_proof(ended=step)

    def last_good(self) -> Path | None:
        """The newest checkpoint from which a step was trained and committed."""
        if (good := self._proof.newest(self._folder)) is not None:
            return good
        resumed = self._resumed
        if resumed and (self._proof.step >= resumed.step or is_proven(resumed.folder)):
            return resumed.folder
        return None

    def best(self) -> Path | None:
        """The checkpoint of the best validation."""
        paths = list_checkpoints(self._folder)
        return next((path for path in paths if step_of(path) == self._proof.best), None)

    def _choose_best(self) -> bool:
        """Look for the checkpoint of the best validation; whether it is another one now.

        Where steps of the two do not meet, the first validation after a checkpoint is its own: one
        before it says nothing of what came in between.
        """
        before = self._proof
        if self.best() is None:
            self._proof = replace(self._proof, best=None, best_loss=math.inf)
        for path in list_checkpoints(self._folder):
            later = [step for step in self._validations if step >= step_of(path)]
            loss = self._validations[min(later)] if later else math.inf
            if loss < math.inf and loss <= self._proof.best_loss:
                self._proof = replace(self._proof, best=step_of(path), best_loss=loss)
        return self._proof != before

    def _settle(self) -> None:
        """Write down which checkpoints are good, and remove those that are no longer needed."""
        good = self._proof.newest(self._folder)
        self._proof_is_due = [good] != list_checkpoints(self._folder)[-1:]
        self._write_proof()
        if self.latest is not None:
            prune(self._folder, self._settings.train.keep, self.latest, good, self.best())

    def _write_proof(self, ended: int = 0) -> None:
        try:
            replace(self._proof, ended=ended).write(self._folder)
        except CheckpointError as error:
            self._display.note(str(error))


def commit(
    run_folder: Path,
    step: int,
    shards: list[Shard],
    facts: dict[str, Any],
    tokenizer: Tokenizer | None,
    template: ChatTemplate | None = None,
) -> Path:
    """Make the partial checkpoint of `step` the real one, in one rename; returns its folder."""
    partial = partial_folder(run_folder, step)
    final = checkpoints_folder(run_folder) / f"step-{step:08d}"
    manifest = {"format": FORMAT, "step": step, **facts, "shards": [vars(s) for s in shards]}
    try:
        if tokenizer is not None:
            tokenizer.save(partial / TOKENIZER)
            manifest["tokenizer_sha256"] = sha256_of(partial / TOKENIZER)
        if template is not None:
            write_file(partial / CONFIG, template.json().encode())
            manifest["template_sha256"] = sha256_of(partial / CONFIG)
        write_file(partial / MANIFEST, json.dumps(sealed(manifest), indent=1).encode())
        replaced = _hidden(final, "replaced")
        if final.exists():  # the same step again, after a resume from an earlier one
            final.rename(replaced)
        put_in_place(partial, final)
        shutil.rmtree(replaced, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint of step {step} cannot be completed in {partial}: {error}. "
            "Earlier checkpoints are untouched; free some space or choose another run.out"
        ) from error
    return final


def discard_partial(run_folder: Path, step: int | None = None) -> None:
    """Remove what failed or interrupted work left behind: that of one step, or all of it.

    A checkpoint that was to be replaced, and was not, takes its place again.
    """
    folder = checkpoints_folder(run_folder)
    which = "step-*" if step is None else f"step-{step:08d}"
    for replaced in folder.glob(f".replaced-{which}"):
        final = folder / replaced.name.removeprefix(".replaced-")
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):  # it is still there for the next attempt
                replaced.rename(final)
    for kind in ("partial", "pruned"):
        for leftover in folder.glob(f".{kind}-{which}"):
            shutil.rmtree(leftover, ignore_errors=True)
    if step is None:
        discard_replacements(run_folder)
        discard_replacements(folder)


def prune(run_folder: Path, keep: int, latest: Path, *needed: Path | None) -> None:
    """Keep `latest` and the newest of the others, `keep` in all; `needed` stay in any case."""
    others = [path for path in list_checkpoints(run_folder) if path != latest]
    for old in others[: max(0, len(others) - (keep - 1))]:
        if old in needed:
            continue
        pruned = _hidden(old, "pruned")
        with contextlib.suppress(OSError):  # one too many is no reason to stop training
            old.rename(pruned)
            shutil.rmtree(pruned)


def set_aside_later(run_folder: Path, step: int) -> list[Path]:
    """Rename checkpoints after `step`, from which a run continues; returns where they are.

    Left in place, the old course would look like the newer one to whoever resumes next.
    """
    moved = []
    for path in list_checkpoints(run_folder):
        if step_of(path) <= step:
            continue
        aside = path.with_name(next_free_name(path.parent, f"abandoned-{path.name}"))
        try:
            path.rename(aside)
        except OSError as error:
            raise CheckpointError(f"cannot set the later {path} aside: {error}") from error
        moved.append(aside)
    return moved


def _hidden(checkpoint: Path, kind: str) -> Path:
    """The name that a checkpoint bears while it is on its way out."""
    return checkpoint.with_name(f".{kind}-{checkpoint.name}")


def divergence(misses: int, step: int, good: Path | None, origin: str) -> StageError | None:
    """Why to give up, with a way back, once updates have been refused too often in a row."""
    if misses < PATIENCE:
        return None
    return StageError(
        f"gradients were not finite in {misses} steps in a row, up to step {step}: "
        f'{way_back(good, origin)} with a lower optim.lr, or with codec.backward = "fp32"'
    )


def way_back(good: Path | None, origin: str = "") -> str:
    """Where the last good weights of a run are, and what to do with them or without any.

    First what is known of the origin of the trouble.
    """
    known = f"{origin}; " if origin else ""
    if good is None:
        return f"{known}no good checkpoint exists. Start a new run"
    return f"{known}the last good weights are in {good}. Resume from there"
