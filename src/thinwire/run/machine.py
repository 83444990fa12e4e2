"""One record of a machine, from its join to the split and the status table: measured, or listed.

As a program, `python -m thinwire.run.machine DEVICE FOLDER`, it measures a GPU with the settings on
its input, and prints the record as JSON: apart, so that no memory there stays taken.
"""

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.errors import ConfigError
from thinwire.report.human import human_bytes, human_flops
from thinwire.settings import Settings, read_toml, threads_per_stage
from thinwire.typed import from_plain, nearest, option

if TYPE_CHECKING:  # torch may be missing: the doctor says so
    import torch

APART_SECONDS = 120.0  # for a process that measures a GPU; importing torch may take long
MOST_OF_A_MACHINE = 1e9  # of any of its figures
_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")

EXAMPLE = '[[peer]]\nname = "ana"\ntflops = 12.0\nmemory_gb = 24.0\nmbps_up = 40.0'


@dataclass(frozen=True)
class Machine:
    """What a machine has to give, as a `[[peer]]` of a peers.toml lists it. 0: not known."""

    name: str = option("", "how the peer is called; each has a name of its own")
    tflops: float = option(0.0, "rate at which it trains, in TFLOP/s", above=0)
    memory_gb: float = option(0.0, "memory free for the run, in GB (10^9 bytes)", above=0)
    mbps_up: float = option(0.0, "upload rate in Mbit/s; 0 = unlimited", least=0)
    mbps_down: float = option(0.0, "download rate in Mbit/s; 0 = unlimited", least=0)
    latency_ms: float = option(0.0, "one-way delay to the host in ms: half a ping", least=0)
    reachable: bool = option(False, "whether others can open connections to it")
    bf16_tflops: float = option(0.0, "rate of a run in bf16; 0 = that of tflops", least=0)
    mupdates: float = option(
        0.0, "parameters that it updates per second, in millions; 0 = updates take no time", least=0
    )
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

    def update_seconds(self, parameters: int) -> float:
        """For which it updates so many parameters."""
        return parameters / (self.mupdates * 1e6) if self.mupdates else 0.0

    @property
    def memory_bytes(self) -> int:
        """Bytes free for the run."""
        return int(self.memory_gb * 1e9)

    def describe(self) -> str:
        """A line for a person."""
        rate = f"{human_flops(self.tflops * 1e12)} with this run's blocks; " if self.tflops else ""
        text = (
            f"{self.device}: {rate}{human_bytes(self.memory_bytes)} of memory "
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
    example = f"give each peer a table such as\n{EXAMPLE}"
    values = read_toml(path, f"write it, and {example}")
    for key in values:
        if key != "peer":
            raise ConfigError(f'{path}: unknown key "{key}"{nearest(key, ["peer"])}')
    listed = values.get("peer", [])
    if not isinstance(listed, list) or not listed:
        raise ConfigError(f"{path} lists no peers: {example}")
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
    ((name, times),) = Counter(peer.name for peer in peers).most_common(1)
    if times > 1:  # nobody could say which of them sits where
        raise ConfigError(f'{path}: two peers are called "{name}": give one another name')
    return peers


def measure_machine(device: str, folder: Path, settings: Settings | None = None) -> Machine:
    """Memory, disk, and the rate with a block of a run's settings, if they are known."""
    from thinwire.engine.build import choose_device

    chosen = choose_device(device, 0)
    if chosen.type != "cuda":
        return _measured(chosen, folder, settings)
    # -P: a file in the current folder must not pass for a module
    command = [sys.executable, "-P", "-m", "thinwire.run.machine", device, str(folder)]
    asked = json.dumps(settings.to_plain() if settings else {})
    try:
        done = subprocess.run(
            command, input=asked, capture_output=True, text=True, timeout=APART_SECONDS
        )
        return Machine(**json.loads(done.stdout))
    except (OSError, subprocess.TimeoutExpired, ValueError, TypeError):
        raise ConfigError(
            f"the device {device_name(chosen)} could not be measured; choose another with --device"
        ) from None


def _measured(device: "torch.device", folder: Path, settings: Settings | None) -> Machine:
    import torch

    from thinwire.plan import Rates, measure_rates

    threads, rates = torch.get_num_threads(), Rates(0.0)
    memory_gb = free_memory(device) / 1e9
    if settings is not None:
        torch.set_num_threads(threads_per_stage(settings))
        with contextlib.suppress(RuntimeError):  # not even a block fits into its memory
            rates = measure_rates(settings)
    name = device_name(device)
    torch.set_num_threads(threads)
    return Machine(
        device=name,
        tflops=rates.flops / 1e12,
        mupdates=0.0 if math.isinf(rates.updates) else rates.updates / 1e6,
        memory_gb=memory_gb,
        disk_gb=free_disk(folder) / 1e9,
    )


def device_name(device: "torch.device") -> str:
    """The device in words, such as "cuda (NVIDIA H200)"."""
    import torch

    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    if device.type == "cpu":
        return f"cpu ({torch.get_num_threads()} threads)"
    return device.type


def free_memory(device: "torch.device") -> int:
    """Bytes that a stage could take now: of a GPU, this machine or container; half if unknown."""
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

    asked = json.load(sys.stdin)
    settings = Settings.from_plain(asked) if asked else None
    found = _measured(choose_device(sys.argv[1], 0), Path(sys.argv[2]), settings)
    print(json.dumps(asdict(found)))
