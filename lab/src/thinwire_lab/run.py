"""`thinwire lab NAME`: runs an experiment and writes what it leaves behind."""

import argparse
import json
import sys

from thinwire_lab.experiment import EXPERIMENTS
from thinwire_lab.outcome import write_outcome


def run_lab(options: argparse.Namespace) -> None:
    """Run one experiment, write its files, print its verdict."""

    def say(text: str) -> None:
        print(text, file=sys.stderr if options.json else sys.stdout, flush=True)

    experiment = EXPERIMENTS[options.name]
    command = experiment.command_line(options)
    say(f"{options.name}: {experiment.summary}")
    found = experiment.run(options, say)
    found.command = command
    place = write_outcome(found, options.out)
    if options.json:
        print(json.dumps(found.to_plain(), indent=1))
        return
    print(f"\nVerdict: {found.conclusion}\n\n{place / 'report.md'}\n{place / 'plot.png'}")
