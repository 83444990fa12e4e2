"""What a machine has to give: measured here or in a process of its own, or listed in a file."""

import pytest
import torch

from thinwire.errors import ConfigError
from thinwire.run import machine
from thinwire.run.machine import free_disk, load_peers, measure_machine
from thinwire.settings import Settings

CPU = torch.device("cpu")


def test_a_machine_is_measured_with_what_the_run_trains(tmp_path):
    """Its rate with a block of the run and the threads that it gives; unknown without a run."""
    before = torch.get_num_threads()
    settings = Settings.from_plain({"run": {"threads": before + 1}, "model": {"preset": "tiny"}})
    found = measure_machine("cpu", tmp_path / "not" / "there", settings)
    assert found.device == f"cpu ({before + 1} threads)" and found.memory_bytes > 1e7
    assert found.tflops > 1e-6 and found.mbps_up == 0 and "this run's blocks" in found.describe()
    assert found.disk_gb * 1e9 == pytest.approx(free_disk(tmp_path), rel=0.2)
    assert torch.get_num_threads() == before
    unknown = measure_machine("cpu", tmp_path)
    assert unknown.tflops == 0 and "FLOP" not in unknown.describe()


def test_a_process_of_its_own_tells_the_same(tmp_path, monkeypatch):
    """As it measures a GPU, on whose memory it must leave nothing. It imports nothing from the
    current folder.
    """
    (tmp_path / "torch.py").write_text("raise SystemExit('this is not torch')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("thinwire.engine.build.choose_device", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(machine, "device_name", str)
    settings = Settings.from_plain({"run": {"device": "cpu"}, "model": {"preset": "tiny"}})
    found = measure_machine("cpu", tmp_path, settings)
    assert found.device.startswith("cpu (") and found.tflops > 1e-6


@pytest.mark.parametrize(("files", "free"), [
    ({"meminfo": "MemTotal: 9 kB\nMemAvailable: 5 kB\n"}, 5 * 1024),
    ({"meminfo": "MemAvailable: 5 kB\n", "memory.max": "max", "memory.current": "1"}, 5 * 1024),
    ({"meminfo": "MemAvailable: 5 kB\n", "memory.max": "900", "memory.current": "200"}, 700),
])  # fmt: skip
def test_a_container_has_what_its_limit_leaves(files, free, tmp_path, monkeypatch):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(machine, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    assert machine.free_memory(CPU) == free
    monkeypatch.setattr(machine, "_MEMINFO", tmp_path / "none")
    assert machine.free_memory(CPU) > 0


GOOD = 'name = "a"\ntflops = 1\nmemory_gb = 1\n'


@pytest.mark.parametrize(("text", "named"), [
    ("", "lists no peers"),
    ("[[peers]]\n", 'unknown key "peers"; did you mean "peer"'),
    (f"[[peer]]\n{GOOD}[[peer]]\n{GOOD}", 'two peers are called "a"'),
    ('[[peer]]\nname = "a"\nmemory_gb = 1', r"peer\[0\] lacks tflops"),
    (f"[[peer]]\n{GOOD}mbps = 3", r'unknown key.*peer\[0\]\.mbps".*did you mean "mbps_up"'),
    (f"[[peer]]\n{GOOD}mbps_up = -3", "mbps_up = -3.0 must be at least 0"),
    (f'[[peer]]\n{GOOD}reachable = "yes"', "reachable must be true or false"),
    ("[[peer]", "is not valid TOML"),
])  # fmt: skip
def test_a_bad_file_is_named(text, named, tmp_path):
    path = tmp_path / "peers.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=named) as refusal:
        load_peers(path)
    assert str(path) in str(refusal.value)


def test_a_file_that_is_not_there_is_shown_how_to_write(tmp_path):
    with pytest.raises(ConfigError, match=r"(?s)does not exist: write it.*\[\[peer\]\]") as refusal:
        load_peers(tmp_path / "none.toml")
    shown = str(refusal.value).partition("such as\n")[2]
    (tmp_path / "peers.toml").write_text(shown)
    assert [p.name for p in load_peers(tmp_path / "peers.toml")] == ["ana"]
