"""What a corpus is made of: documents, each one text that is read as often as is needed; which of
them validate; and their token ids, made in batches on all cores and in bounded memory.

A conversation is a document too: its text is a line of JSON, so that what is counted, split and
found again is the same for both.
"""

import hashlib
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from thinwire.data import chat
from thinwire.data.corpus import SIDES, TokenChunk
from thinwire.data.sources import SourceRecord, text_of
from thinwire.data.tokenizer import Tokenizer, interruptible, pieces_of
from thinwire.errors import DataError

BATCH_CHARACTERS = 1_000_000
_KEY = b"thinwire document"
_RANGE = 1 << 64
# Less text than this makes too few windows to validate with.
SHORTEST_TAIL_BYTES = 16_384


Document = tuple[str, bool]  # a text, and whether it was given for validation
Piece = tuple[str, bool]  # a text or a part of one, and whether the text ends here
Group = tuple[Callable[[], Iterator[SourceRecord]], int]  # records to read, and how far they go


class Texts:
    """Plain texts: of a group of records to train on, and of one to validate on."""

    whole = False  # whether a document must stay in one piece

    def __init__(
        self, groups: list[Group], key: str = "text", template: chat.ChatTemplate | None = None
    ) -> None:
        """`template` was published with the tokenizer: it stays with the corpus."""
        self.template = template
        self._groups = groups
        self._key = key
        self.size = sum(size for _, size in groups)  # how far reading goes; 0 if not known
        self.characters = 0  # that were encoded
        self._lost: Counter[str] = Counter()  # of these

    def read(self, told: Callable[[int], None] = lambda done: None) -> Iterator[Document]:
        """All documents, those to train on first; `told` hears about 200 times how far it is."""
        before = due = 0
        for number, (records, size) in enumerate(self._groups):
            for record in records():
                if text := self._text(record):
                    yield text, number == 1
                    done = before + record.position
                    if due <= done < self.size:
                        told(done)
                        due = done + max(1, self.size // 200)
            before += size
        if self.size:
            told(self.size)

    def _text(self, record: SourceRecord) -> str:
        """The document in a record; empty: it is left out, as white space alone is."""
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
        """The ids of every (side, document), each with the end of text; what is lost is counted."""

        def encoded(sides: Iterator[tuple[str, list[Piece]]]) -> list[TokenChunk]:
            return [self._chunk(tokenizer, side, pieces) for side, pieces in sides if pieces]

        batch: dict[str, list[Piece]] = {side: [] for side in SIDES}
        size = 0
        for side, document in passages:
            for piece in [(document, True)] if self.whole else pieces_of(document):
                batch[side].append(piece)
                size += len(piece[0])
                if size >= BATCH_CHARACTERS:
                    yield from interruptible(encoded, batch.items())
                    batch, size = {side: [] for side in SIDES}, 0
        yield from interruptible(encoded, batch.items())
        if 2 * self._lost.total() > self.characters:
            raise DataError(f"the text and its tokenizer do not fit: {Texts.remarks(self)[0]}")

    def _chunk(self, tokenizer: Tokenizer, side: str, pieces: list[Piece]) -> TokenChunk:
        """One for all: many short texts are written as fast as few long ones."""
        found = self._encoded(tokenizer, side, [text for text, _ in pieces])
        decoded = tokenizer.decode_all([each.ids for each in found])
        end, parts = tokenizer.end_of_text, list[tuple[Any, ...]]()
        last = np.array([end or 0], np.uint32), np.zeros(1, np.uint32), np.zeros(1, np.uint8)
        for each, back, (_, is_end) in zip(found, decoded, pieces, strict=True):
            self.characters += len(each.text)
            if back != each.text:
                self._lost += Counter(each.text) - Counter(back)
            parts.append(each[1:])
            is_ended = self.whole and each.ids[-1:].tolist() == [end]  # as by some templates
            if is_end and end is not None and not is_ended:
                parts.append(last)
        columns = zip(*parts, strict=True)
        joined: Any = (c[0] if c[0] is None else np.concatenate(c) for c in columns)
        ids, sizes, learned = joined
        return TokenChunk(side, ids, sizes if side == "valid" else None, learned)

    def _encoded(self, tokenizer: Tokenizer, side: str, texts: list[str]) -> list[chat.Encoded]:
        if side == "train":
            return list(map(chat.Encoded, texts, tokenizer.encode_all(texts)))
        measured = tokenizer.encode_measured(texts)
        return [chat.Encoded(text, *found[:2]) for text, found in zip(texts, measured, strict=True)]


class Conversations(Texts):
    """Conversations, with the template that renders them."""

    whole = True

    def __init__(self, groups: list[Group], template: chat.ChatTemplate, learn_all: bool) -> None:
        super().__init__(groups)
        self.template: chat.ChatTemplate = template
        self._learn_all = learn_all
        self._forms: Counter[str] = Counter()
        self._unanswered = 0

    def read(self, told: Callable[[int], None] = lambda done: None) -> Iterator[Document]:
        self._forms.clear()
        self._unanswered = 0
        yield from super().read(told)
        if not self._forms:
            without = f"{self._unanswered:,} without an answer of the assistant"
            found = without if self._unanswered else "there are no records"
            raise DataError(f"no conversation to learn from: {found}; check data.path")

    def _text(self, record: SourceRecord) -> str:
        try:
            conversation = chat.conversation_of(record.values)
        except chat.NotAConversation as error:
            raise DataError(
                f"{record.where} is not a conversation: {error}; correct or remove it"
            ) from None
        if not (self._learn_all or any(map(chat.is_learned, conversation.messages))):
            self._unanswered += 1
            return ""
        self._forms[conversation.form] += 1
        return conversation.json()

    def texts(self, document: str) -> list[str]:
        return [message["content"] for message in chat.Conversation.from_json(document).messages]

    def remarks(self) -> list[str]:
        forms = ", ".join(f"{count:,} {form}" for form, count in self._forms.most_common())
        found = [f"conversations by their form: {forms}; chat template: {self.template.name}"]
        if self._unanswered:
            found.append(
                f"{self._unanswered:,} conversations without an answer of the assistant are left "
                "out: there is nothing to learn from them"
            )
        return found + super().remarks()

    def _encoded(self, tokenizer: Tokenizer, side: str, texts: list[str]) -> list[chat.Encoded]:
        talks = [chat.Conversation.from_json(text) for text in texts]
        return chat.Chat(tokenizer, self.template).encode_all(talks, self._learn_all)


class DocumentHash(NamedTuple):
    """A document by a keyed hash of its UTF-8 bytes."""

    digest: bytes
    size: int  # in UTF-8 bytes
    place: int  # in range(2**64): decides between training and validation
    sample: float  # in [0, 1), independent of the place: for drawing a sample of the documents

    @classmethod
    def of(cls, text: str) -> "DocumentHash":
        """That of a text."""
        raw = text.encode()
        digest = hashlib.blake2b(raw, digest_size=16, key=_KEY).digest()
        place, sample = struct.unpack("<QQ", digest)
        return cls(digest, len(raw), place, sample / _RANGE)


class ValidationSplit:
    """Sends each document to "train" or "valid", or the end of a long one to "valid".

    The content alone decides, so an exact copy of a validation document never trains. Unless some
    were given for validation (data.valid_path), every document with a place below a threshold
    validates, which moves just enough for one document where a side would be empty.
    """

    def __init__(self, documents: Iterable[Document], fraction: float, whole: bool = False) -> None:
        """Read every document once; an empty corpus is refused. `whole` keeps each in one piece."""
        self.documents = self.size = highest = 0  # size: UTF-8 bytes of those not given
        self.given: set[bytes] = set()  # digests of the documents given for validation
        lowest = _RANGE
        for _, is_given, document in self._hashed(documents):
            self.documents += 1
            if is_given:
                self.given.add(document.digest)
                continue
            self.size += document.size
            lowest, highest = min(lowest, document.place), max(highest, document.place)
        self.content = self._last_content  # a hash of all documents in order, side by side
        if self.size == 0:
            raise DataError("the corpus is empty: its files hold only white space; check data.path")
        self._is_one = lowest == highest
        if whole and self._is_one and not self.given:
            raise DataError("the corpus is one conversation: add others, or set data.valid_path")
        self._whole = whole
        self._fraction = fraction
        self._threshold = min(max(int(fraction * _RANGE), lowest + 1), highest)
        # Bytes that one document should give to validation.
        self._longest = max(fraction * self.size, SHORTEST_TAIL_BYTES)

    def passages(self, documents: Iterable[Document]) -> Iterator[tuple[str, str, float]]:
        """A side, a document or part, its hash's sample; an error at the end if they changed."""
        for text, is_given, document in self._hashed(documents):
            for side, part in self._parts(text, document, is_given):
                yield side, part, document.sample
        if self._last_content != self.content:
            raise DataError("the corpus changed while it was being read: start again")

    def _hashed(self, documents: Iterable[Document]) -> Iterator[tuple[str, bool, DocumentHash]]:
        """All documents with their hashes; at the end a hash of each side's, wherever they are."""
        hashes = [hashlib.blake2b(digest_size=16) for _ in range(2)]
        for text, is_given in documents:
            document = DocumentHash.of(text)
            hashes[is_given].update(document.digest)
            yield text, is_given, document
        self._last_content = " ".join(each.hexdigest() for each in hashes)

    def _parts(self, text: str, document: DocumentHash, is_given: bool) -> list[tuple[str, str]]:
        """The (side, text) pairs of a document: none if it validates too, two if its end does."""
        if self.given:
            if is_given:
                return [("valid", text)]
            return [] if document.digest in self.given else [("train", text)]
        if self._is_one:
            return _split_near_end(text, self._fraction)
        if document.place >= self._threshold:
            return [("train", text)]
        if self._whole or document.size <= 2 * self._longest:
            return [("valid", text)]
        return _split_near_end(text, self._longest / document.size)


def _split_near_end(text: str, fraction: float) -> list[tuple[str, str]]:
    """The last `fraction` of a text validates, from the start of a line where it has lines."""
    if len(text) < 2:
        raise DataError("the corpus is one document of one character: nothing to train on")
    wanted = min(max(1, round(len(text) * (1 - fraction))), len(text) - 1)
    reach = (len(text) - wanted) // 2  # not to a line that would change the share much
    after = text.find("\n", wanted - 1, wanted + reach) + 1
    cut = after or text.rfind("\n", max(0, wanted - reach), wanted) + 1 or wanted
    return [("train", text[:cut]), ("valid", text[cut:])]
