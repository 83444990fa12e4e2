"""Runs of `thinwire host` and `thinwire join` between nodes of an emulated internet.

Beside them stands what the planner, the emulator and the simulator say of the same links.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from wan_network import Network, Wan, open_network

from thinwire.plan import make_plan, plan_to_plain
from thinwire.report import PlainDisplay
from thinwire.settings import Settings
from thinwire.train import train
from thinwire.typed import to_toml
from thinwire_lab.arms import merged
from thinwire_lab.bench import CASES

STAGES, STEPS = 4, 40
OUTAGE_S = 15.0  # for which a killed peer is waited for, before another may take its seat
HOST, RELAY = 1, STAGES + 2  # nodes; the peers are between them
_PATIENCE_S = 300.0
_THINWIRE = [sys.executable, "-P", "-m", "thinwire"]

Row = dict[str, Any]


class Machine:
    """A `thinwire` process on a node, with a home that no other has."""

    def __init__(
        self, network: Network, node: int, home: Path, *words: str, said: str = ""
    ) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self._log = home / f"output-{time.monotonic_ns()}.txt"
        own = {"HOME": home, "THINWIRE_CACHE": home / "cache", "THINWIRE_DATA": home / "data"}
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                [*network.prefix(node), *_THINWIRE, *words],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=home,
                env={**os.environ, **{key: str(path) for key, path in own.items()}},
            )
        assert self.process.stdin is not None
        self.process.stdin.write(said.encode())
        self.process.stdin.close()

    def text(self) -> str:
        """What it has printed so far."""
        return self._log.read_text()

    def find(self, pattern: str) -> str:
        """Wait for something that it prints."""
        deadline = time.monotonic() + _PATIENCE_S
        while not (found := re.search(pattern, self.text())):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"it did not say {pattern!r}:\n{self.text()}")
            time.sleep(0.05)
        return found[1]

    def end(self) -> None:
        """Kill it, if it is alive, as a loss of power would."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Steps:
    """Notes when each step of a run is finished, by the file that the host writes."""

    def __init__(self, metrics: Path) -> None:
        self.seen: list[tuple[float, int]] = []  # time, step
        self._metrics = metrics
        self._is_over = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def wait_for(self, step: int, after: float = 0.0) -> float:
        """When this step, or a later one, was finished after a moment."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            for moment, number in list(self.seen):
                if moment > after and number >= step:
                    return moment
            if time.monotonic() > deadline:
                raise SystemExit(f"step {step} did not come; {self._metrics} is as it is")
            time.sleep(0.02)

    def close(self) -> None:
        """Watch no more."""
        self._is_over.set()

    def _watch(self) -> None:
        read = 0
        while not self._is_over.wait(0.02):
            with contextlib.suppress(OSError):
                lines = self._metrics.read_text().splitlines()
                for line in lines[min(read, len(lines)) :]:
                    row = json.loads(line)
                    if row.get("kind") == "step":
                        self.seen.append((time.monotonic(), row["step"]))
                read = len(lines)


def settings_of(case: str, wan: Wan, folder: Path, name: str) -> Settings:
    """A run of `python -m thinwire_lab.bench`, over these links."""
    plain = {
        "run": {"name": name, "out": str(folder), "device": "cpu", "threads": 1},
        "link": {
            "mbps_up": wan.mbps,
            "mbps_down": wan.mbps,
            "latency_ms": wan.latency_ms,
            "outage": OUTAGE_S,
        },
        "train": {"steps": STEPS, "checkpoint_every": 10},
    }
    values = merged(merged(CASES["base"], CASES["slow_links"][case]), plain)
    return Settings.from_plain(values)


def bench_runs(case: str, wan: Wan, folder: Path) -> list[Row]:
    """The same run planned, emulated, with peers that can be reached, and with two that cannot."""
    emulated = settings_of(case, wan, folder, "emulated")
    plan = plan_to_plain(make_plan(emulated, None))
    rows = [{"run": "planned", "step s": plan["step_seconds"]}]
    with (folder / "emulated.txt").open("w") as log, PlainDisplay(log) as display:
        summary = train(emulated, display)
    rows.append({"run": "emulated", **figures(summary, wan)})
    rows.append({"run": "simulated", "step s": summary["simulated_step_seconds"]})
    for name, closed in (("direct", 0), ("two relayed", 2)):
        with open_network(RELAY, wan) as network:
            rows.append({"run": name, **hosted_run(network, case, wan, folder / name, closed)})
    return rows


def hosted_run(network: Network, case: str, wan: Wan, folder: Path, closed: int) -> Row:
    """A host and four peers, of which some accept nothing; one is killed, and another joins."""
    with contextlib.ExitStack() as held:
        host, invite, steps = _start_host(network, case, wan, folder, closed > 0, held)
        peers = []
        for stage, node in enumerate(range(HOST + 1, HOST + 1 + STAGES)):
            began = time.monotonic()
            peers.append(_join(network, node, folder, f"peer-{node}", invite, stage < closed, held))
            if stage + 1 < STAGES:  # seats are taken in the order of arrival
                host.find(f"(here: .*peer-{node})")
        first = steps.wait_for(1) - began
        steps.wait_for(STEPS // 2 + 5)
        ways = _ways(network, folder)
        killed = time.monotonic()
        peers[-1].end()
        _join(network, HOST + STAGES, folder, "late", invite, False, held)
        again = steps.wait_for(1, killed + 0.5) - killed
        host.process.wait(_PATIENCE_S)
        summary = json.loads((_run_folder(folder) / "summary.json").read_text())
    return {
        **figures(summary, wan),
        "links": ways,
        "last join to step 1, s": first,
        "pause after a kill, s": again,
    }


def figures(summary: dict[str, Any], wan: Wan) -> Row:
    """What is compared: the step, tokens per second, and how full the busiest uplink was."""
    step = summary["step_seconds_median"]
    per_step = summary["timed"]["tokens_per_step"]
    up = [0.0] * (len(summary["cuts"]) + 1)  # bytes that each stage sends in a step
    for cut in summary["cuts"]:
        up[cut["cut"]] += cut["forward_bytes_per_token"] * per_step
        up[cut["cut"] + 1] += cut["backward_bytes_per_token"] * per_step
    return {
        "step s": step,
        "tokens/s": summary["tokens_per_s"],
        "uplink": max(up) * 8 / (wan.mbps * 1e6) / step,
    }


def _start_host(
    network: Network,
    case: str,
    wan: Wan,
    folder: Path,
    with_relay: bool,
    held: contextlib.ExitStack,
) -> tuple[Machine, str, Steps]:
    home = folder / "host"
    home.mkdir(parents=True)
    config = home / "run.toml"
    config.write_text(to_toml(settings_of(case, wan, home / "runs", "hosted")))
    words = ["host", str(config), "--listen", f"{network.address(HOST)}:0", "--machines", "9"]
    if with_relay:
        words += ["--relay", held.enter_context(relay_in(network, RELAY, folder))]
    host = Machine(network, HOST, home, *words)
    held.callback(host.end)
    steps = Steps(_run_folder(folder) / "metrics.jsonl")
    held.callback(steps.close)
    return host, host.find(r"thinwire join (tw1-\S+)"), steps


def _ways(network: Network, folder: Path) -> str:
    """How each cut is crossed at this moment, by the status of the host."""
    words = ["status", str(_run_folder(folder)), "--json"]
    status = Machine(network, HOST, folder / "host", *words)
    status.process.wait(_PATIENCE_S)
    return ", ".join(link["way"] for link in json.loads(status.text())["links"])


def _run_folder(folder: Path) -> Path:
    return folder / "host" / "runs" / "hosted"


def _join(
    network: Network,
    node: int,
    folder: Path,
    name: str,
    invite: str,
    is_closed: bool,
    held: contextlib.ExitStack,
) -> Machine:
    door = ["--no-listen"] if is_closed else ["--listen", f"{network.address(node)}:0"]
    words = ["join", "-", "--name", name, "--threads", "1", *door]
    peer = Machine(network, node, folder / name, *words, said=invite)
    held.callback(peer.end)
    return peer


@contextlib.contextmanager
def relay_in(network: Network, node: int, folder: Path) -> Iterator[str]:
    """A relay on a node; its HOST:PORT/PASS."""
    folder.mkdir(parents=True, exist_ok=True)
    password = folder / "relay-pass"
    password.write_text("a-pass-for-the-bench\n")
    words: Sequence[str] = ("--listen", network.address(node), "--pass-file", str(password))
    relay = Machine(network, node, folder / "relay", "relay", *words)
    try:
        yield relay.find(r"--relay (\S+)\n")
    finally:
        relay.end()
