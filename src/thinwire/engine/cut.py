"""The cuts of a run as codecs see them: where a tensor is packed, and what ends remember.

What a codec remembers belongs to the cut, named by the block above it, so it is found again
whatever the stages are called. Both ends remember alike, also a step that is refused.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from thinwire.codec import Codec, Leg, Place, Surroundings, TensorSpec, build_codecs
from thinwire.engine.checkpoint import Checkpoint, Source, Versions
from thinwire.engine.feed import Feed
from thinwire.errors import CheckpointError
from thinwire.settings import Settings
from thinwire.wire import Frame, FrameKind

MEMORY = "codec/"  # in a checkpoint as codec/BLOCK/LEG/send or receive/NAME

_ACTIVATIONS = FrameKind.FORWARD, FrameKind.EVALUATE, FrameKind.PROBE
LEGS = {FrameKind.BACKWARD: Leg.BACKWARD} | dict.fromkeys(_ACTIVATIONS, Leg.FORWARD)
TRAINING = (FrameKind.FORWARD, FrameKind.BACKWARD)  # of the others no codec remembers anything


@dataclass(eq=False)
class CutEnd:
    """One stage's end of one cut: the codec that sends, the one that receives, their memory."""

    codecs: dict[Leg, Codec]
    spec: TensorSpec
    is_lower: bool = True
    cut: int = 0
    block: int = 0  # above the cut
    seed: int = 0
    # For codecs that remember them: (step, microbatch) -> the training examples of its rows.
    examples: Callable[[int, int], tuple[int, ...]] | None = None

    @classmethod
    def build(
        cls,
        settings: Settings,
        cut: int,
        is_lower: bool,
        spec: TensorSpec,
        feed: Feed | None = None,
        scratch: Path | None = None,
    ) -> "CutEnd":
        """The end of a run's cut, with no memory yet; `scratch` is where it may keep much. Without
        a feed nothing is known of training examples: for validation and text.
        """
        codecs, block = build_codecs(*settings.codec.names(cut)), settings.split()[cut].stop
        examples = feed.examples if feed is not None else None
        end = cls(codecs, spec, is_lower, cut, block, settings.run.seed, examples)
        count = feed.example_count if feed is not None else 0
        for leg, codec in codecs.items():
            folder = None
            if scratch is not None and codec.remembers_examples:
                folder = scratch / memory_prefix(block, leg, is_lower)
                folder.mkdir(parents=True, exist_ok=True)
            codec.prepare(spec, Surroundings(count, settings.codec.memory_mb << 20, folder))
        return end

    def place(self, leg: Leg, step: int, microbatch: int, training: bool) -> Place:
        """Where in the run a tensor of this cut is packed."""
        examples = None
        if training and self.examples and any(c.remembers_examples for c in self.codecs.values()):
            examples = self.examples(step, microbatch)
        return Place(leg, step, microbatch, self.cut, self.seed, training, examples)

    def pack(
        self, kind: FrameKind, tensor: Tensor, step: int, number: int, made_with: Versions
    ) -> Frame:
        """The frame that takes a tensor of this stage to its neighbour."""
        codec = self.codecs[LEGS[kind]]
        sender = self.cut if self.is_lower else self.cut + 1
        versions = made_with.weight_version, made_with.basis_version
        payload = codec.pack(tensor.to(self.spec.dtype), self._place_of(kind, step, number))
        return Frame(kind, sender, step, number, *versions, codec.tag, tuple(tensor.shape), payload)

    def unpack(self, frame: Frame) -> Tensor:
        """The tensor in a frame of the neighbour."""
        place = self._place_of(frame.kind, frame.step, frame.microbatch)
        return self.codecs[place.leg].unpack(frame.payload, self.spec, place)

    def _place_of(self, kind: FrameKind, step: int, number: int) -> Place:
        """Both probes of a move of the basis are packed at one place, so chance is the same."""
        microbatch = 0 if kind is FrameKind.PROBE else number
        return self.place(LEGS[kind], step, microbatch, kind in TRAINING)

    def agreements(self) -> dict[str, str]:
        """Fingerprints, by leg, of what both ends of this cut must remember alike."""
        return {leg.value: codec.agreement() for leg, codec in self.codecs.items()}

    def state_tensors(self) -> dict[str, Tensor]:
        """What this end remembers, by the names that it has in a checkpoint."""
        return {
            memory_prefix(self.block, leg, self.is_lower) + name: tensor
            for leg, codec in self.codecs.items()
            for name, tensor in codec.state_tensors().items()
        }

    def load(self, source: Source) -> None:
        """Remember what the source's run did at this cut; CheckpointError when it cannot."""
        saved = memories(source.settings)
        for leg, codec in self.codecs.items():
            # Where another codec was there, or no cut, it begins anew, on both ends.
            if not codec.remembers or saved.get((self.block, leg)) != codec.name:
                continue
            prefix = memory_prefix(self.block, leg, self.is_lower)
            try:
                codec.load_state_tensors(source.tensors_under(prefix))
            except ValueError as error:
                raise CheckpointError(
                    f"the memory of {codec.name} on the {leg.value} leg of cut {self.cut} in "
                    f"{source} does not fit this run: {error}. Resume with the same batch and "
                    "microbatches, or with codecs without memory"
                ) from error


