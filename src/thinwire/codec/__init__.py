"""Codecs: tensors to bytes and back, outside autograd (floor 1)."""

from thinwire.codec.base import Codec, Leg, Payload, Place, TensorSpec, cross
from thinwire.codec.cast import Cast
from thinwire.codec.parse import CodecConfig, build_codecs, parse_codec

__all__ = [
    "Cast",
    "Codec",
    "CodecConfig",
    "Leg",
    "Payload",
    "Place",
    "TensorSpec",
    "build_codecs",
    "cross",
    "parse_codec",
]
