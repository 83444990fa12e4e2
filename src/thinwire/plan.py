"""The planner: an estimate of what a run will cost, before it starts, by the schedule's simulator,
from a rate that is measured with one block of the model (or given) and the sizes of the settings.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from thinwire.engine.build import Weights, choose_device, is_emulated, model_weights, stage_weights
from thinwire.engine.passes import autocast_for
from thinwire.model import LoraConfig, architecture
from thinwire.model.optim import Role, StageOptimizer, orthogonalising_flops
from thinwire.model.stage import WEIGHT_TYPES
from thinwire.report.human import duration, human_bytes, human_flops
from thinwire.report.table import against_bf16
from thinwire.schedule import Costs, Counts, Simulation, deal, grid, simulate, window_table
from thinwire.settings import Settings, crossing, machine_cores, threads_per_stage

WORTH = 0.03  # what another split, order or window must gain before the plain one is left
_MEASURE_SECONDS = 5.0  # an update that takes longer is computed from its matrix products
_MEASURE_FLOPS = 2e10  # a probe larger than this is measured on fewer tokens and scaled
_PASSES = 3.0  # a forward and a backward of trained matrices have so many forwards' operations
_TABLE_BYTES = 2  # the fixed token table is kept in bf16
_GRID_COLUMNS = 40  # a grid with more slots than these is shown by its two ends
_GRID_END = 12


class Rates(NamedTuple):
    """How fast a machine trains: operations, and parameters that it updates, per second."""

    flops: float
    updates: float = math.inf  # as many as there are: then updates cost no time


@dataclass(frozen=True)
class Plan:
    """What the planner found."""

    settings: Settings
    costs: Costs
    simulation: Simulation
    windows: list[tuple[int, float, list[int]]]
    weights: list[Weights]
    memory_bytes: list[int]
    flops_per_s: float
    is_measured: bool  # whether the FLOP rate was measured here, or given
    machine: str  # what they share
    better_split: tuple[list[int], float] | None  # one that is faster, and the seconds of its step
    undelayed_seconds: float | None  # of a step without delayed updates, where it has them

    @property
    def parameters(self) -> list[int]:
        """Parameters that each stage holds."""
        return [weights.count for weights in self.weights]


def make_plan(settings: Settings, flops_per_s: float | None = None) -> Plan:
    """Measure (unless a FLOP rate is given), simulate, and estimate memory for each stage."""
    rates = Rates(flops_per_s) if flops_per_s else measure_rates(settings)
    # Stages of a local run share this machine; with a given rate each has a machine of its own.
    cores, machine = (None, "a machine per stage") if flops_per_s else _shared(settings)
    costs, network = estimate_costs(settings, *rates), crossing.network_of(settings)
    p, schedule, windows, undelayed = settings.pipeline, settings.schedule(), [], None
    simulation = simulate(schedule, costs, network, cores=cores)
    if p.schedule == "1f1b" and p.stages > 1:
        windows = window_table(p.stages, p.microbatches, costs, network, cores, p.delay)
        if schedule.window not in [window for window, *_ in windows]:
            this = (schedule.window, simulation.step_seconds, list(schedule.held))
            windows = sorted([*windows, this])
    if p.delay:
        other = dataclasses.replace(schedule, delay=0)
        undelayed = simulate(other, costs, network, cores=cores).step_seconds
    weights = [stage_weights(settings, stage) for stage in range(p.stages)]
    stages = zip(settings.split(), weights, schedule.held, strict=True)
    return Plan(
        settings,
        costs,
        simulation,
        windows,
        weights,
        memory_bytes=[block_memory(settings, *stage) for stage in stages],
        flops_per_s=rates.flops,
        is_measured=flops_per_s is None,
        machine=machine,
        better_split=_better_split(settings, rates, simulation),
        undelayed_seconds=undelayed,
    )


def _shared(settings: Settings) -> tuple[float, str]:
    """How many stages of a local run compute at full speed at once, and what they share."""
    device = choose_device(settings.run.device, 0)
    if device.type == "cpu":
        cores = machine_cores()
        return max(1.0, cores / threads_per_stage(settings)), f"{cores} cores shared by all stages"
    gpus = torch.cuda.device_count() if device.type == "cuda" else 1
    return float(gpus), f"{gpus} GPU{'s' * (gpus > 1)} shared by all stages"


def _better_split(
    settings: Settings, rates: Rates, now: Simulation
) -> tuple[list[int], float] | None:
    """The split whose slowest stage is fastest, and its seconds, where that gains enough."""

    def seconds(stage: int, blocks: range) -> float:
        return sum(block_seconds(settings, blocks, rates.flops))

    least_on_last = max(1, settings.boundary.free_layers)
    _, counts = deal(settings.model.layers, settings.pipeline.stages, least_on_last, seconds)
    costs = estimate_costs(with_split(settings, counts), *rates)
    network = crossing.network_of(settings)
    other = simulate(now.schedule, costs, network, cores=now.cores).step_seconds
    return (list(counts), other) if other * (1 + WORTH) < now.step_seconds else None


def with_split(settings: Settings, counts: Counts) -> Settings:
    """The same run with so many blocks on each stage; an even split is left unnamed, as it was."""
    if list(counts) == [len(blocks) for blocks in settings.split()]:
        return settings
    return settings.with_keys("pipeline", split=list(counts))


def estimate_costs(
    settings: Settings, flops_per_s: float, updates_per_s: float = math.inf
) -> Costs:
    """Seconds and bytes of every action."""
    split = settings.split()
    seconds = [block_seconds(settings, blocks, flops_per_s) for blocks in split]
    sizes = [crossing.frame_bytes(settings, cut) for cut in range(len(split) - 1)]
    update = [0.0] * len(split)
    if updates_per_s < math.inf:
        update = [stage_weights(settings, s).trained / updates_per_s for s in range(len(split))]
    rows = [crossing.row_bytes(settings)] if settings.boundary.shares_embedding else []
    return Costs(
        forward=[out for out, _ in seconds],
        backward=[back for _, back in seconds],
        update=update,
        forward_bytes=[out for out, _ in sizes],
        backward_bytes=[back for _, back in sizes],
        row_bytes=rows * len(sizes),
    )


def block_seconds(settings: Settings, blocks: range, flops_per_s: float) -> tuple[float, float]:
    """Seconds of one forward and one backward of the stage that holds these blocks."""
    family, batch = architecture(settings.model), settings.microbatch_size
    forward = family.forward_flops(blocks, batch)
    backward = family.backward_flops(blocks, batch, frozen=settings.lora.rank > 0)
    if settings.pipeline.recompute:
        backward += forward
    return forward / flops_per_s, backward / flops_per_s


def block_memory(settings: Settings, blocks: range, weights: Weights, in_flight: int) -> int:
    """Bytes of weights, gradients, optimizer state, token table and activations in flight, and of a
    rounded copy under autocast. With delayed updates all but the state is there twice.
    """
    width, twice = WEIGHT_TYPES[settings.run.precision].itemsize, settings.pipeline.overlap
    states = 2 * twice + (3 if settings.optim.name == "adamw" else 2)  # gradient, moments
    model, family = settings.model, architecture(settings.model)
    batch = settings.microbatch_size
    compute_width = 2 if settings.run.precision == "bf16" else width
    if settings.pipeline.recompute:
        streams = len(blocks)
        is_between_cuts = blocks.start > 0 and blocks.stop < model.layers
        if settings.boundary.trains_tables and is_between_cuts and len(blocks) > 1:
            streams += 1  # rows of the table, from the first layer to the last
        kept = streams * settings.tokens_per_microbatch * model.dim * width
    else:
        kept = family.kept_bytes(blocks, batch, width, compute_width)
    activations = kept * in_flight
    if blocks.stop == model.layers:
        activations += family.logits(batch) * (compute_width + 2 * 4)
    fixed = settings.boundary.anchor == "fixed"
    table = model.vocab * model.dim * _TABLE_BYTES if fixed else 0
    if settings.boundary.shares_embedding:
        # A gradient, and those of rows that wait; on the first stage two moments too.
        needed = 4 if blocks.start == 0 else 2
        table = (needed - states) * model.vocab * model.dim * width
    rounded = (1 + twice) * weights.trained * compute_width if compute_width < width else 0
    return weights.bytes + weights.trained * width * states + rounded + table + activations


def measure_rates(settings: Settings, repeats: int = 3) -> Rates:
    """How fast this machine trains one block, and updates parameters as the model has them, with
    the threads of a stage of a local run. Large models are measured on a part of a microbatch, and
    what is emulated once, on a hundredth of that. Updates of adapters cost nothing: they are few.
    """
    device, dtype = choose_device(settings.run.device, 0), WEIGHT_TYPES[settings.run.precision]
    most = _MEASURE_FLOPS / _PASSES
    if is_emulated(settings.run.precision, device):
        most, repeats = most / 100, 0
    block, shape, flops = architecture(settings.model).probe(settings.microbatch_size, most)
    block = block.to(device, dtype)
    x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads_per_stage(settings))
    autocast = autocast_for(settings.run.precision, device)

    def train() -> None:
        with autocast():
            y = block(x)
        y.sum().backward()

    def seconds(act: Callable[[], None]) -> float:
        start = time.perf_counter()
        act()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    parameters = dict(block.named_parameters())
    has_muon = settings.optim.name == "muon"
    matrices = {n: Role.MATRIX for n, p in parameters.items() if has_muon and p.ndim > 1}

    def update_seconds(roles: dict[str, Role]) -> float:
        optimizer = StageOptimizer(parameters, roles, settings.optim)
        taken = []
        for _ in range(repeats + 1):
            for parameter in parameters.values():
                parameter.grad = torch.ones_like(parameter)
            taken.append(seconds(partial(optimizer.step, 0.0)))
            if sum(taken) > _MEASURE_SECONDS:
                break
        return min(taken)

    try:
        best = min(seconds(train) for _ in range(repeats + 1))
        rate = flops * _PASSES / best
        if settings.lora.rank:
            return Rates(rate)
        own = sum(p.numel() for p in parameters.values())
        all_trained = model_weights(settings).trained
        of_others = update_seconds({})
        products = sum(orthogonalising_flops(parameters[name].shape) for name in matrices)
        of_blocks = of_others + products / rate
        if matrices and of_blocks < _MEASURE_SECONDS:  # of 8b on a CPU it would be minutes
            of_blocks = update_seconds(matrices)
        layers, others = settings.model.layers, max(0, all_trained / own - settings.model.layers)
        return Rates(rate, all_trained / (layers * of_blocks + others * of_others))
    finally:
        torch.set_num_threads(threads)


def plan_text(plan: Plan) -> str:
    """The plan for a person."""
    settings, simulation = plan.settings, plan.simulation
    rows = f"sequences, {settings.tokens_per_step:,} tokens,"
    lines = [
        "An estimate: nothing is trained. The step is simulated from a compute rate that is "
        f"{'measured here' if plan.is_measured else 'given'},",
        "the sizes of frames, and the links of the settings.",
        "",
        f"model: {sum(plan.parameters):,} parameters, {architecture(settings.model).describe()}",
        *_lora_lines(plan),
        f"step: {settings.train.batch:,} {rows} in {settings.pipeline.microbatches} microbatches",
        f"compute: {human_flops(plan.flops_per_s)} per stage, "
        f"{'measured here with one block' if plan.is_measured else 'as given'}; {plan.machine}",
        _link_line(settings),
        *_log_lines(settings),
        "",
        "schedule (a column is a slot of equal length, F forward, B backward, U update):",
        grid(simulation.schedule, _GRID_COLUMNS, _GRID_END),
        "",
        simulation.describe(),
        "",
        f"stage  {'parameters':>14}  {'memory':>9}  layers",
    ]
    for stage, blocks in enumerate(settings.split()):
        memory = human_bytes(plan.memory_bytes[stage])
        sizes = f"{stage:5}  {plan.parameters[stage]:14,}  {memory:>9}"
        lines.append(f"{sizes}  blocks {blocks.start}..{blocks.stop - 1}")
    if settings.pipeline.stages > 1:
        lines += ["", *_cut_lines(settings)]
    if plan.windows:
        lines += ["", "window  seconds per step  microbatches held by each stage"]
        for window, seconds, held in plan.windows:
            mark = "  <- this run" if window == simulation.schedule.window else ""
            lines.append(f"{window:6}  {seconds:16.3f}  {' '.join(map(str, held))}{mark}")
    if notes := _notes(plan):
        lines += ["", *notes]
    seconds = simulation.step_seconds
    rate = settings.tokens_per_step / seconds
    total = seconds * settings.train.steps
    lines += [
        "",
        f"estimate: {seconds:.3f} s per step, {rate:,.0f} tokens/s, {duration(total)} for "
        f"{settings.train.steps:,} steps, not counting start, validations and checkpoints",
    ]
    return "\n".join(lines)


def _lora_lines(plan: Plan) -> list[str]:
    """What is trained, and what that saves, where adapters are trained beside frozen weights."""
    settings = plan.settings
    if not settings.lora.rank:
        return []
    whole = dataclasses.replace(settings, lora=LoraConfig())
    held = enumerate(zip(settings.split(), plan.simulation.schedule.held, strict=True))
    needed = max(block_memory(whole, at, stage_weights(whole, i), most) for i, (at, most) in held)
    trained = sum(weights.trained for weights in plan.weights)
    share = 100 * trained / sum(plan.parameters)
    return [
        f"trained: {trained:,} of them ({share:.2g} %), adapters of rank {settings.lora.rank} and "
        "what the cuts learn; the others are frozen",
        f"the largest stage takes {human_bytes(max(plan.memory_bytes))}; with all weights trained "
        f"it would take {human_bytes(needed)}",
    ]


def _notes(plan: Plan) -> list[str]:
    simulation, notes = plan.simulation, []
    if plan.better_split:
        counts, seconds = plan.better_split
        notes.append(
            f"note: pipeline.split = {counts} would take {seconds:.3f} s per step: stages would "
            "compute more equally long; its cuts lie elsewhere"
        )
    if plan.undelayed_seconds is not None:
        times = plan.undelayed_seconds / simulation.step_seconds
        notes.append(
            f"note: without delayed updates (pipeline.delay = 0) a step would take "
            f"{plan.undelayed_seconds:.3f} s, {times:.2f} times as long, and learn more; this is "
            "the time of steps between two pauses, which validations and checkpoints are"
        )
    fastest = min((seconds for _, seconds, _ in plan.windows), default=math.inf) * (1 + WORTH)
    if fastest < simulation.step_seconds:
        window, seconds = next((w, s) for w, s, _ in plan.windows if s <= fastest)
        notes.append(
            f"note: with pipeline.window = {window} a step would take {seconds:.3f} s: more "
            "microbatches in flight hide more of the delays, and take memory"
        )
    return notes


def _cut_lines(settings: Settings) -> list[str]:
    tokens = settings.tokens_per_microbatch
    cuts = list(range(settings.pipeline.stages - 1))
    alike = len({settings.codec.names(cut) for cut in cuts}) == 1
    lines = []
    for cut in cuts[:1] if alike else cuts:
        out, back = crossing.frame_bytes(settings, cut)
        which = "each cut" if alike else f"cut {cut}"
        ratio = 2 * crossing.BF16_BYTES * settings.model.dim * tokens / (out + back)
        about = crossing.size_word(settings, cut)
        lines.append(
            f"{which}, per microbatch: {about}{human_bytes(out)} forward "
            f"({out / tokens:,.1f} bytes per token), {human_bytes(back)} backward "
            f"({back / tokens:,.1f}); {against_bf16(ratio)}"
        )
    if rows := crossing.row_bytes(settings):
        ratio = 2 * crossing.BF16_BYTES * settings.model.dim / crossing.bytes_per_token(settings)
        lines.append(
            f"each cut, per step: about {human_bytes(rows)} each way for rows of the embedding "
            f"({rows / settings.tokens_per_step:,.1f} bytes per token); with them "
            f"{against_bf16(ratio)}"
        )
    return lines


def plan_to_plain(plan: Plan) -> dict[str, Any]:
    """The plan for a program."""
    settings, simulation = plan.settings, plan.simulation
    out, back = crossing.frame_bytes(settings)
    sizes = zip(plan.costs.forward_bytes, plan.costs.backward_bytes, strict=True)
    return {
        "step_seconds": simulation.step_seconds,
        "tokens_per_s": settings.tokens_per_step / simulation.step_seconds,
        "bound": simulation.bound,
        "chain_seconds": simulation.chain,
        "bubble_fraction": simulation.bubble_fraction,
        "flops_per_s": plan.flops_per_s,
        "flops_are_measured": plan.is_measured,
        "parameters": plan.parameters,
        "trained_parameters": [weights.trained for weights in plan.weights],
        "memory_bytes": plan.memory_bytes,
        "forward_bytes": out,
        "backward_bytes": back,
        "cuts": [
            {
                "cut": cut,
                "forward_bytes": forward,
                "backward_bytes": backward,
                "bytes_are": crossing.size_kind(settings, cut),
                "row_bytes": crossing.row_bytes(settings),
            }
            for cut, (forward, backward) in enumerate(sizes)
        ],
        "uplink_utilisation": simulation.uplink_utilisation,
        "windows": [
            {"window": w, "step_seconds": s, "in_flight": held} for w, s, held in plan.windows
        ],
        "better_split": plan.better_split[0] if plan.better_split else None,
        "better_split_step_seconds": plan.better_split[1] if plan.better_split else None,
        "undelayed_step_seconds": plan.undelayed_seconds,
        "schedule": str(simulation.schedule),
        "config_hash": settings.hash,
    }


def _log_lines(settings: Settings) -> list[str]:
    """How much disk the logs take from which a lost stage is computed again."""
    reach, every = crossing.logged_steps(settings), crossing.checkpoint_interval(settings)
    if not reach:
        return []
    steps = min(every if every > 0 else settings.train.steps, settings.train.steps, reach)
    ends = 2 if settings.pipeline.stages > 2 else 1
    room = human_bytes(ends * crossing.logged_bytes(settings, steps))
    return [
        f"logs: up to {room} on the disk of a stage, what it sends in {steps:,} steps, until a "
        "checkpoint is complete"
    ]


def _link_line(settings: Settings) -> str:
    link = settings.link
    if not link.emulate:
        return "links: not emulated (link.emulate is off): the estimate takes them to cost no time"
    up, down = (
        f"{mbps:g} Mbps" if mbps else "unlimited" for mbps in (link.mbps_up, link.mbps_down)
    )
    return f"links: {up} up, {down} down per host, {link.latency_ms:g} ms one way"
