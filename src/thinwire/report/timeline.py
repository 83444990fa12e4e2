"""The timeline of one step of a run: what each stage computed, sent and waited for, and when.

A run keeps that of a typical step as JSON beside its plots, so that runs can be compared later.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from thinwire.errors import ThinwireError
from thinwire.report.records import StageRecord, TraceSpan, revived


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


def write_timeline(timeline: Timeline, path: Path) -> None:
    """Write it as one JSON object."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dataclasses.asdict(timeline), allow_nan=False) + "\n")


def read_timeline(path: Path) -> Timeline:
    """What `write_timeline` wrote; ThinwireError when it cannot be read."""
    try:
        return revived(Timeline, json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ThinwireError(
            f"{path} is not the timeline of a step: {error}. `thinwire train` writes one "
            "when a run ends"
        ) from error
