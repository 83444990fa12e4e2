"""Long texts in pieces that a tokenizer can take one by one."""

from collections.abc import Iterable, Iterator

# The `tokenizers` library needs over a hundred bytes of memory for each character it works on.
PIECE_CHARACTERS = 128_000


def pieces_of(texts: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Pieces of every text, each with whether it is the last of its text."""
    for text in texts:
        start = 0
        while len(text) - start > PIECE_CHARACTERS:
            seam = _seam(text, start)
            yield text[start:seam], False
            start = seam
        yield text[start:], True


def _seam(text: str, start: int) -> int:
    """Where to cut: between a letter or digit and a newline. Byte-level BPE never merges
    across that, so the pieces give the ids that the whole text would give.
    """
    lowest, limit = start + PIECE_CHARACTERS // 2, start + PIECE_CHARACTERS
    last = at = text.rfind("\n", lowest, limit)
    while at > 0 and not text[at - 1].isalnum():
        at = text.rfind("\n", lowest, at)
    if at > 0:
        return at
    return last if last > 0 else limit
