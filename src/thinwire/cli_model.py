"""The commands that open a checkpoint: its validation loss, and text from it."""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.arguments import add_value, number
from thinwire.errors import ConfigError

if TYPE_CHECKING:  # commands import what they need when they run: --help stays quick
    from thinwire.inference import Model, TextModel

AddCommand = Callable[[str, Callable[[argparse.Namespace], None], str], argparse.ArgumentParser]
AddOptions = Callable[[argparse.ArgumentParser], None]


def add_model_commands(add: AddCommand, add_plugins: AddOptions) -> None:
    """Put `eval` and `generate` on the command line."""
    sub = add("eval", eval_command, "compute a checkpoint's validation loss")
    _add_checkpoint(sub, add_plugins)
    add_value(sub, "--batches", number(int, 0), "validation microbatches; 0 = as in training", 0)
    sub.add_argument("--json", action="store_true", help="print JSON")

    sub = add("generate", generate_command, "generate text from a checkpoint")
    _add_checkpoint(sub, add_plugins)
    add_value(sub, "--prompt", str, "text to continue", "def ")
    add_value(sub, "--tokens", number(int, 1), "tokens to generate", 64)
    add_value(sub, "--temperature", number(float, 0), "sampling temperature; 0 = greedy", 0.8)
    add_value(sub, "--top-k", number(int, 0), "sample from the K likeliest tokens; 0 = all", 40)
    add_value(
        sub,
        "--top-p",
        number(float, above=0, most=1),
        "sample from the likeliest tokens that make up this probability; 1 = all",
        1.0,
    )
    add_value(sub, "--seed", number(int), "seed of the sampling", 0)
    _add_pipeline(sub)


def _add_checkpoint(sub: argparse.ArgumentParser, add_plugins: AddOptions) -> None:
    sub.add_argument(
        "checkpoint", type=Path, help="a checkpoint, or a run folder (its newest checkpoint)"
    )
    sub.add_argument(
        "--compression",
        default="on",
        choices=("on", "off"),
        help="apply the run's codecs at its cuts (default: on)",
    )
    add_plugins(sub)
    sub.add_argument(
        "--device",
        default="auto",
        choices=("auto", "cpu", "cuda", "mps"),
        help="device to compute on (default: auto)",
    )


def _add_pipeline(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--pipeline",
        action="store_true",
        help="compute with one process per stage, over links with the run's codecs",
    )
    sub.add_argument(
        "--no-emulation",
        action="store_true",
        help="with --pipeline: do not hold messages back as the run's [link] section says",
    )


def eval_command(options: argparse.Namespace) -> None:
    """Print a checkpoint's validation loss."""
    from thinwire.report import open_display

    with open_display(sys.stderr) as display:
        model = _open_model(options)
        result = model.evaluate(display, options.batches)
    if options.json:
        print(json.dumps(result, indent=1))
        return
    if "accuracy" in result:
        extra, over = f"accuracy {100 * result['accuracy']:.2f} %", f"{result['images']:,} images"
    else:
        bits = f", {result['bits_per_byte']:.4f} bits per byte" if result["bits_per_byte"] else ""
        extra, over = f"perplexity {result['perplexity']:.1f}{bits}", f"{result['tokens']:,} tokens"
    print(
        f"{result['checkpoint']}: validation loss {result['valid_loss']:.4f} ({extra}) over "
        f"{over}, compression {result['compression']}"
    )


def generate_command(options: argparse.Namespace) -> None:
    """Print a continuation of the prompt."""
    from thinwire.inference import Sampling

    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    with _text_model(options) as model:
        _show_notes(model.notes())
        ids = model.encode(options.prompt)
        if len(ids) > (most := model.settings.model.context):
            _show_notes([f"the prompt has {len(ids)} tokens, the model sees the last {most}"])
        print(options.prompt, end="", flush=True)
        for piece in model.write(ids, options.tokens, sampling):
            print(piece, end="", flush=True)
        print()


@contextlib.contextmanager
def _text_model(options: argparse.Namespace) -> Iterator["TextModel"]:
    """The model in this process, or in those of its stages; then what crossed is told at the end.

    What is told goes to stderr: the text alone is on stdout.
    """
    if not options.pipeline:
        if options.no_emulation:
            raise ConfigError("--no-emulation is about the links of --pipeline: add that, too")
        yield _open_model(options)
        return
    if options.compression == "off":
        raise ConfigError(
            "--pipeline sends what training sends, so --compression off does not go with it: "
            "leave out one of the two"
        )
    from thinwire.inference.pipeline import PipelineModel
    from thinwire.report import PlainDisplay

    display = PlainDisplay(sys.stderr)  # a live one would paint over the text
    place, emulate = options.checkpoint, not options.no_emulation
    with PipelineModel(place, display, options.device, options.allow_plugins, emulate) as model:
        yield model
        print(model.finish().text(), file=sys.stderr)


def _show_notes(notes: list[str]) -> None:
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def _open_model(options: argparse.Namespace) -> "Model":
    from thinwire.inference import Model

    is_on = options.compression == "on"
    return Model(options.checkpoint, options.device, is_on, allow_plugins=options.allow_plugins)
