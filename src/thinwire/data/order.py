"""Which tokens a step trains on, computed from numbers alone.

Shapes: B sequences of a microbatch, T tokens of context, N indices.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

from thinwire.errors import DataError

MASKED = -100  # the target of a position from whose next token nothing is learned, as torch has it
_ROUNDS = 8
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # odd 64-bit multipliers that spread bits well


@dataclass(frozen=True, eq=False)
class Batch:
    """Token ids of a few windows; the target of each position is the token after it, or -100."""

    inputs_BT: np.ndarray
    targets_BT: np.ndarray
    examples_B: np.ndarray  # the window's number, the same in every epoch


class Windows:
    """A side of a corpus in windows of `context` tokens that do not overlap. Those without a token
    that is `learned` are left out: they would cost as much as any other and teach nothing.
    """

    def __init__(self, tokens: np.ndarray, context: int, learned: np.ndarray | None = None):
        self.tokens = tokens
        self.context = context
        # The last window, too, needs one token after its end as a target.
        self.all = self.count = max(0, len(tokens) - 1) // context
        self._learned = learned
        if learned is not None:
            targets = learned[1 : self.all * context + 1].reshape(self.all, context)
            counts = targets.sum(axis=1, dtype=np.int64)  # of ones and zeros, without a copy
            self._numbers = np.flatnonzero(counts)
            self._counts = counts[self._numbers]
            self.count = len(self._numbers)

    def gather(self, examples_B: np.ndarray) -> Batch:
        """A few windows by their numbers below `count`."""
        inputs_BT, targets_BT = self.sides(self.tokens, examples_B)
        if self._learned is not None:
            targets_BT[self.sides(self._learned, examples_B)[1] == 0] = MASKED
        return Batch(inputs_BT, targets_BT, examples_B)

    def learned_count(self, examples_N: np.ndarray) -> int:
        """Tokens that these windows teach."""
        if self._learned is None:
            return len(examples_N) * self.context
        return int(self._counts[examples_N].sum())

    def sides(self, values: np.ndarray, examples_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A value of each token of some windows, and of the token after each."""
        numbers_B = examples_B if self._learned is None else self._numbers[examples_B]
        positions = numbers_B[:, None] * self.context + np.arange(self.context + 1)
        ids = values[positions].astype(np.int64)
        # Copies, also of a single window: what is masked in one must not change the other.
        return ids[:, :-1].copy(), ids[:, 1:].copy()

    def __str__(self) -> str:
        text = f"{len(self.tokens)} tokens make {self.all} windows of {self.context} tokens"
        return text if self._learned is None else f"{text}, {self.count} with a token to learn"


class Shuffled:
    """(step, microbatch) -> examples, the same on every machine, with no state and no table. A run
    is one endless sequence of epochs, each with all `count` examples in an order of its own. A step
    takes the next `batch` places, so it may end one epoch and begin the next.
    """

    def __init__(self, count: int, batch: int, microbatches: int, seed: int) -> None:
        self.count = count
        self.batch = batch
        self.microbatches = microbatches
        self.seed = seed

    def examples(self, step: int, microbatch: int) -> np.ndarray:
        """The numbers of a microbatch's examples, the same in every epoch."""
        size = self.batch // self.microbatches
        return shuffled(step * self.batch + microbatch * size, size, self.count, self.seed)


class Order(Shuffled):
    """(step, microbatch) -> Batch, of windows of `context` tokens that do not overlap."""

    def __init__(
        self,
        tokens: np.ndarray,
        context: int,
        batch: int,
        microbatches: int,
        seed: int,
        learned: np.ndarray | None = None,
    ) -> None:
        self._windows = Windows(tokens, context, learned)
        super().__init__(self._windows.count, batch, microbatches, seed)
        self.is_masked = learned is not None
        if self.count < batch:
            raise DataError(
                f"the training corpus is shorter than one batch: {self._windows}, {batch} are "
                "needed; lower the batch size or the context, or use a larger corpus"
            )

    def microbatch(self, step: int, microbatch: int) -> Batch:
        """The windows that belong to one microbatch of one step, both counted from 0."""
        return self._windows.gather(self.examples(step, microbatch))

    def learned_count(self, step: int) -> int:
        """Tokens that all microbatches of a step teach together: one per window at least."""
        examples_N = shuffled(step * self.batch, self.batch, self.count, self.seed)
        return self._windows.learned_count(examples_N)


