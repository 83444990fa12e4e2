"""The loss on any text: every token once, with the checkpoint's own tokenizer."""

import math
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from thinwire.errors import DataError
from thinwire.inference import Model
from thinwire.report import PlainDisplay


def display() -> PlainDisplay:
    return PlainDisplay(StringIO())


def plain_loss(model: Model, ids: list[int]) -> float:
    """The definition: window after window of the context, each token once, one mean over all."""
    context, total = model.settings.model.context, 0.0
    for start in range(0, len(ids) - 1, context):
        window = torch.tensor([ids[start : start + context + 1]])
        logits = model(window[:, :-1])[0]
        total += F.cross_entropy(logits, window[0, 1:], reduction="sum").item()
    return total / (len(ids) - 1)


@pytest.mark.parametrize("words", [3, 16, 90, 400])
def test_the_loss_is_that_of_every_token(chatting: Callable, tmp_path: Path, words: int) -> None:
    """Texts shorter than a window, of a few windows, of several microbatches."""
    model = Model(chatting(model__context=16), "cpu")
    text = " ".join(f"stage{number % 7} wire" for number in range(words))
    (tmp_path / "other.txt").write_text(text)
    tokenizer = model.tokenizer()
    ids = [*tokenizer.encode(text), tokenizer.end_of_text]
    found = model.evaluate_text(tmp_path / "other.txt", display())
    with torch.no_grad():
        assert found["valid_loss"] == pytest.approx(plain_loss(model, ids), abs=1e-10)
    assert found["tokens"] == len(ids) - 1
    first = len(tokenizer.decode(ids[:1]))  # its first token is predicted by nothing
    bits = found["valid_loss"] / math.log(2) * found["tokens"] / (len(text) - first)
    assert found["bits_per_byte"] == pytest.approx(bits)
    assert found["data"].endswith("other.txt")


def test_documents_are_separated_and_limits_hold(chatting: Callable, tmp_path: Path) -> None:
    model = Model(chatting(model__context=16), "cpu")
    lines = [f'{{"words": "stage {number} wire"}}' for number in range(200)]
    (tmp_path / "other.jsonl").write_text("\n".join(lines))
    tokenizer = model.tokenizer()
    one_by_one = [[*tokenizer.encode(f"stage {n} wire"), tokenizer.end_of_text] for n in range(200)]
    found = model.evaluate_text(tmp_path, display(), text_key="words")
    assert found["tokens"] == sum(map(len, one_by_one)) - 1
    limited = model.evaluate_text(tmp_path, display(), 2, "words")
    assert limited["tokens"] == 2 * 8 * 16 and limited["valid_loss"] != found["valid_loss"]


def test_few_windows_at_once_of_a_large_vocabulary(
    chatting: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits are the largest tensor of all; how many there are at once changes no loss."""
    model = Model(chatting(model__context=16), "cpu")
    (tmp_path / "other.txt").write_text("stage wire " * 60)
    found = model.evaluate_text(tmp_path / "other.txt", display())
    monkeypatch.setattr("thinwire.inference.model.MOST_LOGITS", 2 * 16 * 300)
    again = model.evaluate_text(tmp_path / "other.txt", display())
    assert again["valid_loss"] == pytest.approx(found["valid_loss"], abs=1e-12)
    assert model.evaluate_text(tmp_path / "other.txt", display(), 1)["tokens"] == 2 * 16


def test_text_that_cannot_be_scored_is_refused(chatting: Callable, tmp_path: Path) -> None:
    model = Model(chatting(), "cpu")
    with pytest.raises(DataError, match="--data"):
        model.evaluate_text(tmp_path / "nowhere", display())
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(DataError, match="too little text"):
        model.evaluate_text(tmp_path / "empty.txt", display())
