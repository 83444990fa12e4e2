"""Runs for the tests of the engine, with codecs that remember."""

import itertools

import pytest
from remembering import ByExample, Delta

from settings_values import EXACT
from thinwire.codec import parse


@pytest.fixture
def known(monkeypatch):
    """The codecs of remembering.py can be named in settings."""
    for codec in (Delta, ByExample):
        monkeypatch.setitem(parse._CODECS, codec.name, codec)


@pytest.fixture
def settings_with(known, make_settings):
    """Six float32 steps, saved in the middle, with a codec that remembers in both legs."""
    own = {**EXACT, "codec__forward": "delta", "codec__backward": "delta", "train__steps": 6}
    return lambda **changes: make_settings(**{**own, "train__checkpoint_every": 3, **changes})


@pytest.fixture
def saved_run(run_in_threads, corpus, tmp_path):
    """Runs to the end: the outcome, and the folders of its checkpoints by step."""

    def run(settings, folder="run", **how):
        outcome = run_in_threads(settings, folder=tmp_path / folder, **how)
        saved = {s: outcome.commit(tmp_path / folder, s, corpus) for s in outcome.shards()}
        return outcome, saved

    return run


@pytest.fixture
def resumed(run_in_threads, tmp_path):
    """Goes on from a checkpoint, each time in a new folder."""
    folders = (tmp_path / f"resumed-{number}" for number in itertools.count())

    def run(settings, checkpoint, prepare_worker=None):
        return run_in_threads(settings, checkpoint, prepare_worker, next(folders))

    return run
