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
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.report import PlainDisplay
from thinwire.schedule import Costs, Links, simulate
from thinwire.settings import Settings, merged
from thinwire.settings.crossing import bytes_per_token
from thinwire.train import train
from thinwire_lab.arms import DENSE, Arm, Values, base_of, check_arms, small_settings, width_of
from thinwire_lab.experiment import Say, sheet, steps_of, words
from thinwire_lab.outcome import Outcome, Row, size_notes
from thinwire_lab.plots import Line, Panel

UNLIMITED = 0.0
RATES = sheet("bandwidth")["rates"]  # in Mbit/s
PAYS = 1.05  # a narrow cut pays while it trains at least so much faster
NOISE = 1 + (PAYS - 1) / 2  # a limited run that is so much faster than without a limit
KINDS = ("measured", "simulated")


Speeds = dict[str, dict[float, float]]
"""Tokens per second of one arm, measured and simulated, by the rate of its links in Mbit/s."""


def boundaries(modes: Sequence[str], ranks: Sequence[int]) -> Values:
    """Dense, and each mode at each rank: the boundary of each arm."""
    return {DENSE: {"mode": DENSE, "rank": 0}} | {
        (mode if len(ranks) == 1 else f"{mode} k={rank}"): {"mode": mode, "rank": rank}
        for mode, rank in itertools.product(modes, ranks)
        if mode != DENSE
    }


@dataclass(frozen=True)
class Study:
    """What is measured: each boundary without a limit and at each rate.

    A dense step over a slow link can take minutes; `dense_microbatches` shortens those steps (two
    of them are timed), which costs dense the filling of the pipeline: compare it with its
    simulated rate, which has all microbatches.
    """

    base: Values
    boundaries: Values
    rates: list[float]
    steps: int
    scratch: str
    seed: int = 0
    dense_microbatches: int = 0

    def arm(self, name: str, rate: float) -> Arm:
        """One measurement."""
        own = self.boundaries[name]
        limit = {"emulate": True, "mbps_up": rate, "mbps_down": rate}
        changes: Values = {
            "boundary": own,
            "run": {"name": f"{own['mode']}-{own['rank']}-{rate:g}", "out": self.scratch},
            "link": limit if rate else {"emulate": False},
        }
        return Arm(name, self.seed, self.steps, changes)

    def arms(self) -> list[Arm]:
        """All measurements."""
        every = itertools.product(self.boundaries, [UNLIMITED, *self.rates])
        return [self.arm(name, rate) for name, rate in every]

    def settings(self, name: str, rate: float = UNLIMITED) -> Settings:
        """The settings of one measurement."""
        found, short = self.arm(name, rate).settings(self.base), self.dense_microbatches
        if name != DENSE or not rate or not short:
            return found
        window, batch = min(short, found.schedule().window), found.microbatch_size * short
        fewer = {"microbatches": short, "window": window}
        changes = {"pipeline": fewer, "train": {"batch": batch, "steps": 2}}
        return Settings.from_plain(merged(found.to_plain(), changes))

    def measure(self, name: str, say: Say) -> Speeds:
        """Run an arm's pipeline at each rate, and simulate it at all rates."""
        measured, simulated, whole = {}, {}, self.settings(name)
        for rate in (UNLIMITED, *self.rates):
            summary = train(self.settings(name, rate), PlainDisplay(io.StringIO()))
            measured[rate] = summary["tokens_per_s"]
            say(f"{name:<12} {_rate(rate):>10}  {measured[rate]:>12,.1f} tokens/s")
            if rate == UNLIMITED:
                costs = Costs(**summary["measured_costs"])
        for rate in [*sorted({*RATES["simulated"], *self.rates}), UNLIMITED]:
            delay_s = whole.link.latency_ms / 1e3 if rate else 0.0
            links = Links.alike(whole.pipeline.stages, rate, rate, delay_s)
            step = simulate(whole.schedule(), costs, links).step_seconds
            simulated[rate] = whole.tokens_per_step / step
        return dict(zip(KINDS, (measured, simulated), strict=True))


