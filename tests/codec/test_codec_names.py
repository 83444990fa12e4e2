"""Codec names as users write them."""

import pytest

from thinwire.codec import CodecConfig, parse_codec
from thinwire.errors import ConfigError


@pytest.mark.parametrize("name", ["fp64", "fp32", "bf16", "fp16"])
def test_a_name_reads_back_to_the_same_codec(name: str) -> None:
    codec = parse_codec(name)
    assert codec.name == name
    again = parse_codec(codec.name)
    assert type(again) is type(codec) and again.tag == codec.tag


def test_the_default_codecs_exist() -> None:
    config = CodecConfig()
    assert parse_codec(config.forward).name == config.forward
    assert parse_codec(config.backward).name == config.backward


@pytest.mark.parametrize(
    ("wrong", "meant"), [("bf61", "bf16"), ("fp23", "fp32"), ("float16", "fp16"), ("FP64", "fp64")]
)
def test_a_slip_is_answered_with_the_nearest_name(wrong: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f'codec.forward = "{wrong}" .*mean "{meant}"'):
        parse_codec(wrong, "codec.forward")


def test_a_name_unlike_any_is_answered_with_all_of_them() -> None:
    with pytest.raises(ConfigError, match="allowed: fp64, fp32, bf16, fp16"):
        parse_codec("zip")
