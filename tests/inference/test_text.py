"""How tokens are chosen, and where a text ends, without a model: against plain references."""

import math
from itertools import islice
from unittest.mock import Mock

import pytest
import torch

from thinwire.errors import CheckpointError
from thinwire.inference.model import Choice, Model, Sampling, Writing, shares


def plain_nucleus(probabilities, top_p):
    """The definition: the likeliest tokens, until they make up top-p, as shares of their sum."""
    order = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])
    kept: list[int] = []
    for token in order:
        kept.append(token)
        if math.fsum(probabilities[i] for i in kept) >= top_p:
            break
    total = math.fsum(probabilities[i] for i in kept)
    return [probabilities[i] / total if i in kept else 0.0 for i in range(len(probabilities))]


@pytest.mark.parametrize("top_p", [1e-9, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_top_p_keeps_what_the_definition_keeps(top_p, temperature):
    for seed in range(5):
        logits = torch.randn(50, generator=torch.Generator().manual_seed(seed)).double() * 3
        found = shares(logits, Sampling(temperature, 0, top_p))
        wanted = plain_nucleus(torch.softmax(logits / temperature, -1).tolist(), top_p)
        assert found.tolist() == pytest.approx(wanted, abs=1e-12)
        assert (found > 0).sum() >= 1 and float(found.sum()) == pytest.approx(1)


def test_a_small_top_p_is_greedy_and_all_of_it_is_plain_sampling():
    logits = torch.randn(30, generator=torch.Generator().manual_seed(1))
    greedy = Choice(Sampling(0.0))(logits)
    assert Choice(Sampling(1.0, 0, 1e-6))(logits) == greedy == Choice(Sampling(1e-40))(logits)
    assert torch.equal(shares(logits, Sampling(0.7, 0)), torch.softmax(logits / 0.7, -1))


def test_a_model_that_says_nan_is_named_as_the_cause():
    for temperature in (0.0, 1.0):
        with pytest.raises(CheckpointError, match="diverged; use an earlier checkpoint"):
            Choice(Sampling(temperature))(torch.tensor([0.0, math.nan]))


@pytest.fixture(scope="module")
def tokenizer(corpus):
    found = corpus.tokenizer()
    assert found is not None
    return found


@pytest.fixture
def written(tokenizer):
    """The pieces of a text whose characters are a token each, and how it ended."""

    def write(text, *stop, ends=()):
        ids = [id for character in text for id in tokenizer.encode(character)]
        writing = Writing(tokenizer, tokenizer.encode("a"), ids, ends, stop)
        return list(writing), writing

    return write


@pytest.mark.parametrize(("text", "stop", "shown"), [
    ("one two three", ("two",), "one "), ("one two three", ("three", "two"), "one "),
    ("one two", ("two",), "one "),  # found with the very last token
    ("one twitch", ("two",), "one twitch"),  # a beginning that comes to nothing
    ("one tw", ("two",), "one tw"),  # ... because the text ends
    ("aaab", ("aab",), "a"), ("one", (), "one"), ("one", ("",), "one"), ("né€!", ("€",), "né"),
    ("xy", ("xy", "y"), ""),
])  # fmt: skip
def test_text_stops_before_a_string(written, text, stop, shown):
    pieces, writing = written(text, *stop)
    assert "".join(pieces) == shown
    assert writing.ended_by == ("length" if shown == text else "stop")


def test_an_end_token_ends_the_text_and_is_not_shown(written, tokenizer):
    (end,) = tokenizer.encode("!")
    pieces, writing = written("hi! more", ends=(end,))
    assert "".join(pieces) == "hi" and writing.ended_by == "stop" and writing.count == 3


@pytest.mark.parametrize(("cached", "parts"), [
    (True, [[0, 1, 2], [3], [3, 4], [5], [6]]),
    (False, [[0, 1, 2], [0, 1, 2, 3], [3, 4], [3, 4, 5], [3, 4, 5, 6]]),
])  # fmt: skip
def test_a_window_begins_anew_when_it_is_full(cached, parts):
    reader = Mock(crosses_by_token=cached, device="cpu", stages=[Mock()])
    reader.settings.model.context = 4
    reader.side_effect = lambda inputs, *_: torch.eye(9)[None, None, inputs[0, -1] + 1]  # counts on
    assert [*islice(Model.tokens_behind(reader, [0, 1, 2], Sampling(0.0)), 5)] == [3, 4, 5, 6, 7]
    assert [call.args[0][0].tolist() for call in reader.call_args_list] == parts
    assert reader.stages[0].new_past.call_count == (2 if cached else 0), "one for each window"
