"""What every experiment leaves behind: a verdict, a table, a picture and a short report.

reports/NAME/report.md    the question, the verdict, the table, how to make it again
reports/NAME/table.csv    every figure
reports/NAME/figures.csv  where rows are conclusions: the figures behind them
reports/NAME/plot.png     the picture
reports/NAME/result.json  the same for programs

A report is overwritten only by the command that made it; another command's stands in NAME-2.
"""

import csv
import itertools
import json
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import thinwire
from thinwire.settings import Settings
from thinwire.settings.crossing import size_word
from thinwire_lab.plots import Panel, draw

Row = dict[str, Any]


@dataclass
class Outcome:
    """The result of one experiment."""

    name: str
    question: str
    verdict: str
    holds: bool | None  # whether the claim under test holds; None where there is no yes or no
    rows: list[Row]
    panels: list[Panel]  # its picture
    command: str = ""  # that makes the same figures again
    notes: list[str] = field(default_factory=list)
    figures: list[Row] = field(default_factory=list)  # behind the rows, where these conclude
    too_small: str = ""  # why the runs cannot decide; the verdict then tells what was seen

    def __post_init__(self) -> None:
        if self.too_small:
            self.holds = None

    @property
    def conclusion(self) -> str:
        """The verdict as people read it, with its yes or no."""
        if self.too_small:
            return f"Too small to decide: {self.too_small}. {self.verdict}"
        return {True: "Holds. ", False: "Does not hold. ", None: ""}[self.holds] + self.verdict

    def to_plain(self) -> dict[str, Any]:
        """The outcome for a program."""
        plain = {key: value for key, value in vars(self).items() if key != "panels"}
        return {**plain, "machine": machine()}


def size_notes(settings: Settings) -> list[str]:
    """What to know of `frame_bytes` of the first cut, taken as the size of all frames."""
    notes = ["bytes: as planned; the actual size varies"] * bool(size_word(settings, 0))
    return notes + ["bytes: of the first cut; others differ"] * bool(settings.codec.cuts)


def machine() -> str:
    """What computed the figures."""
    gpu = f", {torch.cuda.get_device_name(0)}" if torch.cuda.is_available() else ""
    return f"{platform.machine()}{gpu}, torch {torch.__version__}, thinwire {thinwire.__version__}"


def write_outcome(outcome: Outcome, folder: Path) -> Path:
    """Write report, table, picture and JSON; returns their folder."""
    place = _place(outcome, folder)
    place.mkdir(parents=True, exist_ok=True)
    _write_table(outcome.rows, place / "table.csv")
    if outcome.figures:
        _write_table(outcome.figures, place / "figures.csv")
    draw(outcome.name, outcome.panels).savefig(place / "plot.png", dpi=120, bbox_inches="tight")
    (place / "result.json").write_text(json.dumps(outcome.to_plain(), indent=1) + "\n")
    parts = [
        f"# {outcome.name}",
        outcome.question,
        f"**Verdict:** {outcome.conclusion}",
        markdown_table(outcome.rows),
        "![plot](plot.png)",
        "\n".join(f"- {note}" for note in outcome.notes),
        *([markdown_table(outcome.figures)] if outcome.figures else []),
        f"Made by `{outcome.command}` on {machine()}.\n",
    ]
    (place / "report.md").write_text("\n\n".join(parts))
    return place


def _place(outcome: Outcome, folder: Path) -> Path:
    """The first of NAME, NAME-2, ... that no other command's report stands in."""
    for number in itertools.count(1):
        place = folder / (outcome.name if number == 1 else f"{outcome.name}-{number}")
        try:
            if json.loads((place / "result.json").read_text())["command"] == outcome.command:
                return place
        except FileNotFoundError:
            return place
        except (OSError, ValueError, KeyError, TypeError):
            continue  # a report that cannot be read is somebody's all the same
    raise AssertionError("numbers do not end")


def _write_table(rows: list[Row], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, _columns(rows))
        writer.writeheader()
        writer.writerows(rows)


def markdown_table(rows: list[Row]) -> str:
    """Rows as a Markdown table, numbers in a readable form."""
    columns = _columns(rows)
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(row.get(c)) for c in columns) + " |" for row in rows]
    return "\n".join(lines)


def _columns(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        if value != 0 and not 1e-3 <= abs(value) < 1e6:
            return f"{value:.2e}"
        places = 4 if abs(value) < 10 else 2 if abs(value) < 1000 else 0  # no more than is known
        text = f"{value:,.{places}f}"
        return text.rstrip("0").rstrip(".") if places else text
    return str(value)
