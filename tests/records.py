"""Steps as a run records them, for tests that show or store them."""

import math

from thinwire.report.records import LinkRecord, StageRecord, StepRecord


def step_record(step=40, steps=200, stage_count=3, **changes):
    """A believable step of a run over `stage_count` stages, any field replaceable."""
    stages = [StageRecord(s, f"{2 * s}..{2 * s + 1}", 0.75, 0.4, 0.05, "cpu")
              for s in range(stage_count)]  # fmt: skip
    links = [LinkRecord(b, 1_200_000, 2_300_000, 0.83 if b == 0 else math.nan)
             for b in range(stage_count - 1)]  # fmt: skip
    values = {"loss": 5.1234, "lr": 3e-4, "grad_norm": 1.25, "tokens": step * 4096,
              "tokens_per_s": 3412.4, "step_seconds": 1.25, "eta_seconds": 192.0,
              "stages": stages, "links": links}  # fmt: skip
    return StepRecord(step, steps, **(values | changes))
