"""Step time of both engines, side by side: our own, and the one on PyTorch's pipelining.

    python lab/tools/cluster_bench.py
    python lab/tools/cluster_bench.py --steps 30 --mbps 80 --latency-ms 25 --wan ./wan

Each case trains the same run.toml on four processes of this machine. Without limits all talk over
loopback. At `--mbps` our own engine emulates its links; PyTorch's ranks are in network namespaces,
each with a card of that rate and delay (see wan_network.py), which needs root. The losses of both
engines must be equal, or this says so.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from wan_network import Network, Wan, open_network

STAGES = 4
PORT = "29517"
RECIPES = ("dense", "thin32")


def settings_for(folder: Path, name: str, recipe: str, options: argparse.Namespace) -> Path:
    """A run.toml of a recipe, in a folder of the bench's own."""
    path = folder / f"{name}.toml"
    changes = {
        "run.name": name, "run.out": folder, "run.device": "cpu", "run.threads": 1,
        "train.steps": options.steps, "train.eval_every": 0, "train.eval_batches": 1,
        "train.checkpoint_every": -1, "pipeline.stages": STAGES, "optim.warmup": 2,
        "link.mbps_up": options.mbps, "link.mbps_down": options.mbps,
        "link.latency_ms": options.latency_ms,
    }  # fmt: skip
    words = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    run([sys.executable, "-m", "thinwire", "init", str(path), "--recipe", recipe, *words])
    return path


def train_own(path: Path, emulate: bool) -> None:
    """`thinwire train`."""
    emulated = f"link.emulate={str(emulate).lower()}"
    run([sys.executable, "-m", "thinwire", "train", str(path), "--set", emulated])


def train_cluster(path: Path, network: Network | None, schedule: str) -> None:
    """The ranks of `thinwire.cluster`, with what torchrun would tell each of them."""
    ranks = []
    for rank in range(STAGES):
        prefix = network.prefix(rank + 1) if network else []
        environment = {
            "RANK": rank, "WORLD_SIZE": STAGES, "MASTER_PORT": PORT,
            "MASTER_ADDR": network.address(1) if network else "127.0.0.1",
            "LOCAL_RANK": 0 if network else rank, "LOCAL_WORLD_SIZE": 1 if network else STAGES,
            **({"GLOO_SOCKET_IFNAME": "wan0"} if network else {}),
        }  # fmt: skip
        words = [*prefix, sys.executable, "-m", "thinwire.cluster", str(path)]
        words += ["--schedule", schedule] if schedule else []
        ranks.append(
            subprocess.Popen(
                words,
                env={**os.environ, **{name: str(value) for name, value in environment.items()}},
                stdout=subprocess.DEVNULL,
            )
        )
    if any(process.wait() for process in ranks):
        raise SystemExit("a rank failed: its error is above")


def run(words: list[str]) -> None:
    """A command that must succeed."""
    finished = subprocess.run(words, capture_output=True, text=True)
    if finished.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{finished.stdout}{finished.stderr}")


def row(folder: Path, name: str) -> dict[str, Any]:
    """What a run says of its time and bytes, and its losses."""
    summary = json.loads((folder / name / "summary.json").read_text())
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    cuts = summary["cuts"]
    sent = [cut["forward_bytes_per_token"] + cut["backward_bytes_per_token"] for cut in cuts]
    return {
        "step_ms": 1000 * summary["step_seconds_median"],
        "tokens_per_s": summary["tokens_per_s"],
        "bytes_per_token": sum(sent) / len(sent),
        "losses": [record["loss"] for record in records if record["kind"] == "step"],
    }


def bench(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """All cases, one after the other; engines take turns, so that a busy machine is fair."""
    rows = []
    limited = f"{options.mbps:g} Mbit/s, {options.latency_ms:g} ms"
    for recipe in RECIPES:
        for links in ("unlimited", limited):
            is_slow = links == limited
            wan = Wan(options.mbps, options.latency_ms, program=options.wan)
            name = f"own-{recipe}-{'slow' if is_slow else 'fast'}"
            train_own(settings_for(folder, name, recipe, options), is_slow)
            rows.append({"recipe": recipe, "links": links, "engine": "thinwire train",
                         **row(folder, name)})  # fmt: skip
            own = rows[-1]["losses"]
            for schedule in options.schedules:
                name = f"cluster-{schedule}-{recipe}-{'slow' if is_slow else 'fast'}"
                path = settings_for(folder, name, recipe, options)
                with open_network(STAGES, wan) if is_slow else nullcontext() as network:
                    train_cluster(path, network, schedule)
                rows.append({"recipe": recipe, "links": links, "engine": f"PyTorch, {schedule}",
                             **row(folder, name)})  # fmt: skip
                rows[-1]["equal"] = rows[-1]["losses"] == own
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """A table in Markdown."""
    print("| recipe | links | engine | step, ms | tokens/s | bytes per token and cut | losses |")
    print("|---|---|---|---|---|---|---|")
    for found in rows:
        equal = {None: "", True: "equal", False: "NOT EQUAL"}[found.get("equal")]
        print(
            f"| {found['recipe']} | {found['links']} | {found['engine']} | {found['step_ms']:.0f} "
            f"| {found['tokens_per_s']:,.0f} | {found['bytes_per_token']:.1f} | {equal} |"
        )


def main() -> None:
    """Measure, print a table, and keep it as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--mbps", type=float, default=80.0)
    parser.add_argument("--latency-ms", type=float, default=25.0)
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "gpipe"])
    parser.add_argument("--wan", type=Path, help="a program that emulates the network")
    parser.add_argument("--json", type=Path, help="also write the results to this JSON file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = bench(options, Path(folder))
    show(rows)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
