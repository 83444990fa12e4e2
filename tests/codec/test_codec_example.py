"""The codecs of examples/: found through the settings, in every process, as good as their word."""

import math
import sys
from io import StringIO
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.codec import Leg, Place, cross, parse_codec, spec_of
from thinwire.codec.parse import _CODECS
from thinwire.engine.checkpoint import Checkpoint
from thinwire.errors import CheckpointError, ConfigError, WireError
from thinwire.inference import Model
from thinwire.report import PlainDisplay
from thinwire.run.start import open_resume
from thinwire.settings import Settings
from trained import save_tensor

EXAMPLES = Path(__file__).parents[2] / "examples"
PLACE = Place(Leg.BACKWARD, step=0, microbatch=0)


@pytest.fixture(autouse=True)
def findable(monkeypatch):
    """As with PYTHONPATH=examples; what was registered is forgotten afterwards."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    registered = {"sign": "sign_codec", "exchanged": "exchanged_rounding"}
    for module in registered.values():
        monkeypatch.delitem(sys.modules, module, raising=False)
    yield
    for name, module in registered.items():
        _CODECS.pop(name, None)
        sys.modules.pop(module, None)


def test_rounding_is_exchanged(make_settings):
    make_settings(codec__plugins=["exchanged_rounding"], codec__forward="exchanged(2)")
    codec, x = parse_codec("exchanged(2)"), torch.randn(4, 64)
    assert codec.name == "exchanged(2)"
    usual, other = parse_codec("int2"), Place(Leg.FORWARD, step=0, microbatch=0)
    here, there = (cross(codec, codec, x, place) for place in (PLACE, other))
    assert torch.equal(here, cross(usual, usual, x, other))
    assert torch.equal(there, cross(usual, usual, x, PLACE)) and not torch.equal(here, there)
    assert codec.pack(x, PLACE) == usual.pack(x, other)


def test_an_unknown_codec_becomes_known_by_a_plugin(make_settings):
    with pytest.raises(ConfigError, match=r'codec\.backward = "sign"'):
        make_settings(codec__backward="sign")
    made = make_settings(codec__backward="sign+ef", codec__plugins=["sign_codec"])
    assert Settings.from_plain(made.to_plain()) == made
    assert parse_codec("sign+ef21+zstd").name == "sign+ef21+zstd"


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.lists(st.integers(0, 9), max_size=4).map(tuple), st.integers(0, 2**32))
def test_what_it_promises_holds(shape, seed):
    import sign_codec

    codec = sign_codec.Sign()
    sent = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    payload = bytes(codec.pack(sent, PLACE))
    spec = spec_of(sent)
    got = codec.unpack(payload, spec, PLACE)
    count = math.prod(shape)
    tokens = math.prod(shape[:-1]) if count else 0
    assert len(payload) == 2 * tokens + math.ceil(count / 8) == codec.payload_limit(shape)
    assert got.shape == sent.shape and torch.equal(got < 0, sent < 0)
    if count:
        mean = sent.abs().mean(-1, keepdim=True) if shape else sent.abs()
        torch.testing.assert_close(got.abs(), mean.expand(shape), rtol=2.0**-8, atol=0)
        with pytest.raises(WireError, match="sign payload"):
            codec.unpack(payload[:-1], spec, PLACE)


def test_a_checkpoint_whose_plugin_is_missing_says_which(make_settings, tmp_path, monkeypatch):
    made = make_settings(codec__backward="sign", codec__plugins=["sign_codec"]).to_plain()
    folder = save_tensor(tmp_path, 1, settings=made)
    assert Checkpoint.open(folder, allow_plugins=True).settings.codec.backward == "sign"
    monkeypatch.delitem(sys.modules, "sign_codec")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(EXAMPLES)])
    words = r'plugin: .*"sign_codec" failed.*PYTHONPATH'
    with pytest.raises(CheckpointError, match=words) as caught:
        _ = Checkpoint.open(folder, allow_plugins=True).settings
    assert "version of thinwire" not in str(caught.value)


def test_a_checkpoint_runs_no_code_unless_it_is_allowed(make_settings, tmp_path, monkeypatch):
    """The module marks that it was imported: opening the checkpoint of a stranger must not."""
    (tmp_path / "stranger.py").write_text(
        "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    plain = make_settings().to_plain()
    plain["codec"]["plugins"] = ["stranger"]
    folder = save_tensor(tmp_path, 1, settings=plain)
    for refused in (
        lambda: Checkpoint.open(folder).settings,
        lambda: Checkpoint.open(folder, trusted_plugins=["another"]).settings,
        lambda: Model(folder, "cpu"),
        lambda: open_resume(folder, make_settings(), PlainDisplay(StringIO())),
    ):
        with pytest.raises(CheckpointError, match=r"run: stranger\..*--allow-plugins"):
            refused()
    assert not (tmp_path / "ran").exists()
    trusted = Checkpoint.open(folder, trusted_plugins=["stranger"])
    assert trusted.settings.codec.plugins == ["stranger"]
    assert (tmp_path / "ran").exists()
    monkeypatch.delitem(sys.modules, "stranger")
