"""Entropy coding: the payload of any codec, compressed by Zstandard."""

import zstandard

from thinwire.codec.base import Codec, Parts, Payload, Place, Shape, TensorSpec, Wrapper
from thinwire.errors import ConfigError, WireError

DEFAULT_LEVEL = 1


class Zstd(Wrapper):
    """`+zstd`: what the inner codec would send, as one Zstandard frame with size and checksum.

    Nothing is lost and nothing is remembered; only the bytes differ. A receiver knows what size
    must come out, and refuses a frame that says another before any memory is taken for it.
    """

    content_decides_size = True

    def __init__(self, inner: Codec, level: int = DEFAULT_LEVEL):
        if not 1 <= level <= zstandard.MAX_COMPRESSION_LEVEL:
            raise ConfigError(
                f"zstd({level}): the level must lie between 1 (fast) and "
                f"{zstandard.MAX_COMPRESSION_LEVEL} (small)"
            )
        if any(codec.content_decides_size for _, codec in inner.walk()):
            raise ConfigError(f"{inner.name}+zstd: compressing twice saves nothing")
        super().__init__(inner)
        self._level = level
        self._compressor = zstandard.ZstdCompressor(level=self._level, write_checksum=True)
        self._decompressor = zstandard.ZstdDecompressor()

    @property
    def name(self) -> str:
        suffix = "zstd" if self._level == DEFAULT_LEVEL else f"zstd({self._level})"
        return f"{self.inner.name}+{suffix}"

    @property
    def by_token(self) -> bool:
        return self.inner.by_token

    def to_bytes(self, parts: Parts) -> Payload:
        return self._compressor.compress(self.inner.to_bytes(parts))

    def from_bytes(self, payload: Payload, spec: TensorSpec, place: Place) -> Parts:
        wanted = sum(part.bytes for part in self.inner.layout(spec.shape, place))
        try:
            size = zstandard.frame_content_size(payload)
            if size != wanted:
                said = f"{size} bytes" if size >= 0 else "an unknown size"
                raise WireError(
                    f"a {self.name} payload for shape {spec.shape} holds {wanted} bytes, "
                    f"but one of {said} arrived"
                )
            plain = self._decompressor.decompress(payload, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise WireError(f"a {self.name} payload cannot be read: {error}") from None
        return self.inner.from_bytes(plain, spec, place)

    def payload_limit(self, shape: Shape) -> int:
        size = self.inner.payload_limit(shape)
        # What cannot be compressed: blocks of 128 KiB as they are, each with a header of 3 bytes,
        # and magic (4), descriptor (1), window (1), size (8) and checksum (4) of the frame.
        return size + 3 * (size // 2**17 + 1) + 18

    def expected_bytes(self, shape: Shape) -> int:
        coded = self.inner.coded_bytes(shape)
        return coded if coded < self.inner.payload_limit(shape) else self.payload_limit(shape)
