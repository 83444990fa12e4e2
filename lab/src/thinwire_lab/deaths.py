"""`python -m thinwire_lab.deaths`: kills processes of runs at random moments, and shows the cost.

Stages of a run on one machine die, then members of a hosted run, each of which joins again at once.
Afterwards the weights are compared with those of an undisturbed run, and the steps are counted.
Each death takes seconds on an idle machine; how far it is goes to standard error.

With `--wan PROGRAM` (root): a member of a hosted run dies that holds as much as an inner stage of
four holds of the preset 160m, between network namespaces that PROGRAM joins. It is called with
Mbit/s, one-way milliseconds, milliseconds of queue, lost packets in a million and the names of the
namespaces, gives node K the address 10.88.0.K there, and carries packets until it is told to end.
Then what logs and a stand-by cost a run whose links decide its speed: the same steps with logs and
without, and in one run with a stand-by and without, by turns; beside what the host planned, and
what the simulator says with the compute that was measured. All share this machine's cores, where
the stand-by computes when nobody else does, as if it had its own. With `--only-speed` no more than
a step of such a run beside its plan, changed by `--set`; `--share` gives each member its own part
of a core.
"""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from thinwire.paths import cache_folder
from thinwire.run.formation import read_formation
from thinwire.run.record import read_progress
from thinwire.schedule import simulate
from thinwire.settings import Settings, apply_override, merged
from thinwire.typed import to_toml
from thinwire_lab.bench_link import Row, show

STAGES, STEPS_A_DEATH = 3, 25
COUNTED, TURNS = 60, 4  # steps whose median is the speed of a run, and how often each is measured
PATIENCE_S = 900.0
Env = Mapping[str, str] | None
STANDBY = r"stage (\d+) has a stand-by"
SMALL: dict[str, dict[str, Any]] = {
    "model": {"layers": 6, "dim": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab": 300,
              "context": 64},
    "train": {"batch": 8, "checkpoint_every": 10},
}  # fmt: skip
LARGE: dict[str, dict[str, Any]] = {  # each stage: three blocks of the preset 160m, 226 MB of state
    "model": {"layers": 9, "dim": 768, "heads": 12, "kv_heads": 4, "ffn": 2048, "vocab": 512,
              "context": 64},
    "train": {"batch": 4, "steps": 10_000, "checkpoint_every": 5},
    "link": {"shard_share": 0.5},
}  # fmt: skip
LIGHT: dict[str, dict[str, Any]] = {  # links take longer than the stages, on two cores for all
    "model": {"layers": 3, "dim": 256, "heads": 4, "kv_heads": 2, "ffn": 64, "vocab": 512,
              "context": 64},
    "train": {"batch": 8, "steps": 10_000, "checkpoint_every": 0},
}  # fmt: skip
WITHOUT_END: dict[str, dict[str, Any]] = {  # until it is stopped, after whichever step
    "train": {"steps": 100_000}, "optim": {"schedule": "constant", "warmup": 2},
}  # fmt: skip


