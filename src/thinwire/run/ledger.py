"""What the stages of a run report, put together; and whether their loss explodes."""

import itertools
import math
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from thinwire.engine.reports import Evaluation, Meters, Moved, Step
from thinwire.report.records import LinkRecord, StageRecord, StepRecord, Timeline, TraceSpan
from thinwire.run.conduct import first_not_finite
from thinwire.run.protocol import Ready, RunProgress
from thinwire.schedule import Costs, Links, simulate
from thinwire.settings import Settings
from thinwire.settings.crossing import BF16_BYTES, network_of

# What a stage waits for: what a neighbour still computes; or has computed, and is on its way; a
# basis, or rows of a shared embedding; the verdict that ends the step.
WAITS = ("neighbour", "link", "basis", "verdict")
_WARMUP_STEPS = 2  # first steps pay for allocations and caches
_LAST_TRACES = 16  # steps of which one is drawn
_FORWARD_KINDS = ("FORWARD", "VERDICT", "BASIS", "ROWS")
_BACKWARD_KINDS = ("BACKWARD", "TALLY", "BASIS", "ROWS")
_LAST_RECORDS = 16  # more than the steps without a good gradient after which a run ends
_LAST_LOSSES = 10  # the final training loss is the mean of these, for a batch's loss is noisy
_LAST_SECONDS = 20  # steps over which the speed on display is taken

STRETCH = 64  # steps whose losses a later one is held against
LATEST = 16  # steps whose median is held against them
WORST_SHARE = 20  # of the losses of a stretch, one in so many is not looked at
LEAST_RISE, RISE_SHARE = 1.0, 0.5  # in nats, and of the loss before: no run recovers that by chance

Crossed = np.ndarray  # bytes forward and backward over each cut, a row for each


class _Timings:
    """What steps add up to: of each only its duration is kept, so a run may be of any length."""

    def __init__(self, stages: int):
        self.seconds: list[float] = []
        self.sums: list[defaultdict[str, float]] = [defaultdict(float) for _ in range(stages)]
        self._traces: deque[list[Step]] = deque(maxlen=_LAST_TRACES)

    def add(self, reports: list[Step]) -> None:
        """Count one step that all stages have reported."""
        self.seconds.append(_step_seconds(reports))
        self._traces.append(reports)
        for stage, (sums, report) in enumerate(zip(self.sums, reports, strict=True)):
            parts = {**vars(report.costs), "wait": report.wait, **_wait_seconds(reports, stage)}
            for name, seconds in parts.items():
                sums[name] += seconds

    def shares(self, stage: int, microbatches: int) -> dict[str, Any]:
        """What a stage did with the steps' time; compute, update, wait and other are all of it."""
        total, sums = sum(self.seconds) or math.nan, self.sums[stage]
        compute = (sums["forward"] + sums["backward"]) / total * microbatches
        update, wait = sums["update"] / total, sums["wait"] / total
        parts = {"stage": stage, "compute": compute, "update": update, "wait": wait}
        waits = {reason: sums[reason] / total for reason in WAITS}
        return {**parts, "wait_for": waits, "other": max(0.0, 1 - compute - update - wait)}

    def typical(self) -> list[Step]:
        """Of the last few steps the one nearest to the median duration of all."""
        median = statistics.median(self.seconds)
        return min(self._traces, key=lambda reports: abs(_step_seconds(reports) - median))


def _wait_seconds(reports: Sequence[Step], stage: int) -> dict[str, float]:
    """What a stage waited for in a step, by the reasons in WAITS."""
    waits = dict.fromkeys(WAITS, 0.0)
    for lane, label, start, end in reports[stage].spans:
        if lane != "wait":
            continue
        source = {"F": stage - 1, "B": stage + 1}.get(label[:1])
        if source is None:
            waits["verdict" if label == "U" else "basis"] += end - start
            continue
        spans = reports[source].spans
        ends = (to for lane, name, _, to in spans if (lane, name) == ("compute", label))
        computed = min(end, max(start, next(ends, start)))
        waits["neighbour"] += computed - start
        waits["link"] += end - computed
    return waits


def _step_seconds(reports: Sequence[Step]) -> float:
    """A step as the first stage sees it: from its first forward to the end of its update."""
    return reports[0].end - reports[0].start


