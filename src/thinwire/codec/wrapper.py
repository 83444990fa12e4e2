"""A codec around another: what it does not define itself, the codec inside does."""

from torch import Tensor

from thinwire.codec.base import Codec, Layout, Parts, Payload, Place, Shape, TensorSpec


class Wrapper(Codec):
    """As the codec inside, but for what a subclass overrides.

    Only `by_token` is False until a subclass declares it: a wrapper might mix tokens.
    """

    def __init__(self, inner: Codec):
        self.inner = inner

    def inside(self) -> dict[str, Codec]:
        return {"inner": self.inner}

    def layout(self, shape: Shape, place: Place) -> Layout:
        return self.inner.layout(shape, place)

    def encode(self, tensor: Tensor, place: Place) -> Parts:
        return self.inner.encode(tensor, place)

    def decode(self, parts: Parts, spec: TensorSpec, place: Place) -> Tensor:
        return self.inner.decode(parts, spec, place)

    def to_bytes(self, parts: Parts) -> Payload:
        return self.inner.to_bytes(parts)

    def from_bytes(self, payload: Payload, spec: TensorSpec, place: Place) -> Parts:
        return self.inner.from_bytes(payload, spec, place)

    def payload_limit(self, shape: Shape) -> int:
        return self.inner.payload_limit(shape)

    def expected_bytes(self, shape: Shape) -> int:
        return self.inner.expected_bytes(shape)

    def coded_bytes(self, shape: Shape) -> int:
        return self.inner.coded_bytes(shape)

    @property
    def content_decides_size(self) -> bool:
        return self.inner.content_decides_size

    @property
    def size_varies(self) -> bool:
        return self.content_decides_size or self.inner.size_varies
