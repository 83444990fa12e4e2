"""What a corpus is made of: documents, each one text that is read as often as is needed.

A conversation is a document too: its text is a line of JSON (data/conversations.py), so that what
is counted, split and found again is the same for both. They come from files, or from the Hugging
Face `datasets` library, which streams: a dataset may be far larger than the disk.
"""

import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.data.chat import Chat, ChatTemplate
from thinwire.data.conversations import Conversation, NotAConversation, conversation_of
from thinwire.data.corpus import TokenChunk
from thinwire.data.encode import LostCharacters, encode_conversations, encode_passages
from thinwire.data.sources import SourceFile, SourceRecord, SourceText, source_file, text_of, walk
from thinwire.data.tokenizer import Tokenizer
from thinwire.errors import DataError, ThinwireError
from thinwire.lazy import needs
from thinwire.paths import expanded

_SAVED = ("state.json", "dataset_dict.json")  # what save_to_disk leaves


class Document(NamedTuple):
    """A text, whether it was given for validation, and how far reading has come."""

    text: str
    is_given: bool
    consumed: int


Group = tuple[Callable[[], Iterator[Any]], int]
"""Where to read records, and how far that goes, in whatever their positions count."""


class Documents(ABC):
    """The documents of a source: of one group of records to train on, and of one to validate on."""

    whole = False
    """Whether a document must stay in one piece."""

    def __init__(self, groups: list[Group]) -> None:
        self._groups = groups
        self.size = sum(size for _, size in groups)  # how far reading goes; 0 if not known

    def read(self) -> Iterator[Document]:
        """All documents, those to train on first."""
        before = 0
        for number, (records, size) in enumerate(self._groups):
            for record in records():
                if text := self._text(record):
                    yield Document(text, number == 1, before + record.position)
            before += size

    @abstractmethod
    def _text(self, record: Any) -> str:
        """The document in a record; empty: it is left out."""

    @abstractmethod
    def texts(self, document: str) -> Iterable[str]:
        """What a tokenizer is trained on."""

    @abstractmethod
    def encode(
        self, tokenizer: Tokenizer, passages: Iterable[tuple[str, str]], losses: LostCharacters
    ) -> Iterator[TokenChunk]:
        """The ids of every (side, document)."""

    @abstractmethod
    def remarks(self) -> list[str]:
        """What the user should know of them, once all have been read."""


class Texts(Documents):
    """Plain text, from files or, by its key, from records; white space alone is none."""

    def __init__(self, groups: list[Group], key: str = "text") -> None:
        super().__init__(groups)
        self._key = key

    def _text(self, record: SourceText | SourceRecord) -> str:
        text = record.text if isinstance(record, SourceText) else text_of(record, self._key)
        return "" if text.isspace() else text

    def texts(self, document: str) -> Iterable[str]:
        return [document]

    def encode(
        self, tokenizer: Tokenizer, passages: Iterable[tuple[str, str]], losses: LostCharacters
    ) -> Iterator[TokenChunk]:
        return encode_passages(tokenizer, passages, losses)

    def remarks(self) -> list[str]:
        return []


class Conversations(Documents):
    """Conversations, from files or from a dataset, with the template that renders them."""

    whole = True

    def __init__(self, groups: list[Group], template: ChatTemplate, learn_all: bool) -> None:
        super().__init__(groups)
        self._template = template
        self._learn_all = learn_all
        self._forms: Counter[str] = Counter()
        self._unanswered = 0

    def read(self) -> Iterator[Document]:
        self._forms.clear()
        self._unanswered = 0
        yield from super().read()
        if not self._forms:
            without = f"{self._unanswered:,} without an answer of the assistant"
            found = without if self._unanswered else "there are no records"
            raise DataError(f"no conversation to learn from: {found}; check data.path")

    def _text(self, record: SourceRecord) -> str:
        try:
            if not isinstance(record.values, dict):
                raise NotAConversation("it is not an object")
            conversation = conversation_of(record.values)
        except NotAConversation as error:
            raise DataError(
                f"{record.where} is not a conversation: {error}; correct or remove it"
            ) from None
        if not (self._learn_all or conversation.has_answer):
            self._unanswered += 1
            return ""
        self._forms[conversation.form] += 1
        return conversation.json()

    def texts(self, document: str) -> Iterable[str]:
        return Conversation.from_json(document).texts

    def encode(
        self, tokenizer: Tokenizer, passages: Iterable[tuple[str, str]], losses: LostCharacters
    ) -> Iterator[TokenChunk]:
        chat = Chat(tokenizer, self._template)
        return encode_conversations(chat, passages, self._learn_all, losses)

    def remarks(self) -> list[str]:
        forms = ", ".join(f"{count:,} {form}" for form, count in self._forms.most_common())
        found = [f"conversations by their form: {forms}; chat template: {self._template.name}"]
        if self._unanswered:
            found.append(
                f"{self._unanswered:,} conversations without an answer of the assistant are left "
                "out: there is nothing to learn from them"
            )
        return found


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

    def records(self) -> Iterator[SourceRecord]:
        """The records in order."""
        try:
            for number, values in enumerate(self._opened(), 1):
                yield SourceRecord(values, f"{self.place}, record {number} of {self.split}", number)
        except ThinwireError:
            raise
        except Exception as error:  # the library raises whatever its readers and the network raise
            raise self._refused(error) from error

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
            raise self._refused(error) from error

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

    def _refused(self, error: Exception) -> DataError:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return DataError(
            f"the dataset {self.place} cannot be read: {reason}; check data.path and data.split, "
            "and that this machine can reach the Hugging Face hub. A dataset in a local folder "
            "needs no network"
        )
