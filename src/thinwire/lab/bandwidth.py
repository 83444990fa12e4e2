"""`thinwire lab bandwidth`: how fast each mode trains from 10 Mbps to 100 Gbps, and where a
narrow cut stops paying.

Real pipelines of processes run over emulated links at a few rates; the compute times that the
unlimited run measured then feed the simulator, which gives every rate. Where both exist they stand
side by side, so the simulation can be judged.
"""

import io
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from thinwire.engine import Settings
from thinwire.errors import ConfigError
from thinwire.lab.convergence import best_by_method
from thinwire.lab.experiment import Outcome, Row
from thinwire.plan import frame_bytes, size_notes
from thinwire.report import PlainDisplay
from thinwire.schedule import Costs, Network, simulate
from thinwire.train import train

RATES = [10.0, 30.0, 80.0, 200.0, 500.0, 1e3, 3e3, 1e4, 3e4, 1e5]
PAYS = 1.05  # a narrow cut pays while it trains at least so much faster


def run_bandwidth(
    base: dict[str, dict[str, Any]],
    arms: dict[str, dict[str, Any]],
    measured_rates: list[float],
    scratch: Path,
    command: str,
    say: Callable[[str], None],
    dense_microbatches: int = 0,
    curves: list[Row] | None = None,
) -> Outcome:
    """Measure each arm without limit and at each rate, and simulate the rest.

    `curves` are rows of a convergence log: with them the hours are to a loss that every arm
    reaches, without them to a billion tokens.

    A dense step over a slow link can take minutes; `dense_microbatches` shortens those steps (two
    of them are timed), which costs dense the filling of the pipeline: compare it with its
    simulated rate, which has all microbatches.
    """
    goal, tokens = "1B tokens", dict.fromkeys(arms, 1e9)
    if curves is not None:
        loss, tokens = tokens_to_loss(curves, arms)
        goal = f"loss {loss:.3f}"
    rows: list[Row] = []
    unlimited: dict[str, float] = {}
    for arm, boundary in arms.items():
        whole = _settings(base, boundary, 0.0, f"{arm}-unlimited", scratch)
        summary = train(whole, PlainDisplay(io.StringIO()))
        costs = Costs(**summary["measured_costs"])
        unlimited[arm] = summary["tokens_per_s"]
        say(f"{arm:<12} {'unlimited':>10}  {unlimited[arm]:>12,.1f} tokens/s")
        speeds = {0.0: unlimited[arm]}
        for rate in measured_rates:
            settings = _settings(base, boundary, rate, f"{arm}-{rate:g}", scratch)
            if arm == "dense" and dense_microbatches:
                settings = _shortened(settings, dense_microbatches)
            speeds[rate] = train(settings, PlainDisplay(io.StringIO()))["tokens_per_s"]
            say(f"{arm:<12} {_rate(rate):>10}  {speeds[rate]:>12,.1f} tokens/s")
        rows += _arm_rows(arm, whole, costs, speeds, goal, tokens[arm])
    return Outcome(
        name="bandwidth",
        question="How fast does each mode train over links of which rate, and where does a "
        "narrow cut stop paying?",
        verdict=_verdict(rows, unlimited),
        holds=None,
        rows=rows,
        figure=_figure(rows, goal),
        command=command,
        notes=[
            "measured: processes over emulated links; simulated: the schedule's simulator with "
            "the compute times of the unlimited run",
            f"hours: to {goal}, at the measured rate where there is one",
            *(f"{arm} takes {count / 1e6:,.2f}M tokens to {goal}" for arm, count in tokens.items()),
            *size_notes(whole),
        ],
    )


def tokens_to_loss(
    curves: list[Row], arms: dict[str, dict[str, Any]]
) -> tuple[float, dict[str, float]]:
    """The lowest loss that every arm's curve reaches, and the tokens that each takes to it.

    Of each method the longest run at its best learning rate counts.
    """
    best = best_by_method(curves)
    longest = max((steps for _, steps, _ in best), default=0)
    found: dict[str, list[tuple[float, float]]] = {}
    for arm, boundary in arms.items():
        method = f"{boundary['mode']} k={boundary['rank']}" if boundary["rank"] else "dense"
        runs = [row for (_, n, name), row in best.items() if (n, name) == (longest, method)]
        if not runs:
            raise ConfigError(f"the convergence log has no run of {longest} steps of {method}")
        found[arm] = runs[0]["row"]["curve"]
    loss = max(min(value for _, value in curve) for curve in found.values())
    return loss, {arm: _crossing(curve, loss) for arm, curve in found.items()}


