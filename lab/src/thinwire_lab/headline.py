"""`thinwire lab headline`: time to a loss over a stated link, beside dense and the public figures.

Time is seconds per step times steps. Seconds per step are simulated for the public contest's model
and links from compute that was measured; how many tokens a method needs beside dense comes from
logs of trained arms. The report says which is which.
"""

import argparse
from dataclasses import dataclass
from typing import Any

from thinwire.engine.build import model_weights
from thinwire.errors import ConfigError
from thinwire.plan import Rates, estimate_costs, measure_rates
from thinwire.report.human import human_count
from thinwire.schedule import Costs, Links, build, simulate
from thinwire.settings import Settings, merged
from thinwire.settings.crossing import bytes_per_token
from thinwire_lab.arms import Values, base_of, split_patterns
from thinwire_lab.decide import too_short
from thinwire_lab.experiment import Say, sheet, words
from thinwire_lab.logs import Method, dense_among, grounds_of, methods_of, read_logs, tokens_at
from thinwire_lab.outcome import Outcome, Row, size_notes
from thinwire_lab.plots import Line, Panel, short_name

LEAST_STEPS = 200  # of training: shorter runs say nothing of what a method costs
AIM = 10.0  # times faster than dense
ENOUGH = 1.002  # of the fastest window's time: a smaller window holds less memory


@dataclass(frozen=True)
class Goal:
    """The loss that methods are compared at, and what each takes to it."""

    loss: float
    tokens: dict[str, float]  # by label
    how: str
    doubt: str = ""  # why these tokens decide nothing, if so


def run(options: argparse.Namespace, say: Say) -> Outcome:
    """Read the logs, measure or read compute, simulate, multiply."""
    base = base_of(options, sheet("headline")["settings"])
    methods, left_out = compared_methods(options)
    goal = goal_of(methods, options.loss)
    arms = {m.label: crossing_settings(m, base) for m in methods}
    costs, compute = compute_costs(arms, options)
    rows = [
        row
        for link in sheet("headline")["links"]
        for row in link_rows(link, methods, arms, costs, goal)
    ]
    steps = max(max(method.by_steps) for method in methods)
    trained, simulated = methods[-1].stages, arms[methods[-1].label].pipeline.stages
    apart = f"the losses are of pipelines of {trained} stages, the seconds of {simulated}"
    outcome = Outcome(
        **words("headline", **_facts(methods, goal, arms, compute)),
        verdict=verdict(rows),
        holds=all(_best(rows, link)["times as fast"] >= AIM for link in {r["link"] for r in rows}),
        too_small=too_short(steps, LEAST_STEPS)
        or goal.doubt
        or (apart if trained != simulated else ""),
        rows=rows,
        panels=panels_of(rows),
    )
    for arm, settings in arms.items():
        outcome.notes += [f"{arm}: {note}" for note in size_notes(settings)]
    if left_out:
        outcome.notes.append(f"left out: {left_out} arms of other models, texts or settings")
    return outcome


def compared_methods(options: argparse.Namespace) -> tuple[list[Method], int]:
    """Dense, and the methods of the logs' largest ground with the chosen number of stages; how many
    arms of other grounds are left out.

    Those whose longest run is as long as dense's: a shorter schedule passes a loss sooner.
    """
    runs = read_logs(options.logs or [options.out / "convergence.jsonl"])
    ground, *other_grounds = grounds_of(runs)
    methods = methods_of(ground)
    dense = dense_among(methods)
    others = [method for method in methods if method.label != dense.label]
    if options.methods:
        named = split_patterns(options.methods)
        others = [method for method in others if method.label in named]
    stages = options.stages or max((method.stages for method in others), default=0)
    length = max(dense.by_steps)
    chosen = [m for m in others if m.stages == stages and max(m.by_steps) == length]
    if not chosen:
        raise ConfigError(
            f"the log has no arm with {stages} stages and {length} steps, as dense has, beside it"
        )
    return [dense, *chosen], sum(map(len, other_grounds))


def goal_of(methods: list[Method], loss: float | None = None) -> Goal:
    """What each method takes to a loss: by the last losses of runs of several lengths where all
    methods have such around it, else along the curve of the longest run.

    Along a curve the learning rate is still high where an early method passes the loss, and a
    schedule that ended there would have been faster: that favours the methods that come last.
    """
    target = loss or max(method.finals()[-1][1] for method in methods)
    finals = {method.label: method.finals() for method in methods}
    if all(len(f) > 1 and f[0][1] >= target >= f[-1][1] for f in finals.values()):
        found = {label: tokens_at(curve, target, log=True) for label, curve in finals.items()}
        return Goal(target, found, "between the last losses of runs of several lengths")
    curves = {method.label: method.curve() for method in methods}
    for label, curve in curves.items():
        if not curve or min(point for _, point in curve) > target:
            raise ConfigError(f"{label} does not reach loss {target:.4f} in the log: raise --loss")
    found = {label: tokens_at(curve, target) for label, curve in curves.items()}
    doubt = (
        "tokens are read along the curves of single lengths, which favours the methods that come "
        "last; train each method at several lengths into one log"
    )
    return Goal(target, found, "along the curves of the longest runs", doubt)


