"""`thinwire lab convergence`: what narrow cuts cost in loss, at equal tokens.

Every arm trains the same model on the same batches with the same optimizer; arms differ in what
crosses the cut. Learning rates are swept per arm. An arm is trained in one process (lab/chain.py),
several arms at a time in processes of their own; each is logged as it ends, and arms that are in
the log already are not trained again, so a grid can be finished over several calls.
"""

import argparse
import dataclasses
import hashlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from thinwire.data import Corpus
from thinwire.engine import Settings
from thinwire.engine.build import choose_device
from thinwire.engine.feed import Feed
from thinwire.lab.chain import Chain
from thinwire.lab.experiment import Outcome, Row
from thinwire.plan import estimate_costs, frame_bytes
from thinwire.schedule import Network, simulate

BF16_BYTES = 2
CHOSEN_LINK = Network(80.0, 80.0, 0.025)


@dataclass(frozen=True)
class Arm:
    """One training run of the grid."""

    mode: str
    rank: int
    lr: float
    stages: int
    seed: int
    steps: int
    anchor: str = "auto"
    learn: bool = False
    update_every: int = 0

    @property
    def method(self) -> str:
        """The arm without learning rate and seed: what is compared."""
        extras = [
            f" k={self.rank}" if self.rank else "",
            f" anchor={self.anchor}" if self.anchor != "auto" else "",
            " learned" if self.learn else "",
            f" moved/{self.update_every}" if self.update_every else "",
        ]
        return self.mode + "".join(extras)

    def settings(self, base: dict[str, dict[str, Any]]) -> Settings:
        """The settings of this arm on a base model, data set and batch."""
        values = {section: dict(keys) for section, keys in base.items()}

        def put(section: str, **keys: Any) -> None:
            values.setdefault(section, {}).update(keys)

        put("boundary", mode=self.mode, rank=self.rank, anchor=self.anchor, learn=self.learn)
        put("boundary", basis_update_every=self.update_every)
        if self.learn:
            put("boundary", basis="per-cut")
        put("pipeline", stages=self.stages, schedule="gpipe")
        put("optim", lr=self.lr, warmup=max(1, self.steps // 10))
        put("run", seed=self.seed)
        put("train", steps=self.steps)
        return Settings.from_plain(values)


def train_arm(arm: Arm, base: dict[str, dict[str, Any]], corpus: Corpus) -> Row:
    """Train one arm and say how its validation loss fell."""
    settings = arm.settings(base)
    device = choose_device(settings.run.device, 0)
    chain = Chain(settings, Feed(corpus, settings, device))
    every = max(1, arm.steps // 10)
    curve = [(0, chain.evaluate())]
    start = time.perf_counter()
    for step in range(arm.steps):
        chain.train_step(step)
        if (step + 1) % every == 0 or step + 1 == arm.steps:
            curve.append(((step + 1) * settings.tokens_per_step, chain.evaluate()))
    seconds = time.perf_counter() - start
    return {
        **dataclasses.asdict(arm),
        **_ground(base, corpus),
        "curve": curve,
        "loss": curve[-1][1],
        "seconds": seconds,
    }


def train_grid(
    arms: list[Arm],
    base: dict[str, dict[str, Any]],
    corpus: Corpus,
    log: Path,
    parallel: int,
    say: Callable[[str], None],
) -> list[Row]:
    """Train the arms that the log lacks, `parallel` at a time.

    Returns the log's rows of this model, batch and corpus: losses on others do not compare.
    """
    ground = _ground(base, corpus)

    def comparable() -> list[Row]:
        return [row for row in read_log(log) if ground.items() <= row.items()]

    done = {_key(row) for row in comparable()}
    waiting = [arm for arm in arms if _key(dataclasses.asdict(arm)) not in done]
    say(f"{len(arms)} arms, {len(arms) - len(waiting)} of them in {log} already")
    running: list[tuple[Arm, subprocess.Popen[str]]] = []
    finished = 0
    while waiting or running:
        while waiting and len(running) < parallel:
            arm = waiting.pop(0)
            running.append((arm, _start(arm, base, corpus)))
        time.sleep(0.2)
        for arm, process in list(running):
            if process.poll() is None:
                continue
            running.remove((arm, process))
            finished += 1
            output = process.stdout.read() if process.stdout else ""
            if process.returncode:
                say(f"FAILED {arm.method} lr {arm.lr:g}: {output[-500:]}")
                continue
            row = json.loads(output.splitlines()[-1])
            with log.open("a") as file:
                file.write(json.dumps(row) + "\n")
            say(
                f"{finished:3}  {arm.stages} stages  {arm.method:<34} lr {arm.lr:<8g} "
                f"seed {arm.seed}  steps {arm.steps}  loss {row['loss']:.4f}  "
                f"{row['seconds']:.0f} s"
            )
    return comparable()


def read_log(log: Path) -> list[Row]:
    """The arms that have been trained."""
    if not log.exists():
        return []
    return [json.loads(line) for line in log.read_text().splitlines() if line.strip()]


def best_by_method(rows: Iterable[Row]) -> dict[tuple[int, int, str], Row]:
    """(stages, steps, method) -> the learning rate with the least mean loss over its seeds."""
    groups: dict[tuple[int, int, str, float], list[Row]] = {}
    for row in rows:
        arm = _arm(row)
        groups.setdefault((arm.stages, arm.steps, arm.method, arm.lr), []).append(row)
    best: dict[tuple[int, int, str], Row] = {}
    for (stages, steps, method, lr), members in groups.items():
        losses = [member["loss"] for member in members]
        found = {
            "lr": lr,
            "loss": sum(losses) / len(losses),
            "seeds": len(losses),
            "spread": max(losses) - min(losses),
            "row": members[0],
        }
        place = (stages, steps, method)
        if place not in best or found["loss"] < best[place]["loss"]:
            best[place] = found
    return best


def table(rows: list[Row], base: dict[str, dict[str, Any]]) -> list[Row]:
    """One row per method: loss gap against the dense arm of the same stages and tokens."""
    best = best_by_method(rows)
    result = []
    for (stages, steps, method), found in sorted(best.items()):
        arm = _arm(found["row"])
        settings = arm.settings(base)
        out, back = frame_bytes(settings)
        tokens = settings.microbatch_size * settings.model.context
        dense = _dense(best, stages, steps)
        gap = found["loss"] / dense["loss"] - 1 if dense else None
        result.append(
            {
                "stages": stages,
                "tokens": steps * settings.tokens_per_step,
                "method": method,
                "bytes per token": (out + back) / tokens,
                "ratio": 2 * BF16_BYTES * settings.model.dim * tokens / (out + back),
                "best lr": found["lr"],
                "seeds": found["seeds"],
                "valid loss": found["loss"],
                "spread": found["spread"] if found["seeds"] > 1 else None,
                "gap": gap,
            }
        )
    return result


def _dense(best: dict[tuple[int, int, str], Row], stages: int, steps: int) -> Row | None:
    """The dense arm to hold against: of the same cuts, or of others, which only round to bf16."""
    same = {s: row for (s, n, method), row in best.items() if n == steps and method == "dense"}
    return same.get(stages) or next(iter(same.values()), None)


def figure(rows: list[Row], base: dict[str, dict[str, Any]], flops_per_s: float) -> Figure:
    """Loss over tokens, over bytes of one boundary, and over time at the chosen link."""
    best = best_by_method(rows)
    longest = max(steps for _, steps, _ in best)
    stages = min(s for s, steps, _ in best if steps == longest)
    plot = Figure(figsize=(15, 5), layout="constrained")
    axes = plot.subplots(1, 3, sharey=True)
    for (s, steps, method), found in sorted(best.items()):
        if (s, steps) != (stages, longest):
            continue
        settings = _arm(found["row"]).settings(base)
        out, back = frame_bytes(settings)
        per_token = (out + back) / (settings.microbatch_size * settings.model.context)
        tokens = [t for t, _ in found["row"]["curve"]][1:]
        losses = [loss for _, loss in found["row"]["curve"]][1:]
        piped = _with_microbatches(settings)
        costs = estimate_costs(piped, flops_per_s)
        step = simulate(piped.schedule(), costs, CHOSEN_LINK).step_seconds
        hours = [t / settings.tokens_per_step * step / 3600 for t in tokens]
        style = {"label": method, "marker": "o", "markersize": 3}
        axes[0].plot([t / 1e6 for t in tokens], losses, **style)
        axes[1].plot([t * per_token / 1e9 for t in tokens], losses, **style)
        axes[2].plot(hours, losses, **style)
    axes[0].set(xlabel="million tokens", ylabel="validation loss", title=f"{stages} stages")
    axes[1].set(xlabel="GB over one boundary, both ways", xscale="log", title="over bytes")
    axes[2].set(xlabel="hours", xscale="log", title="over time at 80 Mbps + 25 ms (simulated)")
    axes[2].legend(fontsize=8)
    for axis in axes:
        axis.grid(alpha=0.3)
    return plot


def _with_microbatches(settings: Settings) -> Settings:
    """For the time axis: the batch in as many microbatches as a pipeline would use, at most 16."""
    values = settings.to_plain()
    counts = [n for n in range(1, 17) if settings.train.batch % n == 0]
    values["pipeline"].update({"microbatches": max(counts), "schedule": "gpipe", "window": 0})
    return Settings.from_plain(values)


def outcome(
    rows: list[Row], base: dict[str, dict[str, Any]], flops_per_s: float, command: str
) -> Outcome:
    """The grid as a report, with the verdict that its figures give."""
    lines = table(rows, base)
    longest = max(line["tokens"] for line in lines)
    decided = [r for r in lines if r["tokens"] == longest and r["gap"] is not None]
    narrow = sorted((r for r in decided if r["method"] != "dense"), key=lambda r: r["gap"])
    parts = [
        f"{r['method']} ({r['ratio']:.0f}x) {r['gap']:+.1%}"
        for r in narrow
        if r["stages"] == narrow[0]["stages"]
    ]
    worst = max((r["gap"] for r in narrow), default=0.0)
    return Outcome(
        name="convergence",
        question=(
            "What do narrow cuts cost in validation loss at equal tokens, same optimizer, learning "
            "rate tuned per arm?"
        ),
        verdict="loss against dense, best first: " + "; ".join(parts),
        holds=worst <= 0.01,
        rows=lines,
        figure=figure(rows, base, flops_per_s),
        command=command,
        notes=[
            "gap: against the dense arm of the same tokens (at the first number of stages)",
            "arms are trained in one process with every cut's boundary and rounding in place",
            f"time: simulated at 80 Mbps + 25 ms with {flops_per_s / 1e12:g} TFLOP/s per stage",
        ],
    )


def grid(
    modes: list[str],
    ranks: list[int],
    lrs: list[float],
    stages: list[int],
    seeds: list[int],
    steps: int,
) -> list[Arm]:
    """Each mode at every rank, number of stages, learning rate and seed; dense beside them.

    Dense arms are trained for the first number of stages only: other cuts would change nothing
    but where activations are rounded.
    """
    arms = [
        Arm("dense", 0, lr, stages[0], seed, steps) for lr, seed in itertools.product(lrs, seeds)
    ]
    for count, mode, rank, lr, seed in itertools.product(stages, modes, ranks, lrs, seeds):
        name, _, variant = mode.partition("+")
        arms.append(
            Arm(
                name,
                rank,
                lr,
                count,
                seed,
                steps,
                anchor=variant if variant in ("fixed", "trainable") else "auto",
                learn=variant == "learned",
                update_every=int(variant[5:]) if variant.startswith("moved") else 0,
            )
        )
    return arms


def _ground(base: dict[str, dict[str, Any]], corpus: Corpus) -> dict[str, str]:
    """What arms must share for their losses to be compared: model, batch and corpus."""
    shared = Arm("dense", 0, 1e-3, 1, 0, 10).settings(base).to_plain()
    text = json.dumps([shared["model"], shared["train"], shared["run"]["precision"]])
    return {
        "corpus": corpus.fingerprint,
        "base": hashlib.sha256(text.encode()).hexdigest()[:12],
    }


def _arm(row: Row) -> Arm:
    return Arm(**{field.name: row[field.name] for field in dataclasses.fields(Arm)})


def _key(row: Row) -> tuple[Any, ...]:
    return dataclasses.astuple(_arm(row))


def _start(arm: Arm, base: dict[str, dict[str, Any]], corpus: Corpus) -> "subprocess.Popen[str]":
    order = json.dumps({"arm": dataclasses.asdict(arm), "base": base, "corpus": str(corpus.folder)})
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "thinwire.lab.convergence", order],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def main() -> None:
    """Entry point of an arm's process: train it, print its row as the last line."""
    parser = argparse.ArgumentParser(description="Train one arm (started by thinwire lab).")
    parser.add_argument("order")
    order = json.loads(parser.parse_args().order)
    row = train_arm(Arm(**order["arm"]), order["base"], Corpus.open(order["corpus"]))
    print(json.dumps(row))


if __name__ == "__main__":
    main()