class Validation:
    """Microbatches of validation windows, spread evenly over all there are, the same every time.
    There are at most `limit` (0: all that can be filled) of one size, as a pipeline needs it; with
    fewer windows than `batch` one smaller one. Nothing is read before it is asked for.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        context: int,
        batch: int,
        limit: int,
        learned: np.ndarray | None = None,
    ) -> None:
        self._windows = Windows(tokens, context, learned)
        windows = self._windows.count
        if windows < 1:
            raise DataError(
                f"nothing to validate on: {self._windows}; lower the context, raise "
                "data.valid_fraction, or use a larger corpus"
            )
        self.size = min(batch, windows)
        count = windows // self.size
        self._count = min(count, limit) if limit > 0 else count
        chosen = self._count * self.size
        self._examples_N = (2 * np.arange(chosen, dtype=np.int64) + 1) * windows // (2 * chosen)

    def __len__(self) -> int:
        return self._count

    def microbatch(self, index: int) -> Batch:
        """One microbatch, counted from 0."""
        examples_B = self._examples_N[index * self.size : (index + 1) * self.size]
        return self._windows.gather(examples_B)

    @property
    def target_count(self) -> int:
        """Tokens that all microbatches together predict."""
        return self._windows.learned_count(self._examples_N)

    def total_of_targets(self, values: np.ndarray) -> int:
        """The sum over all learned targets of a value that each token of the side has."""
        total = 0
        for index in range(len(self)):
            batch = self.microbatch(index)
            values_BT = self._windows.sides(values, batch.examples_B)[1]
            total += int(values_BT[batch.targets_BT != MASKED].sum())
        return total


def shuffled(place: int, count: int, size: int, seed: int) -> np.ndarray:
    """Which of `size` examples stand at these places of an endless sequence of shuffled epochs."""
    examples_N = np.empty(count, dtype=np.int64)
    done = 0
    while done < count:  # once for each epoch that the places touch
        epoch, index = divmod(place + done, size)
        taken = min(count - done, size - index)
        indices_N = np.arange(index, index + taken, dtype=np.uint64)
        examples_N[done : done + taken] = permuted(indices_N, size, round_keys(seed, epoch))
        done += taken
    return examples_N


def round_keys(seed: int, epoch: int) -> list[int]:
    """The keys of one epoch's permutation, 64 bits for each round."""
    text = f"thinwire order {seed} {epoch}".encode()
    raw = hashlib.blake2b(text, digest_size=8 * _ROUNDS).digest()
    return [int.from_bytes(raw[i : i + 8], "little") for i in range(0, len(raw), 8)]


def permuted(indices_N: np.ndarray, size: int, keys: list[int]) -> np.ndarray:
    """Where a keyed permutation of range(size) sends each index.

    A Feistel network permutes the smallest range of an even number of bits that holds `size`; an
    index that it sends outside range(size) is sent on until it falls inside ("cycle walking"). It
    is plain arithmetic modulo 2**64, so no version of numpy can change the order.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    values_N = _feistel(indices_N.astype(np.uint64), half, keys)
    while True:
        outside_N = values_N >= np.uint64(size)
        if not outside_N.any():
            return values_N.astype(np.int64)
        values_N[outside_N] = _feistel(values_N[outside_N], half, keys)


def _feistel(values_N: np.ndarray, half: int, keys: list[int]) -> np.ndarray:
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    left_N, right_N = values_N >> shift, values_N & mask
    for key in keys:
        mixed_N = right_N ^ np.uint64(key)
        for multiplier in _MIX:
            mixed_N = (mixed_N ^ (mixed_N >> np.uint64(31))) * np.uint64(multiplier)
        # The high half of a product depends on all bits below it, the low half does not.
        left_N, right_N = right_N, left_N ^ ((mixed_N >> np.uint64(32)) & mask)
    return (left_N << shift) | right_N
