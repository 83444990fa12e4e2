"""`thinwire lab bandwidth`: how fast each mode trains from 10 Mbps to 100 Gbps, and where a
narrow cut stops paying.

Real pipelines of processes run over emulated links at a few rates; the compute times that the
unlimited run measured then feed the simulator, which gives every rate. What is measured and what
is simulated stand side by side, so the simulation can be judged, and are never mixed.
"""

import argparse
import io
import itertools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from thinwire.errors import ConfigError
from thinwire.lab.arms import Values, base_of, merged, refuse_overridden, small_settings, width_of
from thinwire.lab.convergence import best_by_method
from thinwire.lab.experiment import Say, steps_of
from thinwire.lab.outcome import Outcome, Row
from thinwire.lab.pool import Trained, read_log
from thinwire.report import PlainDisplay
from thinwire.schedule import Costs, Network, simulate
from thinwire.settings import Settings
from thinwire.settings.crossing import frame_bytes, size_notes
from thinwire.train import train

DENSE = "dense"
UNLIMITED = 0.0
RATES = [10.0, 30.0, 80.0, 200.0, 500.0, 1e3, 3e3, 1e4, 3e4, 1e5]
PAYS = 1.05  # a narrow cut pays while it trains at least so much faster


@dataclass(frozen=True)
class Study:
    """What is measured: each boundary without a limit and at each rate.

    A dense step over a slow link can take minutes; `dense_microbatches` shortens those steps (two
    of them are timed), which costs dense the filling of the pipeline: compare it with its
    simulated rate, which has all microbatches.
    """

    base: Values
    arms: Values  # boundaries by name; dense is among them
    rates: list[float]
    steps: int
    scratch: Path
    dense_microbatches: int = 0

    def changes(self, arm: str, rate: float) -> Values:
        """The settings of one measurement that the base has not."""
        own = self.arms[arm]
        name = f"{own['mode']}-{own['rank']}-{rate:g}"
        limit = {"emulate": True, "mbps_up": rate, "mbps_down": rate}
        return {
            "boundary": own,
            "run": {"name": name, "out": str(self.scratch)},
            "link": limit if rate else {"emulate": False},
            "train": {"steps": self.steps},
        }

    def settings(self, arm: str, rate: float) -> Settings:
        """The settings of one measurement."""
        found = Settings.from_plain(merged(self.base, self.changes(arm, rate)))
        if arm == DENSE and rate and self.dense_microbatches:
            return _shortened(found, self.dense_microbatches)
        return found

    def check(self, overrides: Sequence[str]) -> None:
        """Refuse what cannot work, and settings that measurements override, before any one runs."""
        for arm, rate in itertools.product(self.arms, [UNLIMITED, *self.rates]):
            refuse_overridden(self.changes(arm, rate), self.base, overrides, arm)
            self.settings(arm, rate)


@dataclass(frozen=True)
class Speeds:
    """Tokens per second of one arm by the rate of its links; UNLIMITED is among the rates."""

    measured: dict[float, float] = field(default_factory=dict)
    simulated: dict[float, float] = field(default_factory=dict)


