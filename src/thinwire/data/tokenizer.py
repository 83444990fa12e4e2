"""A thin wrapper of the `tokenizers` library: byte-level BPE, trained here or loaded."""

import contextlib
import hashlib
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from thinwire.background import on_daemon_thread
from thinwire.data.sources import read_json, reading
from thinwire.errors import DataError
from thinwire.folders import write_file
from thinwire.paths import expanded

# Said before the library is loaded: encode on all cores, and print no warning when a process
# that did so starts another one. A setting of the user's own is kept.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
_OTHERS = "<|end_of_text|> </s> <eos> <|eos|> [EOS] <｜end▁of▁sentence｜>"
END_OF_TEXT_NAMES = (END_OF_TEXT, *_OTHERS.split())
RESERVED = ("<|im_start|>", "<|im_end|>", "<|tools|>", "<|tool_call|>")
"""What ChatML needs: in every tokenizer that is trained for a corpus and has room for it."""
SMALLEST_VOCAB = 257  # every byte, and the end of text
# The library needs over a hundred bytes of memory for each character it works on.
PIECE_CHARACTERS = 128_000
_ANY = (Exception,)  # the library raises nothing more specific
_POLL_SECONDS = 0.1
_GRACE_SECONDS = 0.5

T = TypeVar("T")
R = TypeVar("R")


class Measured(NamedTuple):
    """Ids of a text; of each, the UTF-8 bytes since the one before, and where it ends."""

    ids: np.ndarray
    sizes: np.ndarray
    ends: np.ndarray


class Tokenizer:
    """Text to token ids and back. Special tokens spelled out in a text stay plain text."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True  # "<|endoftext|>" in a document ends nothing
        self._backend = backend
        ids = backend.get_vocab(with_added_tokens=True)
        # The largest id, not the number of entries: ids of some published files have holes.
        self.vocab_size: int = max(ids.values(), default=-1) + 1
        ends = (ids[name] for name in END_OF_TEXT_NAMES if name in ids)
        self.end_of_text: int | None = next(ends, None)
        added = backend.get_added_tokens_decoder()
        special = {number: token.content for number, token in added.items() if token.special}
        self.special_tokens: tuple[str, ...] = tuple(special.values())
        self.special_ids = np.array(list(special), dtype=np.uint32)

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Read a tokenizer.json, the format of the `tokenizers` and `transformers` libraries."""
        place = expanded(path, "data.tokenizer")
        advice = "data.tokenizer must be the path of a tokenizer.json, or empty to train one"
        with reading(f"the tokenizer {path}", _ANY, advice):
            loaded = cls(tokenizers.Tokenizer.from_str(place.read_text(encoding="utf-8")))
        if loaded.vocab_size == 0:
            raise DataError(f"{path} is a tokenizer with an empty vocabulary")
        if loaded.end_of_text is None:  # it may have another name, which stands beside it
            with contextlib.suppress(DataError):
                name = read_json(place.with_name("tokenizer_config.json")).get("eos_token")
                name = name.get("content") if isinstance(name, dict) else name
                loaded.end_of_text = loaded.id_of(name) if isinstance(name, str) else None
        return loaded

    @classmethod
    def train(cls, texts: Iterable[str], vocab: int, special: Sequence[str] = ()) -> "Tokenizer":
        """Train a byte-level BPE of at most `vocab` entries, always alike, `special` ones last."""
        check_trainable(vocab, special)
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab - len(special),
            special_tokens=[END_OF_TEXT],
            # All 256, so that text with bytes never seen in training still has an encoding.
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        pieces = (piece for text in texts for piece, _ in pieces_of(text))
        interruptible(lambda fed: backend.train_from_iterator(fed, trainer), pieces)
        backend.add_special_tokens(list(special))
        return cls(backend)

    @property
    def digest(self) -> str:
        """A hash of everything that decides how text is encoded."""
        return hashlib.blake2b(self._backend.to_str().encode(), digest_size=16).hexdigest()

    def has_vocabulary_of(self, other: "Tokenizer") -> bool:
        """Whether each id of the other stands for the same token here; there may be more."""
        mine, theirs = (t._backend.get_vocab(with_added_tokens=True) for t in (self, other))
        return theirs.items() <= mine.items()

    def json(self) -> str:
        """The text of a tokenizer.json."""
        return self._backend.to_str(pretty=True)

    def save(self, path: str | Path) -> None:
        """Write a tokenizer.json, all of it to the disk."""
        write_file(Path(path), self.json().encode())

    def encode(self, text: str) -> list[int]:
        """Token ids of one text, without any begin or end token."""
        return self._backend.encode(text, add_special_tokens=False).ids

    @cached_property
    def begin_ids(self) -> list[int]:
        """What the tokenizer's own post-processor puts ahead of every text, such as <s>."""
        marked = self._backend.encode("a", add_special_tokens=True)
        return marked.ids[: marked.special_tokens_mask.index(0)] if self.encode("a") else []

    def id_of(self, token: str) -> int | None:
        """The id of a token by its name."""
        return self._backend.token_to_id(token)

    def with_special(self, tokens: Sequence[str]) -> "Tokenizer":
        """The same with more special tokens, whose ids follow the largest."""
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.add_special_tokens(list(tokens))
        return Tokenizer(backend)

    @cached_property
    def _recognising(self) -> tokenizers.Tokenizer:
        """Another one that takes a special token that is spelled out for one."""
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.encode_special_tokens = False
        return backend

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of token ids; special tokens are spelled out."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def encode_all(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each text, computed on all cores."""
        encodings = self._encodings(self._backend.encode_batch_fast, texts)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def encode_measured(self, texts: list[str], rendered: bool = False) -> list[Measured]:
        """The ids of each text, and where and in how many bytes each of them stands; a character
        that is spread over several counts with the first. A `rendered` text has special tokens.
        """
        backend = self._recognising if rendered else self._backend
        encodings = self._encodings(backend.encode_batch, texts)
        return [_measured(text, each) for text, each in zip(texts, encodings, strict=True)]

    def _encodings(self, encode_batch: Callable[..., Any], texts: list[str]) -> list[Any]:
        advice = "choose another data.tokenizer, or leave it empty to train one"
        with reading("the text with this tokenizer", _ANY, advice):
            return encode_batch(texts, add_special_tokens=False)

    def decode_all(self, texts: list[np.ndarray]) -> list[str]:
        """The text of each array of ids, computed on all cores."""
        ids = [text.tolist() for text in texts]
        return self._backend.decode_batch(ids, skip_special_tokens=False)


