"""The end of a run, and several runs beside each other, as tables for a terminal.

They read at 80 columns, without colour and in ASCII. A number that a summary lacks is "-".
"""

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import Box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from thinwire.report.human import ABSENT, duration, human_bytes, percent

Summary = Mapping[str, Any]

# Eight rows of a box, of which only the third, the rule under the head, is drawn.
_HEAD_RULE = Box("    \n" * 2 + " -- \n" + "    \n" * 5, ascii=True)


def summary_table(summary: Summary) -> RenderableType:
    """What one run reached, what crossed its links, and where its time went."""
    parts: list[RenderableType] = [_facts(summary)]
    if summary.get("boundaries"):
        parts.append(_boundary_table(summary))
    if summary.get("time_shares"):
        parts.append(_time_table(summary))
    return Group(*parts)


def comparison_table(summaries: Mapping[str, Summary]) -> RenderableType:
    """One row per run, so that any number of runs fits the width.

    Bytes per token are those of each run's busiest boundary, the one that sets its pace.
    """
    table = _table("Runs")
    table.add_column("run", overflow="fold")
    for name in ("valid\nloss", "tok/s", "fwd\nB/token", "bwd\nB/token", "vs bf16"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("hours to\n1B tokens", justify="right", no_wrap=True)
    for run, summary in summaries.items():
        speed = summary.get("tokens_per_s") or math.nan
        table.add_row(
            Text(run),
            _number(summary.get("final_valid_loss"), ".4f"),
            _number(speed, ",.0f"),
            _number(_busiest(summary, "forward_bytes_per_token"), ",.1f"),
            _number(_busiest(summary, "backward_bytes_per_token"), ",.1f"),
            _times(summary.get("ratio_vs_bf16")),
            _number(1e9 / speed / 3600, ",.1f"),
        )
    return table


def as_text(renderable: RenderableType, width: int = 80) -> str:
    """The table as plain text, for files and for streams that are no terminal."""
    buffer = io.StringIO()
    # an explicit terminal setting: colours must not leak in from the environment
    console = Console(file=buffer, width=width, force_terminal=False, color_system=None)
    console.print(renderable)
    lines = buffer.getvalue().splitlines()
    return "".join(line.rstrip() + "\n" for line in lines)


def _facts(summary: Summary) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    grid.add_row("validation loss", Text(_validation(summary), style="bold"))
    if summary.get("accuracies"):
        grid.add_row("accuracy", Text(_accuracy(summary["accuracies"]), style="bold"))
    grid.add_row("training loss", _training(summary))
    grid.add_row(
        "speed",
        f"{_number(summary.get('tokens_per_s'), ',.0f')} {_unit(summary)}s/s, "
        f"{_number(summary.get('steps'), ',')} steps in "
        f"{duration(summary.get('total_seconds', math.nan))}",
    )
    grid.add_row(
        "step time",
        f"{_number(summary.get('step_seconds_median'), '.3f')} s measured (median), "
        f"{_number(summary.get('simulated_step_seconds'), '.3f')} s simulated{_gap(summary)}",
    )
    grid.add_row("pipeline bubble", f"{percent(summary.get('bubble_fraction'))} of the step")
    grid.add_row("bytes vs bf16", f"{_times(summary.get('ratio_vs_bf16'))} over all boundaries")
    if summary.get("bytes_sent"):
        grid.add_row("bytes sent", _bytes_sent(summary["bytes_sent"]))
    grid.add_row("busiest uplink", percent(summary.get("link_utilisation")))
    if summary.get("space"):
        _add_space(grid, summary["space"])
    grid.add_row(
        "config", f"{summary.get('config_hash', ABSENT)}, seed {summary.get('seed', ABSENT)}"
    )
    return grid


def _validation(summary: Summary) -> str:
    losses = summary.get("valid_losses") or []
    final = _number(summary.get("final_valid_loss"), ".4f")
    if len(losses) < 2:
        return final
    (first_step, first), (last_step, _) = losses[0], losses[-1]
    return f"{_number(first, '.4f')} -> {final}  (step {first_step:,} -> {last_step:,})"


def _accuracy(accuracies: Sequence[tuple[int, float]]) -> str:
    """As `_validation` shows the loss; the steps are the same."""
    shown = [f"{_number(100 * accuracy, '.2f')} %" for _, accuracy in accuracies]
    return " -> ".join(dict.fromkeys((shown[0], shown[-1])))


def _training(summary: Summary) -> str:
    mean, last = summary.get("final_train_loss"), summary.get("last_train_loss")
    if mean is None:
        return ABSENT
    return f"{_number(mean, '.4f')} (mean of the last 10 steps), last {_number(last, '.4f')}"


def _bytes_sent(sent: Summary) -> str:
    validations = human_bytes(sent["by_kind"].get("EVALUATE", 0))
    return f"{human_bytes(sent['total'])} over all links, {validations} of it for validations"


def _add_space(grid: Table, space: Summary) -> None:
    grid.add_row("subspace drift", f"{_number(space.get('largest_drift'), '.1e')} at most")
    moves = space.get("moves") or []
    if moves:
        before, after = percent(moves[0]["energy_before"]), percent(moves[-1]["energy_after"])
        grid.add_row("basis moves", f"{len(moves):,}, captured energy {before} -> {after}")


def _gap(summary: Summary) -> str:
    measured, simulated = summary.get("step_seconds_median"), summary.get("simulated_step_seconds")
    if not measured or not simulated or not math.isfinite(measured / simulated):
        return ""
    return f" ({100 * (measured / simulated - 1):+.0f} %)"


def _boundary_table(summary: Summary) -> RenderableType:
    table = _table(f"Bytes per {_unit(summary)} at each boundary")
    for name in ("boundary", "forward", "backward", "bf16 one way", "vs bf16", "link busy"):
        table.add_column(name, justify="left" if name == "boundary" else "right", no_wrap=True)
    for row in summary["boundaries"]:
        table.add_row(
            f"{row['boundary']} -> {row['boundary'] + 1}",
            _number(row.get("forward_bytes_per_token"), ",.1f"),
            _number(row.get("backward_bytes_per_token"), ",.1f"),
            _number(row.get("bf16_bytes_per_token"), ",.1f"),
            _times(row.get("ratio_vs_bf16")),
            percent(row.get("link_utilisation")),
        )
    return table


def _time_table(summary: Summary) -> RenderableType:
    table = _table("Where the time went")
    table.add_column("stage", no_wrap=True)
    kinds = ("compute", "wait", "update", "other")
    for kind in kinds:
        table.add_column(kind, justify="right", no_wrap=True)
    for row in summary["time_shares"]:
        table.add_row(str(row["stage"]), *(percent(row.get(kind)) for kind in kinds))
    return table


def _unit(summary: Summary) -> str:
    """What the numbers per token are of: tokens, or images."""
    return str(summary.get("unit", "token"))


def _busiest(summary: Summary, key: str) -> float | None:
    known = [row[key] for row in summary.get("boundaries") or [] if row.get(key) is not None]
    return max(known, default=None)


def _number(value: float | None, form: str) -> str:
    if value is None or not math.isfinite(value):
        return ABSENT
    return format(value, form)


def _times(ratio: float | None) -> str:
    text = _number(ratio, ".3g" if ratio is not None and abs(ratio) < 100 else ",.0f")
    return text if text == ABSENT else f"{text}x"


def _table(title: str) -> Table:
    return Table(
        title=f"\n{title}", title_justify="left", title_style="bold", header_style="dim",
        box=_HEAD_RULE, show_edge=False, padding=(0, 1), pad_edge=False,
    )  # fmt: skip
