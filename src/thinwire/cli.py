"""The command line: each command reads its arguments and calls the room that does the work."""

import argparse
import contextlib
import gc
import json
import shlex
import signal
import sys
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import thinwire
from thinwire.arguments import add_config, add_init_from, add_resume, add_set, number, overrides
from thinwire.cli_host import add_host_commands, add_listen, add_web, run_to_end
from thinwire.cli_model import add_model_commands
from thinwire.errors import ConfigError, ThinwireError, printable
from thinwire.recipes import BEST, RECIPES
from thinwire.safe_stream import STALLED_SECONDS, SafeStream, wait_for_no_reader

if TYPE_CHECKING:  # commands import what they need when they run: --help stays quick
    from thinwire.settings import Settings

LAB = "thinwire_lab"  # the package of experiments, where it is installed
INIT_HEADER = """\
# Settings of a thinwire run, every key explained. Delete what you do not change.
# Estimate the cost: thinwire plan run.toml          Start it: thinwire train run.toml
#
"""


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the `thinwire` command.

    Exit codes: 0 done, 2..10 by kind of error, 130 interrupted. A reader that goes away, as
    `head` does, changes none of them.
    """
    out, error = SafeStream(sys.stdout), SafeStream(sys.stderr)
    patience = None  # for a reader who comes back to what a command has said
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            options = make_parser().parse_args(arguments)
            options.command(options)
        except (Exception, KeyboardInterrupt) as problem:
            if isinstance(problem, KeyboardInterrupt):
                with contextlib.suppress(ValueError):  # which is raised outside the main thread
                    signal.signal(signal.SIGINT, signal.SIG_IGN)  # one more must change nothing
                gc.freeze()  # else Python ends with a search for garbage: all of torch, a second
                patience = STALLED_SECONDS
                wait_for_no_reader()
            with contextlib.suppress(KeyboardInterrupt):
                out.finish()  # what was said before comes first
            sys.exit(_explained(problem))
        finally:
            with contextlib.suppress(KeyboardInterrupt):
                out.finish(patience)  # what breaks only now must not change the exit code
                error.finish(patience)


def _explained(error: BaseException) -> int:
    """Say why a command ends, with the notes that the error gathered on its way; its exit code."""
    if isinstance(error, ThinwireError):
        text, code = f"error: {error}", error.exit_code
    elif isinstance(error, KeyboardInterrupt):
        text, code = "interrupted", 130
    else:
        traceback.print_exception(error)
        text, code = "error: internal error; please report the lines above", 1
    told = "\n".join([text, *getattr(error, "__notes__", [])])
    # It may quote a file of another's, whose control characters a terminal would obey.
    print(printable(told, 100_000), file=sys.stderr)
    return code


def make_parser() -> argparse.ArgumentParser:
    """The whole command line; also what completion and the tests of our pages read."""
    parser = argparse.ArgumentParser(
        prog="thinwire",
        description="Pipeline-parallel training of language models over slow links.",
        epilog="Start with `thinwire demo`; then `thinwire init` and `thinwire train run.toml`.",
    )
    parser.add_argument("--version", action="version", version=f"thinwire {thinwire.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, command: Callable[..., None], help: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        sub.set_defaults(command=command)
        return sub

    add_set(add("demo", demo, "train a small model over slow links, thin and dense, and compare"))

    sub = add("init", init, "write a run.toml with every setting explained")
    about = "file to write (default: run.toml)"
    sub.add_argument("path", type=Path, nargs="?", default=Path("run.toml"), help=about)
    sub.add_argument("--force", action="store_true", help="overwrite an existing file")
    about = (
        "settings measured together: 32, 50, 100 or 200 times fewer bytes, 32 times with weights "
        f"that fold into an ordinary Llama, dense, or fine-tuning (default: {BEST})"
    )
    sub.add_argument("--recipe", choices=RECIPES, help=about)
    add_set(sub)
    add_init_from(sub, "the model's shape comes from there too")

    sub = add("train", train_command, "train a model")
    add_config(sub, nargs="?")  # --resume may have it instead
    add_resume(sub)
    about = (
        "train in so many processes, each with neighbouring stages (default: one for each stage); "
        "the model is the same to the bit"
    )
    sub.add_argument("--peers", type=number(int, 1), default=0, metavar="N", help=about)
    add_init_from(sub)
    add_web(sub, samples=True)

    sub = add("plan", plan_command, "estimate a run's cost before starting it")
    add_config(sub)
    about = "compute rate of each stage in TFLOP/s, instead of measuring this machine"
    sub.add_argument("--tflops", type=number(float, above=0), help=about)
    about = "choose the split over the peers that this file lists: their rates, memory and links"
    sub.add_argument("--peers", type=Path, metavar="PEERS.TOML", help=about)
    sub.add_argument("--json", action="store_true", help="print JSON")

    add_model_commands(add)
    add_host_commands(add)

    lab = add("lab", lab_command, "run an experiment and write its report")
    if find_spec(LAB) is None:
        lab.add_argument("words", nargs=argparse.REMAINDER, help="an experiment and its options")
    else:
        from thinwire_lab.experiment import add_experiments

        add_experiments(lab)

    sub = add("relay", relay_command, "let peers meet here that accept nothing from outside")
    add_listen(sub, "0.0.0.0:4617", "address and port to listen on; port 0 = any free one")
    about = "most that passes for one run (default: 200 for each of its links)"
    sub.add_argument("--mbps", type=number(float, 0), default=0, help=about)
    about = "file with the pass (default: one drawn once and kept)"
    sub.add_argument("--pass-file", type=Path, help=about)

    sub = add("completion", completion_command, "print a shell completion script")
    sub.add_argument("shell", choices=("bash", "zsh", "fish"), help="your shell")
    return parser


def demo(options: argparse.Namespace) -> None:
    """Train the same small model with a thin cut and dense, and show both side by side."""
    from thinwire.demo import run_demo

    run_demo(options.set, lambda settings: _trained(settings, shows_summary=False))


def init(options: argparse.Namespace) -> None:
    """Write run.toml."""
    from thinwire.settings import make_recipe
    from thinwire.typed import to_toml

    if options.path.exists() and not options.force:
        raise ConfigError(f"{options.path} exists already: choose another name, or use --force")
    keys = []
    if options.init_from is not None:
        from thinwire.run.start import keys_for

        keys = keys_for(options.init_from)
    recipe = make_recipe(options.recipe, [*keys, *options.set])
    recipe.asked.resolved()  # refuses what cannot work; what is written can still be changed
    head = "".join(f"# {line}\n" for line in recipe.about)
    text = f"{INIT_HEADER}{head}\n{to_toml(recipe.asked)}"
    try:
        options.path.write_text(text)
    except OSError as error:
        raise ConfigError(f"cannot write {options.path}: {error}") from error
    others = ", ".join(other for other in RECIPES if other != recipe.name)
    print(f"wrote {options.path}: recipe {recipe.name} (others: {others}); its cost is at the top")
    print(f"next: thinwire plan {options.path}, thinwire train {options.path}")


def train_command(options: argparse.Namespace) -> None:
    """Train, or continue from a checkpoint."""
    from thinwire.settings import load_settings

    config, resume = options.config, options.resume
    if config is None and resume in (None, True):
        told = "train needs a run.toml (`thinwire init` writes one) or the folder of a run"
        raise ConfigError(told)
    if config is None and resume.is_dir():  # `train --resume X` names one thing for both
        above = resume, *resume.parents[:2]
        config = next((p for p in above if (p / "config.toml").is_file()), resume)
    elif config is None:  # argparse took the config for the value of --resume
        config, resume = resume, True
    settings = load_settings(config, overrides(options), options.allow_plugins)
    if resume is True:
        resume = config if config.is_dir() else settings.run.folder
    plugins, peers = options.allow_plugins, options.peers
    settings = settings.saved_at_validations() if options.sample else settings
    _trained(settings, resume, plugins, peers, web=options.web, sample=options.sample)


def plan_command(options: argparse.Namespace) -> None:
    """Print the plan of a run."""
    from thinwire.plan import make_plan, plan_text, plan_to_plain
    from thinwire.settings import load_settings
    from thinwire.settings.file import remarks

    settings = load_settings(options.config, options.set, options.allow_plugins)
    for remark in remarks(settings):
        print(f"note: {remark}", file=sys.stderr)
    if options.peers is None:
        plan = make_plan(settings, options.tflops * 1e12 if options.tflops else None)
        print(json.dumps(plan_to_plain(plan), indent=1) if options.json else plan_text(plan))
        return
    if options.tflops is not None:
        told = "--tflops and --peers contradict each other: the file has each peer's rate"
        raise ConfigError(told)
    from thinwire.run.machine import load_peers
    from thinwire.run.placement import choose_split, split_text, split_to_plain

    split = choose_split(settings, load_peers(options.peers))
    print(json.dumps(split_to_plain(split), indent=1) if options.json else split_text(split))


def lab_command(options: argparse.Namespace) -> None:
    """Run one experiment, where the lab is installed."""
    if find_spec(LAB) is None:
        raise ConfigError(
            "the experiments are a package of their own, thinwire-lab, which is not installed "
            "here: in a checkout of thinwire, `pip install ./lab`"
        )
    from thinwire_lab.run import run_lab

    run_lab(options)


def relay_command(options: argparse.Namespace) -> None:
    """Be a relay until Ctrl-C."""
    from thinwire.run.relay import run_relay

    run_relay(options.listen, options.mbps, options.pass_file, sys.stdout)


def completion_command(options: argparse.Namespace) -> None:
    """Print the completion script of a shell."""
    from thinwire.completion import completion_script

    print(completion_script(options.shell, make_parser()), end="")


def _trained(settings: "Settings", *how: Any, **shown: Any) -> dict[str, Any]:
    """Train with a display and a page around it that are `shown` so."""
    from thinwire.train import train

    name, way_on = settings.run.name, lambda: _way_on(settings)
    return run_to_end(lambda display: train(settings, display, *how), name, way_on, **shown)


def _way_on(settings: "Settings") -> str:
    """How a run that ended early goes on: from its checkpoint, or under another name."""
    from thinwire.engine.checkpoint import list_checkpoints

    folder = settings.run.folder
    if list_checkpoints(folder):
        plugins = " --allow-plugins" if settings.codec.plugins else ""
        return f"to continue: thinwire train {shlex.quote(str(folder))} --resume{plugins}"
    if (folder / "metrics.jsonl").exists():
        return f"no checkpoint was saved: to start again, delete {folder} or set another run.name"
    return ""
