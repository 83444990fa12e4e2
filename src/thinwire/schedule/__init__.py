"""Schedules as data: what each stage computes in which order, drawn and simulated."""

from thinwire.schedule.build import (
    OPEN,
    Counts,
    PipelineConfig,
    Schedule,
    build,
    deal,
    split_layers,
)
from thinwire.schedule.simulator import Costs, Links, Simulation, grid, simulate, window_table