class Program:
    """A `thinwire` command as a process with a home of its own."""

    def __init__(
        self, prefix: list[str], home: Path, *words: object, said: str = "", env: Env = None
    ):
        home.mkdir(parents=True, exist_ok=True)
        self._log = home / f"output-{time.monotonic_ns()}.txt"
        own = {"HOME": home, "THINWIRE_DATA": home / "data", "THINWIRE_CACHE": cache_folder()}
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-P", "-m", "thinwire", *map(str, words)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **{key: str(path) for key, path in own.items()}, **(env or {})},
            )
        assert self.process.stdin is not None
        self.process.stdin.write(said.encode())
        self.process.stdin.close()

    def text(self) -> str:
        """What it has printed so far."""
        return self._log.read_text()

    def find(self, pattern: str, behind: int = 0) -> str:
        """Wait for something that it prints, behind so many characters."""
        found: re.Match[str] | None = None

        def look() -> bool:
            nonlocal found
            found = re.search(pattern, self.text()[behind:])
            return found is not None

        self.wait_until(look, pattern)
        assert found is not None
        return found[1]

    def wait_until(self, holds: Any, what: str) -> None:
        """Wait for something that this process brings about."""
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"waited for {what!r} in vain:\n{self.text()}")
            time.sleep(0.02)

    def leaves(self) -> list[int]:
        """Its processes that have started no others: the stages of a run on this machine."""
        table = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True).stdout
        parents = [tuple(map(int, line.split())) for line in table.splitlines()]
        below, found = [self.process.pid], []
        while below:
            pid = below.pop()
            children = [child for child, parent in parents if parent == pid]
            below += children
            found += [] if children or pid == self.process.pid else [pid]
        return found

    def end(self) -> None:
        """Kill it, if it is alive, as a loss of power would."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Run:
    """A run's folder, with the program that leads it."""

    def __init__(self, folder: Path, leader: Program):
        self.folder, self.leader = folder, leader

    def rows(self) -> list[Row]:
        """What it has written of its steps."""
        with contextlib.suppress(OSError):
            lines = (self.folder / "metrics.jsonl").read_text().splitlines()
            rows = [json.loads(line) for line in lines if line.endswith("}")]
            return [row for row in rows if row["kind"] == "step"]
        return []

    def wait_for(self, step: int) -> None:
        """Wait until so many steps are written."""
        self.leader.wait_until(lambda: len(self.rows()) >= step, f"step {step}")

    def pause(self) -> float:
        """Seconds until a step is written that is not there yet."""
        began, have = time.monotonic(), len(self.rows())
        self.leader.wait_until(lambda: len(self.rows()) > have, f"step {have + 1}")
        return time.monotonic() - began

    def result(self, undisturbed: "Run") -> Row:
        """Whether it ended as the other did, and how many steps were written twice."""
        steps = [row["step"] for row in self.rows()]
        mine, theirs = (weights_of(run.folder) for run in (self, undisturbed))
        same = mine.keys() == theirs.keys() and all(
            torch.equal(tensor, theirs[name]) for name, tensor in mine.items()
        )
        return {"weights equal": same, "steps twice": len(steps) - len({*steps})}


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    """All tensors of a run's last checkpoint."""
    last = max((run / "checkpoints").glob("step-*"))
    return {k: v for file in last.glob("*.safetensors") for k, v in load_file(file).items()}


