"""What a machine can give: plausible, and in the form in which a split is chosen."""

from pathlib import Path

import pytest
import torch

from thinwire.remote import measure
from thinwire.remote.measure import MachineFigures, free_disk, matmul_rate, measure_machine
from thinwire.wire import Door, Route
from thinwire.wire.speed import LinkRates, SpeedService

CPU = torch.device("cpu")
RUN = "0123456789abcdef"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_a_rate_is_that_of_products_that_were_made(precision: str) -> None:
    rate = matmul_rate(CPU, precision, seconds=0.02)
    assert 1e6 < rate < 1e15


def test_a_machine_is_measured_with_its_way_to_the_host(tmp_path: Path) -> None:
    with SpeedService() as service, Door("127.0.0.1", 0) as door:
        door.admit(RUN, "token")
        door.serve(f"{RUN}/speed", service.address)
        route = Route(f"127.0.0.1:{door.port}", token="token")
        found = measure_machine(CPU, "fp32", tmp_path / "not" / "there", [route], RUN)
    assert found.device.startswith("cpu (") and found.memory_bytes > 1e7
    assert found.disk_bytes == pytest.approx(free_disk(tmp_path), rel=0.2)
    peer = found.as_peer("ana", reachable=True)
    assert found.link is not None and peer.mbps_up == found.link.mbps_up
    assert peer.flops_per_s == pytest.approx(found.flops_per_s)
    assert peer.memory_bytes == pytest.approx(found.memory_bytes, abs=2)


def test_latency_is_half_a_round_trip() -> None:
    figures = MachineFigures("cpu", 2e12, 8 * 10**9, 10**9, LinkRates(20.0, 90.0, 0.03))
    peer = figures.as_peer("ana", reachable=False)
    assert (peer.tflops, peer.memory_gb, peer.latency_ms) == (2.0, 8.0, 15.0)
    assert not peer.reachable


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"meminfo": "MemTotal: 9 kB\nMemAvailable: 5 kB\n"}, 5 * 1024),
        ({"meminfo": "MemAvailable: 5 kB\n", "memory.max": "max", "memory.current": "1"}, 5 * 1024),
        ({"meminfo": "MemAvailable: 5 kB\n", "memory.max": "900", "memory.current": "200"}, 700),
    ],
)
def test_a_container_has_what_its_limit_leaves(
    files: dict[str, str], free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(measure, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(measure, "_CGROUP", tmp_path)
    assert measure.free_memory(CPU) == free
    monkeypatch.setattr(measure, "_MEMINFO", tmp_path / "none")
    assert measure.free_memory(CPU) > 0
