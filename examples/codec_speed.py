"""What codecs cost and give on a Gaussian tensor: speed, bits per element, error.

    python examples/codec_speed.py                      # a choice of codecs, on the CPU
    python examples/codec_speed.py --device cuda int4 "int4(group=64,hadamard)"

Speed is in bytes of the float32 tensor per second, for packing and unpacking together, the best of
five; on a GPU without the way to the host and back. Bits are those of the whole payload. Bits
and error of codecs that remember are those of a first tensor.
"""

import argparse
import time
from collections.abc import Callable

import torch

from thinwire.codec import Codec, Leg, Place, TensorSpec, cross, parse_codec

CHOICE = ["bf16", "fp8", "int8", "int8(group=64)", "int8(hadamard)", "int8(tensor)", "int6",
          "int4", "int4(group=64)", "int4(group=64,hadamard)", "int4(tensor)", "int3", "int2",
          "step(4)", "step(4)+zstd", "topk(0.1)", "randk(0.1)"]  # fmt: skip


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
    spec, size = TensorSpec(shape, x.dtype, device), x.numel() * x.element_size()

    def gigabytes_per_second(work: Callable[[], object]) -> float:
        seconds = []
        for _ in range(6):
            start = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        return size / min(seconds[1:]) / 1e9

    print(f"{device}, {torch.get_num_threads()} threads, float32 {shape}")
    print(f"copying the tensor: {gigabytes_per_second(x.clone):.1f} GB/s")
    print(f"{'codec':26}{'forward GB/s':>14}{'backward GB/s':>14}{'bits':>8}{'error/rms':>11}")
    for name in options.codecs:
        speeds = []
        for leg in Leg:
            place = Place(leg, 0, 0)
            ends = parse_codec(name), parse_codec(name)  # a codec object is one end

            def there_and_back(
                ends: tuple[Codec, Codec] = ends, place: Place = place
            ) -> torch.Tensor:
                sender, receiver = ends
                if device.type == "cpu":
                    return receiver.unpack(sender.pack(x, place), spec, place)
                return cross(sender, receiver, x, place)

            speeds.append(gigabytes_per_second(there_and_back))
        place = Place(Leg.FORWARD, 0, 0)
        bits = 8 * len(parse_codec(name).pack(x, place)) / x.numel()
        error = (cross(parse_codec(name), parse_codec(name), x, place) - x).square().mean().sqrt()
        print(f"{name:26}{speeds[0]:14.2f}{speeds[1]:14.2f}{bits:8.2f}{error:11.4f}")


if __name__ == "__main__":
    main()
