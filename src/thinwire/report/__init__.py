"""What a person sees of a run: live display, metrics on disk, plots, tables.

This room receives plain records and knows nothing of how they come about. The plots are
imported from `thinwire.report.plots`, apart from the rest, since matplotlib is slow to load.
"""

from thinwire.report.display import Display, PlainDisplay, open_display
from thinwire.report.metrics import MetricsWriter
from thinwire.report.records import EvaluationRecord, StepRecord, Timeline
from thinwire.report.table import print_summary, summary_table
