"""Golden runs: did a change alter a loss, a weight or a byte that it was not meant to?

Trains about a dozen small models with the code of one checkout and records their losses, a hash of
every tensor of their checkpoints, and the bytes that crossed their cuts. Bits depend on the
machine, so records are compared on the machine that made them and are not kept in the repository:

    python tools/golden.py record now.json              # this checkout
    python tools/golden.py record then.json --base REV  # another commit, in a worktree of its own
    python tools/golden.py compare then.json now.json   # which numbers differ, run by run
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parent.parent
Record = dict[str, Any]

COMMON = (
    "run.threads=1 run.device=cpu data.source=text model.preset=tiny model.layers=4 model.dim=32 "
    "model.heads=4 model.kv_heads=2 model.ffn=48 model.vocab=300 model.context=32 train.batch=8 "
    "train.steps=6 train.eval_every=3 train.eval_batches=4 train.checkpoint_every=3 "
    "pipeline.stages=2 pipeline.microbatches=4 link.emulate=false"
)
THIN = "boundary.mode={} boundary.rank=6 codec.forward=int8 codec.backward=int4"
RUNS = {
    "dense": "codec.forward=fp32 codec.backward=fp32",
    "dense, 4 stages, gpipe": "pipeline.stages=4 pipeline.schedule=gpipe",
    "dense, recomputed": "pipeline.recompute=true",
    "subspace": THIN.format("subspace"),
    "subspace, moving": THIN.format("subspace") + " boundary.basis_update_every=2",
    "reparam": THIN.format("reparam"),
    "projected": THIN.format("projected") + " boundary.anchor=trainable",
    "projected, learned": THIN.format("projected") + " boundary.basis=per-cut boundary.learn=true",
    "topk": "codec.forward=topk(0.1) codec.backward=topk(shared)",
    "ef21": "codec.forward=topk(0.2)+ef21 codec.backward=int8",
    "lowrank and entropy": "codec.forward=lowrank(2) codec.backward=step(3)+zstd",
    "muon": "optim.name=muon optim.lr=0.005",
    "images": (
        "data.source=images model.preset=resnet18 model.layers=0 model.dim=4 model.heads=0 "
        "model.kv_heads=0 model.ffn=0 model.vocab=0 model.context=0 model.side=8 model.classes=3 "
        "optim.name=sgd optim.lr=0.01 codec.forward=int8(tensor)"
    ),
}
CONTINUED = {
    "dense, resumed": ("dense", ""),
    "dense, resumed in 4 stages": ("dense", "pipeline.stages=4"),
    "subspace, moving, resumed": ("subspace, moving", ""),
    "ef21, resumed": ("ef21", ""),
}
"""Runs that continue from the middle of another one, with these changes."""


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, dest="command")
    sub = commands.add_parser("record", help="train the golden runs and write what they gave")
    sub.add_argument("path", type=Path)
    sub.add_argument("--base", help="a commit, instead of the files as they are here")
    sub.add_argument("--only", default="", help="runs whose name contains this")
    sub = commands.add_parser("compare", help="say which runs differ, and in what")
    sub.add_argument("before", type=Path)
    sub.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.command == "compare":
        sys.exit(
            compare(json.loads(options.before.read_text()), json.loads(options.after.read_text()))
        )
    if options.base is None:
        records = record(ROOT / "src", options.only)
    else:
        with tempfile.TemporaryDirectory() as folder:
            place = f"{folder}/{options.base.replace('/', '-')}"
            subprocess.run(
                ["git", "worktree", "add", "-q", "--detach", place, options.base],
                cwd=ROOT,
                check=True,
            )
            try:
                records = record(Path(place) / "src", options.only)
            finally:
                subprocess.run(
                    ["git", "worktree", "remove", "--force", place], cwd=ROOT, check=True
                )
    options.path.write_text(json.dumps(records, indent=1) + "\n")


def record(source: Path, only: str) -> dict[str, Record]:
    """What each golden run gives with the code in `source`; one that fails is told and recorded."""
    records = {}
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder))
        runs = {**{name: (name, "") for name in RUNS}, **CONTINUED}
        for name, (base, changes) in runs.items():
            if only not in name:
                continue
            if name not in RUNS and base not in records:
                continue
            keys = f"{COMMON} {RUNS[base]} {changes}".split()
            records[name] = train(Path(folder), source, name, keys, None if name in RUNS else base)
            print(
                f"{name}: {records[name].get('error') or records[name]['losses'][-1]}", flush=True
            )
    return records


def write_data(folder: Path) -> None:
    """A little text and a few images, the same every time."""
    words = [f"{a}{b}" for a in ("ka", "li", "mo", "ne") for b in ("ra", "so", "ti", "vu", "wex")]
    order = np.random.default_rng(0)
    for number in range(12):
        text = " ".join(order.choice(words, 900))
        (folder / "text").mkdir(exist_ok=True)
        (folder / "text" / f"{number}.txt").write_text(text.replace(" ka", ".\nKa"))
    images = {
        f"{kind}_{part}": order.integers(0, high, shape).astype(np.uint8)
        for part, count in (("train", 48), ("test", 16))
        for kind, high, shape in (("x", 256, (count, 8, 8, 3)), ("y", 3, (count,)))
    }
    np.savez(folder / "images.npz", **images)


def train(folder: Path, source: Path, name: str, keys: list[str], base: str | None) -> Record:
    """Train one run in a process of its own and read what it left."""
    data = "images.npz" if "data.source=images" in keys else "text"
    keys = [
        *keys,
        f"data.path={folder / data}",
        f"run.out={folder / 'runs'}",
        f"run.name={label(name)}",
    ]
    config = folder / "run.toml"
    config.write_text("")
    command = [sys.executable, "-c", "from thinwire.cli import main; main()", "train", str(config)]
    for key in keys:
        command += ["--set", key]
    if base is not None:
        command += [
            "--resume",
            str(folder / "runs" / label(base) / "checkpoints" / "step-00000003"),
        ]
    environment = {**os.environ, "PYTHONPATH": str(source), "THINWIRE_CACHE": str(folder / "cache")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1]}
    return read_run(folder / "runs" / label(name))


def label(name: str) -> str:
    """The name of a golden run as that of a folder."""
    return name.replace(",", "").replace(" ", "-")


def read_run(run: Path) -> Record:
    """Losses, hashes of the last checkpoint's tensors, and bytes of each cut."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    # The report of a step and the validation after it come from two stages, in either order.
    rows.sort(key=lambda row: (row["step"], row["kind"] != "step"))
    last = max(path for path in (run / "checkpoints").glob("step-*"))
    tensors = {}
    for path in sorted(last.glob("*.safetensors")):
        for name, value in load_file(path).items():
            tensors[name] = hashlib.sha256(value.tobytes()).hexdigest()[:16]
    summary = json.loads((run / "summary.json").read_text())
    cuts = summary["cuts"] if "cuts" in summary else summary["boundaries"]  # as older commits say
    return {
        "losses": [row["loss"] for row in rows if "loss" in row],
        "tensors": tensors,
        "bytes": [
            [cut["forward_bytes_per_token"], cut["backward_bytes_per_token"]] for cut in cuts
        ],
    }


