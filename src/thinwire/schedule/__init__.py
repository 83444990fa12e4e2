"""Schedules as data: what each stage computes in which order, checked, drawn and simulated."""

from thinwire.schedule.action import NO_MICROBATCH, Action, Kind, Schedule
from thinwire.schedule.build import (
    OPEN,
    Counts,
    PipelineConfig,
    build,
    deal,
    forward_only,
    in_flight,
    split_layers,
    stage_window,
    validate,
)
from thinwire.schedule.play import CONTROL_BYTES, ROW_FRAME_BYTES, Costs, Links, Network, Span
from thinwire.schedule.simulate import Simulation, simulate, window_table

__all__ = [
    "CONTROL_BYTES",
    "NO_MICROBATCH",
    "OPEN",
    "ROW_FRAME_BYTES",
    "Action",
    "Costs",
    "Counts",
    "Kind",
    "Links",
    "Network",
    "PipelineConfig",
    "Schedule",
    "Simulation",
    "Span",
    "build",
    "deal",
    "forward_only",
    "in_flight",
    "simulate",
    "split_layers",
    "stage_window",
    "validate",
    "window_table",
]
