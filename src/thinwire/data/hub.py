"""Datasets of the Hugging Face `datasets` library: on its hub, or in a folder on this machine.

They are streamed, so a dataset may be far larger than the disk.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from thinwire.data.files import SourceFile, source_file, walk
from thinwire.data.records import Record
from thinwire.errors import DataError
from thinwire.lazy import needs
from thinwire.paths import expanded

_SAVED = ("state.json", "dataset_dict.json")  # what save_to_disk leaves


@dataclass(frozen=True)
class HubDataset:
    """One split of a dataset. `place` is a folder, or NAME[@REVISION][:CONFIG] on the hub."""

    place: str
    split: str

    @cached_property
    def folder(self) -> Path | None:
        """Where it is on this machine; None for one on the hub."""
        if not self.place:
            raise DataError(
                'data.source = "hf" needs data.path: a dataset on the Hugging Face hub '
                "(NAME or NAME:CONFIG), or the folder of one"
            )
        folder = expanded(self.place, "data.path")
        if folder.is_dir():
            return folder
        if os.path.lexists(folder) or self.place.startswith((".", "/", "~")):
            raise DataError(f"data.path = {self.place} is not a folder that holds a dataset")
        return None

    @cached_property
    def files(self) -> list[SourceFile]:
        """The files of a local dataset; none of one on the hub."""
        if self.folder is None:
            return []
        return [source_file(self.folder, name) for name in walk(self.folder)]

    @property
    def identity(self) -> list[str] | None:
        """What is the same as long as the records are, beside `files`; None if that is unknown."""
        if self.folder is not None:
            return ["folder", self.split]
        revision = self._revision
        return None if revision is None else [*self._name, revision, self.split]

    def records(self) -> Iterator[Record]:
        """The records in order."""
        with _said(self.place):
            for number, values in enumerate(self._opened(), 1):
                yield Record(values, f"{self.place}, record {number} of {self.split}", number)

    @cached_property
    def _name(self) -> tuple[str, str, str]:
        place, _, config = self.place.partition(":")
        name, _, revision = place.partition("@")
        return name, revision, config

    @cached_property
    def _revision(self) -> str | None:
        """The commit that the hub has of it now; None where the hub is not asked (offline)."""
        hub = needs("huggingface_hub", extra="data", what='data.source = "hf"')
        name, revision, _ = self._name
        try:
            found = hub.HfApi().dataset_info(name, revision=revision or None).sha
            return str(found) if found else None
        except hub.errors.OfflineModeIsEnabled:
            return None
        except Exception as error:  # of several libraries
            raise _refused(self.place, error) from error

    def _opened(self) -> Any:
        library = needs("datasets", extra="data", what='data.source = "hf"')
        library.disable_progress_bars()
        if self.folder is None:
            name, revision, config = self._name
            pinned = self._revision
            # Offline, what an earlier download has left is all there is, and it is not streamed.
            return library.load_dataset(
                name,
                config or None,
                split=self.split,
                streaming=pinned is not None,
                revision=pinned or revision or None,
            )
        if not any((self.folder / name).is_file() for name in _SAVED):
            return library.load_dataset(str(self.folder), split=self.split, streaming=True)
        saved = library.load_from_disk(str(self.folder))
        if not isinstance(saved, library.DatasetDict):
            return saved
        if self.split not in saved:
            raise DataError(
                f'{self.place} has no split "{self.split}"; it has {", ".join(saved)}: set '
                "data.split to one of them"
            )
        return saved[self.split]


@contextmanager
def _said(place: str) -> Iterator[None]:
    """What the library raises, in one form."""
    try:
        yield
    except (DataError, GeneratorExit, KeyboardInterrupt):
        raise
    except Exception as error:  # the library raises whatever its readers and the network raise
        raise _refused(place, error) from error


def _refused(place: str, error: Exception) -> DataError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return DataError(
        f"the dataset {place} cannot be read: {reason}; check data.path and data.split, and that "
        "this machine can reach the Hugging Face hub. A dataset in a local folder needs no network"
    )
