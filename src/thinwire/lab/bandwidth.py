"""`thinwire lab bandwidth`: how fast each mode trains from 10 Mbps to 100 Gbps, and where a
narrow cut stops paying.

Real pipelines of processes run over emulated links at a few rates; the compute times that the
unlimited run measured then feed the simulator, which gives every rate. Where both exist they stand
side by side, so the simulation can be judged.
"""

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from thinwire.engine import Settings
from thinwire.lab.experiment import Outcome, Row
from thinwire.plan import frame_bytes
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
) -> Outcome:
    """Measure each arm without limit and at each rate, and simulate the rest.

    A dense step over a slow link can take minutes; `dense_microbatches` shortens those steps (two
    of them are timed), which costs dense the filling of the pipeline: compare it with its
    simulated rate, which has all microbatches.
    """
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
        rows += _arm_rows(arm, whole, costs, speeds)
    return Outcome(
        name="bandwidth",
        question="How fast does each mode train over links of which rate, and where does a "
        "narrow cut stop paying?",
        verdict=_verdict(rows, unlimited),
        holds=None,
        rows=rows,
        figure=_figure(rows),
        command=command,
        notes=[
            "measured: processes over emulated links; simulated: the schedule's simulator with "
            "the compute times of the unlimited run",
            "hours: to a billion tokens, at the measured rate where there is one",
        ],
    )


def _arm_rows(arm: str, settings: Settings, costs: Costs, speeds: dict[float, float]) -> list[Row]:
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
                "hours to 1B tokens": 1e9 / (measured or simulated) / 3600,
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


def _figure(rows: list[Row]) -> Figure:
    plot = Figure(figsize=(8, 5), layout="constrained")
    axes = plot.subplots()
    for arm in dict.fromkeys(r["mode"] for r in rows):
        own = [r for r in rows if r["mode"] == arm and math.isfinite(r["mbps"])]
        (line,) = axes.plot(
            [r["mbps"] for r in own], [r["simulated tokens/s"] for r in own], label=arm
        )
        seen = [r for r in own if r["measured tokens/s"]]
        axes.plot(
            [r["mbps"] for r in seen],
            [r["measured tokens/s"] for r in seen],
            "o",
            color=line.get_color(),
            label=f"{arm}, measured",
        )
    axes.set(xscale="log", yscale="log", xlabel="Mbit/s per host", ylabel="tokens/s")
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
