"""What a peer fetches when it takes a seat: the state of its stage, and no other.

On the host: one `SeatServer` for the checkpoint that an epoch starts from. For each connection
`seat-STAGE@EPOCH` that is accepted from the member in that seat, a thread calls
`serve(pipe, stage)`. When all stages run: `close()`, which removes what it had to extract.

On a member: `fetch_seat(pipe, stage, run_folder, limit, plugins, progress)` before it starts its
child; the path that it returns is the child's `resume`.

With the split that the checkpoint was written with, a seat gets its own stage's file as it is. Of
other files it gets only the tensors that it needs, such as the shared basis that the first stage
saves; with another split, the tensors of its blocks from whichever files hold them. A file whose
hash is here already, because this machine wrote or fetched it, is not sent again.
"""

import contextlib
import json
import re
import shutil
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import save_file

from thinwire.engine.checkpoint import (
    MANIFEST,
    SEAL,
    Checkpoint,
    Shard,
    checkpoints_folder,
    sealed,
    sha256_of,
)
from thinwire.engine.state import names_for_stage
from thinwire.errors import BreachError, CheckpointError, WireError, printable
from thinwire.folders import flush, put_in_place, write_file
from thinwire.remote.pieces import AskSeat, Pace, Refusal, Seat, Talk, Want, give, take
from thinwire.remote.store import link_or_copy
from thinwire.run.machine import free_disk
from thinwire.settings import Settings
from thinwire.wire import Meter, Pipe

Progress = Callable[[int, int], None]
"""Gets the bytes that are here, and those of the whole seat."""
_MOST_FILES = 4096
_FILE = re.compile(r"stage-\d{1,6}\.safetensors")


@dataclass(frozen=True)
class _Offer:
    """A file of a seat, and where the host has it."""

    shard: Shard
    path: Path


class SeatServer:
    """On the host: says which files each stage needs of a checkpoint, and sends them."""

    def __init__(self, checkpoint: Checkpoint, settings: Settings, meter: Meter | None = None):
        self.meter = meter or Meter()
        self._checkpoint = checkpoint
        self._settings = settings
        self._extracts = checkpoints_folder_of(checkpoint) / f".extracts-{checkpoint.step}"
        self._lock = threading.Lock()
        self._seats: dict[int, list[_Offer]] = {}

    def serve(self, pipe: Pipe, stage: int) -> None:
        """Answer the member in this seat until it closes the connection; WireError if it breaks."""
        talk = Talk(pipe, self.meter)
        try:
            while (heard := talk.hear()) is not None:
                match heard:
                    case AskSeat(asked) if asked == stage:
                        talk.say(self._seat(stage))
                    case AskSeat(asked):
                        talk.say(Refusal(f"stage {asked} is not the seat of this peer"))
                    case Want():
                        self._give(talk, stage, heard)
                    case _:
                        raise BreachError("a peer sent what only the host may send")
        finally:
            pipe.close(0)

    def close(self) -> None:
        """Remove what was extracted."""
        shutil.rmtree(self._extracts, ignore_errors=True)

    def _seat(self, stage: int) -> Seat | Refusal:
        try:
            offers = self._offers(stage)
        except (CheckpointError, OSError, safetensors.SafetensorError) as error:
            return Refusal(f"the host cannot read its checkpoint: {error}")
        left_out = ("tokenizer_sha256", "template_sha256")
        kept = {k: v for k, v in self._checkpoint.manifest.items() if k not in left_out}
        kept["shards"] = [vars(offer.shard) for offer in offers]
        kept.pop(SEAL, None)
        return Seat(sealed(kept))

    def _offers(self, stage: int) -> list[_Offer]:
        with self._lock:
            if stage not in self._seats:
                needed = names_for_stage(self._settings, stage, self._checkpoint.names())
                found = [self._offer(stage, shard, needed) for shard in self._checkpoint.shards]
                self._seats[stage] = [offer for offer in found if offer is not None]
            return self._seats[stage]

    def _offer(self, stage: int, shard: Shard, needed: set[str]) -> _Offer | None:
        here = sorted(needed.intersection(shard.tensors))
        if not here:
            return None
        whole = self._checkpoint.folder / shard.file
        if len(here) == len(shard.tensors):
            return _Offer(shard, whole)
        path = self._extracts / str(stage) / shard.file
        path.parent.mkdir(parents=True, exist_ok=True)
        with safetensors.safe_open(whole, framework="pt") as file:
            save_file({name: file.get_tensor(name) for name in here}, path)
        return _Offer(Shard(shard.file, sha256_of(path), path.stat().st_size, here), path)

    def _give(self, talk: Talk, stage: int, want: Want) -> None:
        offers = {offer.shard.sha256: offer for offer in self._seats.get(stage, [])}
        if want.sha256 in offers:
            give(talk, want, offers[want.sha256].path, Pace())
        else:
            talk.say(Refusal("this seat has no such file"))


def checkpoints_folder_of(checkpoint: Checkpoint) -> Path:
    """The folder that a checkpoint lies in."""
    return checkpoint.folder.resolve().parent


