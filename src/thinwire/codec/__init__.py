"""Codecs: tensors to bytes and back, outside autograd."""

from typing import TYPE_CHECKING

from thinwire.codec.config import CodecConfig, PluginError
from thinwire.lazy import on_first_use

if TYPE_CHECKING:
    from thinwire.codec.base import (
        Codec,
        Layout,
        Leg,
        Part,
        Parts,
        Place,
        Shape,
        Stateful,
        Surroundings,
        TensorSpec,
        Wrapper,
        cross,
        elements,
        spec_of,
    )
    from thinwire.codec.parse import build_codecs, parse_codec, register_codec

__getattr__ = on_first_use(__name__, "base", "parse", "quantize")
