"""One step for a whole tensor: tokens that carry more get more bits, once an entropy coder follows.

With a scale per token every token costs the same bits, whether it says much or little. With one
step everywhere the error is the same everywhere, and the cost of a token follows its own size:
at equal error fewer bits on the whole. The symbols only become small by `+zstd`.
"""

import math

import torch
from torch import Tensor

from thinwire.codec.base import Codec, Layout, Part, Parts, Place, Shape, TensorSpec, elements
from thinwire.codec.noise import round_at
from thinwire.codec.quantize import LARGEST
from thinwire.errors import ConfigError

_MOST = 32_000  # the largest symbol: with the shift it stays within 16 bits
_SHIFT = 128  # symbols from -128 to 127 have an upper byte of zero, which then costs nothing
_SMALLEST = 2.0**-100  # a tensor below is rounded as if it reached up to there
_FEWEST_BITS, _MOST_BITS = 1.25, 12.0


class Step(Codec):
    """`step(bits)`: every element a multiple of one step, 16 bits wide before entropy coding.

    step = rms * sqrt(2 pi e) * 2**-bits. The entropy of a Gaussian tensor in such steps is `bits`
    per element, and less than that where magnitudes differ from token to token. Where an
    element exceeds 32,000 steps, the step is enlarged until none does: nothing is clipped.
    A tensor that holds NaN, an infinity or a magnitude above 2**120 arrives as NaN throughout.

    Below 1.05 bits the step would exceed 2 rms: a tensor of elements of one size would arrive as
    zeros, also with feedback, since the step grows with what is owed. From 1.25 bits on the error's
    rms is at most 0.87 of the tensor's, which is what feedback asks for.
    """

    def __init__(self, bits: float):
        self._bits = bits
        if not _FEWEST_BITS <= bits <= _MOST_BITS:
            raise ConfigError(
                f"{self.name}: bits must lie between {_FEWEST_BITS:g} and {_MOST_BITS:g}"
            )

    @property
    def name(self) -> str:
        return f"step({self._bits!r})" if self._bits % 1 else f"step({int(self._bits)})"

    def layout(self, shape: Shape, place: Place) -> Layout:
        count = elements(shape)
        plane = Part(torch.uint8, count)
        return Part(torch.float32, min(count, 1)), plane, plane

    def encode(self, tensor: Tensor, place: Place) -> Parts:
        x = tensor.to(torch.float32).reshape(-1)
        if not len(x):
            return x, x.to(torch.uint8), x.to(torch.uint8)
        largest = torch.maximum(x.amax(), -x.amin()).clamp(min=_SMALLEST)
        # Relative to the largest, so that squares neither overflow nor vanish.
        relative = x / largest
        rms = torch.linalg.vector_norm(relative) / math.sqrt(len(x))
        in_steps = (rms * math.sqrt(2 * math.pi * math.e) * 2.0**-self._bits).clamp(min=1 / _MOST)
        symbols = round_at(relative.div_(in_steps), place).to(torch.int16).add_(_SHIFT)
        step = torch.where(largest <= LARGEST, largest * in_steps, math.nan)
        upper = (symbols >> 8).to(torch.uint8)
        return step.reshape(1), symbols.to(torch.uint8), upper

    def decode(self, parts: Parts, spec: TensorSpec, place: Place) -> Tensor:
        step, lower, upper = parts  # one rounding, so every device gives the same
        symbols = (upper.to(torch.int16) << 8).add_(lower).sub_(_SHIFT)
        return (symbols.to(torch.float32) * step).reshape(spec.shape).to(spec.dtype)
