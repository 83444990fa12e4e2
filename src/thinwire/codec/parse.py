"""Codec names as users write them."""

from thinwire.codec.base import Codec, Leg
from thinwire.codec.cast import FORMATS, Cast
from thinwire.errors import ConfigError
from thinwire.typed import nearest


def build_codecs(forward: str, backward: str, where: str = "codec") -> dict[Leg, Codec]:
    """The codecs of one end of a boundary, new and without memory, for both directions."""
    return {
        Leg.FORWARD: parse_codec(forward, f"{where}.forward"),
        Leg.BACKWARD: parse_codec(backward, f"{where}.backward"),
    }


def parse_codec(name: str, where: str = "codec") -> Codec:
    """The codec a name stands for; `where` is the config key, for the message."""
    if name in FORMATS:
        return Cast(name)
    raise ConfigError(f'{where} = "{name}" is not a codec{nearest(name, FORMATS)}')
