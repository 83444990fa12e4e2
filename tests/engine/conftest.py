"""Runs for the tests of the engine, with codecs that remember."""

import pytest
from remembering import ByExample, Delta

from thinwire.codec import parse


@pytest.fixture
def known(monkeypatch):
    """The codecs of remembering.py can be named in settings."""
    for codec in (Delta, ByExample):
        monkeypatch.setitem(parse._CODECS, codec.name, codec)


@pytest.fixture
def settings_with(known, make_settings):
    """Six float32 steps, saved in the middle, with a codec that remembers in both legs."""

    def make(**changes):
        return make_settings(
            **{
                "run__precision": "fp32",
                "codec__forward": "delta",
                "codec__backward": "delta",
                "train__steps": 6,
                "train__checkpoint_every": 3,
                **changes,
            }
        )

    return make
