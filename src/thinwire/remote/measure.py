"""What this machine can give a run: measured in a second or three, with bounded traffic.

As a program, `python -m thinwire.remote.measure DEVICE FOLDER`, it prints the figures of a machine
as JSON: a GPU is measured in a process of its own, which takes no memory there afterwards.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from thinwire.engine.build import choose_device
from thinwire.errors import ConfigError
from thinwire.remote.messages import Figures
from thinwire.report.human import human_bytes, human_flops
from thinwire.settings.precision import WEIGHT_TYPES
from thinwire.wire.speed import LinkRates

RATE_SECONDS = 0.2
APART_SECONDS = 120.0  # for a process that measures a GPU; importing torch may take long
_SMALLEST, _LARGEST = 128, 8192  # sides of the matrices that are multiplied
_LEAST_PRODUCTS, _BUSY_FACTOR = 12, 5  # for fewer products, up to so many times the time
_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MachineFigures:
    """One machine: its device, and its way to the host where that was measured."""

    device: str  # for people
    flops_per_s: float  # in float32
    bf16_flops_per_s: float
    memory_bytes: int  # free
    disk_bytes: int  # free
    link: LinkRates | None = None

    def describe(self) -> str:
        """A line for a person."""
        text = (
            f"{self.device}: {human_flops(self.flops_per_s)}, in bf16 "
            f"{human_flops(self.bf16_flops_per_s)}; {human_bytes(self.memory_bytes)} of memory and "
            f"{human_bytes(self.disk_bytes)} of disk are free"
        )
        if self.link is None:
            return text
        return (
            f"{text}; to the host {self.link.mbps_up:,.0f} Mbit/s up, "
            f"{self.link.mbps_down:,.0f} down, {self.link.round_trip_s * 1e3:,.0f} ms round trip"
        )


def as_figures(machine: MachineFigures) -> Figures:
    """What a machine measured, as it tells the host."""
    link = machine.link
    return Figures(
        tflops=machine.flops_per_s / 1e12,
        bf16_tflops=machine.bf16_flops_per_s / 1e12,
        memory_gb=machine.memory_bytes / 1e9,
        disk_gb=machine.disk_bytes / 1e9,
        mbps_up=link.mbps_up if link else 0.0,
        mbps_down=link.mbps_down if link else 0.0,
        latency_ms=link.round_trip_s / 2 * 1e3 if link else 0.0,
    )


def measure_machine(device: str, folder: Path) -> MachineFigures:
    """Rates, memory and disk of this machine; a GPU apart, in a process of its own."""
    chosen = choose_device(device, 0)
    if chosen.type != "cuda":
        return figures_of(chosen, folder)
    module = "thinwire.remote.measure"
    # -P: a file in the current folder must not pass for a module
    command = [sys.executable, "-P", "-m", module, device, str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=APART_SECONDS)
        return MachineFigures(**json.loads(done.stdout))
    except (OSError, subprocess.TimeoutExpired, ValueError, TypeError):
        raise ConfigError(
            f"the device {device_name(chosen)} could not be measured; choose another with --device"
        ) from None


def figures_of(device: torch.device, folder: Path) -> MachineFigures:
    """Rates, memory and disk, measured in this process."""
    return MachineFigures(
        device=device_name(device),
        flops_per_s=matmul_rate(device, "fp32"),
        bf16_flops_per_s=matmul_rate(device, "bf16"),
        memory_bytes=free_memory(device),
        disk_bytes=free_disk(folder),
    )


def matmul_rate(
    device: torch.device, precision: str = "fp32", seconds: float = RATE_SECONDS
) -> float:
    """FLOP/s of matrix products in the precision that a run computes in.

    Larger and larger matrices, until one product takes a tenth of the time or they are as large
    as any of a model: small ones would measure what surrounds the product. The best counts, for
    whatever else the machine does only makes a product slower; a busy one gets more time.
    """
    dtype = torch.bfloat16 if precision == "bf16" else WEIGHT_TYPES[precision]
    side, best, begin, products = _SMALLEST, 0.0, time.perf_counter(), 0
    matrix = torch.randn(side, side, device=device, dtype=dtype)
    _product_seconds(matrix)  # the first one also loads libraries
    while (spent := time.perf_counter() - begin) < seconds or (
        products < _LEAST_PRODUCTS and spent < _BUSY_FACTOR * seconds
    ):
        taken = min(_product_seconds(matrix) for _ in range(2))
        products += 2
        best = max(best, 2.0 * side**3 / taken)
        if taken < seconds / 10 and side < _LARGEST:
            side *= 2
            matrix = torch.randn(side, side, device=device, dtype=dtype)
    return best


def _product_seconds(matrix: torch.Tensor) -> float:
    begin = time.perf_counter()
    product = matrix @ matrix
    product[0, 0].item()  # waits for the device
    return max(time.perf_counter() - begin, 1e-9)


def device_name(device: torch.device) -> str:
    """The device in words, such as "cuda (NVIDIA H200)"."""
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    if device.type == "cpu":
        return f"cpu ({torch.get_num_threads()} threads)"
    return device.type


def free_memory(device: torch.device) -> int:
    """Bytes that a stage could take on this device now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return _available_memory()


def _available_memory() -> int:
    """Of the machine, or of the container that this process is in; half of all if unknown."""
    found = [
        int(line.split()[1]) * 1024
        for line in _text(_MEMINFO).splitlines()
        if line.startswith("MemAvailable:")
    ]
    limit, used = (_text(_CGROUP / name).strip() for name in ("memory.max", "memory.current"))
    if limit.isdigit() and used.isdigit():
        found.append(max(0, int(limit) - int(used)))
    return min(found) if found else _physical_memory() // 2


def _physical_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


def free_disk(folder: Path) -> int:
    """Bytes free where the folder is, or will be."""
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    return shutil.disk_usage(place).free


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""


if __name__ == "__main__":
    found = figures_of(choose_device(sys.argv[1], 0), Path(sys.argv[2]))
    print(json.dumps(dataclasses.asdict(found)))
