"""The end of a run as tables for a terminal.

They read at 80 columns, without colour and in ASCII. "-" stands for a number that is not known.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.box import Box
from rich.console import Console, Group, RenderableType
from rich.table import Column, Table

from thinwire.report.human import ABSENT, elapsed, human_bytes, loss_text, percent

Summary = Mapping[str, Any]

_VALIDATION_KINDS = ("EVALUATE", "VALIDATED", "PROBE")  # what a run sends only to be scored
# Eight rows of a box, of which only the third, the rule under the head, is drawn.
_HEAD_RULE = Box("    \n" * 2 + " -- \n" + "    \n" * 5, ascii=True)


def summary_table(summary: Summary) -> RenderableType:
    """What one run reached, what crossed its links, and where its time went."""
    parts: list[RenderableType] = [_facts(summary)]
    if summary["cuts"]:
        parts.append(_cut_table(summary))
    if summary["time_shares"]:
        parts.append(_time_table(summary))
    return Group(*parts)


def print_summary(summary: Summary) -> None:
    """Print the table of a run that has ended, and where its files are."""
    Console(highlight=False).print(summary_table(summary))
    for what, path in summary["paths"].items():
        if path and Path(path).exists():
            print(f"{what + ':':<12}{path}")


def _facts(summary: Summary) -> RenderableType:
    """What is known, a line each."""
    ratio, sent, timed = summary["ratio_vs_bf16"], summary["bytes_sent"], summary["timed"]
    spent = (f"{elapsed(s)} {what}" for what, s in summary["seconds"].items() if s)
    bubble, simulated = (summary[f"{kind}bubble_fraction"] for kind in ("", "simulated_"))
    beside = summary.get("beside_bytes") or {}  # checkpoints, states and ids of other machines
    rows = {
        "validation loss": _validation(summary),
        "training loss": f"{loss_text(summary['last_train_loss'])} in the last step, "
        f"{loss_text(summary['final_train_loss'])} in the mean of the last "
        f"{summary['final_train_loss_steps']}",
        "steps": _steps(summary),
        "speed": f"{_number(summary['tokens_per_s'], ',.0f')} tokens/s over {timed['steps']:,} "
        "steps",
        "time": f"{elapsed(summary['total_seconds'])}: {', '.join(spent)}",
        "step time": f"{elapsed(summary['step_seconds_median'])} (median), of which "
        f"{percent(bubble)} is not compute; simulated "
        f"{elapsed(summary['simulated_step_seconds'])}, {percent(simulated)}",
        "bytes at the cuts": f"{against_bf16(ratio)}, headers included",
        "bytes sent": _bytes_sent(sent) if sent else "",
        "control stream": f"{human_bytes(summary['control_bytes'])} between stages and coordinator",
        "beside the cuts": ", ".join(f"{human_bytes(n)} of {what}" for what, n in beside.items()),
        "settings": f"hash {summary['config_hash']}, seed {summary['seed']}",
    }
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for name, told in rows.items():
        if told:
            grid.add_row(name, told)
    return grid


def _validation(summary: Summary) -> str:
    losses = summary["valid_losses"]
    if not losses:
        return ABSENT
    told = " -> ".join(loss_text(loss) for _, loss in [*losses[:-1][:1], losses[-1]])
    return f"{told} nats per token (step {losses[-1][0]:,}), of {summary['valid_tokens']:,} tokens"


def _steps(summary: Summary) -> str:
    done, first, epochs = summary["steps"], summary["first_step"], summary["epochs"]
    text = f"{done:,} of {summary['steps_planned']:,}"
    if first:
        text += f"; this run resumed at step {first:,}"
    if epochs > 1:
        text += f"; the run was formed {epochs:,} times"
    if (again := summary["steps_run"] - (done - first)) > 0:
        text += f"; {again:,} trained twice, since a peer was lost after them"
    return text


def _bytes_sent(sent: Mapping[str, Any]) -> str:
    scored = human_bytes(sum(sent["by_kind"].get(kind, 0) for kind in _VALIDATION_KINDS))
    return f"{human_bytes(sent['total'])} between stages, {scored} of it for validations"


def _cut_table(summary: Summary) -> RenderableType:
    names = "forward", "backward", "dense bf16\none way", "bytes vs\ndense bf16", "busier\nuplink"
    table = plain_table("Bytes per token at each cut", "cut", "stages", *number_columns(*names))
    for row in summary["cuts"]:
        sizes = (row[f"{name}_bytes_per_token"] for name in ("forward", "backward", "bf16"))
        table.add_row(
            str(row["cut"]),
            f"{row['cut']}, {row['cut'] + 1}",
            *(_number(size, ",.1f") for size in sizes),
            saving(row["ratio_vs_bf16"]),
            percent(row["link_utilisation"]),
        )
    return table


def _time_table(summary: Summary) -> RenderableType:
    """A row per stage; reasons to wait that no stage had are left out."""
    rows = summary["time_shares"]
    waits = [why for why in rows[0]["wait_for"] if any(r["wait_for"][why] >= 5e-4 for r in rows)]
    names = ["compute", "update", *(f"wait for\n{why}" for why in waits), "other"]
    table = plain_table("Where the time of a step went", "stage", *number_columns(*names))
    for row in rows:
        waited = [row["wait_for"][why] for why in waits]
        shares = [row["compute"], row["update"], *waited, row["other"]]
        table.add_row(str(row["stage"]), *map(percent, shares))
    return table


def _number(value: float | None, form: str) -> str:
    if value is None or not math.isfinite(value):
        return ABSENT
    return format(value, form)


def saving(ratio: float | None) -> str:
    """How the bytes compare with those of dense bf16, with its direction: "12.3x fewer"."""
    if ratio is None or not math.isfinite(ratio) or ratio <= 0:
        return ABSENT
    factor = max(ratio, 1 / ratio)
    if factor < 1.005:
        return "no saving"
    number = f"{factor:,.0f}" if factor >= 99.95 else f"{factor:#.3g}"
    return f"{number}x {'fewer' if ratio > 1 else 'more'}"


def against_bf16(ratio: float | None) -> str:
    """The same as a sentence has it: "12.3x fewer bytes than dense bf16"."""
    text = saving(ratio)
    if text == ABSENT:
        return ABSENT
    return f"{text} over dense bf16" if text == "no saving" else f"{text} bytes than dense bf16"


def plain_table(title: str, *columns: Column | str) -> Table:
    """An empty table with a title and a rule under its head, as all of ours are."""
    return Table(
        *columns, title=f"\n{title}", title_justify="left", title_style="bold", header_style="dim",
        box=_HEAD_RULE, show_edge=False, padding=(0, 1), pad_edge=False,
    )  # fmt: skip


def number_columns(*names: str) -> list[Column]:
    """Columns to the right, whose numbers are never broken over lines."""
    return [Column(name, justify="right", no_wrap=True) for name in names]
