"""When a checkpoint of all stages counts, and what to do when weights are lost."""

import itertools
from pathlib import Path

from thinwire.engine.reports import Agreements
from thinwire.engine.worker import PATIENCE
from thinwire.errors import StageError


def divergence(misses: int, step: int, good: Path | None) -> StageError | None:
    """Why to give up, with a way back, once updates have been refused too often in a row."""
    if misses < PATIENCE:
        return None
    return StageError(
        f"gradients were not finite in {misses} steps in a row, up to step {step}: "
        f'{way_back(good)} with a lower optim.lr, or with codec.backward = "fp32"'
    )


def way_back(good: Path | None) -> str:
    """Where the last good weights of a run are, and what to do with them or without any."""
    if good is None:
        return "no good checkpoint exists. Start a new run"
    return f"the last good weights are in {good}. Resume from there"


def check_agreement(step: int, agreements: list[Agreements]) -> None:
    """End the run when two ends of a cut remember different things; stages in their order."""
    for below, above in itertools.pairwise(agreements):
        for cut in sorted(below.keys() & above.keys()):
            for leg, ours in below[cut].items():
                if ours != above[cut][leg]:
                    raise StageError(
                        f"after step {step} the two ends of cut {cut} no longer remember the "
                        f"same on the {leg} leg (below {ours or 'nothing'}, above "
                        f"{above[cut][leg] or 'nothing'}): what the codec makes of the bytes is "
                        "not what was sent. This checkpoint is not kept; resume from an earlier one"
                    )
