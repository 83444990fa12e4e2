"""Codecs: tensors to bytes and back, outside autograd (floor 1)."""

from thinwire.codec.base import Codec, Leg, Payload, Place, TensorSpec
from thinwire.codec.cast import Cast
from thinwire.codec.parse import CodecConfig, parse_codec

__all__ = ["Cast", "Codec", "CodecConfig", "Leg", "Payload", "Place", "TensorSpec", "parse_codec"]