def check_trainable(vocab: int, special: Sequence[str] = ()) -> None:
    """Refuse a vocabulary that has no room for every byte."""
    smallest = SMALLEST_VOCAB + len(special)
    if vocab < smallest:
        raise DataError(
            f"model.vocab = {vocab} is too small for a byte-level tokenizer: "
            f"set it to at least {smallest} (256 bytes and {', '.join((END_OF_TEXT, *special))})"
        )


def _measured(text: str, encoding: Any) -> Measured:
    """The last id ends with the text, and with what a tokenizer dropped there, as white space."""
    ids = np.array(encoding.ids, dtype=np.uint32)
    if not len(ids):
        return Measured(ids, np.empty(0, dtype=np.uint32), np.empty(0, dtype=np.int64))
    ends = np.maximum.accumulate([end for _, end in encoding.offsets])
    ends[-1] = len(text)
    codes = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    widths = 1 + (codes >= 0x80) + (codes >= 0x800) + (codes >= 0x10000)
    bytes_before = np.concatenate([[0], np.cumsum(widths)])
    sizes = np.diff(bytes_before[ends], prepend=0).astype(np.uint32)
    return Measured(ids, sizes, ends)


def pieces_of(text: str) -> Iterator[tuple[str, bool]]:
    """Pieces of a text that may be encoded one by one, each with whether it is the last."""
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        seam = _seam(text, start)
        yield text[start:seam], False
        start = seam
    yield text[start:], True


def _seam(text: str, start: int) -> int:
    """Where to split: between a letter or digit and a newline, which BPE never merges."""
    lowest, limit = start + PIECE_CHARACTERS // 2, start + PIECE_CHARACTERS
    last = at = text.rfind("\n", lowest, limit)
    while at > 0 and not text[at - 1].isalnum():
        at = text.rfind("\n", lowest, at)
    if at > 0:
        return at
    return last if last > 0 else limit


def interruptible(work: Callable[[Iterator[T]], R], items: Iterable[T] = ()) -> R:
    """What `work` makes of the items, computed in a thread: Ctrl-C is heard while a library works.
    What is interrupted gets no further items, and otherwise dies with the process.
    """
    is_abandoned = threading.Event()
    fed = itertools.takewhile(lambda _: not is_abandoned.is_set(), items)
    result = on_daemon_thread("thinwire data", lambda: work(fed))
    try:
        # A signal may reach another thread: only a wait that ends shows it to this one.
        while wait([result], _POLL_SECONDS).not_done:
            pass
        return result.result()
    finally:
        is_abandoned.set()
        wait([result], _GRACE_SECONDS)
