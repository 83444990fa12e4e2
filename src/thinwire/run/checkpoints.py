"""The folder of a run and its checkpoints: claimed, completed or dropped, proven, pruned, opened.

Weights can be ruined and still be finite, and so can their loss: only training shows it. So a
checkpoint counts as proven once a step that began with its weights, or with later ones, was
committed. The last one of a run that ended in good order is taken on trust, and never displaces a
proven one. The one of the best validation is written down too.
"""

import contextlib
import json
import math
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from thinwire.data import Corpus, Tokenizer
from thinwire.data.chat import CONFIG, ChatTemplate
from thinwire.engine import checkpoint as ck
from thinwire.engine.reports import ShardWritten
from thinwire.errors import CheckpointError, ConfigError
from thinwire.folders import claimed, next_free_name, replace_file, replace_folder, write_file
from thinwire.report import Display
from thinwire.settings import Settings

PROVEN = "proven.json"
UNTRAINED = ck.Versions(0, 0)
ORIGIN = "origin"  # what a manifest says of the weights that its run started from


def origin_in(checkpoint: ck.Checkpoint | None) -> dict[str, Any]:
    """What a checkpoint says of the weights that its run started from, under its name."""
    origin = checkpoint.manifest.get(ORIGIN) if checkpoint is not None else None
    return {ORIGIN: origin} if isinstance(origin, dict) else {}


@contextlib.contextmanager
def claim_folder(
    folder: Path, checkpoint: ck.Checkpoint | None, goes_on: bool = False
) -> Iterator[None]:
    """Hold a run's folder: never beside a process, nor over another run; `goes_on`: it is this."""
    with claimed(folder, "wait for it, stop it, or choose another name (--set run.name=...)"):
        if not goes_on:
            _refuse_other_run(folder, checkpoint)
        discard_partial(folder)
        try:
            yield
        finally:
            discard_partial(folder)


def _refuse_other_run(folder: Path, checkpoint: ck.Checkpoint | None) -> None:
    """A folder that holds a run is for that run alone."""
    record, saved = folder / "metrics.jsonl", ck.list_checkpoints(folder)
    if not saved and not (record.is_file() and record.stat().st_size):
        return
    if checkpoint is None:
        way = f": {'continue it with --resume, or ' if saved else ''}choose another name"
    elif not checkpoint.folder.resolve().is_relative_to(folder.resolve()):
        other = f", but not that of {checkpoint.folder}"
        way = f"{other}: resume into that run's own folder, or choose a new name"
    else:
        return
    raise ConfigError(f"{folder} already holds a run{way} (--set run.name=...)")


