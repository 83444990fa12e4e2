"""Checkpoint shards on their way to the host: in the background, resumable, hashed.

Each stage writes its shard on its own machine and reports it (ShardWritten), as in a local run.
The host then fetches the file, at a bounded share of the member's uplink, while training goes on.

On the host: one `ShardCollector` for each epoch. RemotePeers tells it of each ShardWritten
(`announce`) and ShardFailed (`give_up`) that a control stream brings, *and* passes both on to the
coordinator, which was made with `parts_travel=True`. The collector's `on_arrived`, `on_lost` and
`on_refused` become the events PartArrived, PartLost and PartRefused (`said.note`). A file counts
once it was opened and `objection` has nothing against it (engine/shard_check.py); that happens on
the thread of its connection, while training goes on. For each connection `store-NAME` that is
accepted, again and again (`is_replaceable=True`), a thread calls
`collect_from(NAME, stages, pipe)`, which returns when the connection is lost. After the Commit of
a step call `settled(step)`, and at the end of the epoch `close()`.

On a member: one `ShardSender` in the supervising process, with the folder that its child was given
as `run_folder` and a `Pace` of link.shard_share of the measured uplink. A thread calls
`keep_serving(connect)`. When training is over, `pace.change(0)` gives it the whole uplink.

Which checkpoints travel: one step at a time, all stages of it. A checkpoint that comes due
meanwhile waits, and of several that wait the newest goes next; the others are dropped, with a
reason that the run shows. So a slow uplink gets fewer checkpoints, never a growing queue, and the
one under way always arrives. Members keep their own file until a later step is complete.
"""

import collections
import contextlib
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

import torch

from thinwire.codec import build_codecs
from thinwire.engine.build import StageBuilder
from thinwire.engine.checkpoint import Shard, checkpoints_folder, partial_folder
from thinwire.engine.reports import ShardWritten
from thinwire.errors import CheckpointError, ConfigError, ThinwireError, WireError, printable
from thinwire.remote.pieces import (
    SILENCE_S,
    Done,
    Dropped,
    Pace,
    Refusal,
    Talk,
    Want,
    give,
    take,
)
from thinwire.settings import Settings
from thinwire.settings.crossing import wire_shape
from thinwire.settings.precision import WEIGHT_TYPES
from thinwire.wire import Meter, Pipe

REDIAL_S = (1.0, 30.0)  # the first and the longest pause between two attempts
KEPT_SHARDS = 4  # that a member keeps for a host which says nothing of them
LOOK_S = 2.0  # between two looks for more
_REMEMBERED = 64  # steps that were given up, of which parts may still be announced
_HEADER_BYTES = 4096  # for a tensor's name, type and place in its file, and more than that
_STATES = 3  # of the size of a parameter at most: itself and two moments

Told = Callable[[int, int], None]
"""Of a stage and a step: its shard is here."""
Lost = Callable[[int, int, str], None]
"""Of a stage and a step: its shard will not come, or is not what it must be, and why."""
Objection = Callable[[int, ShardWritten, Path], str]
"""Why a file is not the part that a stage has reported; empty if it is."""


def incoming_folder(run_folder: Path) -> Path:
    """Where the host keeps what has arrived of shards; names in it are made of numbers and hashes
    that were checked, never of what a peer wrote.
    """
    return checkpoints_folder(run_folder) / ".incoming"


def most_shard_bytes(settings: Settings, stage: int) -> int:
    """The largest file that a stage's part of a checkpoint can be: none is taken beyond it."""
    built = StageBuilder(settings, torch.device("meta")).build(stage)
    width = WEIGHT_TYPES[settings.run.precision].itemsize
    parameters = built.global_parameters()
    state = sum(_STATES * p.numel() * width for p in parameters.values())
    state += 3 * 8 * settings.model.dim**2  # a basis, the next one, and their covariance
    if settings.boundary.shares_embedding:  # gradients that wait, counts and times of rows
        state += settings.model.vocab * (settings.model.dim * width + 2 * 8)
    names = _STATES * len(parameters) + 64
    cuts = [cut for cut in (stage - 1, stage) if 0 <= cut < settings.pipeline.stages - 1]
    for cut in cuts:
        tensor = 8 * math.prod(wire_shape(settings, cut))
        for codec in build_codecs(*settings.codec.names(cut)).values():
            if codec.remembers:
                state += 4 * settings.pipeline.microbatches * tensor
                state += settings.codec.memory_mb << 20 if codec.remembers_examples else 0
                names += 8 * settings.pipeline.microbatches
    return state + names * _HEADER_BYTES


