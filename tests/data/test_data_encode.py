import numpy as np
import pytest

from thinwire.data import Tokenizer, encode, pieces
from thinwire.data.encode import Passage, encode_passages


@pytest.fixture
def texts(text_of):
    code = "def f():\n    x = 1\n\n    return x;\n\n\n\n" * 50
    return [text_of(i) for i in range(6)] + ["", code, "  indented;\n  x\n" * 100, "x" * 3000]


@pytest.mark.parametrize("side", ["train", "valid"])
def test_passages_in_batches_equal_single_ones(texts, monkeypatch, side):
    """Pieces of long documents must meet where no token reaches across."""
    tokenizer = Tokenizer.train(texts, 400)
    expected = [tokenizer.encode(text) for text in texts]
    monkeypatch.setattr(pieces, "PIECE_CHARACTERS", 700)
    monkeypatch.setattr(encode, "BATCH_CHARACTERS", 1500)
    found: list[list[int]] = [[]]
    for piece in encode_passages(tokenizer, (Passage(side, text) for text in texts)):
        assert piece.side == side
        found[-1] += piece.ids.tolist()
        if piece.last:
            found.append([])
    assert found.pop() == []
    assert len(found) == len(texts)
    for ids, wanted, text in zip(found, expected, texts, strict=True):
        assert tokenizer.decode(ids) == text
        if text != "x" * 3000:  # without line ends it must be cut somewhere
            assert ids == wanted


def test_sides_keep_their_order_and_validation_is_measured(texts, monkeypatch):
    monkeypatch.setattr(encode, "BATCH_CHARACTERS", 1500)
    tokenizer = Tokenizer.train(texts, 400)
    passages = [Passage("valid" if i % 3 else "train", text) for i, text in enumerate(texts)]
    encoded = list(encode_passages(tokenizer, passages))
    assert [tokenizer.decode(piece.ids) for piece in encoded] == texts
    for piece, (side, text) in zip(encoded, passages, strict=True):
        assert piece.side == side
        assert (piece.sizes is None) == (side == "train")
        if piece.sizes is not None:
            assert np.sum(piece.sizes) == len(text.encode())
