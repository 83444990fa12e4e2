"""Which documents validate: decided by their content alone, so an exact copy of a
validation document, anywhere in the corpus, never trains.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from thinwire.errors import DataError

_KEY = b"thinwire document"
_RANGE = 1 << 64


@dataclass(frozen=True)
class DocumentHash:
    """A keyed hash of a document: `place` decides its side, `sample` is independent of it."""

    digest: bytes
    size: int  # in UTF-8 bytes

    @classmethod
    def of(cls, text: str) -> "DocumentHash":
        """Hash the UTF-8 bytes of a text."""
        raw = text.encode()
        return cls(hashlib.blake2b(raw, digest_size=16, key=_KEY).digest(), len(raw))

    @property
    def place(self) -> int:
        """A number in range(2**64) that decides between training and validation."""
        return int.from_bytes(self.digest[:8], "little")

    @property
    def sample(self) -> float:
        """A number in [0, 1) for drawing a sample of the documents."""
        return int.from_bytes(self.digest[8:], "little") / _RANGE


class ContentHash:
    """A hash of documents in their order, wherever they are stored."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, document: DocumentHash) -> None:
        """Take the next document in."""
        self._hash.update(document.digest)

    def hexdigest(self) -> str:
        """The hash of the documents so far."""
        return self._hash.hexdigest()


@dataclass(frozen=True)
class Scan:
    """What one reading of all documents tells, in constant memory."""

    content: str  # hash of all documents in order
    documents: int
    size: int  # in UTF-8 bytes
    lowest: int  # smallest and largest place of any document
    highest: int


def scan_documents(texts: Iterable[str]) -> Scan:
    """Read every document once; an empty corpus is an error."""
    content = ContentHash()
    documents = size = highest = 0
    lowest = _RANGE
    for text in texts:
        document = DocumentHash.of(text)
        content.add(document)
        documents += 1
        size += document.size
        lowest = min(lowest, document.place)
        highest = max(highest, document.place)
    if documents == 0:
        raise DataError(
            "the corpus is empty: its files hold no document with anything but white space; "
            "check data.path"
        )
    return Scan(content.hexdigest(), documents, size, lowest, highest)


@dataclass(frozen=True)
class Split:
    """Sends each document to "train" or "valid"; a corpus of one document is cut in two."""

    fraction: float
    threshold: int
    one_document: bool

    @classmethod
    def of(cls, scan: Scan, fraction: float) -> "Split":
        """The split for a corpus: validation is every document with a place below a threshold.

        Where that would leave a side empty, the threshold moves just enough for one document
        to change sides: the lowest to validation, or the highest to training.
        """
        threshold = int(fraction * _RANGE)
        if scan.lowest >= threshold:
            threshold = scan.lowest + 1
        elif scan.highest < threshold:
            threshold = scan.highest
        return cls(fraction, threshold, scan.lowest == scan.highest)

    def parts(self, text: str, document: DocumentHash) -> list[tuple[str, str]]:
        """The (side, text) pairs that a document contributes: one, or two if it is alone."""
        if self.one_document:
            cut = _cut_near_end(text, self.fraction)
            return [("train", text[:cut]), ("valid", text[cut:])]
        return [("valid" if document.place < self.threshold else "train", text)]


def _cut_near_end(text: str, fraction: float) -> int:
    """Where the last `fraction` of a text begins, at the start of a line where it has lines."""
    if len(text) < 2:
        raise DataError("the corpus is one document of one character: nothing to train on")
    wanted = min(max(1, round(len(text) * (1 - fraction))), len(text) - 1)
    after = text.find("\n", wanted - 1) + 1
    if 0 < after < len(text):
        return after
    return text.rfind("\n", 0, wanted) + 1 or wanted
