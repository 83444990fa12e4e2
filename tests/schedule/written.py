"""Schedules as they print, read back: so tests can write broken ones by hand."""

import re

from thinwire.schedule import NO_MICROBATCH, Action, Kind, Schedule


def written(text):
    """The schedule whose text begins as `x stages=1 microbatches=1 window=1`, then a line a row."""
    header, *lines = text.splitlines()
    name, *sizes = header.split()
    rows = tuple(
        tuple(
            Action(int(stage), Kind(kind), int(microbatch or NO_MICROBATCH))
            for stage, kind, microbatch in re.findall(r"(\d+)([FBU])(\d*)", line)
        )
        for line in lines
    )
    return Schedule(name, *(int(size.partition("=")[2]) for size in sizes), rows)
