"""What a corpus is made of: documents, each one text that is read as often as is needed, and their
token ids, made in batches on all cores and in bounded memory.

A conversation is a document too: its text is a line of JSON, so that what is counted, split and
found again is the same for both. They come from files, or from the Hugging Face `datasets` library,
which streams: a dataset may be far larger than the disk.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from thinwire.data.chat import Chat, ChatTemplate, Conversation, NotAConversation, conversation_of
from thinwire.data.corpus import SIDES, TokenChunk
from thinwire.data.sources import SourceFile, SourceRecord, no_nulls, source_file, text_of, walk
from thinwire.data.tokenizer import Tokenizer, interruptible, pieces_of
from thinwire.errors import DataError, ThinwireError, first_line
from thinwire.lazy import needs
from thinwire.paths import expanded

BATCH_CHARACTERS = 1_000_000
_JUDGED_CHARACTERS = 10_000_000  # enough to know a tokenizer that loses most of a text
_SAVED = ("state.json", "dataset_dict.json")  # what save_to_disk leaves


class Document(NamedTuple):
    """A text, whether it was given for validation, and how far reading has come."""

    text: str
    is_given: bool
    consumed: int


TextPiece = tuple[str, str, bool]
"""Its side, a text or a part of one, and whether the text ends here."""
EncodedPiece = tuple[TokenChunk, str, bool]
"""The ids, the text that they stand for, and whether the end of text must follow."""
Group = tuple[Callable[[], Iterator[SourceRecord]], int]
"""Where to read records, and how far that goes, in whatever their positions count."""


class Texts:
    """Plain texts: of one group of records to train on, and of one to validate on. White space
    alone is none.
    """

    whole = False
    """Whether a document must stay in one piece."""

    def __init__(self, groups: list[Group], key: str = "text") -> None:
        self._groups = groups
        self._key = key
        self.size = sum(size for _, size in groups)  # how far reading goes; 0 if not known
        self.characters = 0  # that were encoded
        self._lost: Counter[str] = Counter()  # of these

    def read(self) -> Iterator[Document]:
        """All documents, those to train on first."""
        before = 0
        for number, (records, size) in enumerate(self._groups):
            for record in records():
                if text := self._text(record):
                    yield Document(text, number == 1, before + record.position)
            before += size

    def _text(self, record: SourceRecord) -> str:
        """The document in a record; empty: it is left out."""
        text = text_of(record, self._key)
        return "" if text.isspace() else text

    def texts(self, document: str) -> list[str]:
        """What a tokenizer is trained on."""
        return [document]

    def remarks(self) -> list[str]:
        """What the user should know of them, once all have been encoded."""
        lost, most = self._lost.total(), self._lost.most_common(5)
        if not lost:
            return []
        often = ", ".join(f"{character!r} {count:,}" for character, count in most)
        return [
            f"the tokenizer loses {lost:,} of {self.characters:,} characters "
            f"({lost / self.characters:.2%}), most often {often}: decoding its ids does not "
            "restore them. A byte-level tokenizer loses none; leave data.tokenizer empty to "
            "train one"
        ]

    def encode(
        self, tokenizer: Tokenizer, passages: Iterable[tuple[str, str]]
    ) -> Iterator[TokenChunk]:
        """The ids of every (side, document) in turn, each followed by the end of text.

        A tokenizer may lack some characters or bytes, and leaves them out silently: what does not
        come back from the ids is counted. A text over 128,000 characters comes in pieces that meet
        at line ends.
        """

        def encoded(batch: Iterator[TextPiece]) -> list[TokenChunk]:
            found = self._encoded(tokenizer, list(batch))
            decoded = tokenizer.decode_all([chunk.ids for chunk, _, _ in found])
            for (_, text, _), back in zip(found, decoded, strict=True):
                self.characters += len(text)
                if back != text:
                    self._lost += Counter(text) - Counter(back)
            if self.characters >= _JUDGED_CHARACTERS:
                self._check_fit()
            return list(_joined(found, tokenizer.end_of_text))

        batch: list[TextPiece] = []
        size = 0
        for piece in self._pieces(passages):
            batch.append(piece)
            size += len(piece[1])
            if size >= BATCH_CHARACTERS:
                yield from interruptible(encoded, batch)
                batch, size = [], 0
        if batch:
            yield from interruptible(encoded, batch)
        self._check_fit()

    def _check_fit(self) -> None:
        """Refuse a tokenizer that loses more than half of the text."""
        if 2 * self._lost.total() > self.characters:
            raise DataError(f"the text and its tokenizer do not fit: {Texts.remarks(self)[0]}")

    def _pieces(self, passages: Iterable[tuple[str, str]]) -> Iterator[TextPiece]:
        for side, text in passages:
            yield from ((side, piece, is_end) for piece, is_end in pieces_of(text))

    def _encoded(self, tokenizer: Tokenizer, batch: list[TextPiece]) -> list[EncodedPiece]:
        sides = {side: [p[1] for p in batch if p[0] == side] for side in ("train", "valid")}
        train = iter(tokenizer.encode_all(sides["train"]))
        valid = iter(tokenizer.encode_measured(sides["valid"]))
        found = []
        for side, text, is_end in batch:
            chunk = TokenChunk(side, *((next(train),) if side == "train" else next(valid)[:2]))
            found.append((chunk, text, is_end))
        return found


class Conversations(Texts):
    """Conversations, with the template that renders them."""

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

    def texts(self, document: str) -> list[str]:
        return Conversation.from_json(document).texts

    def remarks(self) -> list[str]:
        forms = ", ".join(f"{count:,} {form}" for form, count in self._forms.most_common())
        found = [f"conversations by their form: {forms}; chat template: {self._template.name}"]
        if self._unanswered:
            found.append(
                f"{self._unanswered:,} conversations without an answer of the assistant are left "
                "out: there is nothing to learn from them"
            )
        return found + super().remarks()

    def _pieces(self, passages: Iterable[tuple[str, str]]) -> Iterator[TextPiece]:
        return ((side, text, True) for side, text in passages)

    def _encoded(self, tokenizer: Tokenizer, batch: list[TextPiece]) -> list[EncodedPiece]:
        """With which of the ids are learned. The end of text follows a conversation unless it ends
        with that already. It is not learned: an answer has an end of its own.
        """
        talks = [Conversation.from_json(text) for _, text, _ in batch]
        encoded = Chat(tokenizer, self._template).encode_all(talks, self._learn_all)
        found = []
        for (side, _, _), (ids, learned, sizes, text) in zip(batch, encoded, strict=True):
            measured = sizes if side == "valid" else None
            chunk = TokenChunk(side, ids, measured, None if self._learn_all else learned)
            found.append((chunk, text, ids[-1:].tolist() != [tokenizer.end_of_text]))
        return found


def _joined(found: list[EncodedPiece], end: int | None) -> Iterator[TokenChunk]:
    """A chunk for each side, with the end of text where it must follow: many short texts are
    written as fast as few long ones.
    """
    last = np.array([end or 0], np.uint32), np.zeros(1, np.uint32), np.zeros(1, np.uint8)
    for side in SIDES:
        parts: list[tuple[Any, ...]] = []
        for chunk, _, is_open in found:
            if chunk.side == side:
                parts += [chunk[1:], last] if is_open and end is not None else [chunk[1:]]
        if parts:
            columns = zip(*parts, strict=True)
            whole: Any = (c[0] if c[0] is None else np.concatenate(c) for c in columns)
            yield TokenChunk(side, *whole)


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
                where = f"{self.place}, record {number} of {self.split}"
                yield SourceRecord({k: no_nulls(v) for k, v in values.items()}, where, number)
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
        return DataError(
            f"the dataset {self.place} cannot be read: {first_line(error)}; check data.path "
            "and data.split, and that this machine can reach the Hugging Face hub. A dataset in a "
            "local folder needs no network"
        )
