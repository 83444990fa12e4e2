"""What the coordinator tells this room about a run, as plain frozen data. Bytes, frame headers
included, and seconds are those of one step unless a name says otherwise.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class StageRecord:
    """How one stage spent one step."""

    stage: int
    layers: str  # "embed+0..1"
    compute_s: float
    wait_s: float
    update_s: float
    device: str


@dataclass(frozen=True)
class LinkRecord:
    """What crossed a cut, which lies between the stage of its number and the next, in one step."""

    cut: int
    forward_bytes: int
    backward_bytes: int
    utilisation: float  # of the busier uplink of its two ends, 0..1; NaN where no rate is known


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step. `step` counts from 1, so the last one has step == steps."""

    step: int
    steps: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int  # seen since the beginning of the run
    tokens_per_s: float
    step_seconds: float
    eta_seconds: float
    stages: list[StageRecord]
    links: list[LinkRecord]
    measures: dict[str, float] = field(default_factory=dict)  # of the method: drift, energy, ...


@dataclass(frozen=True)
class EvaluationRecord:
    """The validation loss after a step; bits per byte where the tokenizer's ratio is known."""

    step: int
    loss: float
    bits_per_byte: float | None = None


@dataclass(frozen=True)
class TraceSpan:
    """One bar of a step's timeline, in seconds since the step began."""

    stage: int
    lane: str  # "compute", "send" or "wait"
    label: str  # "F0", "B3", "U" on compute; "F0>", "<B0" on send
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The spans of one step, in seconds since it began on the first stage."""

    run: str
    step: int  # counts from 1
    seconds: float  # of the step, as the first stage sees it
    stages: list[StageRecord]
    spans: list[TraceSpan]

    def title(self) -> str:
        """What a chart of it is called."""
        return f"{self.run}: step {self.step}, {self.seconds:.3g} s"
