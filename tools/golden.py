"""Golden runs: did a change alter a loss, a weight or a byte that it was not meant to?

Trains small models with the code of one checkout and records their losses, a hash of every tensor
of their checkpoints, the bytes that crossed their cuts, and text that they wrote. Bits depend on
the machine, so records are compared on the machine that made them and are not kept:

    python tools/golden.py record now.json              # this checkout
    python tools/golden.py record then.json --base REV  # another commit, in a worktree of its own
    python tools/golden.py compare then.json now.json   # which numbers differ, run by run
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
Record = dict[str, Any]

COMMON = (
    "run.threads=1 run.device=cpu run.out=runs data.source=text data.path=text model.preset=tiny "
    "model.layers=4 model.dim=32 model.heads=4 model.kv_heads=2 model.ffn=48 model.vocab=300 "
    "model.context=32 train.batch=8 train.steps=6 train.eval_every=3 train.eval_batches=4 "
    "train.checkpoint_every=3 pipeline.stages=2 pipeline.microbatches=4 link.emulate=false"
)
MIDDLE = "step-00000003"  # where runs are taken up again
THIN = "boundary.mode={} boundary.rank=6 codec.forward=int8 codec.backward=int4"
FOUR = "pipeline.stages=4"


@dataclass(frozen=True)
class Run:
    """One golden run: its settings, where it begins, and how it is made."""

    keys: str = ""  # settings beside the common ones
    recipe: str = ""  # what `thinwire init` begins with; empty = the defaults
    by: str = "train"  # or host, torchrun, lab; or export, generate: of what `begins` trained
    begins: str = ""  # the run whose model it begins with
    resumes: str = ""  # the run that it continues from the middle, with its settings and way


RUNS = {
    "dense": Run("codec.forward=fp32 codec.backward=fp32"),
    "dense, 4 stages, gpipe": Run(f"{FOUR} pipeline.schedule=gpipe"),
    "dense, recomputed": Run("pipeline.recompute=true"),
    "subspace": Run(THIN.format("subspace")),
    "subspace, moving": Run(THIN.format("subspace") + " boundary.basis_update_every=2"),
    "reparam": Run(THIN.format("reparam")),
    "projected": Run(THIN.format("projected")),
    "topk": Run("codec.forward=topk(0.1) codec.backward=topk(shared)"),
    "ef21": Run("codec.forward=topk(0.2)+ef21 codec.backward=int8"),
    "aqsgd": Run(
        "codec.forward=int4+aqsgd codec.backward=int8 data.path=text/0.txt data.valid_fraction=0.3"
    ),
    "ef-mixed and entropy": Run("codec.forward=randk(0.3)+ef-mixed codec.backward=step(3)+zstd"),
    "muon": Run("optim.name=muon optim.lr=0.005"),
    "chat": Run("data.source=chat data.path=chats.jsonl model.vocab=400"),
    "thin32": Run(FOUR, recipe="thin32"),
    "thin50": Run(FOUR, recipe="thin50"),
    "thin100": Run(FOUR, recipe="thin100"),
    "thin200": Run(FOUR, recipe="thin200"),
    "exact32": Run(FOUR, recipe="exact32"),
    "delayed": Run(f"{FOUR} pipeline.delay=2 train.eval_every=0", recipe="thin200"),
    "dense recipe": Run(FOUR, recipe="dense"),
    "finetune": Run(recipe="finetune", begins="dense"),
    "LoRA": Run("lora.rank=4 optim.name=adamw", begins="dense"),
    "hosted": Run("pipeline.split=[2,2]", recipe="thin32", by="host"),
    "torchrun": Run(recipe="thin32", by="torchrun"),
    "codecs on images": Run(by="lab"),
    "dense, resumed": Run(resumes="dense"),
    "dense, resumed in 4 stages": Run(FOUR, resumes="dense"),
    "subspace, moving, resumed": Run(resumes="subspace, moving"),
    "ef21, resumed": Run(resumes="ef21"),
    "chat, resumed": Run(resumes="chat"),
    "thin200, resumed": Run(resumes="thin200"),
    "exact32, resumed": Run(resumes="exact32"),
    "delayed, resumed": Run(resumes="delayed"),
    "LoRA, resumed": Run(resumes="LoRA"),
    "hosted, resumed": Run(resumes="hosted"),
    "torchrun, resumed": Run(resumes="torchrun"),
    "thin32, text": Run(by="generate", begins="thin32"),
    "dense, exported": Run(by="export", begins="dense"),
    "exact32, exported": Run(by="export", begins="exact32"),
    "LoRA, exported": Run(by="export", begins="LoRA"),
}


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


def record(source: Path, only: str = "") -> dict[str, Record]:
    """What each golden run gives with the code in `source`; one that fails is told and recorded.

    Runs that another begins with are made too, if `only` some are asked for.
    """
    wanted = {name for name in RUNS if only in name}
    for run in reversed(RUNS.values()):
        wanted |= {run.begins, run.resumes} if run in map(RUNS.get, wanted) else set()
    records = {}
    with tempfile.TemporaryDirectory() as folder:
        house = House(Path(folder), source)
        for name in (name for name in RUNS if name in wanted):
            try:
                records[name] = house.make(name)
            except Failed as failed:
                records[name] = {"error": str(failed)}
            shown = records[name].get("error") or records[name].get("text")
            print(f"{name}: {shown or records[name]['losses'][-1]}", flush=True)
    return records


class Failed(Exception):
    """A command of a golden run failed; its last line says why."""


class House:
    """A folder with data in it, where the runs of one recording are made."""

    def __init__(self, folder: Path, source: Path):
        self.folder = folder
        self._environment = {
            **os.environ,
            "PYTHONPATH": f"{source}{os.pathsep}{source.parent / 'lab' / 'src'}",
            "THINWIRE_CACHE": str(folder / "cache"),
            "OMP_NUM_THREADS": "1",
            "no_proxy": "127.0.0.1",
        }
        write_data(folder)

    def make(self, name: str) -> Record:
        """Make one run and read what it gave."""
        run = RUNS[name]
        if run.by == "lab":
            return self._lab()
        if run.by == "export":
            return self._export(run.begins)
        if run.by == "generate":
            return {"text": self._generate(self._run_folder(run.begins))}
        resume = []
        if run.resumes:
            base = RUNS[run.resumes]
            run = replace(base, keys=f"{base.keys} {run.keys}", resumes=run.resumes)
            resume = self._take_up(run, name)
        keys = f"{COMMON} {run.keys} run.name={label(name)}".split()
        settings = [word for key in keys for word in ("--set", key)]
        config = [str(self.folder / f"{label(name)}.toml")]
        Path(config[0]).write_text("")
        if run.recipe:
            self._thinwire("init", *config, "--force", "--recipe", run.recipe, *settings)
        if run.begins:
            settings += ["--set", f"train.init_from={self._run_folder(run.begins)}"]
        if run.by == "host":
            self._host([*config, *settings])
        elif run.by == "torchrun":
            ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
            self._finished(*ranks, "-m", "thinwire.cluster", *config, *settings, *resume)
        else:
            self._thinwire("train", *config, *settings, *resume)
        return read_run(self._run_folder(name))

    def _take_up(self, run: Run, name: str) -> list[str]:
        """Where a run goes on from the middle of another; a host continues a copy of its folder."""
        middle = self._run_folder(run.resumes) / "checkpoints" / MIDDLE
        if not middle.exists():
            raise Failed(f"{run.resumes} left no {MIDDLE}")
        if run.by != "host":
            return ["--resume", str(middle)]
        shutil.copytree(self._run_folder(run.resumes), self._run_folder(name))
        for later in (self._run_folder(name) / "checkpoints").iterdir():
            if later.name > MIDDLE:
                shutil.rmtree(later)
        return []

    def _export(self, name: str) -> Record:
        """Export, import and let the import write: its text, and the tensors on the way."""
        exported, imported = (self.folder / f"{label(name)}-{way}" for way in ("hf", "import"))
        self._thinwire("export", str(self._run_folder(name)), str(exported))
        self._thinwire("import", str(exported), "--to", str(imported), "--stages", "2")
        return {
            "text": self._generate(imported),
            "tensors": {
                f"{way}: {key}": value
                for way, place in (("hf", exported), ("import", imported))
                for key, value in hashes(place).items()
            },
        }

    def _generate(self, place: Path) -> str:
        words = ("--prompt", "Ka", "--tokens", "24", "--temperature", "0.8", "--device", "cpu")
        return self._thinwire("generate", str(place), *words).strip()

    def _lab(self) -> Record:
        """Arms of the study of codecs on images, which has a model and data of its own."""
        arms = ("--task", "cifar", "--quick", "--arms", "topk30+aqsgd,fw8-bw2", "--epochs", "2")
        self._thinwire("lab", "codecs", *arms, "--seeds", "0", "--device", "cpu", "--out", "lab")
        lines = (self.folder / "lab" / "codecs.jsonl").read_text().splitlines()
        figures = [json.loads(line)["figures"] for line in lines]
        return {
            "losses": [arm[key] for arm in figures for key in ("loss", "loss_off")],
            "bytes": [[arm["bytes_forward"], arm["bytes_backward"]] for arm in figures],
        }

    def _host(self, words: list[str]) -> None:
        """A host and two peers that join it over loopback."""
        here = ("--listen", "127.0.0.1:0")
        host = self._start("host", "-m", "thinwire", "host", *words, *here)
        machines = [host]
        try:
            invite = self._awaited(host, r"tw1-\S+")
            for name in ("ana", "ben"):
                join = ("-m", "thinwire", "join", invite, "--name", name, *here)
                machines.append(self._start(name, *join, "--device", "cpu", "--threads", "1"))
            codes = [machine.wait() for machine in machines]
            if any(codes):
                raise Failed(self._said(host))
        finally:
            for machine in machines:
                machine.kill()

    def _awaited(self, machine: "subprocess.Popen[bytes]", pattern: str) -> str:
        while not (found := re.findall(pattern, (self.folder / "host.txt").read_text())):
            if machine.poll() is not None:
                raise Failed(self._said(machine))
            time.sleep(0.1)
        return found[-1]

    def _said(self, host: "subprocess.Popen[bytes]") -> str:
        """The last line of a host."""
        host.wait()
        return (self.folder / "host.txt").read_text().strip().splitlines()[-1]

    def _start(self, name: str, *words: str) -> "subprocess.Popen[bytes]":
        """A process with a home of its own; what it says goes to a file."""
        with (self.folder / f"{name}.txt").open("wb") as output:
            return subprocess.Popen(
                [sys.executable, *words],
                cwd=self.folder,
                env={**self._environment, "THINWIRE_DATA": str(self.folder / f"home-{name}")},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def _thinwire(self, *words: str) -> str:
        return self._finished("-m", "thinwire", *words)

    def _finished(self, *words: str) -> str:
        """What a Python program printed."""
        done = subprocess.run(
            [sys.executable, *words],
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise Failed((done.stderr or done.stdout).strip().splitlines()[-1])
        return done.stdout

    def _run_folder(self, name: str) -> Path:
        return self.folder / "runs" / label(name)


def write_data(folder: Path) -> None:
    """A little text and a few conversations, the same every time."""
    words = [f"{a}{b}" for a in ("ka", "li", "mo", "ne") for b in ("ra", "so", "ti", "vu", "wex")]
    order = np.random.default_rng(0)
    (folder / "text").mkdir()
    for number in range(12):
        text = " ".join(order.choice(words, 900))
        (folder / "text" / f"{number}.txt").write_text(text.replace(" ka", ".\nKa"))
    with (folder / "chats.jsonl").open("w") as file:
        for _ in range(300):
            said = [" ".join(order.choice(words, order.integers(2, 12))) for _ in range(4)]
            roles = ("user", "assistant", "user", "assistant")
            turns = [
                {"role": role, "content": text} for role, text in zip(roles, said, strict=True)
            ]
            file.write(json.dumps({"messages": turns}) + "\n")


def label(name: str) -> str:
    """The name of a golden run as that of a folder."""
    return name.replace(",", "").replace(" ", "-")


def read_run(run: Path) -> Record:
    """Losses, hashes of the last checkpoint's tensors, and bytes of each cut."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    # The report of a step and the validation after it come from two stages, in either order.
    rows.sort(key=lambda row: (row["step"], row["kind"] != "step"))
    summary = json.loads((run / "summary.json").read_text())
    cuts = summary["cuts"] if "cuts" in summary else summary["boundaries"]  # as older commits say
    return {
        "losses": [row["loss"] for row in rows if "loss" in row],
        "tensors": hashes(max((run / "checkpoints").glob("step-*"))),
        "bytes": [
            [cut["forward_bytes_per_token"], cut["backward_bytes_per_token"]] for cut in cuts
        ],
    }


def hashes(place: Path) -> dict[str, str]:
    """A hash of every tensor in a folder."""
    return {
        name: hashlib.sha256(value.reshape(-1).view(torch.uint8).numpy()).hexdigest()[:16]
        for path in sorted(place.rglob("*.safetensors"))
        for name, value in load_file(path).items()
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
    losses = [record.get("losses", []) for record in (before, after)]
    if losses[0] != losses[1]:
        pairs = zip(*losses, strict=False)
        first = next((f"{a!r} -> {b!r}" for a, b in pairs if a != b), "another number of them")
        found.append(f"losses ({first})")
    tensors = [record.get("tensors", {}) for record in (before, after)]
    names = tensors[0].keys() | tensors[1].keys()
    changed = sorted(name for name in names if tensors[0].get(name) != tensors[1].get(name))
    if changed:
        found.append(f"{len(changed)} of {len(names)} tensors ({changed[0]})")
    for key, what in (("bytes", "bytes per token"), ("text", "text")):
        if before.get(key) != after.get(key):
            found.append(f"{what} ({before.get(key)} -> {after.get(key)})")
    return found


if __name__ == "__main__":
    main()
