"""Codecs: tensors to bytes and back, outside autograd (floor 1)."""

from thinwire.codec.base import Codec, Leg, Payload, Place, Surroundings, TensorSpec, cross
from thinwire.codec.cast import Cast
from thinwire.codec.config import CodecConfig
from thinwire.codec.parse import build_codecs, parse_codec

__all__ = [
    "Cast",
    "Codec",
    "CodecConfig",
    "Leg",
    "Payload",
    "Place",
    "Surroundings",
    "TensorSpec",
    "build_codecs",
    "cross",
    "parse_codec",
]
