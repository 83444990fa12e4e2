"""What a thin cut would give a large model over slow links: simulated, and built nowhere."""

from dataclasses import dataclass

from thinwire.model import architecture
from thinwire.plan import estimate_costs
from thinwire.report.human import human_count
from thinwire.schedule import simulate
from thinwire.settings import Settings
from thinwire.settings.crossing import network_of


@dataclass(frozen=True)
class CutEstimate:
    """How fast a model would train with one kind of cut: simulated, not measured."""

    name: str  # "dense bf16"
    bytes_per_token: float  # at one cut, both ways
    step_seconds: float
    tokens_per_s: float
    bound: str  # what limits the step


@dataclass(frozen=True)
class CutComparison:
    """Dense bf16 against a thin cut: one model, the same stages and links."""

    model: str
    parameters: int
    stages: int
    tflops: float
    mbps: float
    latency_ms: float
    dense: CutEstimate
    thin: CutEstimate

    @property
    def speedup(self) -> float:
        """How many times as many tokens per second the thin cut gives."""
        return self.thin.tokens_per_s / self.dense.tokens_per_s

    def text(self) -> str:
        """A few lines for a person."""
        arms = (self.dense, self.thin)
        width = max(len(arm.name) for arm in arms)
        lines = [
            f"Simulated: a model of {human_count(self.parameters)} parameters ({self.model}) over "
            f"{self.stages} stages of {self.tflops:g} TFLOP/s, links of {self.mbps:g} Mbps and "
            f"{self.latency_ms:g} ms"
        ]
        for arm in arms:
            lines.append(
                f"  {arm.name:<{width}}  {arm.bytes_per_token:>10,.0f} bytes per token at a cut"
                f"  {arm.tokens_per_s:>10,.0f} tokens/s"
            )
        return "\n".join([*lines, f"  the thin cut is {self.speedup:,.1f}x faster"])


def compare_cuts(
    preset: str,
    tflops: float,
    rank: int,
    codecs: tuple[str, str] = ("int8", "int4"),
    stages: int = 8,
    microbatches: int = 32,
    mbps: float = 80.0,
    latency_ms: float = 25.0,
) -> CutComparison:
    """What a thin cut would give a preset over slow links, without measuring or building it.

    `tflops` is the rate that each stage reaches. A microbatch is one sequence, and twice the
    stages are in flight, which hides the latency from both arms.
    """

    def settings(mode: str, width: int, forward: str, backward: str) -> Settings:
        link = {"emulate": True, "mbps_up": mbps, "mbps_down": mbps, "latency_ms": latency_ms}
        return Settings.from_plain(
            {
                "model": {"preset": preset},
                "pipeline": {"stages": stages, "microbatches": microbatches},
                "link": link,
                "boundary": {"mode": mode, "rank": width},
                "codec": {"forward": forward, "backward": backward},
                "train": {"batch": microbatches},
            }
        )

    dense = settings("dense", 0, "bf16", "bf16")
    thin = settings("projected", rank, *codecs)
    name = f"projected rank {rank}, {codecs[0]} forward, {codecs[1]} back"
    return CutComparison(
        model=preset,
        parameters=architecture(dense.model).parameter_count(),
        stages=stages,
        tflops=tflops,
        mbps=mbps,
        latency_ms=latency_ms,
        dense=_cut_estimate("dense bf16", dense, tflops * 1e12),
        thin=_cut_estimate(name, thin, tflops * 1e12),
    )


def _cut_estimate(name: str, settings: Settings, flops_per_s: float) -> CutEstimate:
    costs = estimate_costs(settings, flops_per_s)
    step = simulate(settings.schedule(), costs, network_of(settings), steps=2)
    crossing = costs.forward_bytes[0] + costs.backward_bytes[0]
    return CutEstimate(
        name=name,
        bytes_per_token=crossing / settings.tokens_per_microbatch,
        step_seconds=step.step_seconds,
        tokens_per_s=settings.tokens_per_step / step.step_seconds,
        bound=step.bound,
    )
