"""From settings to a stage: device, space, layers with their boundaries, starting weights; how many
weights it has; and all stages of a model in one process.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codec import Leg, TensorSpec, cross
from thinwire.engine.cut import CutEnd
from thinwire.engine.feed import Feed
from thinwire.engine.passes import autocast_for
from thinwire.errors import ConfigError
from thinwire.model import Boundary, Narrow, Past, Score, Stage, SubspaceBoundary, architecture
from thinwire.model.boundary import DenseBoundary, ProjectedBoundary
from thinwire.model.layers import attach_adapters, round_frozen
from thinwire.model.stage import WEIGHT_TYPES
from thinwire.model.subspace import Constraint, Space, fixed_table, random_basis
from thinwire.settings import Settings, threads_per_stage
from thinwire.settings.crossing import wire_shape


def choose_device(wanted: str, stage: int) -> torch.device:
    """The device of a stage; several GPUs are dealt out in turn."""
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    is_here = {"cuda": cuda, "mps": mps, "cpu": True}
    if wanted == "auto":
        wanted = next(device for device in is_here if is_here[device])
    if not is_here.get(wanted, True):
        raise ConfigError(f'run.device = "{wanted}", but torch finds none on this machine')
    if wanted == "cuda":
        return torch.device("cuda", stage % torch.cuda.device_count())
    return torch.device(wanted)


def check_devices(settings: Settings) -> None:
    """Refuse a device that is not here, before anything is prepared or started for it."""
    for stage in range(settings.pipeline.stages):
        _check_precision(settings.run.precision, choose_device(settings.run.device, stage))


def prepare_torch(settings: Settings, device: torch.device) -> None:
    """Process-wide settings of torch: threads, and the same result every time."""
    torch.set_num_threads(threads_per_stage(settings))
    _check_precision(settings.run.precision, device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # What a caller convolves would round to ten bits; matrix products do not unless told to.
        torch.backends.cudnn.allow_tf32 = False
    # Not as a warning only: then attention's backward on a GPU would still add up in any order.
    if settings.run.compile:
        torch.use_deterministic_algorithms(True)
    else:  # the same, without the compiler, which takes seconds to import
        torch.set_deterministic_debug_mode("error")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def is_emulated(precision: str, device: torch.device) -> bool:
    """Whether a CPU only emulates a precision, a hundred times slower than fp32 or worse."""
    has_bf16 = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    return precision == "bf16" and device.type == "cpu" and not has_bf16()


def _check_precision(precision: str, device: torch.device) -> None:
    if device.type == "mps" and precision == "fp64":
        raise ConfigError('run.precision = "fp64" does not exist on mps: use run.device = "cpu"')


class StageBuilder:
    """Builds stages of one run on one device; they share one space, held once."""

    def __init__(self, settings: Settings, device: torch.device):
        self.settings, self.device = settings, device
        self.dtype = WEIGHT_TYPES[settings.run.precision]
        self.architecture = architecture(settings.model)
        self.space: Space | None = None
        boundary, model, is_meta = settings.boundary, settings.model, device.type == "meta"
        if boundary.mode != "dense":
            if is_meta:  # deriving a basis takes seconds
                basis_DK = torch.empty(model.dim, boundary.rank, device=device)
            else:
                basis_DK = random_basis(model.dim, boundary.rank, boundary.basis_seed)
            table_VD = None
            if boundary.anchor == "fixed" and not is_meta:
                seed = boundary.basis_seed
                table_VD = fixed_table(model.vocab, model.dim, seed, model.embed_std).to(device)
            self.space = Space(basis_DK.to(device, self.dtype), table_VD)

    def build(self, index: int) -> Stage:
        """A stage with empty weights: initialise it or load it."""
        settings, blocks = self.settings, self.settings.split()[index]
        is_last = blocks.stop == settings.model.layers
        narrow = None
        if self.space is not None and settings.boundary.is_constrained:
            held = settings.model.layers - settings.boundary.free_layers
            is_free = settings.boundary.shares_embedding
            narrow = Narrow(self.space, held, settings.boundary.mode == "reparam", is_free)
        # Made on the CPU, whose rounding is the reference for rotary tables, or with no memory.
        with torch.device("meta" if self.device.type == "meta" else "cpu"):
            stage = Stage(
                self.architecture.stage_layers(blocks, narrow),
                incoming=self.boundary(receives=True) if index > 0 else None,
                outgoing=self.boundary(receives=False) if not is_last else None,
                recompute=settings.pipeline.recompute,
                next_name="" if is_last else self.architecture.block_name(blocks.stop),
                bound=settings.boundary.bound,
            )
            if settings.lora.rank:
                attach_adapters(stage.layers, settings.lora)
        if settings.run.compile and self.device.type != "meta":
            stage.compile_layers()
        stage.to(device=self.device, dtype=self.dtype)
        if settings.lora.rank and settings.run.precision == "bf16":
            round_frozen(stage.layers)
        return stage

    def initialise(self, stage: Stage) -> None:
        """Starting weights: a function of the seed and the parameters' names."""
        settings, model = self.settings, self.settings.model
        stage.initialise(model, settings.run.seed)
        if settings.boundary.shares_embedding:
            # Every machine draws its own copy, so it must come out the same on all of them.
            copy_VD = stage.embedding_copy()
            assert copy_VD is not None, "every stage has the embedding, or a copy"
            start_VD = fixed_table(model.vocab, model.dim, settings.run.seed, model.embed_std)
            with torch.no_grad():
                copy_VD.copy_(start_VD)
        constraint = self.constraint(stage)
        if constraint is not None:
            constraint.project_weights()

    def constraint(self, stage: Stage, in_training: bool = False) -> Constraint | None:
        """What holds the stage's weights in the space; in training those that are not frozen."""
        if self.space is None or self.settings.boundary.mode != "subspace":
            return None
        held = [h for h in stage.held_parameters() if h.parameter.requires_grad or not in_training]
        return Constraint(self.space.basis_DK, held)

    @property
    def wire_spec(self) -> TensorSpec:
        """The contract of a cut: what a frame's tensor must be."""
        return TensorSpec(wire_shape(self.settings), self.dtype, self.device)

    def boundary(self, receives: bool) -> Boundary:
        """One end of a cut."""
        config, space, model = self.settings.boundary, self.space, self.settings.model
        if space is None:
            return DenseBoundary()
        if config.is_constrained and not config.shares_embedding:
            return SubspaceBoundary(space)
        width = model.dim if config.shares_embedding else config.table
        table = (model.vocab, width) if receives and width else None
        return ProjectedBoundary(space, config.trains_tables, table, config.shares_embedding)


