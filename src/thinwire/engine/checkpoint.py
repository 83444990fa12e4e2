"""Checkpoints: one safetensors file per stage and a manifest with hashes, complete or absent.

    checkpoints/step-00000200/
        manifest.json            written last: what is here, of which run, with sha256 of all
        stage-0.safetensors      parameters, optimizer state, what codecs remember: by global names
        stage-1.safetensors
        tokenizer.json           when the corpus has one, so that a checkpoint stands on its own
        tokenizer_config.json    its chat template, when it has one (data/chat.py opens both)

Stages write into a hidden `.partial-` folder, which the coordinator renames once all have written,
and what is removed is first renamed to a hidden name: a folder called `step-` is always whole.
Names are global, so any number of stages can load what others wrote: a `Source` is a state by
names, on disk, in memory or in another form.
"""

import contextlib
import functools
import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import safetensors
from safetensors.torch import save_file
from torch import Tensor

from thinwire.codec import PluginError
from thinwire.data.chat import CONFIG
from thinwire.engine.trace import not_finite
from thinwire.errors import CheckpointError, ConfigError, GoneError
from thinwire.folders import flush
from thinwire.settings import Settings
from thinwire.typed import Exact, learn_types

FORMAT = 2
SEAL = "manifest_sha256"
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
IMPORTED = "imported_from"  # the key by which a manifest says that it is of an import
Count = Annotated[int, msgspec.Meta(ge=0)]
Hash = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
BASIS, COVARIANCE = "space/basis", "space/covariance"
NEXT_BASIS, NEXT_MEASURES = "space/next_basis", "space/next_measures"
# What runs with Muon meant before these settings existed.
_RATES_BEFORE = dict.fromkeys(("matrix_lr", "table_lr", "head_lr"), 1.0)
MUON_BEFORE = {"model": {"embed_std": 0.02}, "optim": _RATES_BEFORE}


@dataclass(frozen=True)
class Versions:
    """How often weights were updated, and the shared basis moved."""

    weight_version: int
    basis_version: int

    def __str__(self) -> str:
        return f"weight version {self.weight_version} and basis version {self.basis_version}"


class Source(ABC):
    """Tensors by global names, after `step` steps of the run of these settings; `str` names it."""

    settings: Settings

    def __init__(self, step: int, versions: Versions, names: Iterable[str]):
        self.step, self.versions = step, versions
        self._names = set(names)

    def names(self) -> set[str]:
        """The names of all tensors."""
        return self._names

    @abstractmethod
    def _read(self, name: str) -> Tensor:
        """A tensor that is there; it becomes the taker's own."""

    def tensors(self, wanted: Iterable[str]) -> dict[str, Tensor]:
        """The tensors of these names; CheckpointError says which is missing."""
        wanted = set(wanted)
        missing = wanted - self._names
        if missing:
            raise CheckpointError(
                f"{len(missing)} tensors are missing from {self}, such as {min(missing)}: it was "
                "written by a model of another shape"
            )
        return self._read_all(wanted)

    def _read_all(self, names: set[str]) -> dict[str, Tensor]:
        return {name: self._read(name) for name in sorted(names)}

    def tensor(self, name: str) -> Tensor:
        """One of them."""
        return self.tensors([name])[name]

    def check_shape(self, name: str, tensor: Tensor, wanted: Tensor) -> None:
        """CheckpointError if a tensor of this source has another shape than is wanted."""
        if tensor.shape != wanted.shape:
            shapes = f"{tuple(tensor.shape)} in {self}, the model needs {tuple(wanted.shape)}"
            raise CheckpointError(f"{name} has shape {shapes}")

    def tensors_under(self, prefix: str) -> dict[str, Tensor]:
        """All tensors whose names begin so, by the rest of their names."""
        found = self._read_all({name for name in self._names if name.startswith(prefix)})
        return {name.removeprefix(prefix): tensor for name, tensor in found.items()}


class Snapshot(Source):
    """A state in memory: of a stage, or of all stages together."""

    def __init__(
        self, tensors: Mapping[str, Tensor], settings: Settings, step: int, versions: Versions
    ):
        super().__init__(step, versions, tensors)
        self._tensors, self.settings = tensors, settings

    def _read(self, name: str) -> Tensor:
        return self._tensors[name].detach().clone()

    def __str__(self) -> str:
        return f"the state of step {self.step} in memory"


