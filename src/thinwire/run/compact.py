"""The small form that a step's report has on the control stream.

A report is mostly times. On the wire they are whole microseconds, each span counted from the end
of the one before it, and of the meters only what was sent; the whole is deflated. So a report takes
about an eighth of the bytes that its JSON would.
"""

import itertools
import json
import zlib
from typing import Any

from thinwire.wire import HEADER_BYTES

_LANES = {"c": "compute", "w": "wait", "s": "send"}
_LETTERS = {lane: letter for letter, lane in _LANES.items()}
_MICRO = 1e-6
_LEVEL = 6


def as_text(message: dict[str, Any]) -> bytes:
    """A message as JSON."""
    return json.dumps(message, separators=(",", ":")).encode()


def parsed(text: bytes) -> Any:
    """The inverse of `as_text`; ValueError for what it cannot have made."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def deflate(text: bytes) -> bytes:
    """A text in fewer bytes."""
    return zlib.compress(text, _LEVEL)


def inflate(payload: bytes, limit: int) -> bytes:
    """The inverse of `deflate`; ValueError for what it cannot have made, or is beyond `limit`."""
    reader = zlib.decompressobj()
    try:
        text = reader.decompress(payload, limit)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if not reader.eof:
        raise ValueError(f"it is cut off, or longer than {limit} bytes")
    return text


def compact_step(report: dict[str, Any]) -> dict[str, Any]:
    """A step's report as it travels."""
    return {
        **report,
        "spans": _compact_spans(report["spans"], report["start"]),
        "meters": {link: _compact_counts(meter) for link, meter in report["meters"].items()},
    }


def expand_step(small: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `compact_step`; ValueError, naming the field, for what it cannot have made."""
    report = dict(small)
    for name, expand in (("spans", _expand_spans), ("meters", _expand_meters)):
        if name in report and "start" in report:  # a missing field is reported later
            try:
                report[name] = expand(report)
            except (TypeError, ValueError, LookupError, AttributeError, OverflowError):
                raise ValueError(f"{name} that cannot be read") from None
    return report


def _compact_spans(spans: list[tuple[str, str, float, float]], origin: float) -> list[Any]:
    """Names, gaps and durations; a stage sends while it computes, so sends count for themselves."""
    names, gaps, durations = [], [], []
    ends = {True: 0, False: 0}
    for lane, label, start, end in spans:
        first, last = (round((time - origin) / _MICRO) for time in (start, end))
        names.append(_LETTERS[lane] + label)
        gaps.append(first - ends[lane == "send"])
        durations.append(last - first)
        ends[lane == "send"] = last
    return [" ".join(names), gaps, durations]


def _expand_spans(report: dict[str, Any]) -> list[tuple[str, str, float, float]]:
    names, gaps, durations = report["spans"]
    origin = float(report["start"])
    ends = {True: 0, False: 0}
    spans = []
    for name, gap, duration in zip(names.split(), gaps, durations, strict=True):
        lane = _LANES[name[0]]
        first = ends[lane == "send"] + int(gap)
        last = ends[lane == "send"] = first + int(duration)
        spans.append((lane, name[1:], origin + first * _MICRO, origin + last * _MICRO))
    return spans


def _compact_counts(meter: dict[str, Any]) -> dict[str, list[int]]:
    kinds = meter["sent"].items()
    return {k: [c["frames"], c["payload_bytes"]] for k, c in kinds if k != "total"}


def _expand_meters(report: dict[str, Any]) -> dict[str, Any]:
    return {
        link: {"sent": _expand_counts(counts), "received": {}}
        for link, counts in report["meters"].items()
    }


def _expand_counts(counts: dict[str, list[int]]) -> dict[str, dict[str, int]]:
    total = [sum(int(c[i]) for c in counts.values()) for i in range(2)]
    return {
        kind: {"frames": n, "header_bytes": n * HEADER_BYTES, "payload_bytes": size}
        for kind, (n, size) in itertools.chain(counts.items(), [("total", total)])
    }
