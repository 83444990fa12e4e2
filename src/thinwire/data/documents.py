"""What a corpus is made of: documents, each one text that is read as often as is needed.

A conversation is a document too: its text is a line of JSON (data/conversations.py), so that what
is counted, split and found again is the same for both.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from thinwire.data.chat import Chat
from thinwire.data.conversations import Conversation, NotAConversation, conversation_of, form_of
from thinwire.data.corpus import Chunk
from thinwire.data.encode import Losses, encode_conversations, encode_passages
from thinwire.data.files import SourceFile
from thinwire.data.hub import HubDataset
from thinwire.data.records import Record, read_records
from thinwire.data.sources import read_documents, text_of
from thinwire.data.template import ChatTemplate
from thinwire.data.tokenizer import Tokenizer
from thinwire.errors import DataError


class Read(NamedTuple):
    """A document, whether it was given for validation, and how far reading has come."""

    text: str
    is_given: bool
    consumed: int


Groups = list[tuple[Callable[[], Iterator[Record]], int]]
"""Where to read records to train on, and then those to validate on; each with its size."""


class Documents(ABC):
    """The documents of a source."""

    whole = False
    """Whether a document must stay in one piece."""
    size: int
    """How far reading goes, in whatever it counts; 0 if that is not known."""

    @abstractmethod
    def read(self) -> Iterator[Read]:
        """All documents, those to train on first."""

    def texts(self, document: str) -> Iterable[str]:
        """What a tokenizer is trained on."""
        return [document]

    @abstractmethod
    def encode(
        self, tokenizer: Tokenizer, passages: Iterable[tuple[str, str]], losses: Losses
    ) -> Iterator[Chunk]:
        """The ids of every (side, document)."""

    def remarks(self) -> list[str]:
        """What the user should know of them, once all have been read."""
        return []


class Texts(Documents):
    """Plain text, from files or from the text column of a dataset."""

    def __init__(self, groups: list[tuple[Callable[[], Iterator[tuple[str, int]]], int]]) -> None:
        self._groups = groups
        self.size = sum(size for _, size in groups)

    @classmethod
    def of_files(
        cls, files: list[SourceFile], given: list[SourceFile], key: str, skip_undecodable: bool
    ) -> "Texts":
        """The texts of files, and of those to validate on."""
        return cls([
            (lambda: read_documents(files, key, skip_undecodable), sum(f.size for f in files)),
            (lambda: read_documents(given, key), sum(f.size for f in given)),
        ])  # fmt: skip

    @classmethod
    def of_records(cls, groups: Groups, key: str) -> "Texts":
        """The text of each record."""

        def reader(records: Callable[[], Iterator[Record]]) -> Callable[[], Iterator]:
            return lambda: ((text_of(record, key), record.position) for record in records())

        return cls([(reader(records), size) for records, size in groups])

    def read(self) -> Iterator[Read]:
        before = 0
        for number, (documents, size) in enumerate(self._groups):
            for text, consumed in documents():
                if text and not text.isspace():
                    yield Read(text, number == 1, before + consumed)
            before += size

    def encode(
        self, tokenizer: Tokenizer, passages: Iterable[tuple[str, str]], losses: Losses
    ) -> Iterator[Chunk]:
        return encode_passages(tokenizer, passages, losses)


class Conversations(Documents):
    """Conversations, from files or from a dataset, with the template that renders them."""

    whole = True

    def __init__(self, groups: Groups, template: ChatTemplate, learn_all: bool) -> None:
        self._groups = groups
        self._template = template
        self._learn_all = learn_all
        self._forms: Counter[str] = Counter()
        self._unanswered = 0
        self.size = sum(size for _, size in groups)

    def read(self) -> Iterator[Read]:
        self._forms.clear()
        self._unanswered = before = 0
        for number, (records, size) in enumerate(self._groups):
            for record in records():
                conversation = _conversation(record)
                if not (self._learn_all or conversation.has_answer):
                    self._unanswered += 1
                    continue
                self._forms[conversation.form] += 1
                yield Read(conversation.json(), number == 1, before + record.position)
            before += size
        if not self._forms:
            without = f"{self._unanswered:,} without an answer of the assistant"
            found = without if self._unanswered else "there are no records"
            raise DataError(f"no conversation to learn from: {found}; check data.path")

    def texts(self, document: str) -> Iterable[str]:
        return Conversation.from_json(document).texts

    def encode(
        self, tokenizer: Tokenizer, passages: Iterable[tuple[str, str]], losses: Losses
    ) -> Iterator[Chunk]:
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


def conversations_of_files(
    files: list[SourceFile], given: list[SourceFile], template: ChatTemplate, learn_all: bool
) -> Conversations:
    """The conversations in files, and in those to validate on."""
    groups: Groups = [
        (lambda: read_records(files), sum(file.size for file in files)),
        (lambda: read_records(given), sum(file.size for file in given)),
    ]
    return Conversations(groups, template, learn_all)


def documents_of_hub(
    datasets: list[HubDataset], key: str, template: ChatTemplate, learn_all: bool
) -> Documents:
    """Those of a dataset: conversations if its first record is one, or else texts."""
    groups: Groups = [(dataset.records, 0) for dataset in datasets]
    first: Any = next(datasets[0].records(), None)
    if first is not None and form_of(first.values) is not None:
        return Conversations(groups, template, learn_all)
    return Texts.of_records(groups, key)


def _conversation(record: Record) -> Conversation:
    try:
        if not isinstance(record.values, dict):
            raise NotAConversation("it is not an object")
        return conversation_of(record.values)
    except NotAConversation as error:
        raise DataError(
            f"{record.where} is not a conversation: {error}; correct or remove it"
        ) from None