class Ledger:
    """Collects the stages' reports step by step, over all epochs, and sums the run up."""

    def __init__(
        self, settings: Settings, stages: list[Ready], first_step: int, links: Links | None = None
    ):
        """`links`: as they were measured, 0 where they were not; None: as the settings emulate."""
        self.settings = settings
        self.first_step = first_step
        self.records: deque[StepRecord] = deque(maxlen=_LAST_RECORDS)
        self._stages, cuts = range(len(stages)), len(stages) - 1
        # Two kinds of steps do not say how fast a run trains: the first ones, and one behind a
        # validation, which on the first stage begins while later stages still validate.
        kinds = ("steady", "behind validations", "first")  # the best first
        self._times = {kind: _Timings(len(stages)) for kind in kinds}
        self._validations: dict[int, float] = {}  # losses, by step
        self._valid_count = 0
        self._seconds = dict.fromkeys(("training", "validation", "waiting"), 0.0)
        self._refused_in_all = self._epochs = 0
        self._largest_drift: float | None = None
        self._moves: list[dict[str, Any]] = []
        self._outages = [{"cut": cut, "count": 0, "seconds": 0.0} for cut in range(cuts)]
        # By training over each cut: until the last step, and all, once stages have ended.
        self._crossed: Crossed = np.zeros((cuts, 2), int)
        self._crossed_before, self._sent_before = self._crossed, Counter[str]()  # in earlier epochs
        self._meters: dict[int, Meters] = {}  # the latest that each stage has reported
        self.go_on(stages, first_step, links)

    def go_on(
        self, stages: list[Ready], first_step: int, links: Links | None = None, waited: float = 0.0
    ) -> None:
        """The run is formed, perhaps again, and goes on from this step: later ones are void."""
        self._seconds["waiting"] += waited
        self._crossed_before = self._crossed_in_all
        self._sent_before += self._sent_in_epoch()
        while self.records and self.records[-1].step > first_step:
            self.records.pop()
        self._moves = [move for move in self._moves if move["step"] <= first_step]
        self._drop_evaluations(first_step + 1)
        self.first_step = min(self.first_step, first_step)
        self._ready, self._network = stages, links or network_of(self.settings)
        self._epochs += 1
        self._epoch_began = self.done = first_step
        self.refused = 0  # updates in a row that were not committed
        self.origin = ""  # of non-finite values, in the first of these
        self._pending: dict[int, dict[int, Step]] = {}
        self._crossed, self._meters = np.zeros_like(self._crossed_before), {}
        self._finished: set[int] = set()

    def add_step(self, stage: int, report: Step) -> StepRecord | None:
        """File one stage's report; the step's record once every stage has reported it."""
        reports = self._pending.setdefault(report.step, {})
        reports[stage] = report
        self._meters[stage] = report.meters
        if len(reports) < len(self._stages):
            return None
        del self._pending[report.step]
        complete = [reports[s] for s in self._stages]
        kind, since = "steady", report.step - self._epoch_began
        if since == 0 or self.settings.is_evaluation_step(report.step):
            kind = "behind validations"
        self._times["first" if since < _WARMUP_STEPS else kind].add(complete)
        # On the last stage a step begins when the validation before it is over on all stages.
        self._seconds["training"] += complete[-1].end - complete[-1].start
        self.done = report.step + 1
        if complete[0].committed:
            self.refused, self.origin = 0, ""
        else:
            self.origin = self.origin if self.refused else first_not_finite(complete)
            self.refused += 1
            self._refused_in_all += 1
        record = self._record(complete)
        self.records.append(record)
        if (drift := record.measures.get("drift")) is not None:
            self._largest_drift = max(drift, self._largest_drift or 0.0)
        if {"energy_before", "energy_after"} <= record.measures.keys():
            # The jump is that of one batch's loss, scored just before and just after the move;
            # None where it was not measured, as when a run resumed where the move was due.
            self._moves.append({"step": record.step, "loss_jump": None, **record.measures})
        return record

    def add_evaluation(self, report: Evaluation) -> None:
        """File a validation, from the stage that has it; it replaces an earlier one of the step."""
        self._drop_evaluations(report.step)
        self._validations[report.step] = report.loss
        self._valid_count = report.count
        self._seconds["validation"] += report.seconds

    def _drop_evaluations(self, step: int) -> None:
        self._validations = {at: loss for at, loss in self._validations.items() if at < step}

    def add_outage(self, cut: int, seconds: float) -> None:
        """File that the link over a cut was down for so long."""
        self._outages[cut]["count"] += 1
        self._outages[cut]["seconds"] += seconds

    def add_finished(self, stage: int, meters: Meters) -> None:
        """File the last word of a stage: what each of its links has sent, to the goodbye."""
        self._meters[stage] = meters
        self._finished.add(stage)
        if self._is_finished:
            self._crossed = _crossed([self._meters[stage] for stage in self._stages])

    def last_losses(self) -> list[float]:
        """The last loss of training and the last of a validation, where there are any."""
        losses = [record.loss for record in self.records]
        return losses[-1:] + [*self._validations.values()][-1:]

    def progress(self) -> RunProgress:
        """How the run works, with a typical step, to draw; there must have been a step."""
        chosen = self._timed.typical()
        origin = chosen[0].start
        spans = [
            TraceSpan(stage, lane, label, start - origin, end - origin)
            for stage, report in enumerate(chosen)
            for lane, label, start, end in report.spans
            if label != "norm"
        ]
        which = self.settings.run.name, chosen[0].step + 1
        timeline = Timeline(*which, _step_seconds(chosen), self._stage_records(chosen), spans)
        median, measured = statistics.median(self._timed.seconds), (self._cuts(), self._costs())
        return RunProgress(median, timeline, self._shares(), *measured, self._network)

    def _shares(self) -> list[dict[str, Any]]:
        microbatches = self.settings.pipeline.microbatches
        return [self._timed.shares(stage, microbatches) for stage in self._stages]

    @property
    def _which(self) -> str:
        """The kind of steps whose durations count: the best that there are."""
        return next((kind for kind, times in self._times.items() if times.seconds), "first")

    @property
    def _timed(self) -> _Timings:
        return self._times[self._which]

    @property
    def _steps_run(self) -> int:
        return sum(len(times.seconds) for times in self._times.values())

    def summary(
        self,
        total_seconds: float,
        start_seconds: float = 0.0,
        earlier: Sequence[tuple[int, float]] = (),
    ) -> dict[str, Any]:
        """What summary.json says of the run; `earlier`: steps and losses of earlier validations."""
        settings, timed = self.settings, self._timed
        seconds, per_step = timed.seconds, settings.tokens_per_step
        counted = {"steps": len(seconds), "tokens_per_step": per_step}
        shares = self._shares()
        computed = [share["compute"] + share["update"] for share in shares]
        cuts, busiest = self._cuts(), _busiest(self._uplinks_busy())
        dense = sum(2 * row["bf16_bytes_per_token"] for row in cuts)
        left = sum(r["forward_bytes_per_token"] + r["backward_bytes_per_token"] for r in cuts)
        losses = [record.loss for record in self.records][-_LAST_LOSSES:]
        validations = [(step, loss) for step, loss in earlier if step < self.first_step]
        validations += self._validations.items()
        final = {
            "final_train_loss": statistics.fmean(losses) if losses else None,
            "last_train_loss": losses[-1] if losses else None,
            "final_valid_loss": validations[-1][1] if validations else None,
        }
        # Training and validation are timed on the last stage, where they do not overlap. Waiting
        # is from the end of an epoch to the training of the next; other is saving, the goodbyes
        # of the stages, and the rest.
        parts = {"start": start_seconds, **self._seconds}
        simulated = simulate(settings.schedule(), self._costs(), network_of(settings))
        space = {"largest_drift": self._largest_drift, "moves": self._moves}
        by_kind = self._sent_before + self._sent_in_epoch()
        sent = {"by_kind": dict(sorted(by_kind.items())), "total": by_kind.total()}
        return {
            "name": settings.run.name,
            **final,
            "final_train_loss_steps": len(losses),  # of which that loss is the mean
            # JSON has no NaN: a null that is named here was NaN or infinite
            "not_finite": [k for k, loss in final.items() if not math.isfinite(loss or 0.0)],
            "valid_losses": validations,
            "valid_tokens": self._valid_count,  # behind each of these
            "steps": self.done,
            "steps_run": self._steps_run,
            "epochs": self._epochs,
            "tokens": self.done * per_step,
            # tokens per second of the steps that count, and which these are: they divide
            "tokens_per_s": per_step * len(seconds) / sum(seconds) if seconds else None,
            "timed": {**counted, "seconds": sum(seconds), "which": self._which},
            "step_seconds_median": statistics.median(seconds) if seconds else None,
            "seconds": {**parts, "other": max(0.0, total_seconds - sum(parts.values()))},
            # as the simulator plays it with the measured costs
            "simulated_step_seconds": simulated.step_seconds if self._steps_run else None,
            "simulated_bubble_fraction": simulated.bubble_fraction if self._steps_run else None,
            "measured_costs": vars(self._costs()),
            # share of the stages' time within a step in which they do not compute, as the
            # simulator's and the planner's
            "bubble_fraction": 1 - statistics.fmean(computed) if seconds else None,
            "time_shares": shares,
            "link_utilisation": None if math.isnan(busiest) else busiest,
            # bytes of bf16 dense both ways over all that training sent, headers included
            "ratio_vs_bf16": dense / left if cuts else None,
            "cuts": cuts,
            "outages": self._outages,
            # Every byte that left, headers included, over all links and both ends of each: beside
            # training validations, handshakes and goodbyes. None until all have said their last.
            "bytes_sent": sent if self._is_finished else None,
            "space": space if self._moves or self._largest_drift is not None else None,
            "refused_updates": self._refused_in_all,
            "total_seconds": total_seconds,
            "config_hash": settings.hash,
            "seed": settings.run.seed,
            "versions": self._ready[0].versions,
        }

    def _costs(self) -> Costs:
        """Mean measured times and bytes, as the simulator takes them."""
        timed, crossed = self._timed, self._crossed_in_all
        steps = max(1, len(timed.seconds))
        frames = max(1, self._steps_run * self.settings.pipeline.microbatches)
        kinds = ("forward", "backward", "update")
        forward, backward, update = ([sums[k] / steps for sums in timed.sums] for k in kinds)
        up, down = (crossed // frames).T.tolist()
        return Costs(forward, backward, update, up, down)

    def _record(self, reports: list[Step]) -> StepRecord:
        settings, seconds, before = self.settings, _step_seconds(reports), self._crossed
        self._crossed = _crossed([report.meters for report in reports])
        moved = self._crossed - before
        busy = self._busy(moved, seconds)
        links = [
            LinkRecord(cut, forward, backward, _busiest(busy[cut : cut + 2]))
            for cut, (forward, backward) in enumerate(moved.tolist())
        ]
        usual = statistics.fmean(self._timed.seconds[-_LAST_SECONDS:])
        loss, measures = reports[-1].loss, dict[str, float]()
        for report in reports:  # of the shared space: the worst of each, over all stages
            for name, value in report.measures.items():
                measures[name] = max(value, measures.get(name, value))
        return StepRecord(
            step=self.done,
            steps=settings.train.steps,
            loss=math.nan if loss is None else loss,
            lr=reports[0].lr,
            grad_norm=reports[0].grad_norm,
            tokens=self.done * settings.tokens_per_step,
            tokens_per_s=settings.tokens_per_step / usual,
            step_seconds=seconds,
            eta_seconds=usual * (settings.train.steps - self.done),
            stages=self._stage_records(reports),
            links=links,
            measures=measures,
        )

    def _stage_records(self, reports: list[Step]) -> list[StageRecord]:
        records, microbatches = [], self.settings.pipeline.microbatches
        for stage, (ready, report) in enumerate(zip(self._ready, reports, strict=True)):
            costs = report.costs
            seconds = (costs.forward + costs.backward) * microbatches, report.wait, costs.update
            records.append(StageRecord(stage, ready.layers, *seconds, ready.device))
        return records

    @property
    def _is_finished(self) -> bool:
        return len(self._finished) == len(self._stages)

    @property
    def _crossed_in_all(self) -> Crossed:
        return self._crossed_before + self._crossed

    def _cuts(self) -> list[dict[str, Any]]:
        tokens = self._steps_run * self.settings.tokens_per_step
        rows, busy = [], self._uplinks_busy()
        for cut, (forward, backward) in enumerate(self._crossed_in_all.tolist()):
            if not tokens or not forward + backward:
                continue  # within a process, where nothing is sent
            dense = BF16_BYTES * self.settings.model.dim
            codecs = self.settings.codec.names(cut)
            rows.append(
                {
                    "cut": cut,
                    "forward_codec": codecs[0],
                    "backward_codec": codecs[1],
                    "forward_bytes_per_token": forward / tokens,
                    "backward_bytes_per_token": backward / tokens,
                    "bf16_bytes_per_token": dense,
                    "ratio_vs_bf16": 2 * dense * tokens / (forward + backward),
                    "link_utilisation": _busiest(busy[cut : cut + 2]),  # of its two ends
                }
            )
        return rows

    def _sent_in_epoch(self) -> Counter[str]:
        """What all stages have sent by the meters that they reported last, by kind of frame."""
        by_kind: Counter[str] = Counter()
        for moved in (moved for meters in self._meters.values() for moved in meters.values()):
            by_kind.update({kind: _sent(moved, (kind,)) for kind in moved["sent"]})
        del by_kind["total"]
        return by_kind

    def _uplinks_busy(self) -> list[float]:
        """Share of each uplink that training uses, by bytes per step and the steps that count."""
        per_step, seconds = self._crossed_in_all / max(1, self._steps_run), self._timed.seconds
        return self._busy(per_step, statistics.fmean(seconds) if seconds else 0.0)

    def _busy(self, crossed: Crossed, seconds: float) -> list[float]:
        """Share of each stage's uplink that these bytes at the cuts take in so many seconds."""
        up, down = np.pad(crossed[:, 0], (0, 1)), np.pad(crossed[:, 1], (1, 0))
        return [
            8e-6 * sent / (rate * seconds) if len(crossed) and rate and seconds else math.nan
            for sent, rate in zip((up + down).tolist(), self._network.mbps_up, strict=True)
        ]


def _busiest(shares: Sequence[float]) -> float:
    """The largest share that is known; NaN if none is."""
    return max((share for share in shares if not math.isnan(share)), default=math.nan)


def bits_per_byte(loss: float, tokens: int, size: int) -> float | None:
    """A loss in nats per token as bits per byte of text, comparable across tokenizers."""
    return loss / math.log(2) * tokens / size if size else None


def _crossed(meters: Sequence[Meters]) -> Crossed:
    rows = [
        (_sent(below[f"cut-{cut}"], _FORWARD_KINDS), _sent(above[f"cut-{cut}"], _BACKWARD_KINDS))
        for cut, (below, above) in enumerate(itertools.pairwise(meters))
    ]
    return np.array(rows, int).reshape(-1, 2)


def _sent(moved: Moved, kinds: tuple[str, ...]) -> int:
    counts = [moved["sent"][kind] for kind in kinds if kind in moved["sent"]]
    return sum(count["header_bytes"] + count["payload_bytes"] for count in counts)


class LossWatch:
    """Hears the reports of a run in order, and says when its loss explodes: is finite, and far
    above its own past. Training is noisy, so the median of the last steps counts, against what all
    but the worst losses of the calmest stretch stayed below. Validations score the same data, so
    one counts against the best; but where the training loss stays below that, a run overfits.
    """

    def __init__(self, best: float = math.inf):
        self.explosion = ""  # what is said of it, as long as it lasts
        self._best = best  # validation so far
        self._validation = -math.inf  # the last one
        self._losses: deque[float] = deque(maxlen=STRETCH + LATEST)  # of the last steps
        self._calmest = math.inf  # what the losses of the calmest stretch stayed below

    def hear(self, report: Step | Evaluation) -> str:
        """What a report changes; most change nothing, and so does a loss that is not finite."""
        if report.loss is None or not math.isfinite(report.loss):
            return ""
        if isinstance(report, Evaluation):
            self._validation = report.loss
            self._best = min(self._best, report.loss)
        else:
            self._losses.append(report.loss)
            if len(self._losses) == STRETCH + LATEST:
                stretch = sorted([*self._losses][:STRETCH])
                self._calmest = min(self._calmest, stretch[-1 - STRETCH // WORST_SHARE])
        trouble = self._trouble()
        if bool(trouble) == bool(self.explosion):
            return ""
        done = report.step + isinstance(report, Step)
        self.explosion = f"the loss has exploded by step {done}: {trouble}" if trouble else ""
        return self.explosion or f"the loss is back to where it was, at step {done}"

    def _trouble(self) -> str:
        if not self._losses:
            return ""  # a validation alone may be of a run that has overfitted before
        now = statistics.median([*self._losses][-LATEST:])
        if now > self._limit(self._calmest):
            return f"that of training is {now:.4g}, where it had stayed below {self._calmest:.4g}"
        if self._validation > self._limit(self._best) and now > self._best:
            return f"that of validation is {self._validation:.4g}, and was {self._best:.4g}"
        return ""

    def _limit(self, loss: float) -> float:
        """The highest loss that may follow on this one; lower for a run that has exploded."""
        rise = max(LEAST_RISE, RISE_SHARE * loss)
        return loss + (rise / 2 if self.explosion else rise)