@dataclass(frozen=True)
class Weights:
    """The parameters of a stage, or of a part of it."""

    count: int = 0
    trained: int = 0  # with a gradient and moments: the others are frozen
    bytes: int = 0  # of all of them, without gradients and moments

    @classmethod
    def of(cls, parameters: Iterable[Tensor]) -> "Weights":
        """Counted one by one."""
        found = list(parameters)
        trained = sum(p.numel() for p in found if p.requires_grad)
        return cls(sum(p.numel() for p in found), trained, sum(p.nbytes for p in found))

    def __add__(self, other: "Weights") -> "Weights":
        return Weights(
            self.count + other.count, self.trained + other.trained, self.bytes + other.bytes
        )


def stage_weights(settings: Settings, stage: int) -> Weights:
    """Of what a stage holds, counted on layers without memory."""
    return Weights.of(StageBuilder(settings, torch.device("meta")).build(stage).parameters())


def model_weights(settings: Settings) -> Weights:
    """Of the whole model as it is trained, with its cuts; what two stages hold counts once."""
    builder = StageBuilder(settings, torch.device("meta"))
    stages = [builder.build(index) for index in range(settings.pipeline.stages)]
    return Weights.of(p for stage in stages for p in stage.owned_parameters().values())


Told = Callable[[int, int], None]  # batches of a validation that are done, and in all


class Joined:
    """All stages of a model and both ends of its cuts; weights are still empty."""

    def __init__(
        self,
        settings: Settings,
        device: torch.device,
        feed: Feed | None = None,
        devices: Sequence[torch.device] = (),
    ):
        """Inputs and outputs are on `device`, and so are all stages without `devices`."""
        self.settings, self.device = settings, device
        self.devices = devices  # without any, stages may be moved later: transformers does
        places = devices or [device] * settings.pipeline.stages
        builders = {one: StageBuilder(settings, one) for one in {device, *places}}
        self.builder = builders[device]
        self.stages = [builders[one].build(i) for i, one in enumerate(places)]
        self.spaces = [builders[one].space for one in places]
        spec = self.builder.wire_spec
        self.ends = [
            tuple(CutEnd.build(settings, cut, is_lower, spec, feed) for is_lower in (True, False))
            for cut in range(len(self.stages) - 1)
        ]
        self._at = 0, 0
        self._autocast = autocast_for(settings.run.precision, device)

    def logits(
        self, inputs: Tensor, compressed: bool = True, pasts: list[Past] | None = None
    ) -> Tensor:
        """The model's output, across all cuts; codecs may be left out, narrow boundaries not. With
        the past of each stage, of the positions that follow those in it.
        """
        x = ids = inputs
        for index, stage in enumerate(self.stages):
            if compressed and index > 0:
                x = self.crossed(x, index - 1)
            if self.devices:
                x, ids = x.to(self.devices[index]), ids.to(self.devices[index])
            with self._autocast():
                x = stage(x, ids, pasts[index] if pasts is not None else None)
        return x.to(self.device) if self.devices else x

    def crossed(self, z: Tensor, cut: int) -> Tensor:
        """An activation as the stage above the cut unpacks it."""
        lower, upper = self.ends[cut]
        place = lower.place(Leg.FORWARD, *self._at, training=False)
        z = z.detach().to(lower.spec.dtype)
        return cross(lower.codecs[Leg.FORWARD], upper.codecs[Leg.FORWARD], z, place)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of a microbatch."""
        with self._autocast():
            return self.stages[-1].loss(logits, targets)

    def go_to(self, step: int, microbatch: int) -> None:
        """Say where in the run the tensors are that cross next."""
        self._at = step, microbatch

    @torch.no_grad()
    def validate(self, feed: Feed, step: int, compressed: bool, told: Told | None = None) -> Score:
        """The loss of the validation after `step` updates, as the pipeline makes it."""
        score = Score()
        for number in range(feed.validation_count):
            batch = feed.validation(number)
            self.go_to(step, number)
            logits = self.logits(batch.inputs, compressed)
            score.add(self.loss(logits, batch.targets), batch.targets)
            if told is not None:
                told(number + 1, feed.validation_count)
        return score
