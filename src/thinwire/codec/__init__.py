"""Codecs: tensors to bytes and back, outside autograd (floor 1)."""

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
        Payload,
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
    from thinwire.codec.quantize import Cast

__all__ = [
    "Cast", "Codec", "CodecConfig", "Layout", "Leg", "Part", "Parts", "Payload", "Place",
    "PluginError", "Shape", "Stateful", "Surroundings", "TensorSpec", "Wrapper", "build_codecs",
    "cross", "elements", "parse_codec", "register_codec", "spec_of",
]  # fmt: skip

__getattr__ = on_first_use(__name__, {
    "base": ("Codec", "Layout", "Leg", "Part", "Parts", "Payload", "Place", "Shape", "Stateful",
             "Surroundings", "TensorSpec", "Wrapper", "cross", "elements", "spec_of"),
    "parse": ("build_codecs", "parse_codec", "register_codec"),
    "quantize": ("Cast",),
})  # fmt: skip
