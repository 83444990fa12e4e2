"""Schedules as data: what each stage computes in which order, drawn and simulated."""

from thinwire.schedule.build import (
    OPEN,
    Action,
    Counts,
    Kind,
    PipelineConfig,
    Schedule,
    build,
    deal,
    split_layers,
)
from thinwire.schedule.simulator import (
    ROW_FRAME_BYTES,
    Costs,
    Links,
    Simulation,
    Span,
    cells,
    grid,
    simulate,
    window_table,
)