def _crossing(curve: list[tuple[float, float]], loss: float) -> float:
    """Where a curve first comes down to a loss, on a straight line between its points."""
    for (before, high), (after, low) in itertools.pairwise(curve):
        if low <= loss:
            share = (high - loss) / (high - low) if high > low else 0.0
            return before + share * (after - before)
    return curve[-1][0]


def _arm_rows(
    arm: str,
    settings: Settings,
    costs: Costs,
    speeds: dict[float, float],
    goal: str,
    goal_tokens: float,
) -> list[Row]:
    rows = []
    out, back = frame_bytes(settings)
    tokens = settings.microbatch_size * settings.model.context
    for rate in [*RATES, 0.0]:
        link = settings.link
        network = Network(rate, rate, link.latency_ms / 1e3 if rate else 0.0)
        step = simulate(settings.schedule(), costs, network).step_seconds
        simulated = settings.tokens_per_step / step
        measured = speeds.get(rate)
        rows.append(
            {
                "mode": arm,
                "mbps": rate or math.inf,
                "bytes per token": (out + back) / tokens,
                "measured tokens/s": measured,
                "simulated tokens/s": simulated,
                f"hours to {goal}": goal_tokens / (measured or simulated) / 3600,
            }
        )
    return rows


def _verdict(rows: list[Row], unlimited: dict[str, float]) -> str:
    dense = {r["mbps"]: r for r in rows if r["mode"] == "dense"}
    parts = []
    for arm in unlimited:
        if arm == "dense":
            continue
        own = [r for r in rows if r["mode"] == arm]
        paying = [
            r["mbps"]
            for r in own
            if r["simulated tokens/s"] >= PAYS * dense[r["mbps"]]["simulated tokens/s"]
        ]
        shown = [r for r in own if r["measured tokens/s"] and math.isfinite(r["mbps"])]
        for row in shown:
            base = dense[row["mbps"]]["measured tokens/s"]
            if base:
                parts.append(
                    f"{arm} at {_rate(row['mbps'])}: {row['measured tokens/s'] / base:.1f}x dense, "
                    f"{row['measured tokens/s'] / unlimited[arm]:.2f} of its unlimited rate"
                )
        limit = f"pays up to {_rate(max(paying))}" if paying else "never pays here"
        parts.append(f"{arm} {limit}")
    return "; ".join(parts)


def _figure(rows: list[Row], goal: str) -> Figure:
    plot = Figure(figsize=(13, 5), layout="constrained")
    speed, hours = plot.subplots(1, 2)
    for arm in dict.fromkeys(r["mode"] for r in rows):
        own = [r for r in rows if r["mode"] == arm and math.isfinite(r["mbps"])]
        rates = [r["mbps"] for r in own]
        (line,) = speed.plot(rates, [r["simulated tokens/s"] for r in own], label=arm)
        seen = [r for r in own if r["measured tokens/s"]]
        style = {"color": line.get_color(), "label": f"{arm}, measured"}
        found = [r["mbps"] for r in seen]
        speed.plot(found, [r["measured tokens/s"] for r in seen], "o", **style)
        hours.plot(rates, [r[f"hours to {goal}"] for r in own], color=line.get_color(), label=arm)
    speed.set(ylabel="tokens/s", title="speed")
    hours.set(ylabel="hours", title=f"hours to {goal}")
    for axes in (speed, hours):
        axes.set(xscale="log", yscale="log", xlabel="Mbit/s per host")
        axes.grid(alpha=0.3, which="both")
        axes.legend()
    return plot


def _settings(
    base: dict[str, dict[str, Any]], boundary: dict[str, Any], rate: float, name: str, out: Path
) -> Settings:
    values = {section: dict(keys) for section, keys in base.items()}
    values.setdefault("boundary", {}).update(boundary)
    values.setdefault("run", {}).update({"name": name, "out": str(out)})
    link = values.setdefault("link", {})
    if rate:
        link.update({"emulate": True, "mbps_up": rate, "mbps_down": rate})
    else:
        link.update({"emulate": False})
    return Settings.from_plain(values)


def _shortened(settings: Settings, microbatches: int) -> Settings:
    values = settings.to_plain()
    batch = settings.microbatch_size * microbatches
    values["pipeline"].update({"microbatches": microbatches, "window": 0})
    values["pipeline"]["window"] = min(microbatches, settings.schedule().window)
    values["train"].update({"batch": batch, "steps": 2})
    return Settings.from_plain(values)


def _rate(mbps: float) -> str:
    if not mbps or math.isinf(mbps):
        return "unlimited"
    return f"{mbps / 1e3:g} Gbps" if mbps >= 1e3 else f"{mbps:g} Mbps"