@dataclass(frozen=True)
class Shard:
    """One stage's file within a checkpoint, as the manifest lists it."""

    file: Annotated[str, msgspec.Meta(pattern=r"\Astage-[0-9]{1,6}\.safetensors\Z")]
    sha256: Hash
    bytes: Count
    tensors: list[Exact]


class Facts(msgspec.Struct):
    """What every manifest says, beside its format and its hash."""

    step: Count
    weight_version: Count
    basis_version: Count
    settings: dict[str, Any]
    corpus: str
    shards: list[Shard]
    tokenizer_sha256: str = ""
    template_sha256: str = ""


learn_types(Facts)


def checkpoints_folder(run_folder: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return run_folder / "checkpoints"


def partial_folder(run_folder: Path, step: int) -> Path:
    """Where stages write the checkpoint after `step` updates until it is complete."""
    return checkpoints_folder(run_folder) / f".partial-step-{step:08d}"


def write_shard(folder: Path, stage: int, tensors: dict[str, Tensor]) -> Shard:
    """Write one stage's tensors and flush them to the disk; CheckpointError says why if not."""
    path = folder / f"stage-{stage}.safetensors"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, path)
        path.chmod(0o644)  # the library writes 0600: another user could not even verify it
        flush(path)
        return Shard(path.name, sha256_of(path), path.stat().st_size, sorted(tensors))
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"stage {stage} cannot write its part of the checkpoint to {folder}: {error}. "
            "Earlier checkpoints are untouched; free some space or choose another place"
        ) from error


def not_finite_in(file: Any) -> str:
    """The first tensor of an open safetensors file, which is mapped, that is not finite. What was
    gathered for the next move of a basis does not count: none is made unless it is.
    """
    names = sorted(set(file.keys()) - {COVARIANCE, NEXT_MEASURES})
    return not_finite({name: file.get_tensor(name).flatten() for name in names})


