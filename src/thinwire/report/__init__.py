"""What a person sees of a run: live display, metrics on disk, plots, tables. Floor 1.

This room receives plain records and knows nothing of how they come about. The plots are
imported from `thinwire.report.plots`, apart from the rest, since matplotlib is slow to load.
"""

from thinwire.report.display import Display, PlainDisplay, open_display
from thinwire.report.metrics import MetricsWriter, read_metrics
from thinwire.report.records import (
    EvaluationRecord,
    LinkRecord,
    StageRecord,
    StepRecord,
    Timeline,
    TraceSpan,
    read_timeline,
    write_timeline,
)
from thinwire.report.table import as_text, comparison_table, summary_table

__all__ = [
    "Display",
    "EvaluationRecord",
    "LinkRecord",
    "MetricsWriter",
    "PlainDisplay",
    "StageRecord",
    "StepRecord",
    "Timeline",
    "TraceSpan",
    "as_text",
    "comparison_table",
    "open_display",
    "read_metrics",
    "read_timeline",
    "summary_table",
    "write_timeline",
]