def settings_of(
    folder: Path, name: str, values: dict[str, dict[str, Any]], steps: int = 0
) -> Settings:
    """A run of three stages, if values do not say else, that computes with one thread each."""
    stages = values.get("pipeline", {}).get("stages", STAGES)
    run: dict[str, dict[str, Any]] = {
        "run": {"name": name, "out": str(folder), "device": "cpu", "threads": 1},
        "pipeline": {"stages": stages, "microbatches": 4, "window": 4,
                     "split": [values["model"]["layers"] // stages] * stages},
        "train": {"eval_every": 0, "eval_batches": 1},
        "link": {"emulate": False, "outage": 60.0},
    }  # fmt: skip
    values = merged(values, {"train": {"steps": steps}}) if steps else values
    return Settings.from_plain(merged(run, values))


def train_here(folder: Path, name: str, steps: int) -> Run:
    """`thinwire train`, with its stages on this machine."""
    settings = settings_of(folder, name, merged(SMALL, WITHOUT_END), steps)
    config = folder / f"{name}.toml"
    config.write_text(to_toml(settings))
    return Run(settings.run.folder, Program([], folder / "home", "train", config))


class Hosted(contextlib.ExitStack):
    """A host and its members; with a network, each on a node of its own."""

    share = 0.0  # of a core for each member; 0: no limit

    def __init__(self, folder: Path, settings: Settings, has_network: bool = False):
        super().__init__()
        self._folder, self._has_network = folder, has_network
        self.members: dict[str, Program] = {}
        config = folder / f"{settings.run.name}.toml"
        config.write_text(to_toml(settings))
        words = ["host", config, "--listen", f"{self._address(0)}:0", "--machines", 99]
        host = Program(self._prefix(0), folder / "host", *words)
        self.callback(host.end)
        self.run = Run(settings.run.folder, host)
        self._invite = host.find(r"thinwire join (tw1-\S+)")

    def join(self, number: int, env: Env = None, idle: bool = False) -> None:
        """Have a member join, or join again, and wait until it is there."""
        self.begin_to_join(number, env, idle)
        self.wait_for_members()

    def wait_for_members(self) -> None:
        """Wait until all are there."""
        for member in self.members.values():
            member.find("(enrolled as)")

    def begin_to_join(self, number: int, env: Env = None, idle: bool = False) -> None:
        """Have a member join, or join again; `idle` has it compute when nobody else does."""
        name = f"peer-{number}"
        words = ["join", "-", "--name", name, "--listen", f"{self._address(number)}:0"]
        home = self._folder / name
        prefix = [*self._prefix(number), *(["chrt", "--idle", "0"] if idle else [])]
        self.members[name] = Program(prefix, home, *words, said=self._invite, env=env)
        self.callback(self.members[name].end)

    def _address(self, number: int) -> str:
        return f"10.88.0.{number + 1}" if self._has_network else "127.0.0.1"

    def _prefix(self, number: int) -> list[str]:
        node = f"thinwire-{number}"
        own = part_of_a_core(self.share, node) if number and self.share else []
        return [*own, *(["ip", "netns", "exec", node] if self._has_network else [])]


def kill_stages(folder: Path, deaths: int, chance: random.Random) -> Row:
    """Stages of a run on one machine die, at random moments."""
    steps = STEPS_A_DEATH * max(deaths, 1)
    undisturbed = train_here(folder, "undisturbed", steps)
    undisturbed.leader.process.wait()
    run = train_here(folder, "local", steps)
    pauses = [_kill(run, chance, run.leader.leaves, _kill_process) for _ in range(deaths)]
    run.leader.process.wait()
    return {"killed": "a stage", **_times(pauses), **run.result(undisturbed)}


def kill_members(folder: Path, deaths: int, spares: int, chance: random.Random) -> Row:
    """Members of a hosted run die, at random moments, and join again."""
    with Hosted(folder, settings_of(folder, "hosted", merged(SMALL, WITHOUT_END))) as hosted:
        for number in range(1, STAGES + spares + 1):
            hosted.begin_to_join(number)

        def holders() -> list[str]:
            hosted.wait_for_members()  # who was killed before
            return read_formation(hosted.run.folder).members()

        def kill(name: str) -> None:
            hosted.members[name].end()
            hosted.begin_to_join(int(name.rpartition("-")[2]))

        pauses = [_kill(hosted.run, chance, holders, kill) for _ in range(deaths)]
        hosted.run.leader.process.send_signal(signal.SIGINT)  # it stops with a checkpoint
        hosted.run.leader.process.wait(PATIENCE_S)
    undisturbed = train_here(folder, "reference", len(hosted.run.rows()))
    undisturbed.leader.process.wait()
    which = f"a member, of {STAGES} and {spares} spare"
    return {"killed": which, **_times(pauses), **hosted.run.result(undisturbed)}


def _kill(run: Run, chance: random.Random, alive: Any, kill: Any) -> float:
    """Kill one of those who are alive, a few steps from now; seconds without a step."""
    run.wait_for(len(run.rows()) + chance.randint(2, STEPS_A_DEATH // 2))
    killable = sorted(alive())
    time.sleep(chance.random() * 0.3)
    kill(chance.choice(killable))
    pause = run.pause()
    print(f"step {len(run.rows())}: {pause:.1f} s without a step", file=sys.stderr)
    return pause


def _kill_process(pid: int) -> None:
    subprocess.run(["kill", "-9", str(pid)], check=False)


def _times(pauses: list[float]) -> Row:
    return {
        "times": len(pauses),
        "seconds without a step: median": statistics.median(pauses),
        "worst": max(pauses),
    }


# Over an emulated internet


def part_of_a_core(share: float, name: str) -> list[str]:
    """What gives a program and those that it starts so much of a core (cgroup v1, root)."""
    group = Path("/sys/fs/cgroup/cpu") / name
    group.mkdir(exist_ok=True)
    (group / "cpu.cfs_period_us").write_text("5000")
    (group / "cpu.cfs_quota_us").write_text(f"{5000 * share:.0f}")
    return ["sh", "-c", f'echo $$ > {group}/tasks; exec "$@"', "sh"]


@contextlib.contextmanager
def network(wan: Path, mbps: float, latency_ms: float) -> Iterator[None]:
    """Nodes for the host, for a member of each stage and for a spare; gone afterwards."""
    names = [f"thinwire-{number}" for number in range(STAGES + 2)]
    with contextlib.ExitStack() as held:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
            held.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
            subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        figures = map(str, (mbps, latency_ms, 50, 0))
        process = subprocess.Popen([str(wan.resolve()), *figures, *names])
        held.callback(process.wait)
        held.callback(process.terminate)
        time.sleep(1.0)
        yield


def over_wan(folder: Path, spares: int, log_mb: int | None) -> Row:
    """A member dies after a checkpoint is complete: how long that takes. With a spare, it is the
    one that the spare stands by for; else that of the middle stage.
    """
    changes: dict[str, dict[str, Any]] = {} if log_mb is None else {"train": {"log_mb": log_mb}}
    settings = settings_of(folder, "wan", merged(LARGE, changes))
    with Hosted(folder, settings, has_network=True) as hosted:
        run = hosted.run
        for number in range(1, STAGES + spares + 1):
            hosted.join(number)
        saved = int(run.leader.find(r"checkpoint of step (\d+) in"))
        run.wait_for(len(run.rows()) + 3)
        before = [row["step_seconds"] for row in run.rows()[2:]]
        killed = 1
        if spares and log_mb != 0:
            killed = int(run.leader.find(STANDBY))
        hosted.members[read_formation(run.folder).seats[killed]].end()
        pause = run.pause()
        moved = [sum(cut_bytes(link) for link in row["links"]) for row in run.rows()]
        step, usual = statistics.median(before), statistics.median(moved[:-1])
        return {
            "spares": spares,
            "logs": "off" if log_mb == 0 else "on",
            "step s": step,
            "tokens/s": settings.tokens_per_step / step,
            "pause s": pause,
            "steps to compute anew": len(before) + 2 - saved,
            "MB sent again": (moved[-1] - usual) / 1e6,
        }


def cost_over_wan(folder: Path) -> Iterator[Row]:
    """What logs and a stand-by cost a run that saves nothing meanwhile."""
    for log_mb in (0, 4096):
        name = "logs" if log_mb else "no-logs"
        settings = settings_of(folder, name, merged(LIGHT, {"train": {"log_mb": log_mb}}))
        with Hosted(folder, settings, has_network=True) as hosted:
            run, alone, followed, fed = hosted.run, [], [], 0.0
            for number in range(1, STAGES + 1):
                hosted.begin_to_join(number)
            run.wait_for(2)
            for _ in range(TURNS):
                alone.append(_step_seconds(run))
                if log_mb:
                    said = len(run.leader.text())
                    hosted.join(STAGES + 1, idle=True)
                    run.leader.find(STANDBY, said)
                    run.wait_for(len(run.rows()) + COUNTED)  # it catches up meanwhile
                    found = {int(stage) for stage in re.findall(STANDBY, run.leader.text()[said:])}
                    followed.append(_step_seconds(run))
                    links = run.rows()[-1]["links"]
                    fed = sum(link["forward_bytes"] for link in links if link["cut"] + 1 in found)
                    fed += sum(link["backward_bytes"] for link in links if link["cut"] in found)
                    hosted.members[f"peer-{STAGES + 1}"].end()
            for what, steps, more in ((name, alone, 0.0), ("a stand-by", followed, fed)):
                if steps:
                    middle = statistics.median(steps)
                    moved = sum(map(cut_bytes, run.rows()[-1]["links"]))
                    yield {
                        "what": what,
                        "step s, by turns": " ".join(f"{step:.3f}" for step in steps),
                        **_foretold(run, settings),
                        "tokens/s": settings.tokens_per_step / middle,
                        "MB a step over cuts": moved / 1e6,
                        "MB a step to it": more / 1e6,
                    }


def speed_over_wan(folder: Path, settings: Settings) -> Row:
    """What a step takes, beside what was planned."""
    with Hosted(folder, settings, has_network=True) as hosted:
        for number in range(1, settings.pipeline.stages + 1):
            hosted.begin_to_join(number)
        hosted.run.wait_for(5)
        step = _step_seconds(hosted.run)
        foretold = _foretold(hosted.run, settings)
    return {"step s": step, **foretold, "tokens/s": settings.tokens_per_step / step}


def _foretold(run: Run, settings: Settings) -> Row:
    """A step as the host planned it, and as the simulator has it with the compute measured."""
    known = read_progress(run.folder)
    assert known is not None, "it is written with every step"
    played = simulate(settings.schedule(), known.measured_costs, known.links, steps=4)
    planned = float(run.leader.find(r"a step takes ([\d.]+) s"))
    return {"planned": planned, "by measured compute": played.step_seconds}


def _step_seconds(run: Run) -> float:
    """The median of the next steps."""
    have = len(run.rows())
    run.wait_for(have + COUNTED)
    return statistics.median(row["step_seconds"] for row in run.rows()[have:])


def cut_bytes(link: Row) -> int:
    """What a row of metrics says of a cut, both ways."""
    return int(link["forward_bytes"] + link["backward_bytes"])


def measured(scratch: Path, options: argparse.Namespace) -> Iterator[Row]:
    """One row after the other: each takes minutes."""
    if options.wan is None:
        chance, half = random.Random(options.seed), options.deaths // 2
        yield kill_stages(scratch, options.deaths - half, chance)
        if half:
            yield kill_members(scratch, half, 1, chance)
        return
    if options.only_speed:
        values, Hosted.share = merged(LIGHT, {}), options.share
        for override in options.set:
            apply_override(values, override)
        with network(options.wan, options.mbps, options.latency_ms):
            yield speed_over_wan(scratch, settings_of(scratch, "speed", values))
        return
    deaths = () if options.only_cost else ((0, None), (1, None), (1, 0))
    for number, (spares, log_mb) in enumerate(deaths):
        folder = scratch / str(number)
        folder.mkdir()
        with network(options.wan, options.mbps, options.latency_ms):
            yield over_wan(folder, spares, log_mb)
    folder = scratch / "cost"
    folder.mkdir()
    with network(options.wan, options.mbps, options.latency_ms):
        yield from cost_over_wan(folder)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m thinwire_lab.deaths", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--deaths", type=int, default=50, help="of both kinds together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--wan", type=Path, help="program that joins network namespaces")
    parser.add_argument("--only-cost", action="store_true", help="of logs and a stand-by")
    parser.add_argument("--only-speed", action="store_true", help="a step beside its plan")
    parser.add_argument("--share", type=float, default=0.0, help="of a core for each such member")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value",
                        help="changes a setting of --only-speed; up to 4 stages")  # fmt: skip
    parser.add_argument("--mbps", type=float, default=80.0)
    parser.add_argument("--latency-ms", type=float, default=25.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="thinwire-deaths-") as scratch:
        rows: list[Row] = []
        for row in measured(Path(scratch), options):
            print(json.dumps(row), flush=True)
            rows.append(row)
        for columns in dict.fromkeys(tuple(row) for row in rows):
            show([row for row in rows if tuple(row) == columns])
        if not all(row.get("weights equal", True) for row in rows):
            raise SystemExit("the weights differ from those of an undisturbed run")


if __name__ == "__main__":
    main()
