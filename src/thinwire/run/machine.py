"""One record of a machine, from its join to the split and the status table: measured, or listed.

As a program, `python -m thinwire.run.machine DEVICE FOLDER`, it prints the record of this machine
as JSON: a GPU is measured in a process of its own, which takes no memory there afterwards.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.errors import ConfigError
from thinwire.report.human import human_bytes, human_flops
from thinwire.settings import read_toml
from thinwire.typed import from_plain, nearest, option

if TYPE_CHECKING:  # torch may be missing: the doctor says so
    import torch

RATE_SECONDS = 0.2
APART_SECONDS = 120.0  # for a process that measures a GPU; importing torch may take long
MOST_PEERS = 256  # in one file: choosing among more would take long
MOST_OF_A_MACHINE = 1e9  # of any of its figures
_SMALLEST, _LARGEST = 128, 8192  # sides of the matrices that are multiplied
_LEAST_PRODUCTS, _BUSY_FACTOR = 12, 5  # for fewer products, up to so many times the time
_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")

EXAMPLE = """\
[[peer]]
name = "ana"
tflops = 12.0
memory_gb = 24.0
mbps_up = 40.0
mbps_down = 200.0
latency_ms = 15.0
reachable = true
"""


@dataclass(frozen=True)
class Machine:
    """What a machine has to give: its rate, its memory, its way to the host. 0: not known.

    A table `[[peer]]` of a peers.toml has the same keys.
    """

    name: str = option("", "how the peer is called; each has a name of its own")
    tflops: float = option(0.0, "rate at which it trains, in TFLOP/s", above=0)
    memory_gb: float = option(0.0, "memory free for the run, in GB (10^9 bytes)", above=0)
    mbps_up: float = option(0.0, "upload rate in Mbit/s; 0 = unlimited", least=0)
    mbps_down: float = option(0.0, "download rate in Mbit/s; 0 = unlimited", least=0)
    latency_ms: float = option(0.0, "one-way delay to the host in ms: half a ping", least=0)
    reachable: bool = option(False, "whether others can open connections to it")
    bf16_tflops: float = option(0.0, "rate of a run in bf16; 0 = that of tflops", least=0)
    disk_gb: float = option(0.0, "disk free for the run, in GB", least=0)
    device: str = option("", "the device in words")

    def __post_init__(self) -> None:
        """Refuse what no machine measures: hosts compute with what peers say of theirs."""
        numbers = [value for value in vars(self).values() if not isinstance(value, str)]
        if not all(0 <= number <= MOST_OF_A_MACHINE for number in numbers):
            raise ValueError(f"numbers from 0 to {MOST_OF_A_MACHINE:g}")

    def flops_per_s(self, precision: str) -> float:
        """Floating-point operations per second of a run in this precision."""
        is_bf16 = precision == "bf16" and self.bf16_tflops
        return (self.bf16_tflops if is_bf16 else self.tflops) * 1e12

    @property
    def memory_bytes(self) -> int:
        """Bytes free for the run."""
        return int(self.memory_gb * 1e9)

    def describe(self) -> str:
        """A line for a person."""
        text = (
            f"{self.device}: {human_flops(self.tflops * 1e12)}, in bf16 "
            f"{human_flops(self.bf16_tflops * 1e12)}; {human_bytes(self.memory_bytes)} of memory "
            f"and {human_bytes(self.disk_gb * 1e9)} of disk are free"
        )
        if not self.mbps_up:
            return text
        return (
            f"{text}; to the host {self.mbps_up:,.0f} Mbit/s up, {self.mbps_down:,.0f} down, "
            f"{2 * self.latency_ms:,.0f} ms round trip"
        )


def load_peers(path: Path) -> list[Machine]:
    """The peers that a peers.toml lists, in its order; what is wrong in it is named."""
    example = f"give each peer a table such as\n{EXAMPLE.rstrip()}"
    values = read_toml(path, f"write it, and {example}")
    for key in values:
        if key != "peer":
            raise ConfigError(f'{path}: unknown key "{key}"{nearest(key, ["peer"])}')
    listed = values.get("peer", [])
    if not isinstance(listed, list) or not listed:
        raise ConfigError(f"{path} lists no peers: {example}")
    if len(listed) > MOST_PEERS:
        raise ConfigError(f"{path} lists {len(listed):,} peers: at most {MOST_PEERS} are allowed")
    peers = []
    for index, table in enumerate(listed):
        where = f"{path}: peer[{index}]"
        try:
            peers.append(from_plain(Machine, table, where))
        except ValueError as error:
            raise ConfigError(f"{where} must have {error}") from None
        needed = ("name", "tflops", "memory_gb")
        if lacking := [key for key in needed if not getattr(peers[-1], key)]:
            raise ConfigError(f"{where} lacks {lacking[0]}: every peer needs {', '.join(needed)}")
    check_names(peers, f"{path}: ")
    return peers


def check_names(peers: list[Machine], where: str = "") -> None:
    """Refuse two peers of one name: nobody could say which of them sits where."""
    names = [peer.name for peer in peers]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f'{where}two peers are called "{twice}": give one another name')


def measure_machine(device: str, folder: Path, threads: int = 0) -> Machine:
    """Rates, memory and disk of this machine, with so many threads of a CPU (0: all); a GPU apart,
    in a process of its own.
    """
    import torch

    from thinwire.engine.build import choose_device

    chosen = choose_device(device, 0)
    if chosen.type != "cuda":
        before = torch.get_num_threads()
        torch.set_num_threads(threads or before)
        try:
            return _measured(chosen, folder)
        finally:
            torch.set_num_threads(before)
    # -P: a file in the current folder must not pass for a module
    command = [sys.executable, "-P", "-m", "thinwire.run.machine", device, str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=APART_SECONDS)
        return Machine(**json.loads(done.stdout))
    except (OSError, subprocess.TimeoutExpired, ValueError, TypeError):
        raise ConfigError(
            f"the device {device_name(chosen)} could not be measured; choose another with --device"
        ) from None


def _measured(device: "torch.device", folder: Path) -> Machine:
    return Machine(
        device=device_name(device),
        tflops=matmul_rate(device, "fp32") / 1e12,
        bf16_tflops=matmul_rate(device, "bf16") / 1e12,
        memory_gb=free_memory(device) / 1e9,
        disk_gb=free_disk(folder) / 1e9,
    )


def matmul_rate(
    device: "torch.device", precision: str = "fp32", seconds: float = RATE_SECONDS
) -> float:
    """FLOP/s of matrix products in the precision that a run computes in.

    Larger and larger matrices, until one product takes a tenth of the time or they are as large
    as any of a model: small ones would measure what surrounds the product. The best counts, for
    whatever else the machine does only makes a product slower; a busy one gets more time.
    """
    import torch

    from thinwire.settings.precision import WEIGHT_TYPES

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


def _product_seconds(matrix: "torch.Tensor") -> float:
    begin = time.perf_counter()
    product = matrix @ matrix
    product[0, 0].item()  # waits for the device
    return max(time.perf_counter() - begin, 1e-9)


def device_name(device: "torch.device") -> str:
    """The device in words, such as "cuda (NVIDIA H200)"."""
    import torch

    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    if device.type == "cpu":
        return f"cpu ({torch.get_num_threads()} threads)"
    return device.type


def free_memory(device: "torch.device") -> int:
    """Bytes that a stage could take on this device now: of a GPU, of the machine, or of the
    container that this process is in; half of all if unknown.
    """
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    lines = _text(_MEMINFO).splitlines()
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    limit, used = (_text(_CGROUP / name).strip() for name in ("memory.max", "memory.current"))
    if limit.isdigit() and used.isdigit():
        found.append(max(0, int(limit) - int(used)))
    if found:
        return min(found)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, ValueError, OSError):
        return 0


def existing_folder(folder: Path) -> Path:
    """The folder, or the one above it that exists and in which it would be made."""
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    return place


def free_disk(folder: Path) -> int:
    """Bytes free where the folder is, or will be."""
    return shutil.disk_usage(existing_folder(folder)).free


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""


if __name__ == "__main__":
    from thinwire.engine.build import choose_device

    print(json.dumps(asdict(_measured(choose_device(sys.argv[1], 0), Path(sys.argv[2])))))