def run(options: argparse.Namespace, say: Say) -> Outcome:
    """Measure and simulate what the options ask for."""
    base = merged(base_of(options, small_settings("small")), {"run": {"seed": options.seed}})
    base.setdefault("optim", {}).setdefault("warmup", 2)
    curves = None if options.curves is None else read_log(options.curves)
    ranks = options.ranks or [width_of(base) // 16 or 1]
    with tempfile.TemporaryDirectory(prefix="thinwire-lab-") as scratch:
        study = Study(
            base,
            boundaries(options.modes.split(","), ranks),
            options.mbps or ([80.0] if options.quick else [10.0, 80.0, 500.0]),
            steps_of(options),
            Path(scratch),
            options.dense_microbatches,
        )
        study.check(options.set)
        return run_bandwidth(study, say, curves)


def boundaries(modes: list[str], ranks: list[int]) -> Values:
    """Dense, and each mode at each rank."""
    return {DENSE: {"mode": DENSE, "rank": 0}} | {
        (mode if len(ranks) == 1 else f"{mode} k={rank}"): {"mode": mode, "rank": rank}
        for mode in modes
        for rank in ranks
        if mode != DENSE
    }


def run_bandwidth(
    study: Study, say: Callable[[str], None], curves: list[Trained] | None = None
) -> Outcome:
    """Measure each arm without limit and at each rate, and simulate the rest.

    `curves` are rows of a convergence log: with them the hours are to a loss that every arm
    reaches, without them to a billion tokens.
    """
    goal, tokens, ways = "1B tokens", dict.fromkeys(study.arms, 1e9), []
    if curves is not None:
        loss, tokens = tokens_to_loss(curves, study.arms)
        goal = f"loss {loss:.3f}"
        ways = [
            f"{arm} takes {count / 1e6:,.2f}M tokens to {goal}" for arm, count in tokens.items()
        ]
    speeds = {arm: measure(study, arm, say) for arm in study.arms}
    rows = table(study, speeds, goal, tokens)
    short = study.dense_microbatches
    return Outcome(
        name="bandwidth",
        question="How fast does each mode train over links of which rate, and where does a "
        "narrow cut stop paying?",
        verdict=verdict(speeds),
        holds=None,
        too_small=incomparable(speeds),
        rows=rows,
        figure=figure(speeds, goal, tokens),
        notes=[
            "measured: processes over emulated links, one run per rate; simulated: the schedule's "
            "simulator with the compute times of the unlimited run, without the cost of transport",
            f"hours: to {goal}",
            *ways,
            *([f"dense is measured with {short} microbatches and two steps"] if short else []),
            *size_notes(study.settings(DENSE, UNLIMITED)),
        ],
    )


def measure(study: Study, arm: str, say: Callable[[str], None]) -> Speeds:
    """Run an arm's pipeline at each rate, and simulate it at all rates."""
    found = Speeds()
    whole = study.settings(arm, UNLIMITED)
    for rate in (UNLIMITED, *study.rates):
        summary = train(study.settings(arm, rate), PlainDisplay(io.StringIO()))
        found.measured[rate] = summary["tokens_per_s"]
        say(f"{arm:<12} {_rate(rate):>10}  {found.measured[rate]:>12,.1f} tokens/s")
        if rate == UNLIMITED:
            costs = Costs(**summary["measured_costs"])
    for rate in [*sorted({*RATES, *study.rates}), UNLIMITED]:
        network = Network(rate, rate, whole.link.latency_ms / 1e3 if rate else 0.0)
        step = simulate(whole.schedule(), costs, network).step_seconds
        found.simulated[rate] = whole.tokens_per_step / step
    return found


def tokens_to_loss(
    curves: list[Trained], arms: dict[str, dict[str, Any]]
) -> tuple[float, dict[str, float]]:
    """The lowest loss that every arm's curve reaches, and the tokens that each takes to it.

    Of each method the longest run at its best learning rate counts.
    """
    best = best_by_method(curves)
    longest = max((steps for _, steps, _ in best), default=0)
    found: dict[str, list[tuple[float, float]]] = {}
    for arm, boundary in arms.items():
        method = f"{boundary['mode']} k={boundary['rank']}" if boundary["rank"] else "dense"
        runs = [runs for (_, n, name), runs in best.items() if (n, name) == (longest, method)]
        if not runs:
            raise ConfigError(f"the convergence log has no run of {longest} steps of {method}")
        found[arm] = runs[0][0].figures["curve"]
    loss = max(min(value for _, value in curve) for curve in found.values())
    return loss, {arm: _crossing(curve, loss) for arm, curve in found.items()}


def _crossing(curve: list[tuple[float, float]], loss: float) -> float:
    """Where a curve first comes down to a loss, on a straight line between its points."""
    for (before, high), (after, low) in itertools.pairwise(curve):
        if low <= loss:
            share = (high - loss) / (high - low) if high > low else 0.0
            return before + share * (after - before)
    return curve[-1][0]


def table(
    study: Study, speeds: dict[str, Speeds], goal: str, tokens: dict[str, float]
) -> list[Row]:
    """A row for each arm and rate, measured and simulated apart."""
    rows: list[Row] = []
    for arm, own in speeds.items():
        settings = study.settings(arm, UNLIMITED)
        per_token = sum(frame_bytes(settings)) / settings.tokens_per_microbatch
        for rate in own.simulated:
            row: Row = {"mode": arm, "link": _rate(rate), "bytes per token": per_token}
            for kind in ("measured", "simulated"):
                speed = getattr(own, kind).get(rate)
                hours = tokens[arm] / speed / 3600 if speed else None
                row |= {
                    f"{kind} tokens/s": speed,
                    f"{kind}, x dense": ratio(speeds, kind, arm, rate),
                    f"{kind}, hours to {goal}": hours,
                }
            rows.append(row)
    return rows


def ratio(speeds: dict[str, Speeds], kind: str, arm: str, rate: float) -> float | None:
    """How many times as fast as dense an arm is, "measured" or "simulated"."""
    own, dense = (getattr(speeds[name], kind).get(rate) for name in (arm, DENSE))
    return own / dense if own and dense else None


def verdict(speeds: dict[str, Speeds]) -> str:
    """What was measured, what the simulation adds, and where the two disagree."""
    measured, simulated, apart = [], [], []
    for arm in speeds:
        if arm == DENSE:
            continue
        own = speeds[arm]
        paying = [rate for rate in own.simulated if _pays(ratio(speeds, "simulated", arm, rate))]
        limit = "at every rate" if UNLIMITED in paying else "at no rate"
        if paying and UNLIMITED not in paying:
            limit = f"up to {_rate(max(paying))}"
        simulated.append(f"{arm} is at least {PAYS}x dense {limit}")
        for rate in own.measured:
            if rate == UNLIMITED:
                continue
            seen, foretold = (ratio(speeds, kind, arm, rate) for kind in ("measured", "simulated"))
            assert seen and foretold, "dense is measured wherever an arm is"
            share = own.measured[rate] / own.measured[UNLIMITED]
            measured.append(
                f"{arm} is {seen:.2f}x dense at {_rate(rate)} ({share:.2f} of its unlimited rate)"
            )
            if _pays(seen) != _pays(foretold):
                apart.append(
                    f"{arm} at {_rate(rate)}: {seen:.2f}x measured, {foretold:.2f}x simulated"
                )
    doubt = f" The two disagree, so trust the measurement: {'; '.join(apart)}." if apart else ""
    return f"Measured: {'; '.join(measured)}. Simulated: {'; '.join(simulated)}.{doubt}"


def incomparable(speeds: dict[str, Speeds]) -> str:
    """Why the arms' compute times do not compare, if so: without a link no cut can pay."""
    found = [
        f"{arm} {times:.2f}x"
        for arm in speeds
        if _pays(times := ratio(speeds, "simulated", arm, UNLIMITED) or 0.0)
    ]
    if not found:
        return ""
    return (
        f"without any limit the simulation has {', '.join(found)} as fast as dense, so the compute "
        "times that the runs measured do not compare; try more --steps on an idle machine"
    )


def _pays(times: float | None) -> bool:
    return times is not None and times >= PAYS


def figure(speeds: dict[str, Speeds], goal: str, tokens: dict[str, float]) -> Figure:
    """Speed and hours over the rate: simulated as lines, measured as dots."""
    plot = Figure(figsize=(13, 5.5), layout="constrained")
    left, right = plot.subplots(1, 2)
    for number, (arm, own) in enumerate(speeds.items()):
        for kind, style in (("simulated", "-"), ("measured", "o")):
            found = {rate: s for rate, s in getattr(own, kind).items() if rate != UNLIMITED}
            shown: dict[str, Any] = {"color": f"C{number}", "label": f"{arm}, {kind}"}
            left.plot(list(found), list(found.values()), style, **shown)
            hours = [tokens[arm] / speed / 3600 for speed in found.values()]
            right.plot(list(found), hours, style, **shown)
    left.set(ylabel="tokens/s", title="speed")
    right.set(ylabel="hours", title=f"hours to {goal}")
    for axes in (left, right):
        axes.set(xscale="log", yscale="log", xlabel="Mbit/s per host")
        axes.grid(alpha=0.3, which="both")
    plot.suptitle("Training speed over the rate of the links")
    handles, labels = left.get_legend_handles_labels()
    plot.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return plot


def _shortened(settings: Settings, microbatches: int) -> Settings:
    values = settings.to_plain()
    batch = settings.microbatch_size * microbatches
    values["pipeline"].update({"microbatches": microbatches, "window": 0})
    values["pipeline"]["window"] = min(microbatches, settings.schedule().window)
    values["train"].update({"batch": batch, "steps": 2})
    return Settings.from_plain(values)


def _rate(mbps: float) -> str:
    if mbps == UNLIMITED:
        return "unlimited"
    return f"{mbps / 1e3:g} Gbps" if mbps >= 1e3 else f"{mbps:g} Mbps"