def compare(before: dict[str, Record], after: dict[str, Record]) -> int:
    """Print what differs; 1 if anything does."""
    differing = 0
    for name in [*before, *(name for name in after if name not in before)]:
        found = differences(before.get(name), after.get(name))
        differing += bool(found)
        print(f"{name}: {'; '.join(found) or 'equal'}")
    print(f"{differing} of {len(before.keys() | after.keys())} runs differ")
    return 1 if differing else 0


def differences(before: Record | None, after: Record | None) -> list[str]:
    """What differs between two records of one run, in words."""
    if before is None or after is None:
        return ["only in the second" if before is None else "only in the first"]
    if "error" in before or "error" in after:
        errors = [record.get("error", "none") for record in (before, after)]
        return [] if errors[0] == errors[1] else [f"error: {errors[0]} -> {errors[1]}"]
    found = []
    if before["losses"] != after["losses"]:
        pairs = zip(before["losses"], after["losses"], strict=False)
        first = next((f"{a!r} -> {b!r}" for a, b in pairs if a != b), "another number of them")
        found.append(f"losses ({first})")
    names = before["tensors"].keys() | after["tensors"].keys()
    changed = sorted(n for n in names if before["tensors"].get(n) != after["tensors"].get(n))
    if changed:
        found.append(f"{len(changed)} of {len(names)} tensors ({changed[0]})")
    if before["bytes"] != after["bytes"]:
        found.append(f"bytes per token ({before['bytes']} -> {after['bytes']})")
    return found


if __name__ == "__main__":
    main()
