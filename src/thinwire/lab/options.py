"""What `thinwire lab` can run, and the options of each experiment.

They stand here, apart from the code of the experiments, because --help must not wait for torch.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.arguments import StrictParser, number, numbers

Option = tuple[str, dict[str, Any]]
"""A flag and how argparse is told of it."""

NOT_IN_COMMAND = ("out", "json", "parallel", "minutes", "from_log")
"""Options that change no figure: the command in a report leaves them out."""
UNUSED_BY_ARMS = (
    *("link.*", "run.name", "run.out"),
    *("train.eval_every", "train.checkpoint_every", "train.keep"),
)
"""Settings that do nothing where arms train in one process, without links and checkpoints."""

QUICK: Option = ("--quick", {"action": "store_true", "help": "a small version, for a first look"})
SEED: Option = ("--seed", {"type": number(int), "default": 0, "help": "seed (default: 0)"})
DEVICE: Option = (
    "--device",
    {"default": "auto", "choices": ("auto", "cpu", "cuda", "mps"), "help": "device to compute on"},
)
OUT: Option = (
    "--out",
    {"type": Path, "default": Path("lab"), "help": "folder for reports and logs (default: lab)"},
)
JSON: Option = ("--json", {"action": "store_true", "help": "print the result as JSON"})
SET: Option = (
    "--set",
    {"action": "append", "default": [], "metavar": "section.key=value",
     "help": "change one setting of the model, the data or the training; repeatable"},
)  # fmt: skip
MODES: Option = ("--modes", {"help": "comma-separated boundary modes (default: subspace)"})
LRS: Option = (
    "--lrs",
    {"type": numbers(float, above=0),
     "help": "comma-separated learning rates; each arm's best one counts"},
)  # fmt: skip
PARALLEL: Option = (
    "--parallel",
    {"type": number(int, 1), "default": 1, "help": "arms to train at a time (default: 1)"},
)
MINUTES: Option = (
    "--minutes",
    {"type": number(float, 0), "default": 0,
     "help": "start no arm after this many minutes; the same command continues (0: no limit)"},
)  # fmt: skip
FROM_LOG: Option = (
    "--from-log",
    {"action": "store_true", "help": "train nothing; report the arms in the log"},
)
DENSE_SEEDS: Option = (
    "--seeds",
    {"type": numbers(int), "default": [0, 1],
     "help": "comma-separated seeds: dense trains with all of them, which shows the noise, other "
     "arms with the first (default: 0,1)"},
)  # fmt: skip
BASIC = (QUICK, SEED, DEVICE, OUT, JSON)
GRID = (QUICK, DEVICE, OUT, JSON, PARALLEL, MINUTES, FROM_LOG, SET)
"""Options of experiments that train a grid of arms."""


def _steps(usual: int, quick: int) -> Option:
    shown = f"training steps (default: {usual}, or {quick} with --quick)"
    return "--steps", {"type": number(int, 0), "default": 0, "help": shown}


def _ranks(usual: str) -> Option:
    shown = f"comma-separated ranks (default: {usual})"
    return "--ranks", {"type": numbers(int, 1), "help": shown}


@dataclass(frozen=True)
class Experiment:
    """One experiment: the module that runs it, what it does, and what can be chosen."""

    module: str
    does: str
    options: tuple[Option, ...]
    steps: tuple[int, int] | None = None  # usual, and with --quick
    unused: tuple[str, ...] = ()  # patterns of settings that change nothing here
    more: str = ""

    @property
    def defaults(self) -> dict[str, Any]:
        """The default of each option, by the name that it has in code."""
        return {flag[2:].replace("-", "_"): told.get("default") for flag, told in self.options}


def _stepped(
    module: str, does: str, steps: tuple[int, int], options: tuple[Option, ...], **rest: Any
) -> Experiment:
    return Experiment(module, does, (_steps(*steps), *options), steps, **rest)


EXPERIMENTS = {
    "lossless": Experiment(
        "lossless", "compare loss, activations and gradients with and without cuts", BASIC
    ),
    "optimizer": Experiment(
        "optimizer", "measure which optimizers keep weights in the subspace", BASIC
    ),
    "rank-collapse": _stepped(
        "rank_collapse",
        "follow the stable rank of weights and gradients through training",
        (500, 16),
        BASIC,
    ),
    "subspace": _stepped(
        "stability", "follow a moving basis through a long run", (1000, 120), BASIC
    ),
    "bandwidth": _stepped(
        "bandwidth",
        "measure and simulate tokens/s from 10 Mbps to 100 Gbps",
        (12, 4),
        (
            *BASIC,
            MODES,
            _ranks("1/16 of the width"),
            (
                "--mbps",
                {"type": numbers(float, above=0),
                 "help": "comma-separated rates to measure, in Mbit/s (default: 10,80,500)"},
            ),
            (
                "--curves",
                {"type": Path, "metavar": "LOG",
                 "help": "convergence.jsonl of the same model; hours are then to a loss that "
                 "every mode reaches"},
            ),
            (
                "--dense-microbatches",
                {"type": number(int, 0), "default": 0, "metavar": "N",
                 "help": "measure dense with N microbatches and two steps, to save time"},
            ),
            SET,
        ),
    ),
    "convergence": _stepped(
        "convergence",
        "compare the loss of narrow cuts with dense, at equal tokens",
        (300, 20),
        (
            *GRID,
            LRS,
            (
                "--modes",
                {"help": "comma-separated boundary modes (default: subspace,reparam,projected), "
                 "each with +fixed, +trainable, +learned or +movedN as a variant"},
            ),
            _ranks("1/8, 1/32 and 1/100 of the width"),
            (
                "--stages",
                {"type": numbers(int, 1), "default": [4],
                 "help": "comma-separated numbers of stages (default: 4)"},
            ),
            (
                "--seeds",
                {"type": numbers(int), "default": [0],
                 "help": "comma-separated seeds of every arm; dense has at least two (default: 0)"},
            ),
            (
                "--sweep-steps",
                {"type": number(int, 0), "default": 0, "metavar": "N",
                 "help": "choose each method's learning rate by runs of N steps"},
            ),
            (
                "--tflops",
                {"type": number(float, above=0), "default": 50.0,
                 "help": "compute rate of a stage, for the plot over time (default: 50)"},
            ),
        ),
        unused=UNUSED_BY_ARMS,
    ),
    "codecs": _stepped(
        "codecs",
        "test the findings of arXiv 2401.07788 on lossy codecs",
        (300, 50),
        (
            *GRID,
            DENSE_SEEDS,
            (
                "--task",
                {"choices": ("cifar", "lm"), "default": "cifar",
                 "help": "images or language (default: cifar)"},
            ),
            (
                "--arms",
                {"metavar": "PATTERNS",
                 "help": 'comma-separated patterns of arms, such as "topk*,tune/fw8-*"; dense is '
                 "always among them (default: all)"},
            ),
            (
                "--epochs",
                {"type": number(int, 0), "default": 0,
                 "help": "epochs over the images (default: 30, or 5 with --quick), or of "
                 "fine-tuning (default: 3)"},
            ),
            (
                "--base-steps",
                {"type": number(int, 0), "default": 0, "metavar": "N",
                 "help": "lm: steps of the model that is fine-tuned (default: those of --steps)"},
            ),
            (
                "--tune-on",
                {"metavar": "TEXT",
                 "help": "lm: file or folder to fine-tune on (default: Python's documentation)"},
            ),
        ),
        unused=UNUSED_BY_ARMS,
    ),
    "frontier": _stepped(
        "frontier",
        "map loss against bytes over boundary mode, rank and codec",
        (300, 50),
        (
            *GRID,
            DENSE_SEEDS,
            LRS,
            (
                "--arms",
                {"metavar": "ARMS",
                 "help": "comma-separated patterns of the grid's arms, and arms of your own; see "
                 "below (default: the whole grid)"},
            ),
        ),
        unused=UNUSED_BY_ARMS,
        more='an arm is "MODE [RANK] FORWARD/BACKWARD": a boundary mode (dense, subspace, reparam '
        "or projected), its rank as a number or as a part of the width (not for dense), and the "
        'codec of each direction, such as "projected d/8 int8/int4", "subspace 12 int4(group=64)/'
        'int8" or "dense int8/int8". A pattern selects from the grid: "reparam*" or "*/int4". '
        "Dense bf16/bf16 is always among the arms. Arms that the log in --out holds for the same "
        "settings and steps are not trained again, and the report shows them too.",
    ),
}  # fmt: skip


def add_experiments(lab: argparse.ArgumentParser) -> None:
    """Give `thinwire lab` a subcommand for each experiment, with that experiment's options."""
    names = lab.add_subparsers(
        title="experiments", dest="name", required=True, metavar="EXPERIMENT",
        parser_class=StrictParser,
    )  # fmt: skip
    for name, experiment in EXPERIMENTS.items():
        described = experiment.does[0].upper() + experiment.does[1:] + "."
        parser = names.add_parser(
            name, help=experiment.does, description=described, epilog=experiment.more
        )
        for flag, told in experiment.options:
            parser.add_argument(flag, **told)
