"""`python -m thinwire_lab.audits`: members of a hosted run that lie, and how soon that is found.

The second of three members begins to lie once a stand-by follows its stage and compares. The
stand-by computes as the others do, or by other kernels, as another CPU would. Honest members show
how often there is a false alarm.
"""

import argparse
import dataclasses
import re
import tempfile
from pathlib import Path
from typing import Any

import thinwire_lab
from thinwire.settings import merged
from thinwire_lab.bench_link import Row, show
from thinwire_lab.deaths import SMALL, STAGES, Hosted, settings_of

LIES = ("none", "scale", "skip", "noise")
OTHER_KERNELS = {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
LONGEST = 1_000_000  # steps: the runs are ended before


def audited(folder: Path, lie: str, is_alike: bool, steps: int, codec: str) -> Row:
    """A run whose second member lies so, until that is found or for so many steps."""
    folder.mkdir()
    begins = folder / "from"
    liar = {
        "PYTHONPATH": str(Path(thinwire_lab.__file__).parent / "lying"),
        "THINWIRE_LIE": lie,
        "THINWIRE_LIE_FROM": str(begins),
    }
    changes: dict[str, dict[str, Any]] = {
        "train": {"audit": True, "checkpoint_every": 50},
        "codec": {"forward": codec, "backward": codec},
    }
    settings = settings_of(folder, "audited", merged(SMALL, changes), LONGEST)
    # The slowest, which lies and is followed, gets the smallest stage: the one in the middle.
    pipeline = dataclasses.replace(settings.pipeline, split=[3, 1, 2])
    settings = dataclasses.replace(settings, pipeline=pipeline)
    with Hosted(folder, settings) as hosted:
        run = hosted.run
        for number in range(1, STAGES + 1):
            hosted.join(number, liar if number == 2 else None)
        hosted.join(STAGES + 1, None if is_alike else OTHER_KERNELS)
        expected = run.leader.find(r"compares what it sends; expected: ([\w ]+)")
        run.wait_for(len(run.rows()) + 20)
        first = len(run.rows()) + 5
        begins.write_text(str(first))
        run.leader.wait_until(
            lambda: "[audit]" in run.leader.text() or len(run.rows()) >= first + steps, "an end"
        )
        told = re.search(r"\[audit\].*?the (\w+) of step (\d+), .*?, (.*?)\. ", run.leader.text())
        return {
            "lie": lie,
            "codec": codec,
            "expected": expected,
            "lied for steps": len(run.rows()) - first,
            "found at the lie's step": int(told[2]) - first + 1 if told else "never",
            "tensor": told[1] if told else "",
            "by how much": told[3] if told else "",
        }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m thinwire_lab.audits", description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="after which nothing is found")
    parser.add_argument("--lies", nargs="+", default=LIES, choices=LIES)
    parser.add_argument("--codec", default="bf16", help="of both legs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="thinwire-audits-") as scratch:
        rows = []
        for lie in options.lies:
            for is_alike in (True, False):
                folder = Path(scratch) / f"{lie}-{is_alike}"
                rows.append(audited(folder, lie, is_alike, options.steps, options.codec))
                print(rows[-1], flush=True)
        show(rows)


if __name__ == "__main__":
    main()
