import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from thinwire.data import Tokenizer, documents
from thinwire.data import tokenizer as tokenizer_module
from thinwire.data.documents import Texts
from thinwire.data.tokenizer import END_OF_TEXT
from thinwire.errors import DataError


@pytest.fixture
def texts(text_of):
    code = "def f():\n    x = 1\n\n    return x;\n\n\n\n" * 50
    return [text_of(i) for i in range(6)] + ["", code, "  indented;\n  x\n" * 100, "x" * 3000]


@pytest.mark.parametrize("side", ["train", "valid"])
def test_passages_in_batches_equal_single_ones(texts, monkeypatch, side):
    """Pieces of long documents must meet where no token reaches across."""
    tokenizer = Tokenizer.train(texts, 400)
    expected = [tokenizer.encode(text) for text in texts]
    monkeypatch.setattr(tokenizer_module, "PIECE_CHARACTERS", 700)
    monkeypatch.setattr(documents, "BATCH_CHARACTERS", 1500)
    found: list[list[int]] = [[]]
    for chunk in Texts([]).encode(tokenizer, ((side, text) for text in texts)):
        assert chunk.side == side
        for token in chunk.ids.tolist():
            if token == tokenizer.end_of_text:
                found.append([])
            else:
                found[-1].append(token)
    assert found.pop() == []
    assert len(found) == len(texts)
    for ids, wanted, text in zip(found, expected, texts, strict=True):
        assert tokenizer.decode(ids) == text
        if text != "x" * 3000:  # without line ends it must be cut somewhere
            assert ids == wanted


def test_sides_keep_their_order_and_validation_is_measured(texts, monkeypatch):
    monkeypatch.setattr(documents, "BATCH_CHARACTERS", 1500)
    tokenizer = Tokenizer.train(texts, 400)
    passages = [("valid" if i % 3 else "train", text) for i, text in enumerate(texts)]
    documents_of = Texts([])
    encoded = list(documents_of.encode(tokenizer, passages))
    assert len(encoded) > 2 and sum(chunk.sizes is None for chunk in encoded) > 1  # several batches
    for side in ("train", "valid"):
        whole = "".join(text + END_OF_TEXT for own, text in passages if own == side)
        found = [chunk for chunk in encoded if chunk.side == side]
        assert "".join(tokenizer.decode(chunk.ids) for chunk in found) == whole
        assert all((chunk.sizes is None) == (side == "train") for chunk in found)
    assert all(len(chunk.ids) == len(chunk.sizes) for chunk in found)
    sizes = sum(int(chunk.sizes.sum()) for chunk in found)
    assert sizes == len(whole.replace(END_OF_TEXT, "").encode())
    assert documents_of.characters == sum(map(len, texts))
    assert documents_of.remarks() == []


def test_no_more_is_held_than_a_batch(texts, monkeypatch):
    monkeypatch.setattr(documents, "BATCH_CHARACTERS", 1500)
    taken = 0

    def endless():
        nonlocal taken
        while True:
            taken += 100
            yield ("train", "x" * 99 + "\n")

    encoded = Texts([]).encode(Tokenizer.train(texts, 300), endless())
    assert len([next(encoded) for _ in range(3)]) == 3 and taken == 4500


def lost(backend, text):
    texts = Texts([])
    list(texts.encode(Tokenizer(backend), [("train", text)]))
    (told,) = texts.remarks()
    return told


def byte_level(*alphabet):
    backend = tokenizers.Tokenizer(models.BPE(dict(zip(alphabet, range(99), strict=False)), []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def test_characters_without_a_token_are_counted():
    told = lost(byte_level("a", "b", "Ġ"), "a baß ab\nba é é")
    assert "loses 4 of 15 characters (26.67%), most often 'é' 2, " in told
    assert "'ß' 1" in told and "'\\n' 1" in told


def test_what_loses_most_of_the_text_is_refused():
    with pytest.raises(DataError, match=r"do not fit: the tokenizer loses 6 of 10 characters"):
        lost(byte_level("a"), "aaaabbbbbb")
