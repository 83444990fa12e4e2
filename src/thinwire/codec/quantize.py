"""Float formats, and quantizers: whole numbers of 2 to 8 bits, multiples of a step.

Shapes: a tensor is R rows (its last dimension is the row), D wide, split into G groups of W
elements; the last group of a row may be short. All arithmetic is in float32. What shares a scale
with NaN, an infinity or a magnitude above 2**120 (after the rotation) arrives as NaN.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from thinwire.codec.base import Codec, Layout, Leg, Part, Parts, Place, Shape, TensorSpec, elements
from thinwire.errors import ConfigError

FORMATS = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
LARGEST = 2.0**120  # what is above counts as infinite: below, no sum or product overflows
_SMALLEST = 2.0**-126  # the smallest scale: its reciprocal is finite
_NAN_BITS = 0x7FC0  # NaN in bf16

# Of `step`:
_FEWEST_BITS, _MOST_BITS = 1.25, 12.0
_CODED_BITS = 1.6, 8.0  # what +zstd needs at least; above the last nothing is estimated
_CODED_MARGIN = 0.1  # bits per element above a Gaussian's entropy, about
_CODED_FRAME = 64  # bytes of a frame and of its table of codes, about
_MOST_STEPS = 32_000  # the largest symbol: it fits into 16 bits
_SHIFT = 136  # symbols from -136 to 119 have an upper byte of zero, which then costs nothing
_NIBBLE = range(128, 144)  # shifted symbols of -8 to 7: they differ in their lower four bits alone
_FEW_OUTSIDE = 100  # below one in so many symbols outside, pairs of nibbles cost less than bytes
_SMALLEST_LARGEST = 2.0**-100  # a tensor below is rounded as if it reached up to there

# Of random words, a hash of a key and a counter: the same numbers on every device and in any order
# of calls, so runs repeat exactly and no state has to be saved.
_STRIDE = -0x61C88647  # 2**32 over the golden ratio, modulo 2**32: neighbours land far apart
_FACTORS = (-0x7A143595, -0x3D4D51CB)  # those of MurmurHash3's last mix, as signed numbers

_WORDS = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}

# Of the rotation:
_SIZES = (256, 64, 16, 4)
_SIGNS_KEY = 0x5157


class Cast(Codec):
    """Round to a float format and send the elements as they are, also NaN and infinity."""

    name = ""
    by_token = True

    def __init__(self, name: str):
        self.name = name
        self._format = FORMATS[name]

    def layout(self, shape: Shape, place: Place) -> Layout:
        return (Part(self._format, elements(shape)),)

    def encode(self, tensor: Tensor, place: Place) -> Parts:
        return (tensor.to(self._format).contiguous().reshape(-1),)

    def decode(self, parts: Parts, spec: TensorSpec, place: Place) -> Tensor:
        return parts[0].reshape(spec.shape).to(spec.dtype)


class Integer(Codec):
    """`intN`: whole numbers of N bits about zero, each row or group with a scale of its own: its
    largest magnitude over the largest code, in bf16 rounded up. With 2 bits: -3/2, -1/2, 1/2, 3/2.
    """

    by_token = True

    def __init__(self, bits: int, group: int | None = None, hadamard: bool = False):
        if group is not None and group < 4:
            raise ConfigError(f"group={group}: a group must have at least 4 elements")
        if hadamard and group is not None and group & (group - 1):
            raise ConfigError(
                f"group={group}: with hadamard, the group size must be a power of two"
            )
        self._bits = bits
        self._group = group
        self._hadamard = hadamard
        self._center = 2 if bits == 2 else 2 ** (bits - 1) - 1  # the code at or just above zero
        self._above = 0.5 if bits == 2 else 0.0  # how far above zero that level lies

    @property
    def name(self) -> str:
        arguments = [f"group={self._group}"] if self._group else []
        arguments += ["hadamard"] if self._hadamard else []
        return f"int{self._bits}" + (f"({','.join(arguments)})" if arguments else "")

    def layout(self, shape: Shape, place: Place) -> Layout:
        count, width = elements(shape), _width(shape)
        scales = count // width * -(-width // (self._group or width))
        codes = packed_bytes(count, self._bits)
        return Part(torch.bfloat16, scales), Part(torch.uint8, codes)

    def encode(self, tensor: Tensor, place: Place) -> Parts:
        x_RD = _rows(tensor)
        if self._hadamard:
            x_RD = rotate(x_RD, self._group or x_RD.shape[1])
        x_RGW = self._grouped(x_RD)
        scale_RG1 = _scale(x_RGW, top=self._center - self._above)
        levels_RGW = x_RGW * _reciprocal(scale_RG1)
        if self._above:
            levels_RGW.sub_(self._above)
        codes_RGW = _codes(round_at(levels_RGW, place), self._center, self._bits)
        codes_RD = codes_RGW.flatten(1)[:, : x_RD.shape[1]]
        return scale_RG1.reshape(-1), pack_bits(codes_RD.reshape(-1), self._bits)

    def decode(self, parts: Parts, spec: TensorSpec, place: Place) -> Tensor:
        scales, packed = parts
        width, count = _width(spec.shape), elements(spec.shape)
        codes = unpack_bits(packed, count, self._bits).view(torch.int8) - self._center
        levels_RD = codes.to(torch.float32).view(count // width, width)
        if self._above:
            levels_RD.add_(self._above)
        if self._hadamard:
            levels_RD = rotate(levels_RD, self._group or width, back=True)
        levels_RGW = self._grouped(levels_RD)
        scale_RG1 = scales.to(torch.float32).view(*levels_RGW.shape[:2], 1)
        # One rounding at most, so every device gives the same.
        x_RD = levels_RGW.mul_(scale_RG1).flatten(1)[:, :width]
        return x_RD.reshape(spec.shape).to(spec.dtype)

    def _grouped(self, x_RD: Tensor) -> Tensor:
        """Rows split into groups, the last one filled up with zeros: a view where none is short."""
        rows, width = x_RD.shape
        group = min(self._group or width, width)
        padded = F.pad(x_RD, (0, -width % group)) if width % group else x_RD
        return padded.view(rows, -(-width // group), group)


class TensorInteger(Codec):
    """`intN(tensor)`: whole numbers of N bits over the span from least to greatest element."""

    def __init__(self, bits: int):
        self._bits = bits

    @property
    def name(self) -> str:
        return f"int{self._bits}(tensor)"

    def layout(self, shape: Shape, place: Place) -> Layout:
        count = elements(shape)
        codes = packed_bytes(count, self._bits)
        return Part(torch.float32, 2 if count else 0), Part(torch.uint8, codes)

    def encode(self, tensor: Tensor, place: Place) -> Parts:
        x = tensor.to(torch.float32).reshape(-1)
        if not len(x):
            return x, x.to(torch.uint8)
        least, most = x.amin(), x.amax()
        step = torch.where(most > least, _over(most - least, 2**self._bits - 1), 0.0)
        step = torch.where(torch.maximum(most, -least) <= LARGEST, step, math.nan)
        center = 2 ** (self._bits - 1)
        levels = torch.sub(x, least).mul_(_reciprocal(step)).sub_(center)
        codes = _codes(round_at(levels, place), center, self._bits)
        return torch.stack((least, step)), pack_bits(codes, self._bits)

    def decode(self, parts: Parts, spec: TensorSpec, place: Place) -> Tensor:
        span, packed = parts
        x = unpack_bits(packed, elements(spec.shape), self._bits).to(torch.float32)
        if len(x):
            least, step = span
            x.mul_(step).add_(least)  # rounded after each: every device gives the same
        return x.reshape(spec.shape).to(spec.dtype)


class StepCodec(Codec):
    """`step(bits)`: multiples of one step, rms * sqrt(2 pi e) * 2**-bits or more, in 16 bits.

    Gradients are rounded stochastically, and the receiver, who knows the random numbers, takes them
    off again. Of activations the mean of each column is sent once. docs/codecs.md has the layout.
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
        means, plane = Part(torch.int16, min(count, _width(shape))), Part(torch.uint8, count)
        one = min(count, 1)
        return Part(torch.float32, one), means, Part(torch.uint8, one), plane, plane

    def expected_bytes(self, shape: Shape, coded: bool = False) -> int:
        fewest, most = _CODED_BITS
        if self._bits > most or not coded:
            return self.payload_limit(shape)
        bits = elements(shape) * (max(fewest, self._bits) + _CODED_MARGIN)
        return math.ceil(bits / 8) + _CODED_FRAME + 2 * _width(shape)

    def encode(self, tensor: Tensor, place: Place) -> Parts:
        x = _rows(tensor)
        if not len(x):
            none = x.reshape(-1).to(torch.uint8)
            return none.to(torch.float32), none.to(torch.int16), none, none, none
        largest = torch.maximum(x.amax(), -x.amin()).clamp(min=_SMALLEST_LARGEST)
        # Relative to the largest, so that squares neither overflow nor vanish.
        relative = x / largest
        rms = torch.linalg.vector_norm(relative) / math.sqrt(x.numel())
        in_steps = rms * math.sqrt(2 * math.pi * math.e) * 2.0**-self._bits
        in_steps = in_steps.clamp(min=1 / _MOST_STEPS)
        symbols_RD = round_at(relative.div_(in_steps), place).to(torch.int16)
        step = torch.where(largest <= LARGEST, largest * in_steps, math.nan)
        sums_D = symbols_RD.sum(0) * (place.leg is Leg.FORWARD)
        half = len(x) // 2  # to the nearest: columns about zero have a mean of zero
        means_D = (sums_D + half).div_(len(x), rounding_mode="floor").to(torch.int16)
        symbols = symbols_RD.sub_(means_D).add_(_SHIFT).reshape(-1)  # modulo 2**16, and back
        lower, upper = symbols.to(torch.uint8), (symbols >> 8).to(torch.uint8)
        outside = (symbols < _NIBBLE.start) | (symbols >= _NIBBLE.stop)
        paired = outside.sum() * _FEW_OUTSIDE < len(symbols)
        lower = torch.where(paired, _halves_apart(lower), lower)
        return step.reshape(1), means_D, paired.to(torch.uint8).reshape(1), lower, upper

    def decode(self, parts: Parts, spec: TensorSpec, place: Place) -> Tensor:
        step, means_D, paired, lower, upper = parts
        lower = torch.where(paired > 0, _halves_together(lower), lower)
        symbols = (upper.to(torch.int16) << 8).add_(lower).sub_(_SHIFT)
        if len(means_D):
            symbols.view(-1, len(means_D)).add_(means_D)
        values = symbols.to(torch.float32)
        if place.leg is Leg.BACKWARD:
            rows_RD = values.view(-1, _width(spec.shape))
            rows_RD.sub_(_dither(rows_RD, place) * rows_RD.any(1, keepdim=True))
        # Single operations, each rounded once, so every device gives the same.
        return (values * step).reshape(spec.shape).to(spec.dtype)


