"""Which documents validate: decided by their content alone, so an exact copy of a
validation document, anywhere in the corpus, never trains.

Documents come with a flag that says whether they were given for validation (data.valid_path).
"""

import hashlib
import struct
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from thinwire.errors import DataError

_KEY = b"thinwire document"
_RANGE = 1 << 64
# Less text than this makes too few windows to validate with.
SHORTEST_TAIL_BYTES = 16_384


class DocumentHash(NamedTuple):
    """A document by a keyed hash of its UTF-8 bytes."""

    digest: bytes
    size: int  # in UTF-8 bytes
    place: int  # in range(2**64): decides between training and validation
    sample: float  # in [0, 1), independent of the place: for drawing a sample of the documents

    @classmethod
    def of(cls, text: str) -> "DocumentHash":
        """Hash a text."""
        raw = text.encode()
        digest = hashlib.blake2b(raw, digest_size=16, key=_KEY).digest()
        place, sample = struct.unpack("<QQ", digest)
        return cls(digest, len(raw), place, sample / _RANGE)


class SidedText(NamedTuple):
    """Text for one side of the corpus: a document, or a part of one."""

    side: str
    text: str
    sample: float  # in [0, 1), for drawing a sample of the documents


class ValidationSplit:
    """Sends each document to "train" or "valid", or the end of a long one to "valid".

    Validation is every document with a place below a threshold. Where that would leave a side
    empty, the threshold moves just enough for one document to change sides: the lowest to
    validation, or the highest to training.
    """

    def __init__(
        self, documents: Iterable[tuple[str, bool]], fraction: float, whole: bool = False
    ) -> None:
        """Read every document once, in constant memory but for `given`; an empty corpus is refused.

        `whole` keeps every document in one piece, however long it is.
        """
        self.documents = self.size = highest = 0  # size: UTF-8 bytes of those not given
        self.given: set[bytes] = set()  # digests of the documents given for validation
        lowest, hashes = _RANGE, _new_hashes()
        for text, is_given in documents:
            document = DocumentHash.of(text)
            hashes[is_given].update(document.digest)
            self.documents += 1
            if is_given:
                self.given.add(document.digest)
                continue
            self.size += document.size
            lowest, highest = min(lowest, document.place), max(highest, document.place)
        self.content = _content(hashes)
        """A hash of all documents in order, and of which were given for validation."""
        if self.size == 0:
            raise DataError("the corpus is empty: its files hold only white space; check data.path")
        self._is_one = lowest == highest
        if whole and self._is_one and not self.given:
            raise DataError(
                "the corpus is a single conversation: there must be another one to validate on; "
                "add some, or set data.valid_path"
            )
        self._whole = whole
        self._fraction = fraction
        self._threshold = int(fraction * _RANGE)
        if lowest >= self._threshold:
            self._threshold = lowest + 1
        elif highest < self._threshold:
            self._threshold = highest
        # Bytes that one document should give to validation.
        self._longest = max(fraction * self.size, SHORTEST_TAIL_BYTES)

    def passages(self, documents: Iterable[tuple[str, bool]]) -> Iterator[SidedText]:
        """The same documents once more, by side; an error at the end if they are others."""
        hashes = _new_hashes()
        for text, is_given in documents:
            document = DocumentHash.of(text)
            hashes[is_given].update(document.digest)
            for side, part in self._parts(text, document, is_given):
                yield SidedText(side, part, document.sample)
        if _content(hashes) != self.content:
            raise DataError("the corpus changed while it was being read: start again")

    def _parts(self, text: str, document: DocumentHash, is_given: bool) -> list[tuple[str, str]]:
        """The (side, text) pairs that a document contributes.

        One, but two for a document of which only the end validates: one so long that it alone
        would be twice the share wanted, or the only one. None for a training document that was
        given for validation as well.
        """
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


def _new_hashes() -> list[Any]:
    """Of documents in their order, wherever they are stored: to train on, and given to validate."""
    return [hashlib.blake2b(digest_size=16) for _ in range(2)]


def _content(hashes: list[Any]) -> str:
    return " ".join(each.hexdigest() for each in hashes)


def _split_near_end(text: str, fraction: float) -> list[tuple[str, str]]:
    """The last `fraction` of a text validates, from the start of a line where it has lines."""
    if len(text) < 2:
        raise DataError("the corpus is one document of one character: nothing to train on")
    wanted = min(max(1, round(len(text) * (1 - fraction))), len(text) - 1)
    reach = (len(text) - wanted) // 2  # not to a line that would change the share much
    after = text.find("\n", wanted - 1, wanted + reach) + 1
    cut = after or text.rfind("\n", max(0, wanted - reach), wanted) + 1 or wanted
    return [("train", text[:cut]), ("valid", text[cut:])]