def crossing_settings(method: Method, base: Values) -> Settings:
    """The base with a method's cut. Ranks and tables keep their share of the width."""
    trained = method.settings
    plain, width = trained.relaxed().to_plain(), Settings.from_plain(base).model.dim

    def scaled(size: int) -> int:
        return max(1, size * width // trained.model.dim) if size else 0

    cut = dict(plain["boundary"])
    cut |= {key: scaled(cut[key]) for key in ("rank", "table")}
    changes = {"boundary": cut, "codec": plain["codec"], "optim": {"name": trained.optim.name}}
    return Settings.from_plain(merged(base, changes))


def compute_costs(
    arms: dict[str, Settings], options: argparse.Namespace
) -> tuple[dict[str, Costs], str]:
    """Costs of each arm, and how its compute came about."""
    given = options.tflops is not None
    first = next(iter(arms.values()))
    rates = Rates(options.tflops * 1e12) if given else measure_rates(first)
    told = "given" if given else "measured with one block on this machine"
    rate = f"{rates.flops / 1e12:.3g} TFLOP/s per stage"
    compute = f"compute: {rate}, {told}; ends of cuts not counted"
    return {arm: estimate_costs(settings, *rates) for arm, settings in arms.items()}, compute


def link_rows(
    link: dict[str, Any],
    methods: list[Method],
    arms: dict[str, Settings],
    costs: dict[str, Costs],
    goal: Goal,
) -> list[Row]:
    """One row for each method over a link, and what is public for it."""
    public, dense = sheet("headline")["public"], methods[0].label
    speed = link["mbps"], link["mbps"], link["latency_ms"] / 1e3
    rows = []
    for arm, settings in arms.items():
        seconds, window, bound = fastest(settings, costs[arm], speed)
        share = goal.tokens[arm] / goal.tokens[dense]
        steps = public["dense_steps"] * share
        per_token = bytes_per_token(settings)
        rows.append(
            {
                "link": link["name"],
                "method": arm,
                "ratio": 4 * settings.model.dim / per_token,
                "M tokens to loss": goal.tokens[arm] / 1e6,
                "tokens, x dense": share,
                "window": window,
                "limited by": bound,
                "seconds per step": seconds,
                "hours to loss": goal.tokens[arm] / settings.tokens_per_step * seconds / 3600,
                "steps": round(steps),
                "seconds": steps * seconds,
            }
        )
    reference = rows[0]["seconds"]
    for row in rows:
        row["times as fast"] = reference / row["seconds"]
    if link["name"] == public["link"]:
        first = public["runs"][0]["steps"] * public["runs"][0]["step_seconds"]
        for told in public["runs"]:
            seconds = told["steps"] * told["step_seconds"]
            times = {"seconds per step": told["step_seconds"], "seconds": seconds}
            own = {key: told[key] for key in ("method", "ratio", "steps")}
            rows.append({"link": link["name"], **own, **times, "times as fast": first / seconds})
    return rows


def fastest(
    settings: Settings, costs: Costs, speed: tuple[float, float, float]
) -> tuple[float, int, str]:
    """Seconds per step, window and limit: the smallest window that is about as fast as any.

    Windows double from the number of stages on, up to all microbatches.
    """
    stages, count = settings.pipeline.stages, settings.pipeline.microbatches
    links = Links.alike(stages, *speed)
    doubled = [stages << times for times in range(count.bit_length()) if stages << times < count]
    played = [
        simulate(build("1f1b", stages, count, window), costs, links, steps=2)
        for window in [*doubled, count]
    ]
    least = min(found.step_seconds for found in played)
    found = next(found for found in played if found.step_seconds <= ENOUGH * least)
    return found.step_seconds, found.schedule.window, found.bound


def verdict(rows: list[Row]) -> str:
    """The fastest method over each link, and what it stands beside."""
    parts = []
    for link in dict.fromkeys(row["link"] for row in rows):
        best = _best(rows, link)
        dense = next(row for row in rows if row["link"] == link)
        parts.append(
            f"{link}: {best['method']} ({best['ratio']:.0f}x fewer bytes) takes "
            f"{best['seconds per step']:.2f} s per step and {best['tokens, x dense']:.2f} times "
            f"the tokens of dense ({dense['seconds per step']:.2f} s), so it is "
            f"{best['times as fast']:.1f}x faster"
        )
    return f"Fastest over {'; '.join(parts)}."


def _best(rows: list[Row], link: str) -> Row:
    own = [row for row in rows if row["link"] == link and "M tokens to loss" in row]
    return max(own, key=lambda row: row["times as fast"])


def _facts(
    methods: list[Method], goal: Goal, arms: dict[str, Settings], compute: str
) -> dict[str, Any]:
    trained, shape = methods[0].settings, arms[methods[0].label]
    public = sheet("headline")["public"]
    runs = [
        f"{told['method'].removeprefix('public: ')} took {told['steps']:,} steps of "
        f"{told['step_seconds']} s"
        for told in public["runs"]
    ]
    return {
        "loss": goal.loss,
        "model": f"{human_count(model_weights(trained).count)} parameters",
        "tokens": max(method.finals()[-1][0] for method in methods) / 1e6,
        "stages": methods[-1].stages,
        "how": goal.how,
        "compute": compute,
        "shape": f"{human_count(model_weights(shape).count)} parameters, d {shape.model.dim}",
        "step": shape.tokens_per_step,
        "microbatches": shape.pipeline.microbatches,
        "parts": shape.pipeline.stages,
        "public": f"{'; '.join(runs)} ({public['source']})",
        "steps": public["dense_steps"],
    }


def panels_of(rows: list[Row]) -> list[Panel]:
    """Seconds of each method over each link; public figures in grey."""
    panels = []
    for link in dict.fromkeys(row["link"] for row in rows):
        lines = []
        for label, is_ours in (("this lab", True), ("public", False)):
            own = [row for row in rows if row["link"] == link]
            own = [row for row in own if ("M tokens to loss" in row) == is_ours]
            names = [f"{short_name(row['method'])}: {row['times as fast']:.1f}x" for row in own]
            if own:
                lines.append(Line(label, [row["seconds"] for row in own], names, "o"))
        panels.append(Panel(link, "seconds, at the steps of public dense", "", lines, "x"))
    return panels
