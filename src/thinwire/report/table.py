"""The end of a run as tables for a terminal.

They read at 80 columns, without colour and in ASCII. "-" stands for a number that is not known.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import Box
from rich.console import Console, Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

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
    """What is known of the run, line by line; what is not is left out."""
    settings = "settings", f"hash {summary['config_hash']}, seed {summary['seed']}"
    return fact_grid([*_reached(summary), *_took(summary), *_sent(summary), settings])


def _reached(summary: Summary) -> Iterator[tuple[str, str | Text]]:
    """Losses, and in how many steps they were reached."""
    if losses := summary["valid_losses"]:
        ends = [*losses[:1], *losses[1:][-1:]]  # one alone may be of the start of a run
        loss = " -> ".join(loss_text(loss) for _, loss in ends)
        steps = " -> ".join(f"{step:,}" for step, _ in ends)
        told = f"{loss} nats per token (step {steps}), of {summary['valid_tokens']:,} tokens"
        yield "validation loss", Text(told, style="bold")
    if (mean := summary["final_train_loss"]) is not None:
        last, count = loss_text(summary["last_train_loss"]), summary["final_train_loss_steps"]
        why = "" if math.isfinite(mean) else ", of which one was not finite"
        several = f"{loss_text(mean)} (mean of the last {count} steps{why}), {last} in the last"
        yield "training loss", several if count > 1 else f"{last} in the only step"

    done, first = summary["steps"], summary["first_step"]
    told = f"{done:,} of {summary['steps_planned']:,}"
    if first:
        told += f"; {done - first:,} in this run, which resumed at step {first:,}"
    if (again := summary["steps_run"] - (done - first)) > 0:
        told += f"; {again:,} trained twice, since a peer was lost after them"
    yield "steps", told
    if (epochs := summary["epochs"]) > 1:
        yield "epochs", f"{epochs:,}: the run was formed again after peers left or were lost"


def _took(summary: Summary) -> Iterator[tuple[str, str]]:
    """Where the time went, whose parts add up to the total, and what a step took."""
    timed, parts = summary["timed"], summary["seconds"]
    if count := timed["steps"]:
        warm = "the first 2 of each epoch" if summary["epochs"] > 1 else "the first 2"
        left_out = {
            "steady": f"; not counted: {warm}, and those right after a validation",
            "behind validations": ", each right after a validation, whose end it includes",
            "first": ", which include the warm-up",
        }[timed["which"]]
        steps = f"{count:,} step{'s' if count > 1 else ''} of {timed['tokens_per_step']:,} tokens"
        speed = f"{summary['tokens_per_s']:,.0f} tokens/s"
        yield "speed", f"{speed}: {steps} in {elapsed(timed['seconds'])}{left_out}"
    waiting = f"{elapsed(parts['waiting'])} waiting for peers, " if parts["waiting"] else ""
    told = (
        f"{elapsed(summary['total_seconds'])}: {elapsed(parts['start'])} start, "
        f"{elapsed(parts['training'])} training, {elapsed(parts['validation'])} validation, "
        f"{waiting}{elapsed(parts['other'])} saving and ending"
    )
    yield "time", told
    measured, simulated = summary["step_seconds_median"], summary["simulated_step_seconds"]
    if measured:
        told = f"{elapsed(measured)} measured (median)"
        if simulated and math.isfinite(more := measured / simulated - 1):
            side = f"{abs(more):.0%} {'above' if more >= 0 else 'below'} the {elapsed(simulated)}"
            told += f", {side} simulated from the run's compute times and bytes"
        yield "step time", told
    keys = "bubble_fraction", "simulated_bubble_fraction"
    bubble, simulated = (percent(summary[key]) for key in keys)
    if bubble != ABSENT:
        compared = "" if simulated == ABSENT else f" (simulated: {simulated})"
        yield "bubble", f"{bubble} of the stages' time in a step is not compute{compared}"


def _sent(summary: Summary) -> Iterator[tuple[str, str]]:
    """What crossed which links, and the space that stages share."""
    if (fewer := against_bf16(summary["ratio_vs_bf16"])) != ABSENT:
        yield "bytes at the cuts", f"{fewer}, headers included"
    if sent := summary["bytes_sent"]:
        scored = human_bytes(sum(sent["by_kind"].get(kind, 0) for kind in _VALIDATION_KINDS))
        total = human_bytes(sent["total"])
        yield "bytes sent", f"{total} between stages, {scored} of it for validations"
    if summary["control_bytes"]:
        control = human_bytes(summary["control_bytes"])
        yield "control stream", f"{control} between stages and coordinator, not at the cuts"
    if moved := summary.get("beside_bytes"):  # checkpoints, states and ids of other machines
        parts = (f"{human_bytes(size)} of {what}" for what, size in moved.items())
        yield "beside the cuts", ", ".join(parts)
    if (busy := percent(summary["link_utilisation"])) != ABSENT:
        yield "busiest uplink", f"sends {busy} of the time"
    if space := summary["space"]:
        if (drift := space["largest_drift"]) is not None:
            yield "subspace drift", f"{drift:.1e} at most"
        if moves := space["moves"]:
            before, after = percent(moves[0]["energy_before"]), percent(moves[-1]["energy_after"])
            yield "basis moves", f"{len(moves):,}, captured energy {before} -> {after}"


def _cut_table(summary: Summary) -> RenderableType:
    names = "forward", "backward", "dense bf16\none way", "bytes vs\ndense bf16", "busier\nuplink"
    table = plain_table("Bytes per token at each cut", "cut", "stages", numbers=names)
    for row in summary["cuts"]:
        sizes = (row[f"{name}_bytes_per_token"] for name in ("forward", "backward", "bf16"))
        table.add_row(
            str(row["cut"]),
            f"{row['cut']}, {row['cut'] + 1}",
            *(f"{size:,.1f}" for size in sizes),
            saving(row["ratio_vs_bf16"]),
            percent(row["link_utilisation"]),
        )
    return table


def _time_table(summary: Summary) -> RenderableType:
    """A row per stage; reasons to wait that no stage had are left out."""
    rows = summary["time_shares"]
    waits = [why for why in rows[0]["wait_for"] if any(r["wait_for"][why] >= 5e-4 for r in rows)]
    names = ["compute", "update", *(f"wait for\n{why}" for why in waits), "other"]
    table = plain_table("Where the time of a step went", "stage", numbers=names)
    for row in rows:
        waited = [row["wait_for"][why] for why in waits]
        shares = [row["compute"], row["update"], *waited, row["other"]]
        table.add_row(str(row["stage"]), *map(percent, shares))
    return table


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


def fact_grid(facts: Iterable[tuple[str, str | Text]]) -> RenderableType:
    """What is known by its name, line by line."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for name, told in facts:
        grid.add_row(name, told)
    return grid


def plain_table(title: str, *columns: str, numbers: Sequence[str] = ()) -> Table:
    """An empty table with a title and a rule under its head, as all of ours are. Columns of numbers
    stand behind the others, to the right, and these are never broken over lines.
    """
    left = (Column(name, overflow="fold") for name in columns)
    right = (Column(name, justify="right", no_wrap=True) for name in numbers)
    return Table(
        *left, *right, title=f"\n{title}", title_justify="left", title_style="bold",
        header_style="dim", box=_HEAD_RULE, show_edge=False, padding=(0, 1), pad_edge=False,
    )  # fmt: skip
