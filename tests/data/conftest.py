import random

import pytest

from thinwire.data import prepare

WORDS = """
amber bridge canal delta engine forest garden harbor island jungle kettle lantern
"""


def make_text(seed, lines=40):
    """A few lines of words, different for every seed, the same on every machine."""
    rng, words = random.Random(seed), WORDS.split()
    return "".join(
        " ".join(rng.choice(words) for _ in range(8)) + f" {seed}\n" for _ in range(lines)
    )


@pytest.fixture
def text_of():
    return make_text


@pytest.fixture
def text_folder(tmp_path):
    """Forty small documents, enough for both sides of the split."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i:02d}.txt").write_text(make_text(i), encoding="utf-8")
    return folder


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def made(cache, request):
    """Prepares a corpus for the vocabulary of the test's file, in a cache of the test's own."""
    usual = request.module.VOCAB
    return lambda config, vocab=usual, *rest: prepare(config, vocab, cache, *rest)
