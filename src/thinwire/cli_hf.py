"""The commands that exchange models with other programs: a checkpoint as a Hugging Face folder."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from thinwire.arguments import add_value, number

AddCommand = Callable[[str, Callable[[argparse.Namespace], None], str], argparse.ArgumentParser]
AddOptions = Callable[[argparse.ArgumentParser], None]


def add_hf_commands(add: AddCommand, add_plugins: AddOptions) -> None:
    """Put `export` on the command line."""
    sub = add("export", export_command, "write a checkpoint as a Hugging Face model folder")
    sub.add_argument(
        "checkpoint", type=Path, help="a checkpoint, or a run folder (its newest checkpoint)"
    )
    sub.add_argument("--to", choices=("hf",), default="hf", help="format (default: hf)")
    sub.add_argument("folder", type=Path, help="folder to write")
    sub.add_argument(
        "--dtype",
        choices=("fp32", "bf16"),
        default="fp32",
        help="type of the weights: as trained, or rounded to half the size (default: fp32)",
    )
    add_value(sub, "--shard-gb", number(float, above=0), "most GB of one weight file", 5.0)
    sub.add_argument(
        "--tokenizer",
        type=Path,
        help="tokenizer.json, or the folder of one, for a run that was trained without",
    )
    sub.add_argument("--force", action="store_true", help="replace a model that is there already")
    sub.add_argument(
        "--no-verify",
        action="store_true",
        help="do not open the result with transformers to compare it with the trained model",
    )
    add_plugins(sub)


def export_command(options: argparse.Namespace) -> None:
    """Export a checkpoint, and say how it can be opened."""
    from thinwire.engine import Checkpoint
    from thinwire.hf.export import Wanted, export
    from thinwire.report import open_display

    with open_display(sys.stderr) as display:
        export(
            Checkpoint.open(options.checkpoint, options.allow_plugins),
            Wanted(
                options.folder,
                options.dtype,
                replace=options.force,
                verify=not options.no_verify,
                tokenizer=options.tokenizer,
                shard_bytes=int(options.shard_gb * 1e9),
            ),
            display,
        )
    print(f"wrote {options.folder}")
