"""Completion knows every command and option, because it is written from the parser."""

import shutil
import subprocess

import pytest

from thinwire.cli import make_parser
from thinwire.completion import completion_script


def completions(*words):
    """What bash offers for the last of the words."""
    typed = " ".join(f"'{word}'" for word in ("thinwire", *words))
    program = (
        f"{completion_script('bash', make_parser())}\n"
        f"COMP_WORDS=({typed}); COMP_CWORD={len(words)}; _thinwire\n"
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "some"),
    [([""], ["train", "plan", "lab", "completion"]), (["--ver"], ["--version"]),
     (["train", "--re"], ["--resume"]),
     (["train", "run.toml", "--set", "boundary.r"], ["boundary.rank="]),
     (["train", "run.toml", "--set", "boundary.mode", "=", "p"], []),  # files, by bash itself
     (["eval", "runs/x", "--device", "c"], ["cpu", "cuda"]), (["lab", "con"], ["convergence"]),
     (["lab", "codecs", "--ta"], ["--task"]),
     (["lab", "codecs", "--task", ""], ["cifar", "lm"])],
    ids=lambda words: " ".join(words),
)  # fmt: skip
def test_bash_completes(words, some):
    found = completions(*words)
    assert set(some) <= set(found)
    assert all(word.startswith(words[-1]) for word in found)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_script_names_all_commands_and_settings(shell):
    script = completion_script(shell, make_parser())
    for word in ("convergence", "generate", "optim.schedule=", "resume", "codec.forward="):
        assert word in script
    if program := shutil.which(shell):
        subprocess.run([program, "-n"], input=script, text=True, check=True, capture_output=True)
