"""Values and parsers of the command line, for every command alike."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError


def number(
    kind: type[int] | type[float],
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
) -> Callable[[str], Any]:
    """Reads an option's number; refuses others, and what is out of range, with what is wanted."""
    wanted = "an integer" if kind is int else "a number"
    wanted += f" of at least {least}" if least > -math.inf else ""
    wanted += f" above {above}" if above > -math.inf else ""
    wanted += f" and at most {most}" if most < math.inf else ""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (least <= value <= most and value > above):  # NaN is in no range
            raise argparse.ArgumentTypeError(f"{text!r} must be {wanted}")
        if abs(value) >= 2**63:
            raise argparse.ArgumentTypeError(f"{text!r} is too large")
        return value

    return read


AddCommand = Callable[[str, Callable[[argparse.Namespace], None], str], argparse.ArgumentParser]
"""Puts a command on the command line: its name, what it does, and its help."""


def add_config(sub: argparse.ArgumentParser, nargs: str | None = None) -> None:
    """Give a command the settings of a run."""
    sub.add_argument("config", type=Path, nargs=nargs, help="a run.toml, or a run folder")
    add_set(sub)
    add_plugins(sub)


def add_set(sub: argparse.ArgumentParser) -> None:
    """Give a command the option that overrides settings."""
    about = "override one setting; may be repeated"
    sub.add_argument("--set", action="append", default=[], metavar="section.key=value", help=about)


def add_plugins(sub: argparse.ArgumentParser) -> None:
    """Give a command the option that lets code of others run."""
    about = "import (that is, run) the codec plugins that a checkpoint or run folder names"
    sub.add_argument("--allow-plugins", action="store_true", help=about)


def add_resume(sub: argparse.ArgumentParser) -> None:
    """Give a command the option that continues a run; without a value it is True: the newest."""
    about = "continue from this checkpoint or run folder (default: this run's newest good one)"
    how: dict[str, Any] = {"type": Path, "nargs": "?", "const": True}
    sub.add_argument("--resume", **how, metavar="CHECKPOINT", help=about)


def add_init_from(
    sub: argparse.ArgumentParser, more: str = "short for --set train.init_from=PLACE"
) -> None:
    """Give a command that starts runs the option by which one starts from earlier weights."""
    about = "start a new run from the weights of this checkpoint, run folder or imported model; "
    sub.add_argument("--init-from", metavar="PLACE", help=about + more)


def overrides(options: argparse.Namespace) -> list[str]:
    """The settings that the command line of such a command overrides."""
    own = [f"train.init_from={options.init_from}"] if options.init_from is not None else []
    if own and options.resume:
        raise ConfigError(
            "--init-from and --resume contradict each other: --init-from starts a new run from the "
            "weights of another, --resume continues a run"
        )
    return [*options.set, *own]


def add_value(
    sub: argparse.ArgumentParser, flag: str, read: Callable[[str], Any], help: str, default: Any
) -> None:
    """Give a command an option with a default, which its help tells."""
    sub.add_argument(flag, type=read, default=default, help=f"{help} (default: {default})")


def add_device(sub: argparse.ArgumentParser) -> None:
    """Give a command the option that chooses where it computes."""
    about = "device to compute on (default: auto)"
    sub.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"), help=about)