@dataclass
class _Told:
    """What a member has heard over one connection."""

    done: int = -1
    dropped: set[int] = field(default_factory=set)


class ShardCollector:
    """On the host: fetches the shards of one epoch, one checkpoint after the other.

    `limits` are the most bytes of each stage's shard. `patience`: seconds without a byte of the
    checkpoint under way before it is given up; 0 = never.
    """

    def __init__(
        self,
        run_folder: Path,
        limits: Collection[int],
        objection: Objection,
        on_arrived: Told,
        on_lost: Lost,
        on_refused: Lost,
        patience: float = 900.0,
        silence: float = SILENCE_S,
        meter: Meter | None = None,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ):
        self.meter = meter or Meter()
        self._on_progress = on_progress  # of all stages together: bytes that are here, and in all
        self._run_folder = run_folder
        self._incoming = incoming_folder(run_folder)
        self._limits = list(limits)
        self._objection_to = objection
        self._on_arrived, self._on_lost, self._on_refused = on_arrived, on_lost, on_refused
        self._patience, self._silence = patience, silence
        self._changed = threading.Condition()  # guards all that follows
        self._announced: dict[int, dict[int, ShardWritten]] = {}  # by step and stage
        self._given_up: collections.OrderedDict[int, str] = collections.OrderedDict()
        self._current: int | None = None  # the step whose shards travel
        self._missing: set[int] = set()  # its stages whose shards are not here
        self._taken: set[int] = set()  # ... and are being fetched
        self._have: dict[int, int] = {}  # bytes of its shards that are here, by stage
        self._settled = -1
        self._closed = False
        self._moved_at = time.monotonic()
        if patience:
            threading.Thread(target=self._watch, name="thinwire shards", daemon=True).start()

    def announce(self, stage: int, written: ShardWritten) -> None:
        """A stage says that it has written its shard of a step."""
        step, objection = written.step, self._objection(stage, written.shard)
        with self._changed:
            reason = self._given_up.get(step, "")
            self._announced.setdefault(step, {})[stage] = written
            if objection or reason:
                self._give_up(step, reason or objection)
            self._choose()

    def give_up(self, step: int, reason: str) -> None:
        """The checkpoint of a step cannot be had: fetch none of its shards."""
        with self._changed:
            self._give_up(step, reason)
            self._choose()

    def forget(self) -> None:
        """The run is complete: nothing that has arrived of shards is of use any more."""
        shutil.rmtree(self._incoming, ignore_errors=True)

    def settled(self, step: int) -> None:
        """The checkpoint of a step is complete: members need not keep earlier shards."""
        with self._changed:
            self._settled = max(self._settled, step)
            self._changed.notify_all()
        for part in self._incoming.glob(f"stage-*-{step}-*.part"):
            part.unlink(missing_ok=True)

    def underway(self) -> list[int]:
        """The stages whose shards of the current checkpoint are not here yet."""
        with self._changed:
            return sorted(self._missing)

    def close(self) -> None:
        """Fetch nothing more; what has arrived stays for a later epoch."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def collect_from(self, member: str, stages: Collection[int], pipe: Pipe) -> None:
        """Fetch the shards of these stages over this connection, until it is lost or all is over.

        On a thread of its own. Nothing is lost with the connection: the next one goes on.
        """
        talk, told = Talk(pipe, self.meter), _Told()
        try:
            while (job := self._next_job(stages, told)) is not None:
                if isinstance(job, Done | Dropped):
                    talk.say(job)
                else:
                    self._fetch(talk, member, *job)
        except WireError:
            return  # the member dials again
        finally:
            pipe.close(0)

    def _fetch(self, talk: Talk, member: str, stage: int, written: ShardWritten) -> None:
        step = written.step
        try:
            refused = self._take(talk, stage, written)
        except (CheckpointError, ConfigError) as error:
            self.give_up(step, f"the shard of stage {stage} from {member}: {error}")
        except OSError as error:
            self.give_up(step, f"the shard of stage {stage} cannot be kept: {error}")
        else:
            if refused:
                reason = f"the shard of stage {stage} from {member} is not its state: {refused}"
                self._on_refused(stage, step, reason)
                self.give_up(step, reason)
            else:
                self._arrive(step, stage)
        finally:
            with self._changed:
                self._taken.discard(stage)
                self._changed.notify_all()

    def _take(self, talk: Talk, stage: int, written: ShardWritten) -> str:
        """Fetch a shard and put it where its checkpoint is made; or why it must not be there."""
        step, shard = written.step, written.shard
        part = self._part(step, stage, shard)
        want = Want(step, stage, shard.sha256, shard.bytes, 0)
        take(talk, want, part, lambda done: self._note_progress(step, stage, done), self._silence)
        if refused := self._objection_to(stage, written, part):
            part.unlink()
            return refused
        place = partial_folder(self._run_folder, step) / f"stage-{stage}.safetensors"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        link_or_copy(part, place)  # the part stays, in case this epoch ends before its checkpoint
        return ""

    def _part(self, step: int, stage: int, shard: Shard) -> Path:
        """Where a shard arrives: what there is of it from before, and of no other of this stage."""
        part = self._incoming / f"stage-{stage}-{step}-{shard.sha256}.part"
        for other in self._incoming.glob(f"stage-{stage}-*.part"):
            if other != part and other.name.endswith(f"-{shard.sha256}.part"):
                other.rename(part)
            elif other != part:
                other.unlink()
        return part

    def _objection(self, stage: int, shard: Shard) -> str:
        """Why a shard is not even asked for; empty if it is."""
        if not re.fullmatch(r"[0-9a-f]{64}", shard.sha256):
            return f"stage {stage} reported no sha256 of its shard: {printable(shard.sha256, 80)!r}"
        if shard.file != f"stage-{stage}.safetensors":
            return f"stage {stage} reported the file {printable(shard.file, 80)!r}"
        if not 0 < shard.bytes <= self._limits[stage]:
            return (
                f"stage {stage} reported a shard of {shard.bytes:,} bytes, but its state takes at "
                f"most {self._limits[stage]:,}"
            )
        return ""

    def _next_job(
        self, stages: Collection[int], told: "_Told"
    ) -> tuple[int, ShardWritten] | Done | Dropped | None:
        """What a member is asked for next, or told; None once all is over."""
        with self._changed:
            while not self._closed:
                waiting = sorted((self._missing & set(stages)) - self._taken)
                if self._current is not None and waiting:
                    self._taken.add(waiting[0])
                    return waiting[0], self._announced[self._current][waiting[0]]
                done = min([self._settled, *self._announced])  # what may travel yet is kept
                if done > told.done:
                    told.done = done
                    return Done(done)
                told.dropped &= self._given_up.keys()
                for step in self._given_up:
                    if step not in told.dropped:
                        told.dropped.add(step)
                        return Dropped(step)
                self._changed.wait()
            return None

    def _arrive(self, step: int, stage: int) -> None:
        with self._changed:
            if step != self._current or stage not in self._missing:
                return
            self._missing.discard(stage)
            self._on_arrived(stage, step)
            if not self._missing:
                self._current = None
                self._announced.pop(step)
                self._choose()

    def _give_up(self, step: int, reason: str) -> None:
        if step not in self._given_up:
            self._given_up[step] = reason
            while len(self._given_up) > _REMEMBERED:
                self._given_up.popitem(last=False)
        for stage in sorted(self._announced.pop(step, {})):
            if step != self._current or stage in self._missing:
                self._on_lost(stage, step, reason)
        if step == self._current:
            self._current, self._missing = None, set()

    def _choose(self) -> None:
        """If none is under way: the newest checkpoint of which all stages have written theirs."""
        whole = [s for s, parts in self._announced.items() if len(parts) == len(self._limits)]
        if self._current is None and whole:
            newest = max(whole)
            for older in sorted(step for step in self._announced if step < newest):
                self._give_up(older, f"that of step {newest} came due before it could be sent")
            self._current, self._missing = newest, set(range(len(self._limits)))
            self._have = {}
            self._moved_at = time.monotonic()
        self._changed.notify_all()

    def _note_progress(self, step: int, stage: int, done: int) -> None:
        with self._changed:
            self._moved_at = time.monotonic()
            if step != self._current or self._closed:
                # The rest would keep the uplink from what is wanted now; the member dials again.
                raise WireError(f"the checkpoint of step {step} is no longer waited for")
            self._have[stage] = done
            total = sum(part.shard.bytes for part in self._announced[step].values())
            here = sum(self._have.values())
        self._on_progress(here, total)

    def _watch(self) -> None:
        """Give a checkpoint up of which nothing has come for too long."""
        with self._changed:
            while not self._closed:
                self._changed.wait(min(1.0, self._patience / 4))
                quiet = time.monotonic() - self._moved_at
                if self._current is not None and quiet > self._patience:
                    which = ", ".join(f"stage {stage}" for stage in sorted(self._missing))
                    reason = f"nothing of the shard of {which} has come for {quiet:.0f} s"
                    self._give_up(self._current, reason)
                    self._choose()


class ShardSender:
    """On a member: gives the host the shards that its stages wrote under `run_folder`."""

    def __init__(self, run_folder: Path, pace: Pace):
        self.meter = Meter()
        self._run_folder = run_folder
        self._pace = pace
        self._closed = threading.Event()
        self._pipe: Pipe | None = None
        self._wanted = self._done = -1  # the steps that the host asked for and completed last

    def keep_serving(self, connect: Callable[[], Pipe]) -> None:
        """Serve one connection after the other until `close`; on a thread of its own."""
        pause = REDIAL_S[0]
        while not self._closed.is_set():
            try:
                self.serve(connect())
                pause = REDIAL_S[0]
            except ThinwireError:
                self._closed.wait(pause)
                pause = min(2 * pause, REDIAL_S[1])

    def serve(self, pipe: Pipe) -> None:
        """Answer the host until this connection ends; WireError if it breaks."""
        self._pipe, talk = pipe, Talk(pipe, self.meter)
        try:
            while (heard := talk.hear()) is not None:
                match heard:
                    case Want():
                        self._wanted = heard.step
                        self._give(talk, heard)
                    case Done(step):
                        self._done = step
                        self._forget_before(step)
                    case Dropped(step):
                        place = partial_folder(self._run_folder, step)
                        shutil.rmtree(place, ignore_errors=True)
                    case _:
                        raise WireError("the host sent what only a member may send")
        finally:
            pipe.close(0)

    def close(self) -> None:
        """End, with whatever connection there is."""
        self._closed.set()
        if self._pipe is not None:
            self._pipe.close(0)

    def keep_room(self) -> None:
        """Look until `close` for shards beyond what this disk is for; on a thread of its own."""
        while not self._closed.wait(LOOK_S):
            self.remove_spare()

    def remove_spare(self) -> None:
        """Remove what no host needs: all shards but the newest few, and those that travel."""
        found = [*checkpoints_folder(self._run_folder).glob(".partial-step-*")]
        with contextlib.suppress(OSError):  # one has just been removed: look again later
            newest = sorted(found, key=lambda folder: folder.stat().st_mtime_ns)[-KEPT_SHARDS:]
            needed = {partial_folder(self._run_folder, s) for s in (self._wanted, self._done)}
            for folder in {*found} - {*newest} - needed:
                shutil.rmtree(folder, ignore_errors=True)

    def _give(self, talk: Talk, want: Want) -> None:
        path = partial_folder(self._run_folder, want.step) / f"stage-{want.stage}.safetensors"
        if path.is_file():
            give(talk, want, path, self._pace)
        else:
            talk.say(Refusal(f"there is no shard of stage {want.stage} and step {want.step} here"))

    def _forget_before(self, step: int) -> None:
        for folder in checkpoints_folder(self._run_folder).glob(".partial-step-*"):
            number = folder.name.removeprefix(".partial-step-")
            if number.isdigit() and int(number) < step:
                shutil.rmtree(folder, ignore_errors=True)


def link_or_copy(source: Path, target: Path) -> None:
    """The same file under another name, or a copy where a disk has no such names."""
    with contextlib.suppress(OSError):
        os.link(source, target)
        return
    shutil.copyfile(source, target)
