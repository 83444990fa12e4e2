"""The ledger of a run: what the stages report, put together into records and a summary.

Stages see only themselves. Here their reports of one step meet: the loss from the last stage,
times from each, bytes from both ends of each boundary.
"""

import math
import statistics
from pathlib import Path
from typing import Any

from thinwire.engine import Settings
from thinwire.report import LinkRecord, StageRecord, StepRecord, TraceSpan
from thinwire.schedule import Costs, Network, simulate

BF16_BYTES = 2
FASTER = 100  # a GPU beside the cores of a small machine: what would the links allow then?
_FORWARD_KINDS = ("FORWARD", "VERDICT", "BASIS")
_BACKWARD_KINDS = ("BACKWARD", "TALLY", "BASIS")
_WARMUP_STEPS = 2  # first steps pay for allocations and caches; timings leave them out

Report = dict[str, Any]


class Ledger:
    """Collects the stages' reports step by step, and sums the run up at its end."""

    def __init__(self, settings: Settings, descriptions: list[dict[str, str]], first_step: int):
        self.settings = settings
        self.descriptions = descriptions
        self.stages = settings.pipeline.stages
        self.first_step = first_step
        self.done = first_step
        self.refused = 0  # updates in a row that were not committed
        self.valid_losses: list[tuple[int, float]] = []
        self.records: list[StepRecord] = []
        self._pending: dict[int, dict[int, Report]] = {}
        self._complete: list[list[Report]] = []
        self._crossed = [(0, 0)] * (self.stages - 1)

    def add_step(self, stage: int, report: Report) -> StepRecord | None:
        """File one stage's report; the step's record once every stage has reported it."""
        reports = self._pending.setdefault(report["step"], {})
        reports[stage] = report
        if len(reports) < self.stages:
            return None
        complete = [reports[s] for s in range(self.stages)]
        del self._pending[report["step"]]
        self._complete.append(complete)
        self.done = report["step"] + 1
        self.refused = 0 if complete[0]["committed"] else self.refused + 1
        record = self._record(complete)
        self.records.append(record)
        return record

    def add_evaluation(self, step: int, loss: float) -> None:
        """File a validation loss, from the stage that has it."""
        self.valid_losses.append((step, loss))

    def summary(self, versions: dict[str, str], total_seconds: float) -> dict[str, Any]:
        """Everything a reader of summary.json wants to know about the run."""
        settings = self.settings
        steady = self._steady()
        boundaries = self._boundaries()
        simulated = simulate(settings.schedule(), self._costs(steady), network_of(settings))
        seconds = [_step_seconds(reports) for reports in steady]
        faster = self._costs(steady, FASTER)
        fast_step = simulate(settings.schedule(), faster, network_of(settings)).step_seconds
        losses = [record.loss for record in self.records]
        uplinks = [self._uplink_share(stage, steady) for stage in range(self.stages)]
        return {
            "name": settings.run.name,
            "final_train_loss": statistics.fmean(losses[-10:]) if losses else None,
            "final_valid_loss": self.valid_losses[-1][1] if self.valid_losses else None,
            "valid_losses": self.valid_losses,
            "steps": self.done,
            "tokens": self.done * settings.tokens_per_step,
            "tokens_per_s": settings.tokens_per_step / statistics.fmean(seconds)
            if seconds
            else None,
            "step_seconds_median": statistics.median(seconds) if seconds else None,
            "simulated_step_seconds": simulated.step_seconds if seconds else None,
            "simulated_faster_tokens_per_s": (
                settings.tokens_per_step / fast_step if fast_step else None
            ),
            "measured_costs": vars(self._costs(steady)),
            "bubble_fraction": self._bubble(steady),
            "link_utilisation": max(uplinks, default=None) if network_of(settings) else None,
            "ratio_vs_bf16": _total_ratio(boundaries),
            "boundaries": boundaries,
            "time_shares": [self._time_shares(stage, steady) for stage in range(self.stages)],
            "space": self._space_measures(),
            "refused_updates": sum(not reports[0]["committed"] for reports in self._complete),
            "total_seconds": total_seconds,
            "config_hash": settings.hash,
            "seed": settings.run.seed,
            "versions": versions,
        }

    def median_trace(self) -> tuple[int, list[TraceSpan]]:
        """The spans of the step whose duration is the median: a typical one to draw."""
        steady = sorted(self._steady(), key=_step_seconds)
        chosen = steady[len(steady) // 2]
        origin = chosen[0]["start"]
        spans = [
            TraceSpan(stage, lane, label, start - origin, end - origin)
            for stage, report in enumerate(chosen)
            for lane, label, start, end in report["spans"]
            if label != "norm"
        ]
        return chosen[0]["step"], spans

    def _space_measures(self) -> dict[str, Any] | None:
        """The subspace over the run: largest drift, and each move of the basis with its jump.

        The jump compares the two steps before and after a move: noise of the batches included.
        """
        drifts = [r.measures["drift"] for r in self.records if "drift" in r.measures]
        moves = []
        for index, record in enumerate(self.records):
            if "energy_after" in record.measures:
                after = [r.loss for r in self.records[index + 1 : index + 3]]
                before = [r.loss for r in self.records[max(0, index - 1) : index + 1]]
                jump = statistics.fmean(after) - statistics.fmean(before) if after else None
                moves.append({"step": record.step, **record.measures, "loss_jump": jump})
        if not drifts and not moves:
            return None
        return {"largest_drift": max(drifts, default=None), "moves": moves}

    def _record(self, reports: list[Report]) -> StepRecord:
        settings = self.settings
        seconds = _step_seconds(reports)
        recent = [_step_seconds(r) for r in self._complete[-20:]]
        crossed = [self._crossed_bytes(b, reports) for b in range(self.stages - 1)]
        links = [
            LinkRecord(
                b,
                now[0] - before[0],
                now[1] - before[1],
                self._share_of_link(max(now[0] - before[0], now[1] - before[1]), seconds),
            )
            for b, (now, before) in enumerate(zip(crossed, self._crossed, strict=True))
        ]
        self._crossed = crossed
        return StepRecord(
            step=self.done,
            steps=settings.train.steps,
            loss=reports[-1]["loss"],
            lr=reports[0]["lr"],
            grad_norm=reports[0]["grad_norm"],
            tokens=self.done * settings.tokens_per_step,
            tokens_per_s=settings.tokens_per_step / statistics.fmean(recent),
            step_seconds=seconds,
            eta_seconds=statistics.fmean(recent) * (settings.train.steps - self.done),
            stages=[
                StageRecord(
                    stage,
                    self.descriptions[stage]["layers"],
                    _compute_seconds(report, settings),
                    report["wait"],
                    report["costs"]["update"],
                    self.descriptions[stage]["device"],
                )
                for stage, report in enumerate(reports)
            ],
            links=links,
            measures=_merged_measures(reports),
        )

    def _steady(self) -> list[list[Report]]:
        """The steps whose timings count: all but the first few, if there are more."""
        return self._complete[_WARMUP_STEPS:] or self._complete

    def _crossed_bytes(self, boundary: int, reports: list[Report]) -> tuple[int, int]:
        """Bytes that have left both ends of a boundary so far, forward and backward."""
        name = f"boundary-{boundary}"
        return (
            _sent(reports[boundary]["meters"][name], _FORWARD_KINDS),
            _sent(reports[boundary + 1]["meters"][name], _BACKWARD_KINDS),
        )

    def _boundaries(self) -> list[dict[str, Any]]:
        tokens = len(self._complete) * self.settings.tokens_per_step
        seconds = sum(map(_step_seconds, self._complete))
        dense = BF16_BYTES * self.settings.model.dim
        rows = []
        for b, (forward, backward) in enumerate(self._crossed if tokens else []):
            rows.append(
                {
                    "boundary": b,
                    "forward_bytes_per_token": forward / tokens,
                    "backward_bytes_per_token": backward / tokens,
                    "bf16_bytes_per_token": dense,
                    "ratio_vs_bf16": 2 * dense * tokens / (forward + backward),
                    "link_utilisation": self._share_of_link(max(forward, backward), seconds),
                }
            )
        return rows

    def _share_of_link(self, size: int, seconds: float) -> float:
        link = self.settings.link
        if not link.emulate or not link.mbps_up or not seconds:
            return math.nan
        return size * 8e-6 / (link.mbps_up * seconds)

    def _uplink_share(self, stage: int, steady: list[list[Report]]) -> float:
        """How busy a host's uplink was: it carries activations up and gradients down."""
        if not steady:
            return math.nan
        busy = sum(
            end - start
            for reports in steady
            for lane, _, start, end in reports[stage]["spans"]
            if lane == "send"
        )
        return busy / sum(map(_step_seconds, steady))

    def _costs(self, steady: list[list[Report]], faster: int = 1) -> Costs:
        """Mean measured times (divided by `faster`) and bytes, as the simulator takes them."""

        def mean(stage: int, key: str) -> float:
            measured = [r[stage]["costs"][key] for r in steady]
            return statistics.fmean(measured) / faster if measured else 0.0

        stages = range(self.stages)
        frames = max(1, len(self._complete) * self.settings.pipeline.microbatches)
        return Costs(
            forward=[mean(s, "forward") for s in stages],
            backward=[mean(s, "backward") for s in stages],
            update=[mean(s, "update") for s in stages],
            forward_bytes=[forward // frames for forward, _ in self._crossed],
            backward_bytes=[backward // frames for _, backward in self._crossed],
        )

    def _bubble(self, steady: list[list[Report]]) -> float | None:
        """Share of the stages' time in which they did not compute."""
        if not steady:
            return None
        worked = sum(
            _compute_seconds(report, self.settings) + report["costs"]["update"]
            for reports in steady
            for report in reports
        )
        return 1 - worked / (self.stages * sum(map(_step_seconds, steady)))

    def _time_shares(self, stage: int, steady: list[list[Report]]) -> dict[str, Any]:
        total = sum(map(_step_seconds, steady)) or math.nan
        reports = [reports[stage] for reports in steady]
        compute = sum(_compute_seconds(report, self.settings) for report in reports) / total
        update = sum(report["costs"]["update"] for report in reports) / total
        wait = sum(report["wait"] for report in reports) / total
        other = max(0.0, 1 - compute - update - wait)
        return {"stage": stage, "compute": compute, "wait": wait, "update": update, "other": other}


def _merged_measures(reports: list[Report]) -> dict[str, float]:
    """What the stages measured of the shared space: the worst of each, over all stages."""
    merged: dict[str, float] = {}
    for report in reports:
        for name, value in report["measures"].items():
            merged[name] = max(value, merged.get(name, value))
    return merged


def network_of(settings: Settings) -> Network | None:
    """The simulator's network for these settings; None when links are not emulated."""
    link = settings.link
    if not link.emulate:
        return None
    return Network(link.mbps_up, link.mbps_down, (link.latency_ms + link.jitter_ms / 2) / 1e3)


def bits_per_byte(loss: float, tokens: int, size: int) -> float | None:
    """A loss in nats per token as bits per byte of text, comparable across tokenizers."""
    return loss / math.log(2) * tokens / size if size else None


def next_free_name(out: Path, name: str) -> str:
    """`name`, or the first of name-2, name-3, ... that has no folder yet."""
    candidate, number = name, 1
    while (out / candidate).exists():
        number += 1
        candidate = f"{name}-{number}"
    return candidate


def _step_seconds(reports: list[Report]) -> float:
    """A step as the first stage sees it: from its first forward to the end of its update."""
    return reports[0]["end"] - reports[0]["start"]


def _compute_seconds(report: Report, settings: Settings) -> float:
    costs = report["costs"]
    return (costs["forward"] + costs["backward"]) * settings.pipeline.microbatches


def _sent(snapshot: dict[str, Any], kinds: tuple[str, ...]) -> int:
    counts = [snapshot["sent"][kind] for kind in kinds if kind in snapshot["sent"]]
    return sum(count["header_bytes"] + count["payload_bytes"] for count in counts)


def _total_ratio(boundaries: list[dict[str, Any]]) -> float | None:
    """Bytes of bf16 dense both ways over every byte that left, over all boundaries."""
    if not boundaries:
        return None
    dense = sum(2 * row["bf16_bytes_per_token"] for row in boundaries)
    left = sum(r["forward_bytes_per_token"] + r["backward_bytes_per_token"] for r in boundaries)
    return dense / left
