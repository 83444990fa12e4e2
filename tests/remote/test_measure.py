"""What a machine can give: measured here, or in a process of its own."""

from pathlib import Path

import pytest
import torch

from thinwire.remote import measure
from thinwire.remote.measure import MachineFigures, free_disk, matmul_rate, measure_machine
from thinwire.wire.speed import LinkRates

CPU = torch.device("cpu")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_a_rate_is_that_of_products_that_were_made(precision: str) -> None:
    rate = matmul_rate(CPU, precision, seconds=0.02)
    assert 1e6 < rate < 1e15


def test_a_machine_is_measured(tmp_path: Path) -> None:
    found = measure_machine("cpu", tmp_path / "not" / "there")
    assert found.device.startswith("cpu (") and found.memory_bytes > 1e7
    assert found.flops_per_s > 1e6 and found.bf16_flops_per_s > 1e6
    assert found.disk_bytes == pytest.approx(free_disk(tmp_path), rel=0.2)


def test_a_process_of_its_own_tells_the_same_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it measures a GPU, on whose memory it must leave nothing. It imports nothing from the
    current folder.
    """
    (tmp_path / "torch.py").write_text("raise SystemExit('this is not torch')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "choose_device", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(measure, "device_name", str)
    found = measure_machine("cpu", tmp_path)
    assert found.device.startswith("cpu (") and found.flops_per_s > 1e6 and found.link is None


def test_figures_in_words() -> None:
    figures = MachineFigures("cpu (8 threads)", 2.5e11, 1e11, 8 * 10**9, 10**9)
    assert figures.describe() == (
        "cpu (8 threads): 250.0 GFLOP/s, in bf16 100.0 GFLOP/s; 8.0 GB of memory and 1.0 GB of "
        "disk are free"
    )
    linked = MachineFigures("cpu", 2.5e11, 1e11, 1, 1, LinkRates(20.0, 90.0, 0.03))
    assert linked.describe().endswith("; to the host 20 Mbit/s up, 90 down, 30 ms round trip")


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
