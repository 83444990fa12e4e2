"""What codecs cost and give on a Gaussian tensor: speed, bits per element, error.

    python examples/codec_speed.py                      # a choice of codecs, on the CPU
    python examples/codec_speed.py --device cuda int4 "int4(group=64,hadamard)"

Speeds are in GB of the float32 tensor per second, for packing and unpacking together, the best of
five, for each leg. "On the device" leaves out the copy to CPU memory and what runs there (+zstd):
on a GPU it is what competes with the model. "As bytes" has it all, and "of 1 Gbit/s" is its time
as a share of what the payload takes on such a link. Bits are those of the whole payload; bits and
error of codecs that remember are those of a first tensor.
"""

import argparse
import time
from collections.abc import Callable

import torch
import zstandard

from thinwire.codec import Codec, Leg, Place, Surroundings, TensorSpec, cross, parse_codec

CHOICE = ["bf16", "int8", "int8(group=64)", "int8(hadamard)", "int8(tensor)", "int6", "int4",
          "int4(group=64)", "int4(group=64,hadamard)", "int4(tensor)", "int3", "int2", "step(4)",
          "step(4)+zstd", "topk(0.1)", "randk(0.1)"]  # fmt: skip


LINK = 1e9 / 8  # bytes per second
ZSTD_ELEMENTS = 2**22  # zstd alone is slow: it gets so many at most


class Clock:
    """Times work on a device in gigabytes of one tensor per second."""

    def __init__(self, device: torch.device):
        self._device = device

    def speed(self, work: Callable[[], object], size: int) -> float:
        """The best of five, after one run to warm up."""
        seconds = []
        for _ in range(6):
            start = time.perf_counter()
            work()
            if self._device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        return size / min(seconds[1:]) / 1e9


def zstd_speed(x: torch.Tensor, clock: Clock) -> tuple[float, float]:
    """GB/s and bits of zstd alone, on bf16 numbers in CPU memory."""
    part = x.flatten()[:ZSTD_ELEMENTS]
    numbers = part.bfloat16().cpu().view(torch.uint8).numpy().tobytes()
    packed = zstandard.compress(numbers)
    both = clock.speed(
        lambda: zstandard.decompress(zstandard.compress(numbers)), part.numel() * x.element_size()
    )
    return both, 8 * len(packed) / part.numel()


def main() -> None:
    """One line for each codec."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("codecs", nargs="*", default=CHOICE)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--elements", type=int, default=2**22)
    parser.add_argument("--width", type=int, default=1024)
    options = parser.parse_args()
    device = torch.device(options.device)
    generator = torch.Generator(device).manual_seed(0)
    shape = options.elements // options.width, options.width
    x = torch.randn(shape, generator=generator, device=device)
    spec, size, clock = (
        TensorSpec(shape, x.dtype, device),
        x.numel() * x.element_size(),
        Clock(device),
    )

    zstd, zstd_bits = zstd_speed(x, clock)
    print(f"{device}, {torch.get_num_threads()} threads, float32 {shape}")
    print(f"copying the tensor: {clock.speed(x.clone, size):.1f} GB/s")
    print(f"zstd alone, of bf16 on the CPU: {zstd:.2f} GB/s, {zstd_bits:.2f} bits")
    print(f"{'':26}{'on the device':>18}{'as bytes':>16}{'of 1 Gbit/s':>14}")
    print(f"{'codec':26}{'fwd':>9}{'bwd':>9}{'fwd':>8}{'bwd':>8}{'fwd':>7}{'bwd':>7}"
          f"{'bits':>8}{'error/rms':>11}")  # fmt: skip
    legs = [Place(leg, 0, 0, examples=tuple(range(shape[0]))) for leg in Leg]

    def end(name: str) -> Codec:
        """A codec object is one end; what it may remember is a row for each example."""
        codec = parse_codec(name)
        codec.prepare(spec, Surroundings(shape[0], size))
        return codec

    for name in options.codecs:
        both = end(name), end(name)

        def on_device(place: Place, ends: tuple[Codec, Codec] = both) -> torch.Tensor:
            return ends[1].decode(ends[0].encode(x, place), spec, place)

        def as_bytes(place: Place, ends: tuple[Codec, Codec] = both) -> torch.Tensor:
            return ends[1].unpack(ends[0].pack(x, place), spec, place)

        inside = [clock.speed(lambda p=place: on_device(p), size) for place in legs]
        whole = [clock.speed(lambda p=place: as_bytes(p), size) for place in legs]
        packed = len(end(name).pack(x, legs[0]))
        error = (cross(end(name), end(name), x, legs[0]) - x).square().mean().sqrt()
        shares = [size / (speed * 1e9) / (packed / LINK) for speed in whole]
        print(f"{name:26}{inside[0]:9.2f}{inside[1]:9.2f}{whole[0]:8.2f}{whole[1]:8.2f}"
              f"{shares[0]:7.0%}{shares[1]:7.0%}{8 * packed / x.numel():8.2f}{error:11.4f}",
              flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