def fetch_seat(
    pipe: Pipe,
    stage: int,
    run_folder: Path,
    limit: int,
    plugins: Collection[str] = (),
    progress: Progress = lambda done, total: None,
    meter: Meter | None = None,
) -> Path:
    """Fetch what a stage needs of the host's checkpoint; returns a folder to resume from.

    `limit` is the most bytes that the state of the stage can have: a host that offers more would
    only fill this disk. `plugins` are those that this machine allows: a checkpoint that names
    others is refused, for they are code. What was fetched before a lost connection (WireError) is
    used the next time.
    """
    talk = Talk(pipe, meter)
    try:
        talk.say(AskSeat(stage))
        manifest = _answer(talk)
        shards = _checked_manifest(manifest, plugins)
        if (size := sum(shard.bytes for shard in shards)) > limit:
            raise CheckpointError(
                f"the host offers {size:,} bytes as the state of stage {stage}, which takes at "
                f"most {limit:,} with the settings of this run: nothing of it is fetched"
            )
        return _Fetching(talk, manifest, shards, checkpoints_folder(run_folder), progress).run()
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint cannot be kept in {run_folder}: {error}. Free some space, or choose "
            "another folder"
        ) from error
    finally:
        pipe.close()


def _answer(talk: Talk) -> dict[str, Any]:
    heard = talk.hear()
    if heard is None:
        raise WireError("the host closed the connection before it said what this seat needs")
    if isinstance(heard, Refusal):
        raise CheckpointError(f"the host does not give out the checkpoint: {heard.reason}")
    if not isinstance(heard, Seat):
        raise BreachError("the host sent something else than what this seat needs")
    return heard.manifest


def _checked_manifest(manifest: dict[str, Any], plugins: Collection[str]) -> list[Shard]:
    """The files of a seat, none of which can lie or lead anywhere but beside the manifest."""
    try:
        entries, step = manifest["shards"], manifest["step"]
        if type(step) is not int or not 0 <= step < 10**8 or len(entries) > _MOST_FILES:
            raise ValueError("its step or its number of files cannot be")
        shards = [Shard(**entry) for entry in entries]
        for shard in shards:
            if not _FILE.fullmatch(shard.file) or type(shard.bytes) is not int:
                raise ValueError(f"{printable(str(shard.file), 80)!r} is not the name of a file")
            if not re.fullmatch(r"[0-9a-f]{64}", shard.sha256) or shard.bytes < 0:
                raise ValueError(f"{shard.file} has no hash or size")
        if len({shard.file for shard in shards}) < len(shards):
            raise ValueError("it names a file twice")
        named = manifest["settings"]["codec"].get("plugins", [])
        if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
            raise ValueError("its plugins are no list of names")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"the host's manifest cannot be used: {printable(str(error), 200)}"
        ) from None
    if not set(named) <= set(plugins):
        unknown = ", ".join(sorted(printable(name, 80) for name in set(named) - set(plugins)))
        raise CheckpointError(
            f"the host's checkpoint names plugins, which are code: {unknown}. If you trust them, "
            "join with --allow-plugin NAME for each"
        )
    return shards


class _Fetching:
    """The files of one seat, on their way into a folder that is complete or absent."""

    def __init__(
        self,
        talk: Talk,
        manifest: dict[str, Any],
        shards: list[Shard],
        folder: Path,
        progress: Progress,
    ):
        self._talk, self._manifest, self._shards = talk, manifest, shards
        self._folder, self._progress = folder, progress
        self._step = manifest["step"]
        self._total = sum(shard.bytes for shard in shards)
        self._done = 0

    def run(self) -> Path:
        """The folder of the checkpoint, once all its files are there."""
        final = self._folder / f"step-{self._step:08d}"
        partial = self._folder / ".fetching"
        partial.mkdir(parents=True, exist_ok=True)
        self._drop_others(partial)
        self._check_room(partial)
        for shard in self._shards:
            self._obtain(shard, partial)
            self._done += shard.bytes
            self._progress(self._done, self._total)
        for shard in self._shards:
            _part(partial, shard).rename(partial / shard.file)
        write_file(partial / MANIFEST, json.dumps(self._manifest, indent=1).encode())
        for earlier in self._folder.glob("step-*"):
            shutil.rmtree(earlier)
        put_in_place(partial, final)
        return Checkpoint.open(final).folder

    def _drop_others(self, partial: Path) -> None:
        """Keep only parts of files that are wanted now."""
        wanted = {_part(partial, shard) for shard in self._shards}
        for path in partial.iterdir():
            if path not in wanted:
                path.unlink()

    def _check_room(self, partial: Path) -> None:
        """Take at most half of what is free: the rest is for the shards that the stage writes."""
        missing = [shard for shard in self._shards if not any(self._alike(shard))]
        here = sum(part.stat().st_size for part in partial.iterdir())
        rest, free = sum(shard.bytes for shard in missing) - here, free_disk(partial)
        if rest > free // 2:
            raise CheckpointError(
                f"the state of the stage takes {rest:,} more bytes, but {free:,} are free in "
                f"{self._folder}: the run leaves half of them free. Free some space, or join with "
                "another --folder"
            )

    def _obtain(self, shard: Shard, partial: Path) -> None:
        part = _part(partial, shard)
        if part.is_file() and part.stat().st_size == shard.bytes:
            if sha256_of(part) == shard.sha256:
                return
            part.unlink()
        for path in self._alike(shard):
            if sha256_of(path) == shard.sha256:
                part.unlink(missing_ok=True)
                link_or_copy(path, part)
                flush(part)
                return
        want = Want(self._step, 0, shard.sha256, shard.bytes, 0)
        try:
            take(self._talk, want, part, lambda n: self._progress(self._done + n, self._total))
        except CheckpointError as error:
            raise CheckpointError(f"{shard.file} of step {self._step}: {error}") from error

    def _alike(self, shard: Shard) -> Iterator[Path]:
        """Shards of that size that this machine has written or fetched."""
        for path in self._folder.glob("*step-*/stage-*.safetensors"):
            with contextlib.suppress(OSError):
                if path.stat().st_size == shard.bytes:
                    yield path


def _part(folder: Path, shard: Shard) -> Path:
    return folder / f"{shard.sha256}.part"