def sealed(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest with the hash of its content, which `Checkpoint.open` checks."""
    return {**manifest, SEAL: content_hash(manifest)}


def list_checkpoints(place: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first, given its folder or the one of its checkpoints;
    copies under other names do not count.
    """
    inside, is_step = checkpoints_folder(place), re.compile(r"step-\d{8}").fullmatch
    found = (inside if inside.is_dir() else place).glob("step-*")
    return sorted(path for path in found if is_step(path.name) and (path / MANIFEST).is_file())


def step_of(checkpoint: Path) -> int:
    """The step in the name of a listed checkpoint."""
    return int(checkpoint.name.removeprefix("step-"))


class Checkpoint(Source):
    """A complete checkpoint on disk, opened for reading."""

    def __init__(self, folder: Path, allow_plugins: bool, trusted_plugins: Iterable[str]):
        self.folder = folder
        self.manifest, self.shards = _read_manifest(folder / MANIFEST)
        versions = Versions(self.manifest["weight_version"], self.manifest["basis_version"])
        names = (name for shard in self.shards for name in shard.tensors)
        super().__init__(self.manifest["step"], versions, names)
        self._allow_plugins, self._trusted_plugins = allow_plugins, [*trusted_plugins]

    @classmethod
    def open(
        cls, place: Path, allow_plugins: bool = False, trusted_plugins: Iterable[str] = ()
    ) -> "Checkpoint":
        """Open a checkpoint folder, or the newest checkpoint of a run's folder. Plugins are code:
        they are imported only if whoever opens it allows all, or trusts those by name.
        """
        found = [place] if (place / MANIFEST).is_file() else list_checkpoints(place)
        if not found:
            what = f"no {MANIFEST}, nor those of a run" if place.exists() else "no such folder"
            raise CheckpointError(f"there is no checkpoint at {place}: {what}")
        return cls(found[-1], allow_plugins, trusted_plugins)

    @functools.cached_property
    def settings(self) -> Settings:  # type: ignore[override]  # others have it at once
        """The settings of the run that wrote this, as this thinwire understands them."""
        self._check_plugins()
        try:
            values, optim = self.manifest["settings"], self.manifest["settings"].get("optim", {})
            if isinstance(optim, dict) and optim.get("name") == "muon":
                before = {key: {**rest, **values.get(key, {})} for key, rest in MUON_BEFORE.items()}
                values = values | before
            return Settings.from_plain(values)
        except GoneError as error:
            raise CheckpointError(f"{self.folder} cannot be opened: {error}") from error
        except PluginError as error:
            raise CheckpointError(f"{self.folder} was written with a plugin: {error}") from error
        except ConfigError as error:
            raise CheckpointError(
                f"the settings in {self.folder / MANIFEST} cannot be used: {error}. "
                "Use the version of thinwire that wrote it"
            ) from error

    def _check_plugins(self) -> None:
        """Refuse to run code that nobody but the manifest asked for."""
        codec = self.manifest["settings"].get("codec")
        named = codec.get("plugins") if isinstance(codec, dict) else None
        plugins = named if isinstance(named, list) else [named] if named else []
        if self._allow_plugins or all(plugin in self._trusted_plugins for plugin in plugins):
            return
        listed = ", ".join(map(str, plugins))
        raise CheckpointError(
            f"{self.folder} names plugins, which are code that opening it would run: {listed}. "
            "If you trust them, add --allow-plugins; to train, codec.plugins of your own run.toml "
            "may name them instead"
        )

    def verify(self) -> None:
        """Check each file against its hash, and that all is finite; CheckpointError if not."""
        altered = "is altered or missing: use an earlier checkpoint"
        for shard in self.shards:
            path = self.folder / shard.file
            if sha256_of(path) != shard.sha256:
                raise _unreadable(path, altered)
            with self._opened(shard) as file:
                if set(file.keys()) != set(shard.tensors):
                    raise CheckpointError(f"{path} holds other tensors than the manifest lists")
                if name := not_finite_in(file):
                    raise CheckpointError(
                        f"{name} in {path} is not finite: use an earlier checkpoint"
                    )
        for name, key in ((TOKENIZER, "tokenizer_sha256"), (CONFIG, "template_sha256")):
            expected = self.manifest.get(key)
            if expected and sha256_of(self.folder / name) != expected:
                raise _unreadable(self.folder / name, altered)

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer that the run used, if it had one."""
        path = self.folder / TOKENIZER
        return path if path.is_file() else None

    def _read(self, name: str) -> Tensor:
        return self._read_all({name})[name]

    def _read_all(self, names: set[str]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for shard in self.shards:  # to open a file reads the names of all that it holds
            if here := names.intersection(shard.tensors) - found.keys():
                with self._opened(shard) as file:
                    found |= {name: file.get_tensor(name) for name in sorted(here)}
        return found

    def __str__(self) -> str:
        return f"checkpoint {self.folder}"

    @contextlib.contextmanager
    def _opened(self, shard: Shard) -> Iterator[Any]:
        path = self.folder / shard.file
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                yield file
        except (OSError, safetensors.SafetensorError) as error:
            raise _unreadable(path, f"cannot be read: {error}") from error


def _unreadable(path: Path, why: str) -> CheckpointError:
    """Why a file cannot be used; a run that trains removes checkpoints while others read them."""
    if not path.parent.is_dir():
        gone = f"{path.parent} was removed meanwhile: its run keeps newer ones"
        return CheckpointError(f"{gone}. Try again, or with a higher train.keep there")
    return CheckpointError(f"{path} {why}")


def _read_manifest(path: Path) -> tuple[dict[str, Any], list[Shard]]:
    """The manifest with every fact in its type; CheckpointError names the first that is not."""
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(manifest, dict):
            raise ValueError("it is not an object")
        format = manifest.get("format")
        if type(format) is not int or format != FORMAT:
            raise CheckpointError(
                f"{path} has checkpoint format {format!r}, this thinwire reads format {FORMAT}: "
                "use the version that wrote it"
            )
        shards = msgspec.convert(manifest, Facts).shards
        if manifest.get(SEAL) != content_hash(manifest):
            raise ValueError("its content does not match its hash")
        named = re.fullmatch(r"(?:abandoned-)?step-(\d{8})(?:-\d+)?", path.parent.name)
        if named and int(named[1]) != manifest["step"]:
            raise ValueError(f"it is of step {manifest['step']}, its folder of {int(named[1])}")
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, f"is damaged: {error}") from error
    return manifest, shards


def content_hash(manifest: dict[str, Any]) -> str:
    """The hash of all that a manifest says, however it is laid out as text."""
    content = {key: value for key, value in manifest.items() if key != SEAL}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def sha256_of(path: Path) -> str:
    """The hash of a file, or "missing"."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path}: {error.strerror}; give this user permission to read it"
        ) from error