def run(options: argparse.Namespace, say: Say) -> Outcome:
    """Measure each arm without limit and at each rate, and simulate the rest."""
    base = base_of(options, small_settings("small"))
    base.setdefault("optim", {}).setdefault("warmup", 2)
    compared = boundaries(options.modes.split(","), options.ranks or [width_of(base) // 16 or 1])
    rates = options.mbps or RATES["quick" if options.quick else "measured"]
    short = options.dense_microbatches
    ways = [f"dense is measured with {short} microbatches and two steps"] if short else []
    with tempfile.TemporaryDirectory(prefix="thinwire-lab-") as scratch:
        study = Study(base, compared, rates, steps_of(options), scratch, options.seed, short)
        check_arms(study.arms(), base, options.set)
        speeds = {arm: study.measure(arm, say) for arm in compared}
        outcome = Outcome(
            **words("bandwidth"),
            verdict=verdict(speeds),
            holds=None,
            too_small=incomparable(speeds),
            rows=table(study, speeds),
            panels=panels_of(speeds),
        )
        outcome.notes += [*ways, *size_notes(study.settings(DENSE))]
    return outcome


def table(study: Study, speeds: dict[str, Speeds]) -> list[Row]:
    """A row for each arm and rate, measured and simulated apart."""
    rows: list[Row] = []
    for arm, own in speeds.items():
        settings = study.settings(arm)
        per_token = bytes_per_token(settings)
        for rate in own["simulated"]:
            row: Row = {"mode": arm, "link": _rate(rate), "bytes per token": per_token}
            for kind in KINDS:
                speed = own[kind].get(rate)
                row |= {
                    f"{kind} tokens/s": speed,
                    f"{kind}, x dense": ratio(speeds, kind, arm, rate),
                    f"{kind}, hours to 1B tokens": 1e9 / speed / 3600 if speed else None,
                }
            rows.append(row)
    return rows


def ratio(speeds: dict[str, Speeds], kind: str, arm: str, rate: float) -> float | None:
    """How many times as fast as dense an arm is, "measured" or "simulated"."""
    own, dense = (speeds[name][kind].get(rate) for name in (arm, DENSE))
    return own / dense if own and dense else None


def verdict(speeds: dict[str, Speeds]) -> str:
    """What was measured, what the simulation adds, and where the two disagree."""
    measured, simulated, apart = [], [], []
    for arm, own in speeds.items():
        if arm == DENSE:
            continue
        paying = [rate for rate in own["simulated"] if _pays(ratio(speeds, "simulated", arm, rate))]
        limit = "at every rate" if UNLIMITED in paying else "at no rate"
        if paying and UNLIMITED not in paying:
            limit = f"up to {_rate(max(paying))}"
        simulated.append(f"{arm} is at least {PAYS}x dense {limit}")
        for rate, speed in own["measured"].items():
            if rate == UNLIMITED:
                continue
            seen, foretold = (ratio(speeds, kind, arm, rate) for kind in KINDS)
            share, link = speed / own["measured"][UNLIMITED], _rate(rate)
            measured.append(
                f"{arm} is {seen:.2f}x dense at {link} ({share:.2f} of its unlimited rate)"
            )
            if _pays(seen) != _pays(foretold):
                apart.append(f"{arm} at {link}: {seen:.2f}x measured, {foretold:.2f}x simulated")
    doubt = f" The two disagree, so trust the measurement: {'; '.join(apart)}." if apart else ""
    return f"Measured: {'; '.join(measured)}. Simulated: {'; '.join(simulated)}.{doubt}"


def incomparable(speeds: dict[str, Speeds]) -> str:
    """Why the arms' speeds do not compare, if so: without a link no cut can pay, and no limit can
    make a run faster.
    """
    found = [
        f"{arm} at {_rate(rate)} is {speed / own['measured'][UNLIMITED]:.2f}x as fast as without a "
        "limit"
        for arm, own in speeds.items()
        for rate, speed in own["measured"].items()
        if speed > NOISE * own["measured"][UNLIMITED]
    ] or [
        f"in simulation without a rate limit {arm} is {times:.2f}x as fast as dense"
        for arm in speeds
        if _pays(times := ratio(speeds, "simulated", arm, UNLIMITED))
    ]
    return (
        f"{', '.join(found)}, which is noise; try more --steps on an idle machine" if found else ""
    )


def _pays(times: float | None) -> bool:
    return times is not None and times >= PAYS


def panels_of(speeds: dict[str, Speeds]) -> list[Panel]:
    """Speed over the rate: simulated as lines, measured as dots."""
    lines = []
    for arm, own in speeds.items():
        for kind, style in zip(KINDS, ("o", "-"), strict=True):
            found = {rate: speed for rate, speed in own[kind].items() if rate != UNLIMITED}
            lines.append(Line(f"{arm}, {kind}", list(found), list(found.values()), style))
    return [Panel("training speed", "Mbit/s per host", "tokens/s", lines, "xy")]


def _rate(mbps: float) -> str:
    if mbps == UNLIMITED:
        return "unlimited"
    return f"{mbps / 1e3:g} Gbps" if mbps >= 1e3 else f"{mbps:g} Mbps"