def _halves_apart(whole: Tensor) -> Tensor:
    """The lower halves of bytes, two to a byte, then their upper halves; a last odd byte stays."""
    first, second = whole[: len(whole) // 2 * 2].view(-1, 2).unbind(1)
    lower, upper = first & 15 | second << 4, first >> 4 | second & 0xF0
    return torch.cat([lower, upper, whole[2 * len(lower) :]])


def _halves_together(apart: Tensor) -> Tensor:
    """What `_halves_apart` was given."""
    lower, upper, last = apart.split([len(apart) // 2, len(apart) // 2, len(apart) % 2])
    pairs = torch.stack([lower & 15 | upper << 4, lower >> 4 | upper & 0xF0], 1)
    return torch.cat([pairs.view(-1), last])


# Code i occupies bits i*bits to (i+1)*bits of a stream, from the lowest bit of the first byte. Two
# neighbours are joined within a word of twice their size, and so on until they fill whole bytes.


def packed_bytes(count: int, bits: int) -> int:
    """The length of the stream for so many codes."""
    return (count * bits + 7) // 8


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """The stream of `codes`, a flat uint8 tensor of numbers below 2**bits."""
    count, period = len(codes), _period(bits)
    words = F.pad(codes, (0, -count % period)) if count % period else codes.contiguous()
    width, lane = bits, 8
    while width % 8:
        words = words.view(_WORDS[2 * lane])
        words = words - (words >> lane).mul_((1 << lane) - (1 << width))
        width, lane = 2 * width, 2 * lane
    if width == 8:
        return words.to(torch.uint8)
    kept = words.view(torch.uint8).view(len(words), lane // 8)[:, : width // 8]
    return kept.reshape(-1)[: packed_bytes(count, bits)]


def unpack_bits(packed: Tensor, count: int, bits: int) -> Tensor:
    """The inverse: so many codes as uint8, from a stream of exactly `packed_bytes`."""
    period = _period(bits)
    width, lane, total = bits * period, 8 * period, -(-count // period)
    if width == 8:
        words = packed.to(_WORDS[lane])
    else:
        whole = F.pad(packed, (0, total * width // 8 - len(packed))).view(total, width // 8)
        words = F.pad(whole, (0, (lane - width) // 8)).view(-1).view(_WORDS[lane])
    while lane > 8:
        width, lane = width // 2, lane // 2
        words = words + (words >> width).mul_((1 << lane) - (1 << width))
        words = words.view(_WORDS[lane])
    return words[:count]


def _period(bits: int) -> int:
    """How many codes fill whole bytes."""
    return 8 // math.gcd(bits, 8)


def _width(shape: Shape) -> int:
    """The length of a row, and 1 where there is none: a scalar, or a tensor of no elements."""
    return shape[-1] if elements(shape) and shape else 1


def _rows(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32).reshape(-1, _width(tuple(tensor.shape)))


def _scale(x: Tensor, top: float) -> Tensor:
    """What the last dimension is divided by so that nothing exceeds `top`, rounded up to bf16."""
    largest = torch.maximum(x.amax(-1, keepdim=True), x.amin(-1, keepdim=True).neg_())
    bits = _over(largest, top).view(torch.int32)
    rounded_up = torch.where(largest > 0, (bits + 0xFFFF) >> 16, 0)
    rounded_up = torch.where(largest <= LARGEST, rounded_up, _NAN_BITS)
    return rounded_up.to(torch.int16).view(torch.bfloat16)


def _over(x: Tensor, number: float) -> Tensor:
    """x / number, and not below the smallest scale; CUDA would multiply by 1/number instead."""
    return (x / x.new_full((), number)).clamp(min=_SMALLEST)


def _reciprocal(scale: Tensor) -> Tensor:
    """1/scale, less by a hair so that nothing rounds past the last code; 0 for 0 or NaN."""
    return torch.where(scale > 0, (1 - 2.0**-22) / scale.to(torch.float32), 0.0)


def _codes(levels: Tensor, center: int, bits: int) -> Tensor:
    """Whole numbers about zero as uint8 about `center`; whatever NaN became stays within bits."""
    codes = levels.to(torch.int8).add_(center).view(torch.uint8)
    return codes.bitwise_and_(2**bits - 1) if bits < 8 else codes


def random_words(count: int, key: int, device: torch.device) -> Tensor:
    """int32 numbers, uniform over all 32 bits, decided by the key and their index alone."""
    start, summand = _spread(key)
    words = torch.add(start, torch.arange(count, dtype=torch.int32, device=device), alpha=_STRIDE)
    _fold(words)
    words = torch.add(summand, words, alpha=_FACTORS[0])
    _fold(words)
    return words.mul_(_FACTORS[1])


def round_at(values: Tensor, place: Place) -> Tensor:
    """Round in place to whole numbers: to nearest forward, stochastically backward."""
    if place.leg is Leg.BACKWARD:
        values.add_(_dither(values, place))
    return values.round_()


def _dither(like: Tensor, place: Place) -> Tensor:
    """Random numbers of a place: odd multiples of 2**-16, within (-1/2, 1/2) and symmetric."""
    count = like.numel()
    words = random_words((count + 1) // 2, place.key, like.device).bitwise_or_(0x00010001)
    return words.view(torch.int16)[:count].to(like.dtype).mul_(2.0**-16).view(like.shape)


def _fold(words: Tensor) -> None:
    """words ^= words >>> 16, in one pass: the lower half takes in the upper (little-endian)."""
    halves = words.view(torch.int16).view(len(words), 2)
    halves[:, 0].bitwise_xor_(halves[:, 1])


def _spread(key: int) -> tuple[Tensor, Tensor]:
    """Two numbers of 32 bits from a key of 64, by SplitMix64: near keys give far numbers."""
    key = (key + 0x9E3779B97F4A7C15) % 2**64
    key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    key = (key ^ key >> 27) * 0x94D049BB133111EB % 2**64
    key ^= key >> 31
    low, high = torch.tensor([key % 2**32 - 2**31, (key >> 32) - 2**31], dtype=torch.int32)
    return low, high


def rotate(x_RD: Tensor, largest: int, back: bool = False) -> Tensor:
    """Each row turned by a Walsh-Hadamard transform with random signs, in blocks of `largest` at
    most; `back` undoes it. Blocks are powers of four: 1/sqrt(S) is then a power of two, and turning
    back whole numbers below 2**8 is exact, in whatever order a device adds them up.
    """
    turned = []
    with torch.autocast(x_RD.device.type, enabled=False):
        for start, stop, size in blocks(x_RD.shape[1], largest):
            piece = x_RD[:, start:stop]
            if size > 1:
                piece = _turn(piece.reshape(-1, size), back)
            turned.append(piece.reshape(len(x_RD), stop - start))
    return turned[0] if len(turned) == 1 else torch.cat(turned, dim=1)


def blocks(width: int, largest: int) -> list[tuple[int, int, int]]:
    """How a row is split: (start, stop, size) of runs of equal blocks, the largest first."""
    found, start = [], 0
    for size in (*(size for size in _SIZES if size <= largest), 1):
        stop = width - (width - start) % size
        if stop > start:
            found.append((start, stop, size))
            start = stop
    return found


def _turn(x_NS: Tensor, back: bool) -> Tensor:
    """N blocks turned: 256 as a square of 16 by 16, along both sides, for an eighth of the work."""
    if x_NS.shape[1] < 256:
        return F.linear(x_NS, _matrix(x_NS.shape[1], back, x_NS.device))
    matrix = _matrix(16, back, x_NS.device)
    squares = F.linear(x_NS.reshape(-1, 16), matrix).view(-1, 16, 16)
    return F.linear(squares.transpose(1, 2).reshape(-1, 16), matrix)


@lru_cache(maxsize=64)
def _matrix(size: int, back: bool, device: torch.device) -> Tensor:
    """An orthogonal matrix of elements ±1/sqrt(size): signs, then the transform; or its inverse."""
    matrix_SS = torch.ones(1, 1)
    while len(matrix_SS) < size:
        matrix_SS = torch.kron(torch.tensor([[0.5, 0.5], [0.5, -0.5]]), matrix_SS)
        matrix_SS = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix_SS)
    is_negative_S = random_words(size, _SIGNS_KEY, torch.device("cpu")) < 0
    signs_S = 1.0 - 2.0 * is_negative_S.float()
    return (matrix_SS * (signs_S[:, None] if back else signs_S)).to(device)