Ends = tuple[CutEnd | None, CutEnd | None]  # of the cut below a stage and of the one above


def cuts_of(settings: Settings, stage: int) -> list[tuple[int, bool]]:
    """The cuts that a stage is at, the one below it first, and whether it is their lower end."""
    both = (stage - 1, False), (stage, True)
    return [(cut, is_lower) for cut, is_lower in both if 0 <= cut < settings.pipeline.stages - 1]


def ends_of(settings: Settings, stage: int, spec: TensorSpec, feed: Feed, scratch: Path) -> Ends:
    """A stage's ends of the cut below it and of the one above, where there are such cuts."""
    found = {
        is_lower: CutEnd.build(settings, cut, is_lower, spec, feed, scratch)
        for cut, is_lower in cuts_of(settings, stage)
    }
    return found.get(False), found.get(True)


def memory_prefix(block: int, leg: Leg, is_lower: bool) -> str:
    """How the names begin that one end of the cut before a block gives what it remembers."""
    role = "send" if (leg is Leg.FORWARD) == is_lower else "receive"
    return f"{MEMORY}{block}/{leg.value}/{role}/"


def codecs_of(settings: Settings) -> dict[int, dict[Leg, Codec]]:
    """The codecs of each cut, from the first on, by the block above it."""
    cuts = enumerate(settings.split()[:-1])
    return {blocks.stop: build_codecs(*settings.codec.names(cut)) for cut, blocks in cuts}


def memories(settings: Settings) -> dict[tuple[int, Leg], str]:
    """The codecs that remember something, by the block above their cut and by leg."""
    cuts = codecs_of(settings).items()
    return {
        (block, leg): codec.name
        for block, codecs in cuts
        for leg, codec in codecs.items()
        if codec.remembers
    }


def are_cuts_learned(settings: Settings) -> bool:
    """Whether a run that moved its cuts would lose what it learned: narrow cuts, and memories."""
    return settings.boundary.mode != "dense" or bool(memories(settings))


def check_memory(settings: Settings, checkpoint: Checkpoint) -> list[str]:
    """Refuse a resume in which a cut with a memory is gone; returns what begins without one. Who
    resumes with codecs that remember nothing has chosen that: it is only said.
    """
    saved, now, cuts = memories(checkpoint.settings), memories(settings), codecs_of(settings)
    # A run without cuts still says which codecs it would use.
    used, notes = [*cuts.values()] or [build_codecs(*settings.codec.names(0))], list[str]()
    for (block, leg), name in saved.items():
        if block in cuts:
            continue
        lost = f"the memory of {name} on the {leg.value} leg of the cut before block {block}"
        if any(codecs[leg].remembers for codecs in used):
            split = [len(blocks) for blocks in checkpoint.settings.split()]
            raise CheckpointError(
                f"{checkpoint.folder} holds {lost}, but this run has no cut there: resume with "
                f"pipeline.split = {split} as before, with a finer one, or with codecs without "
                f"memory; or start a new run from its weights: --init-from {checkpoint.folder}"
            )
        notes.append(f"{lost} is dropped: this run has no cut there")
    return notes + [
        f"{name} is new on the {leg.value} leg of the cut before block {block} and starts with an "
        "empty memory"
        for (block, leg), name in now.items()
        if saved.get((block, leg)) != name
    ]