class Proof(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is known of a run's checkpoints, by the number of updates they hold."""

    step: int  # those of up to so many updates are proven
    ended: int = 0  # the run ended in good order with so many
    best: int | None = None  # that of the best validation, and its loss
    best_loss: float = math.inf

    def newest(self, run_folder: Path) -> Path | None:
        """The newest checkpoint that is proven."""
        proven = [p for p in ck.list_checkpoints(run_folder) if ck.step_of(p) <= self.step]
        return proven[-1] if proven else None

    def write(self, run_folder: Path) -> None:
        """Keep this for whoever resumes; in one rename, so that it is never half written."""
        replace_file(ck.checkpoints_folder(run_folder) / PROVEN, msgspec.json.encode(self))


ALL_GOOD = Proof(sys.maxsize)  # of a run from before proofs were kept


def read_proof(run_folder: Path) -> Proof:
    """What was written; if there is nothing, or it cannot be read, all counts as good."""
    try:
        text = (ck.checkpoints_folder(run_folder) / PROVEN).read_bytes()
        return msgspec.json.decode(text, type=Proof)
    except (OSError, ValueError):
        return ALL_GOOD


def begin_proof(run_folder: Path, resumed: ck.Checkpoint | None) -> Proof:
    """What is known when a run begins or goes on: nothing of the course that it leaves."""
    if resumed is None or not resumed.folder.resolve().is_relative_to(run_folder.resolve()):
        return Proof(0)
    before = read_proof(run_folder)
    if before.best is not None and before.best > resumed.step:
        before = Proof(before.step)
    return replace(before, step=min(before.step, resumed.step), ended=0)


def is_proven(checkpoint: Path) -> bool:
    """Whether a checkpoint is good as far as is known; so is a copy under another name."""
    proof = read_proof(checkpoint.resolve().parent.parent)
    try:
        return ck.step_of(checkpoint) <= proof.step or ck.step_of(checkpoint) == proof.ended
    except ValueError:
        return True


def open_newest(
    place: Path, allow_plugins: bool = False, trusted_plugins: Iterable[str] = ()
) -> tuple[ck.Checkpoint, list[str]]:
    """The checkpoint that is named, or of a run the newest that is good and opens; and notes."""
    found = [] if (place / ck.MANIFEST).is_file() else ck.list_checkpoints(place)
    good = [path for path in found if is_proven(path)]
    candidates, notes = [*reversed(good or found)] or [place], []
    if found and found[-1] not in good:
        way = "it is used because there is no other"
        if good:
            way = f"continuing from {good[-1]}. To use the other, name it: --resume {found[-1]}"
        unproven = f"no step was trained from {found[-1]} yet, so its weights may be ruined"
        notes.append(f"{unproven}; {way}")
    errors: list[CheckpointError] = []
    for path in candidates:
        try:
            checkpoint = ck.Checkpoint.open(path, allow_plugins, trusted_plugins)
            checkpoint.verify()
        except CheckpointError as error:
            errors.append(error)
            notes.append(f"{path} is passed over, for it does not open: {error}")
        else:
            return checkpoint, [*notes, f"continuing from {path}"] if errors else notes
    if others := [path for path in found if path not in candidates]:
        way = f"to use one from which no step was trained yet, name it: --resume {others[-1]}"
        raise CheckpointError(f"{errors[0]}; {way}")
    raise errors[0]


@dataclass
class Checkpoints:
    """Completes the checkpoints of one run; a full disk costs a checkpoint, not the training."""

    settings: Settings
    folder: Path
    data: Corpus
    resumed: ck.Checkpoint | None
    display: Display
    latest: Path | None = None
    failed: dict[int, str] = field(default_factory=dict)  # why there is no checkpoint of a step
    _proof: Proof = field(default_factory=lambda: Proof(0))
    _proof_is_due: bool = False  # there is a checkpoint that is not proven
    _validations: dict[int, float] = field(default_factory=dict)  # losses, by step

    def begin(self) -> float:
        """Training begins: later checkpoints are set aside. The best validation loss before."""
        for moved in set_aside_later(self.folder, self.resumed.step) if self.resumed else ():
            later = "a later checkpoint, which this run does not continue"
            self.display.note(f"{later}, is kept as {moved}")
        self._proof = begin_proof(self.folder, self.resumed)
        self._proof.write(self.folder)
        self._proof_is_due = bool(ck.list_checkpoints(self.folder))
        return self._proof.best_loss

    def complete(self, step: int, parts: list[ShardWritten]) -> None:
        """Make a checkpoint of the parts of all stages."""
        shards = [part.shard for part in parts]
        memory = {cut: legs for part in parts for cut, legs in part.agreements.items()}
        facts = facts_of(self.settings, self.data, memory, parts[0].versions)
        facts |= origin_in(self.resumed)
        written_with = self.data.tokenizer(), self.data.template()
        try:
            self.latest = commit(self.folder, step, shards, facts, *written_with)
        except CheckpointError as error:
            self.drop(step, str(error))
            return
        self._choose_best()
        self._settle()
        self.display.phase("save", f"checkpoint of step {step} in {self.latest}")

    def drop(self, step: int, error: str) -> None:
        """Remove what there is of a checkpoint that cannot be completed."""
        discard_partial(self.folder, step)
        if error:
            self.failed[step] = error
            goes_on = ", training continues" if step < self.settings.train.steps else ""
            self.display.note(f"checkpoint of step {step} not written{goes_on}: {error}")

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

    def way_back(self, after_best: bool = False) -> str:
        """Where good weights are, if any: the last; `after_best`, those of the best validation."""
        if after_best and (best := self.best()) is not None:
            return f"the weights of the best validation are in {best}. Resume from there"
        good, resumed = self._proof.newest(self.folder), self.resumed
        if resumed and (self._proof.step >= resumed.step or is_proven(resumed.folder)):
            good = good or resumed.folder
        if good is None:
            return "no good checkpoint exists. Start a new run"
        return f"the last good weights are in {good}. Resume from there"

    def best(self) -> Path | None:
        """The checkpoint of the best validation."""
        paths = ck.list_checkpoints(self.folder)
        return next((path for path in paths if ck.step_of(path) == self._proof.best), None)

    def _choose_best(self) -> bool:
        """Look for the checkpoint of the best validation; whether it is another one now. The first
        validation after a checkpoint is its own: one before it says nothing of what came between.
        """
        before = self._proof
        if self.best() is None:
            self._proof = replace(self._proof, best=None, best_loss=math.inf)
        for path in ck.list_checkpoints(self.folder):
            later = [step for step in self._validations if step >= ck.step_of(path)]
            loss = self._validations[min(later)] if later else math.inf
            if loss < math.inf and loss <= self._proof.best_loss:
                self._proof = replace(self._proof, best=ck.step_of(path), best_loss=loss)
        return self._proof != before

    def _settle(self) -> None:
        """Write down which checkpoints are good, and remove those that are no longer needed."""
        good = self._proof.newest(self.folder)
        self._proof_is_due = [good] != ck.list_checkpoints(self.folder)[-1:]
        self._write_proof()
        if self.latest is not None:
            prune(self.folder, self.settings.train.keep, self.latest, good, self.best())

    def _write_proof(self, ended: int = 0) -> None:
        try:
            replace(self._proof, ended=ended).write(self.folder)
        except OSError as error:
            self.display.note(f"cannot record in {PROVEN} which checkpoints are good: {error}")


def last_checkpoint(run_folder: Path) -> int | None:
    """The step of the newest checkpoint of a run."""
    return max(map(ck.step_of, ck.list_checkpoints(run_folder)), default=None)


def facts_of(
    settings: Settings, data: Corpus, memory: dict[str, Any], versions: ck.Versions = UNTRAINED
) -> dict[str, Any]:
    """What a manifest says of the run that a checkpoint is of."""
    plain = {"settings": settings.to_plain(), "config_hash": settings.hash}
    return {**plain, "corpus": data.fingerprint, "codec_memory": memory, **vars(versions)}


def commit(
    run_folder: Path,
    step: int,
    shards: list[ck.Shard],
    facts: dict[str, Any],
    tokenizer: Tokenizer | None,
    template: ChatTemplate | None = None,
) -> Path:
    """Make the partial checkpoint of `step` the real one, in one rename; returns its folder."""
    partial = ck.partial_folder(run_folder, step)
    final = ck.checkpoints_folder(run_folder) / f"step-{step:08d}"
    manifest = {"format": ck.FORMAT, "step": step, **facts, "shards": [vars(s) for s in shards]}
    try:
        if tokenizer is not None:
            tokenizer.save(partial / ck.TOKENIZER)
            manifest["tokenizer_sha256"] = ck.sha256_of(partial / ck.TOKENIZER)
        if template is not None:
            write_file(partial / CONFIG, template.json().encode())
            manifest["template_sha256"] = ck.sha256_of(partial / CONFIG)
        write_file(partial / ck.MANIFEST, json.dumps(ck.sealed(manifest), indent=1).encode())
        replace_folder(partial, final)
    except OSError as error:
        lost = f"the checkpoint of step {step} cannot be completed in {partial}: {error}"
        way = "Earlier checkpoints are untouched; free some space or choose another run.out"
        raise CheckpointError(f"{lost}. {way}") from error
    return final


def discard_partial(run_folder: Path, step: int | None = None) -> None:
    """Remove what failed or interrupted work left behind: that of one step, or all of it."""
    which = "step-*" if step is None else f"step-{step:08d}"
    for leftover in ck.checkpoints_folder(run_folder).glob(f".*-{which}"):
        shutil.rmtree(leftover, ignore_errors=True)


def prune(run_folder: Path, keep: int, latest: Path, *needed: Path | None) -> None:
    """Keep `latest` and the newest of the others, `keep` in all; `needed` stay in any case."""
    others = [path for path in ck.list_checkpoints(run_folder) if path != latest]
    for old in others[: max(0, len(others) - (keep - 1))]:
        if old not in needed:
            pruned = old.with_name(f".pruned-{old.name}")
            with contextlib.suppress(OSError):  # one too many is no reason to stop training
                old.rename(pruned)
                shutil.rmtree(pruned)


def set_aside_later(run_folder: Path, step: int) -> list[Path]:
    """Rename checkpoints after `step`, where a run continues: they would look like its newest."""
    later = [path for path in ck.list_checkpoints(run_folder) if ck.step_of(path) > step]
    names = [next_free_name(path.parent, f"abandoned-{path.name}") for path in later]
    return [path.rename(path.with_name(name)) for path, name in zip(later, names, strict=True)]
