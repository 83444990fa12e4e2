"""`torchrun --nproc-per-node N -m thinwire.cluster run.toml`: train on a cluster."""

import argparse
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.arguments import number
from thinwire.cluster.grid import SCHEDULES, lay_out
from thinwire.errors import ThinwireError, printable

if TYPE_CHECKING:
    from thinwire.cluster.world import Seat, World

NEWEST = Path()  # `--resume` without a value
INTERRUPTED = 130


def make_parser() -> argparse.ArgumentParser:
    """The options of a rank; every rank gets the same."""
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node N -m thinwire.cluster",
        description="Train a run.toml on torch.distributed.pipelining, one process per stage.",
    )
    parser.add_argument("config", type=Path, help="a run.toml, or a run folder")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="section.key=value",
        help="override one setting; may be repeated",
    )
    parser.add_argument(
        "--resume",
        type=Path,
        nargs="?",
        const=NEWEST,
        metavar="CHECKPOINT",
        help="continue from this checkpoint or run folder (default: this run's newest good one)",
    )
    parser.add_argument(
        "--schedule",
        choices=SCHEDULES,
        default="",
        help="order of forward and backward passes, also with several stages on each rank "
        "(default: pipeline.schedule)",
    )
    parser.add_argument(
        "--replicas",
        type=number(int, 0),
        default=0,
        help="pipelines that share each batch (default: as many as there are processes for)",
    )
    parser.add_argument(
        "--allow-plugins",
        action="store_true",
        help="import (that is, run) the codec plugins that a checkpoint or run folder names",
    )
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Entry point of a rank. Exit codes are those of `thinwire train`."""
    options = make_parser().parse_args(arguments)
    from thinwire.cluster.world import Seat

    seat = None
    try:
        seat = Seat.read()
        code = _train(options, seat)
    except ThinwireError as error:
        _say(seat, f"error: {error}")
        code = error.exit_code
    except RuntimeError as error:
        # PyTorch wraps whatever ends a forward or backward pass, and tells of lost ranks so.
        known = _known_cause(error)
        if known is None:
            traceback.print_exc()
        _say(seat, f"error: {known or error}")
        code = known.exit_code if known is not None else 1
    sys.stdout.flush()
    sys.exit(code)


def _train(options: argparse.Namespace, seat: "Seat") -> int:
    from thinwire.cluster.engine import Silent, run
    from thinwire.cluster.world import World
    from thinwire.report import open_display
    from thinwire.settings import load_settings

    settings = load_settings(options.config, options.set, options.allow_plugins)
    grid = lay_out(settings, seat.world, options.schedule, options.replicas)
    resume = options.resume
    if resume == NEWEST:
        is_run = options.config.is_dir()
        resume = options.config if is_run else Path(settings.run.out) / settings.run.name
    world = World(seat, grid, settings.run.device)
    shown = open_display(sys.stdout, settings.run.name) if world.leads else Silent()
    with shown as display:
        summary = run(settings, world, display, resume, options.allow_plugins)
    _finish(world)
    if summary is None:
        return 0
    _show(summary)
    return INTERRUPTED if summary["interrupted"] else 0


def _finish(world: "World") -> None:
    world.close()


def _show(summary: dict) -> None:
    from rich.console import Console

    from thinwire.report import summary_table

    Console(highlight=False).print(summary_table(summary))
    for what, path in summary["paths"].items():
        if path:
            print(f"{what + ':':<12}{path}")


def _known_cause(error: BaseException) -> ThinwireError | None:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ThinwireError):
        cause = cause.__cause__
    return cause


def _say(seat: "Seat | None", text: str) -> None:
    """Each machine says once what all of its ranks find."""
    prefix = f"rank {seat.rank}: " if seat is not None and seat.rank else ""
    print(printable(prefix + text), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
