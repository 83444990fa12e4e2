"""The command line: each command reads its arguments and calls the room that does the work."""

import argparse
import copy
import dataclasses
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

import thinwire
from thinwire.errors import ConfigError, ThinwireError

if TYPE_CHECKING:  # commands import what they need when they run: --help stays quick
    from thinwire.engine import Settings

Command = Callable[[argparse.Namespace], None]

INTERRUPTED = 130
LAB_NAMES = (
    "lossless",
    "optimizer",
    "rank-collapse",
    "subspace",
    "bandwidth",
    "convergence",
)
INIT_HEADER = """\
# A run of thinwire: every key with its value and what it means. Delete what you do not change.
# See what it will cost: thinwire plan run.toml      Start it: thinwire train run.toml

"""

DEMO: dict[str, dict[str, Any]] = {
    "pipeline": {"window": 8},
    "optim": {"lr": 6e-3},
    "train": {"steps": 44, "eval_every": 22, "eval_batches": 16, "checkpoint_every": 22},
}
"""Small enough for two cores and two minutes; all else is the defaults: four stages, 80 Mbps."""
DEMO_ARMS: dict[str, dict[str, Any]] = {
    "dense": {"mode": "dense"},
    "subspace": {"mode": "subspace", "rank": 8},
}


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the `thinwire` command. Exit codes: 0 done, 2..7 by kind of error."""
    options = _parser().parse_args(arguments)
    try:
        options.command(options)
    except ThinwireError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        sys.exit(0)
    except Exception:
        traceback.print_exc()
        print("error: this is a defect of thinwire; please report the lines above", file=sys.stderr)
        sys.exit(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="thinwire",
        description="Train language models whose layers are spread over machines with slow links.",
        epilog="Start with `thinwire demo`; then `thinwire init` and `thinwire train run.toml`.",
    )
    parser.add_argument("--version", action="version", version=f"thinwire {thinwire.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, command: Command, help: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        sub.set_defaults(command=command)
        return sub

    def add_config(sub: argparse.ArgumentParser, required: bool) -> None:
        nargs = None if required else "?"
        sub.add_argument("config", type=Path, nargs=nargs, help="run.toml of the run")
        _add_set(sub)

    _add_set(
        add("demo", demo, "train a small model in four processes over slow links, and show it")
    )

    sub = add("init", init, "write a commented run.toml to start from")
    sub.add_argument("path", type=Path, nargs="?", default=Path("run.toml"))
    sub.add_argument("--force", action="store_true", help="write over an existing file")
    _add_set(sub)

    sub = add("train", train_command, "train the model of a run.toml")
    add_config(sub, required=True)
    sub.add_argument(
        "--resume",
        type=Path,
        nargs="?",
        const=Path(),
        metavar="CHECKPOINT",
        help="go on from a checkpoint; without a value, from this run's newest",
    )

    sub = add("plan", plan_command, "say what a run will cost before anyone waits")
    add_config(sub, required=True)
    sub.add_argument(
        "--tflops", type=float, help="rate of each stage's machine, instead of measuring"
    )
    sub.add_argument("--json", action="store_true", help="print JSON")

    sub = add("eval", eval_command, "measure a checkpoint's loss on its run's validation text")
    sub.add_argument("checkpoint", type=Path, help="a checkpoint, or the folder of a run")
    sub.add_argument("--batches", type=int, default=0, help="microbatches; 0 = as in training")
    sub.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"))
    sub.add_argument("--json", action="store_true", help="print JSON")

    sub = add("generate", generate_command, "continue a prompt with a checkpoint")
    sub.add_argument("checkpoint", type=Path, help="a checkpoint, or the folder of a run")
    sub.add_argument("--prompt", default="def ", help="text to continue")
    sub.add_argument("--tokens", type=int, default=64)
    sub.add_argument("--temperature", type=float, default=0.8, help="0 = always the likeliest")
    sub.add_argument("--top-k", type=int, default=40, help="choose among so many; 0 = all")
    sub.add_argument("--seed", type=int, default=0)
    sub.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"))

    sub = add("lab", lab_command, "run an experiment and write its report")
    sub.add_argument("name", choices=LAB_NAMES, help="which experiment")
    sub.add_argument("--quick", action="store_true", help="a small version, for a first look")
    sub.add_argument("--seed", type=int, default=0)
    sub.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"))
    sub.add_argument("--out", type=Path, default=Path("lab"), help="folder for the reports")
    sub.add_argument("--json", action="store_true", help="print JSON")
    sub.add_argument("--steps", type=int, default=0, help="training steps; 0 = the experiment's")
    sub.add_argument("--modes", help="bandwidth, convergence: boundary modes, by commas")
    sub.add_argument("--ranks", help="bandwidth, convergence: ranks, by commas")
    sub.add_argument("--mbps", help="bandwidth: rates to measure, by commas")
    sub.add_argument(
        "--dense-microbatches", type=int, default=0, help="bandwidth: shorten dense steps to these"
    )
    sub.add_argument("--stages", help="convergence: numbers of stages, by commas")
    sub.add_argument("--lrs", help="convergence: learning rates, by commas")
    sub.add_argument("--seeds", help="convergence: seeds, by commas")
    sub.add_argument("--parallel", type=int, default=1, help="convergence: arms at a time")
    sub.add_argument(
        "--tflops", type=float, default=50.0, help="convergence: rate of a stage, for its time axis"
    )
    _add_set(sub)

    sub = add("bench", bench_command, "measure the runtime and the links on this machine")
    sub.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser


def _add_set(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--set", action="append", default=[], metavar="section.key=value", help="override one key"
    )


def demo(options: argparse.Namespace) -> None:
    """Train the same small model dense and in a subspace, and show both side by side."""
    from thinwire.engine import Settings, apply_override
    from thinwire.inference import Model
    from thinwire.report import comparison_table
    from thinwire.summary import FASTER, next_free_name

    summaries = {}
    for arm, boundary in DEMO_ARMS.items():
        values = copy.deepcopy(DEMO)
        values["boundary"] = dict(boundary)
        values["run"] = {"name": f"demo-{arm}"}
        for override in options.set:
            apply_override(values, override)
        settings = Settings.from_plain(values)
        name = next_free_name(Path(settings.run.out), settings.run.name)
        settings = dataclasses.replace(settings, run=dataclasses.replace(settings.run, name=name))
        summaries[arm] = summary = _train(settings, None)
        model = Model(Path(summary["paths"]["checkpoint"]), "cpu")
        text = model.generate("def ", 40, temperature=0.7, top_k=30, seed=settings.run.seed)
        print("\nSample (so small a model, after so few steps, knows little but the layout):")
        print("\n".join(f"  | {line}" for line in text.splitlines()) + "\n")
    Console(highlight=False).print(comparison_table(summaries))
    print(f"\nSimulated: the same runs on stages {FASTER}x faster than this machine's:")
    for arm, summary in summaries.items():
        print(f"  {arm:<10}{summary['simulated_faster_tokens_per_s']:>12,.0f} tokens/s")
    print(f"\nMore: thinwire generate {summary['paths']['folder']} --prompt 'class '")


def init(options: argparse.Namespace) -> None:
    """Write run.toml."""
    from thinwire.config import load_settings
    from thinwire.typed import to_toml

    if options.path.exists() and not options.force:
        raise ConfigError(f"{options.path} exists already: choose another name, or use --force")
    text = INIT_HEADER + to_toml(load_settings(None, options.set))
    try:
        options.path.write_text(text)
    except OSError as error:
        raise ConfigError(f"cannot write {options.path}: {error}") from error
    print(
        f"wrote {options.path}; next: thinwire plan {options.path}, thinwire train {options.path}"
    )


def train_command(options: argparse.Namespace) -> None:
    """Train, or go on from a checkpoint."""
    from thinwire.config import load_settings

    settings = load_settings(options.config, options.set)
    resume = options.resume
    if resume == Path():
        resume = Path(settings.run.out) / settings.run.name
    _train(settings, resume)


def plan_command(options: argparse.Namespace) -> None:
    """Print the plan of a run."""
    from thinwire.config import load_settings
    from thinwire.plan import make_plan, plan_text, plan_to_plain

    if options.tflops is not None and options.tflops <= 0:
        raise ConfigError(f"--tflops {options.tflops} must be positive")
    settings = load_settings(options.config, options.set)
    plan = make_plan(settings, options.tflops * 1e12 if options.tflops else None)
    print(json.dumps(plan_to_plain(plan), indent=1) if options.json else plan_text(plan))


def eval_command(options: argparse.Namespace) -> None:
    """Print a checkpoint's validation loss."""
    from thinwire.inference import Model
    from thinwire.report import open_display

    with open_display(sys.stderr) as display:
        result = Model(options.checkpoint, options.device).evaluate(display, options.batches)
    if options.json:
        print(json.dumps(result, indent=1))
        return
    extra = f", {result['bits_per_byte']:.4f} bits per byte" if result["bits_per_byte"] else ""
    print(
        f"{result['checkpoint']}: validation loss {result['valid_loss']:.4f} (perplexity "
        f"{result['perplexity']:.1f}{extra}) over {result['tokens']:,} tokens"
    )


def generate_command(options: argparse.Namespace) -> None:
    """Print a continuation of the prompt."""
    from thinwire.inference import Model

    model = Model(options.checkpoint, options.device)
    print(
        model.generate(
            options.prompt, options.tokens, options.temperature, options.top_k, options.seed
        )
    )


def lab_command(options: argparse.Namespace) -> None:
    """Run one experiment."""
    from thinwire.lab.run import run_lab

    run_lab(options)


def bench_command(options: argparse.Namespace) -> None:
    """Print the benchmarks of the runtime and the links."""
    from thinwire.lab.bench import run_bench

    run_bench(options.json)


def _train(settings: "Settings", resume: Path | None) -> dict[str, Any]:
    """Train with a display around it, then print the summary."""
    from thinwire.report import open_display, summary_table
    from thinwire.train import Interrupted, train

    with open_display(sys.stdout, settings.run.name) as display:
        try:
            summary = train(settings, display, resume)
        except Interrupted:
            raise KeyboardInterrupt from None
    Console(highlight=False).print(summary_table(summary))
    for what, path in summary["paths"].items():
        if path:
            print(f"{what + ':':<12}{path}")
    return summary


if __name__ == "__main__":
    main()
