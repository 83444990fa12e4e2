"""`torchrun --nproc-per-node N -m thinwire.cluster run.toml`: train on a cluster."""

import argparse
import io
import os
import sys
import traceback

from thinwire.arguments import add_config, add_resume, number
from thinwire.cluster.grid import SCHEDULES, Grid, Seat, lay_out
from thinwire.errors import StageError, ThinwireError, printable
from thinwire.settings import Settings, load_settings

INTERRUPTED = 130
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket Timeout")
"""How gloo and the store of torchrun say that another process is gone."""


def make_parser() -> argparse.ArgumentParser:
    """The options of a rank; every rank gets the same."""
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node N -m thinwire.cluster",
        description="Train a run.toml on torch.distributed.pipelining, under torchrun.",
    )
    add_config(parser)
    add_resume(parser)
    about = (
        "order of forward and backward passes; the last three have several stages on each rank "
        "(default: pipeline.schedule)"
    )
    parser.add_argument("--schedule", choices=SCHEDULES, default="", help=about)
    about = "pipelines that share each batch (default: as many as there are processes for)"
    parser.add_argument("--replicas", type=number(int, 0), default=0, help=about)
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Entry point of a rank. Exit codes are those of `thinwire train`; torchrun's own is 1."""
    options = make_parser().parse_args(arguments)
    try:
        seat = Seat.read()
        settings = load_settings(options.config, options.set, options.allow_plugins)
        grid = lay_out(settings, seat.world, options.schedule, options.replicas)
    except ThinwireError as error:
        # All ranks find the same: one of each machine says it.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            _say(f"error: {error}")
        sys.exit(error.exit_code)
    try:
        code = _train(options, settings, grid, seat)
    except Exception as error:
        known = _known(error)
        if known is None:
            traceback.print_exc()
        _say(f"error: rank {seat.rank}: {known or 'internal error; please report the lines above'}")
        code = known.exit_code if known is not None else 1
    sys.stdout.flush()
    sys.exit(code)


def _train(options: argparse.Namespace, settings: Settings, grid: Grid, seat: Seat) -> int:
    from thinwire.cluster.engine import World, run
    from thinwire.report import open_display, print_summary

    resume = options.resume
    if resume is True:
        resume = options.config if options.config.is_dir() else settings.run.folder
    world = World(seat, grid, settings.run.device)
    stream = sys.stdout if world.leads else io.StringIO()  # one rank speaks for all
    with open_display(stream, settings.run.name) as display:
        summary = run(settings, world, display, resume, options.allow_plugins)
    world.close()
    if summary is None:
        return 0
    print_summary(summary)
    return INTERRUPTED if summary["interrupted"] else 0


def _known(error: BaseException) -> ThinwireError | None:
    """What a user can act on, from what PyTorch wraps around whatever ends a forward pass."""
    if isinstance(error, ThinwireError):
        return error
    if any(words in str(error) for words in LOST):
        return StageError("another rank is gone; what it said, or its log, tells why")
    return _known(error.__cause__) if error.__cause__ else None


def _say(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
