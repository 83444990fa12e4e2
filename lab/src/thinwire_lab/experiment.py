"""What `thinwire lab` can run.

An experiment is NAME.py, whose `run(options, say)` returns an Outcome, and NAME.toml beside it:
what it does, its options and its grid. These are data because --help must not wait for torch.
"""

import argparse
import importlib
import math
import shlex
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.arguments import number

if TYPE_CHECKING:
    from thinwire_lab.outcome import Outcome

Say = Callable[[str], None]
"""Prints a line of progress."""

NOT_IN_COMMAND = ("out", "json", "parallel", "minutes", "from_log")
"""Options that change no figure: the command in a report leaves them out."""
_KINDS = {"int": int, "float": float}
_MODULES = ("lossless", "bandwidth", "convergence", "codecs", "gap", "headline")


class StrictParser(argparse.ArgumentParser):
    """A subcommand's parser that refuses unknown options itself, beside its own usage.

    argparse would leave them to the outermost parser, which knows nothing of the subcommand.
    """

    def __init__(self, **options: Any):
        super().__init__(**options, allow_abbrev=False)  # --seed must not pass for --seeds

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse, and refuse what is left over."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)} (see {self.prog} --help)")
        return found, []


def numbers(
    kind: type[int] | type[float], least: float = -math.inf, above: float = -math.inf
) -> Callable[[str], list[Any]]:
    """Reads comma-separated numbers."""
    read = number(kind, least, above)
    return lambda text: [read(part) for part in text.split(",")]


def paths(text: str) -> list[Path]:
    """Reads comma-separated paths."""
    return [Path(part.strip()) for part in text.split(",") if part.strip()]


@cache
def sheet(module: str) -> dict[str, Any]:
    """The data beside an experiment's module; "common" has what they share."""
    path = Path(__file__).with_name(f"{module}.toml")
    return tomllib.loads(path.read_text(encoding="utf-8"))


def words(module: str, **facts: Any) -> dict[str, Any]:
    """What a sheet has for an outcome: name, question and notes, with these facts."""
    told = sheet(module)
    notes = [note.format(**facts) for note in told["notes"]]
    return {"name": told["name"], "question": told["question"].format(**facts), "notes": notes}


@dataclass(frozen=True)
class Experiment:
    """One experiment: what it does, and what can be chosen."""

    module: str
    name: str
    summary: str
    shares: list[str]  # options of common.toml
    options: dict[str, dict[str, Any]] = field(default_factory=dict)  # and of its own
    steps: list[int] = field(default_factory=list)  # usual, and with --quick
    unused: list[str] = field(default_factory=list)  # patterns of settings that change nothing
    epilog: str = ""

    @classmethod
    def read(cls, module: str) -> "Experiment":
        """The experiment of a module, as its sheet has it."""
        known = {key: value for key, value in sheet(module).items() if key in cls.__annotations__}
        return cls(module, **known)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Give a parser this experiment's options."""
        shared = sheet("common")["options"]
        if self.steps:
            usual, quick = self.steps
            shown = f"training steps (default: {usual}, or {quick} with --quick)"
            parser.add_argument("--steps", type=number(int, 0), default=0, help=shown)
        for name, told in ({name: shared[name] for name in self.shares} | self.options).items():
            parser.add_argument(f"--{name}", **_for_argparse(told))

    def parse(self, *arguments: str) -> argparse.Namespace:
        """The options that such a command line gives."""
        parser = StrictParser(prog=f"thinwire lab {self.name}")
        self.add_arguments(parser)
        return parser.parse_args(arguments, argparse.Namespace(name=self.name))

    def command_line(self, options: argparse.Namespace) -> str:
        """The command that makes the same figures again."""
        parts = ["thinwire lab", self.name]
        for key, default in vars(self.parse()).items():
            value = getattr(options, key)
            if key in NOT_IN_COMMAND or not value or value == default:
                continue
            flag = f"--{key.replace('_', '-')}"
            if key == "set":
                parts += [f"--set {shlex.quote(override)}" for override in value]
            elif value is True:
                parts.append(flag)
            else:
                text = ",".join(map(_shown, value)) if isinstance(value, list) else str(value)
                parts.append(f"{flag} {shlex.quote(text)}")
        return " ".join(parts)

    def run(self, options: argparse.Namespace, say: Say) -> "Outcome":
        """Make the outcome."""
        return importlib.import_module(f"thinwire_lab.{self.module}").run(options, say)


def _shown(value: float | Path) -> str:
    return str(value) if isinstance(value, Path) else f"{value:g}"


def _for_argparse(told: dict[str, Any]) -> dict[str, Any]:
    """An option of a sheet as argparse takes it: `type` is a name, and `list` is for commas."""
    told = dict(told)
    kind, is_list = told.pop("type", ""), told.pop("list", False)
    bounds = {key: told.pop(key) for key in ("least", "above") if key in told}
    if kind in _KINDS:
        told["type"] = (numbers if is_list else number)(_KINDS[kind], **bounds)
    elif kind == "path":
        told["type"] = paths if is_list else Path
    return told


EXPERIMENTS = {found.name: found for found in map(Experiment.read, _MODULES)}


def steps_of(options: argparse.Namespace) -> int:
    """The training steps that options ask for, by --steps or by their experiment's default."""
    return options.steps or EXPERIMENTS[options.name].steps[options.quick]


def add_experiments(lab: argparse.ArgumentParser) -> None:
    """Give `thinwire lab` a subcommand for each experiment, with that experiment's options."""
    names = lab.add_subparsers(
        title="experiments", dest="name", required=True, metavar="EXPERIMENT",
        parser_class=StrictParser,
    )  # fmt: skip
    for name, experiment in EXPERIMENTS.items():
        summary = experiment.summary
        described = summary[0].upper() + summary[1:] + "."
        parser = names.add_parser(
            name, help=summary, description=described, epilog=experiment.epilog
        )
        experiment.add_arguments(parser)
