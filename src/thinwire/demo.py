"""The demo: the same small model trained twice over a home connection, thin and dense.

On two CPU cores a link of 80 Mbps would hide behind the compute, and nothing could be seen. The
upload of a small home connection is as narrow for this model as 80 Mbps are for a large one.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from thinwire.folders import next_free_name
from thinwire.inference import Model
from thinwire.report.human import elapsed, human_bytes
from thinwire.run.record import read_progress
from thinwire.settings import Settings, make_recipe

Summary = dict[str, Any]

COMMON = (
    *("link.mbps_up=5", "link.mbps_down=50", "link.latency_ms=25"),
    *("train.eval_every=0", "train.eval_batches=32", "train.checkpoint_every=0"),
)
"""Small enough for two cores and two minutes; all else is the recipe's, or the defaults."""
RECIPES = {"thin": "thin32", "dense": "dense"}
STEPS = {"thin": 56, "dense": 32}  # thin takes less time for its steps than dense for its own
PROMPT = "    def __init__(self"
WELCOME = """\
One small language model in four processes, as if on four machines at home. Each uploads at most
{up:g} Mbps and is {latency:g} ms from the next. The model learns from Python's own library, twice:
thin, with few numbers per token between the stages, and dense, the usual way.
This takes about two minutes.
"""


def run_demo(overrides: list[str], train: Callable[[Settings], Summary]) -> None:
    """Train both arms, with the overrides of `--set`, and show what the thin cut changes."""
    arms = {arm: _settings(arm, overrides) for arm in RECIPES}
    link = arms["thin"].link
    print(WELCOME.format(up=link.mbps_up, latency=link.latency_ms))
    summaries = {}
    for number, (arm, settings) in enumerate(arms.items(), 1):
        print(f"{number} of {len(arms)}: {arm}")
        summaries[arm] = train(settings)
        print()
    thin = summaries["thin"]["paths"]
    model = Model(Path(thin["checkpoint"]), "cpu")
    text = model.generate(PROMPT, 60, temperature=0.5, top_k=20, seed=0)
    print("What the thin model writes after this short training:")
    print("\n".join(f"  | {line}" for line in text.splitlines()) + "\n")
    print(*conclusion(summaries), "", sep="\n")
    _draw(summaries, Path(thin["plots"]) / "compare.png")
    print(f"More text:       thinwire generate {thin['folder']}")
    print("Your own run:    thinwire init run.toml")


def conclusion(summaries: Mapping[str, Summary]) -> list[str]:
    """What a newcomer can tell a friend: bytes, time and loss, from what was measured."""
    thin, dense = summaries["thin"], summaries["dense"]
    sent = [human_bytes(summary["bytes_sent"]["total"]) for summary in (thin, dense)]
    seen = [summary["tokens"] for summary in (thin, dense)]
    times = [summary["seconds"]["training"] for summary in (thin, dense)]
    losses = [summary["final_valid_loss"] for summary in (thin, dense)]
    speed = seen[0] / times[0] / (seen[1] / times[1])
    faster = f"{speed:.1f}x faster" if speed >= 1 else f"{1 / speed:.1f}x slower"
    lower = "lower" if losses[0] < losses[1] else "higher"
    sooner = "sooner" if times[0] < times[1] else "later"
    return [
        f"The thin run sent {sent[0]}, the dense run {sent[1]}: "
        f"{thin['ratio_vs_bf16']:.0f}x fewer bytes for each token.",
        f"It trained on {seen[0]:,} tokens in {elapsed(times[0])}, the dense run on {seen[1]:,} in "
        f"{elapsed(times[1])}: {faster}.",
        f"It reached a validation loss of {losses[0]:.2f}, the dense run {losses[1]:.2f}: {lower}, "
        f"and {sooner}.",
    ]


def _settings(arm: str, overrides: list[str]) -> Settings:
    own = [*COMMON, f"train.steps={STEPS[arm]}", f"run.name=demo-{arm}"]
    settings = make_recipe(RECIPES[arm], [*own, *overrides]).asked.resolved()
    name = next_free_name(Path(settings.run.out), settings.run.name)
    return dataclasses.replace(settings, run=dataclasses.replace(settings.run, name=name))


def _draw(summaries: Mapping[str, Summary], path: Path) -> None:
    """Draw one step of each; not without matplotlib, as the runs have said."""
    runs = [read_progress(Path(one["paths"]["folder"])) for one in summaries.values()]
    timelines = [run.timeline for run in runs if run is not None]
    with contextlib.suppress(ImportError, OSError, ValueError):  # a full disk, or one before
        from thinwire.report.plots import steps_figure  # slow to import

        steps_figure(timelines, "One step of each run").savefig(path)
        print(f"One step of each, on one scale of time: {path}")
