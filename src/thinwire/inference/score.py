"""Any text as a validation set: its ids, in windows of the context, to the last token.

Shapes: B windows, T tokens of a window.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from thinwire.data import Tokenizer
from thinwire.data.encode import Losses, encode_passages
from thinwire.data.files import text_files
from thinwire.data.sources import read_documents
from thinwire.errors import DataError

MOST_WINDOWS = 8  # at a time
MOST_LOGITS = 1 << 26  # at a time; of these there are several copies, of 256 MiB each


class Window(NamedTuple):
    """Token ids of a few windows of one length, and the token after each."""

    inputs_BT: Tensor
    targets_BT: Tensor


class OtherText:
    """The text of a file or folder as one tokenizer writes it; documents end with its end of text.

    Windows follow each other without overlap, as in training; the last may be shorter.
    """

    def __init__(self, path: Path, tokenizer: Tokenizer, text_key: str, context: int, vocab: int):
        files = text_files(str(path), "--data")
        texts = (("valid", document.text) for document in read_documents(files, text_key))
        losses = Losses()
        chunks = list(encode_passages(tokenizer, texts, losses))
        self._ids_N = np.concatenate([np.empty(0, np.int64), *(chunk.ids for chunk in chunks)])
        if len(self._ids_N) < 2:
            raise DataError(f"{path} has too little text: a loss needs at least two tokens")
        sizes = [chunk.sizes for chunk in chunks if chunk.sizes is not None]
        self._sizes_N = np.concatenate([np.empty(0, np.int64), *sizes])
        self._context = context
        self._at_once = max(1, min(MOST_WINDOWS, MOST_LOGITS // (context * vocab)))
        self.lost = losses.summary()

    def windows(self, most: int = 0) -> list[range]:
        """The places of inputs, a few windows of one length in a range; 0 = all of them."""
        count, step = len(self._ids_N) - 1, self._at_once * self._context
        whole = count - count % self._context
        found = [range(at, min(at + step, whole)) for at in range(0, whole, step)]
        found += [range(whole, count)] if whole < count else []
        return found[:most] if most else found

    def read(self, places: list[range], device: torch.device) -> Iterator[Window]:
        """The windows at these places."""
        for place in places:
            ids_N = torch.from_numpy(self._ids_N[place.start : place.stop + 1].astype(np.int64))
            shape = -1, min(self._context, len(place))
            yield Window(ids_N[:-1].reshape(shape).to(device), ids_N[1:].reshape(shape).to(device))

    def size(self, places: list[range]) -> tuple[int, int]:
        """How many tokens these windows predict, and their UTF-8 bytes."""
        sizes = (int(self._sizes_N[place.start + 1 : place.stop + 1].sum()) for place in places)
        return sum(map(len, places)), sum(sizes)
