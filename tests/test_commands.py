"""The commands of our pages run, or at least exist, on the files that our own commands write."""

import argparse
import ast
import importlib.util
import inspect
import itertools
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from doc_commands import find_blocks, find_python, pages
from thinwire.cli import main, make_parser
from thinwire.settings import Settings, apply_override, load_settings

ROOT = Path(__file__).parent.parent
# What the page sets itself stays as it is, but for the steps.
SHORT = {"model.context": 32, "pipeline.stages": 2, "pipeline.microbatches": 2, "train.batch": 4,
         "optim.warmup": -1, "train.eval_every": 0, "train.eval_batches": 1}  # fmt: skip
OF_FOUR_STAGES = ("codec.cuts=",)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = re.compile(r"(?:thinwire|\.)\[([\w,]+)\]")
BLOCKS = [block for page in pages(ROOT) for block in find_blocks(page.name, page.read_text())]

HELP: dict[str, str] = {}
PARSER = make_parser()


@pytest.fixture
def perform(tmp_path, command):
    """Runs a command in a folder of its own, and gives what it printed.

    Commands of ours run in this process, which has imported torch already; their stages do not.
    """
    for folder in ("examples", "tools", "lab", "tests"):
        (tmp_path / folder).symlink_to(ROOT / folder)

    def run(words, variables):
        if words[0] == "thinwire" and not variables:
            code, shown, _ = command(*words[1:])
            assert not code, " ".join(words)
            return shown
        inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        paths = [p for p in (variables.get("PYTHONPATH"), *inherited) if p]
        environment = {**os.environ, **variables}
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        program = {"thinwire": [sys.executable, "-m", "thinwire"], "python": [sys.executable]}
        finished = subprocess.run([*program.get(words[0], words[:1]), *words[1:]], cwd=tmp_path,
                                  env=environment, capture_output=True, text=True)  # fmt: skip
        output = finished.stdout + finished.stderr
        assert finished.returncode == 0, f"{' '.join(words)}\n{output}"
        return output

    return run


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{block.page}:{block.line}")
def test_commands(block, perform, tmp_path, text_folder, monkeypatch):
    commands = block.commands()
    monkeypatch.chdir(tmp_path)
    if ["thinwire", "init"] not in [words[:2] for _, words in commands]:
        main(["init", "run.toml"])
    for variables, words in commands:
        is_training = words[:2] == ["thinwire", "train"]
        if block.way == "run" or words[0] == "touch" or words[:2] == ["thinwire", "init"]:
            perform(words, variables)
        elif block.way == "short":
            perform([*words, *shortened(words, text_folder)] if is_training else words, variables)
        elif block.way == "plan" and is_training:
            perform(["thinwire", "plan", *words[2:], "--tflops", "1"], variables)
        else:
            for path in variables.get("PYTHONPATH", "").split(os.pathsep):
                monkeypatch.syspath_prepend(tmp_path / path)
            check(words, perform)


def shortened(words, text_folder):
    """What makes a training quick; one that is resumed goes on for as many steps again."""
    text = " ".join(words)
    keys = {key: value for key, value in SHORT.items() if f"{key}=" not in text}
    if any(key in text for key in OF_FOUR_STAGES):
        keys.pop("pipeline.stages", None)
    keys["train.steps"] = 4 if "--resume" in words else 2
    if tomllib.loads(Path(words[2]).read_text())["data"]["source"] == "stdlib":
        # Of the standard library the tokens alone take half a minute.
        keys |= {"data.source": "text", "data.path": text_folder, "data.valid_fraction": 0.1}
    return [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]


# They set up a machine: nothing of this project to check.
SYSTEM_TOOLS = ("modprobe", "sysctl", "git", "source", "cd")


def check(words, perform):
    """Hold a command that is not run against what exists."""
    words = words[1:] if words[0] == "sudo" else words
    if words[0] in SYSTEM_TOOLS:
        return
    if words == ["thinwire", "--version"]:
        perform(words, {})
    elif words[0] == "thinwire":
        options = PARSER.parse_args(words[1:])
        if words[1] in ("train", "plan") and options.config.parts[0] != "models":  # imported
            load_settings(options.config, options.set)
        for override in getattr(options, "set", []):
            apply_override({}, override)
    elif words[0] == "pip":
        for extra in [
            name for found in EXTRAS.findall(" ".join(words)) for name in found.split(",")
        ]:
            assert extra in PROJECT["optional-dependencies"], f"no extra {extra}"
    elif words[0] == "docker":
        check_docker(words[1:], perform)
    elif words[0] == "torchrun":
        check_torchrun(words[1:])
    elif words[0] == "make":
        subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True)
    else:
        assert words[0] == "python", f"no way to check {words[0]}"
        check_python(words[1:], perform)


def check_docker(words, perform):
    """The arguments of a build are those of our Dockerfile; what runs is a command of ours."""
    defined = re.findall(r"^ARG (\w+)=", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    for option, value in itertools.pairwise(words):
        if option == "--build-arg":
            assert value.partition("=")[0] in defined, f"the Dockerfile has no ARG {value}"
    if words[0] == "run":
        check(words[words.index("thinwire") :], perform)


def check_torchrun(words):
    """torchrun and what it starts have these options, and the settings can work."""
    from torch.distributed.run import get_args_parser

    from thinwire.cluster.__main__ import make_parser as make_cluster_parser

    given = get_args_parser().parse_args(words)
    if not given.module:
        assert (ROOT / given.training_script).is_file()
        return
    assert given.training_script == "thinwire.cluster"
    options = make_cluster_parser().parse_args(given.training_script_args)
    load_settings(options.config, options.set)


def check_python(words, perform):
    """The module or file exists, and its --help names the options."""
    program = words[:2] if words[0] == "-m" else words[:1]
    if program[-1] == "timeit":
        assert importlib.util.find_spec(program[-1])
        return
    asked = " ".join(program)
    if asked not in HELP:  # several pages name the same program
        HELP[asked] = perform(["python", *program, "--help"], {})
    text = HELP[asked]
    for word in words[len(program) :]:
        if word.startswith("--"):
            assert re.search(rf"{re.escape(word)}\b", text), f"{word} is no option of {program}"


SUBCOMMANDS = next(a.choices for a in PARSER._actions if isinstance(a, argparse._SubParsersAction))
FENCED, INLINE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL), re.compile(r"`([^`]+)`")
PAGES = [page for page in pages(ROOT) if page.parent in (ROOT, ROOT / "docs")]
SIGNED = "stream", "door"  # on the wire, behind the name
OTHER = ("toml", "py", "bin", "safetensors", "encode", "decode", "pack", "unpack", "loss")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_and_settings_within_the_text_exist(page):
    sections = Settings().to_plain()
    for said in map(str.split, INLINE.findall(FENCED.sub("", page.read_text()))):
        if said[:1] == ["thinwire"] and said[1:2] and not said[1].startswith(("-", *SIGNED)):
            options = {word.partition("=")[0] for word in said if word.startswith("--")}
            assert options <= SUBCOMMANDS[said[1]]._option_string_actions.keys(), said
        setting = re.fullmatch(r"([a-z]+)\.([a-z_]+)(=.*)?", "".join(said))
        if setting and setting[1] in sections and setting[2] not in OTHER:
            assert setting[2] in sections[setting[1]], said
            if setting[3] and not setting[3][1:].isupper():
                apply_override({}, setting[0])


PYTHON = [(page.name, code) for page in pages(ROOT) for code in find_python(page.read_text())]


@pytest.mark.parametrize(("page", "code"), PYTHON, ids=[page for page, _ in PYTHON])
def test_what_python_in_pages_imports_exists_and_takes_its_arguments(page, code):
    known, parts = {}, [*ast.walk(ast.parse(code))]
    for one in parts:
        if isinstance(one, ast.Import | ast.ImportFrom):
            pytest.importorskip((getattr(one, "module", "") or one.names[0].name).partition(".")[0])
            exec(ast.unparse(one), known)
    for one in parts:
        name = ast.unparse(one.func) if isinstance(one, ast.Call) else ""
        if name.partition(".")[0] in known:
            named = {word.arg: None for word in one.keywords}
            inspect.signature(eval(name, known)).bind(*one.args, **named)


def test_blocks_are_found_with_their_way():
    text = (
        "text\n# T\n<!-- commands: run -->\n\n    thinwire init a  # why\n    A=b make \\\n  c\n\n"
        "<!-- commands: check: needs a GPU -->\n\n    touch x && thinwire eval y\n\n    make z\n"
        "\n    no command here\n\n```python\nimport thinwire\n```\n"
    )
    first, second = find_blocks("page.md", text)
    assert (first.way, first.line, second.way, second.line) == ("run", 5, "check", 11)
    assert first.commands() == [({}, ["thinwire", "init", "a"]), ({"A": "b"}, ["make", "c"])]
    found = [" ".join(words) for _, words in second.commands()]
    assert found == ["touch x", "thinwire eval y", "make z"]
    assert find_python(text) == ["import thinwire\n"]


@pytest.mark.parametrize(("text", "message"), [
    ("\n    thinwire demo\n", "page.md:2: commands without a mark"),
    ("text\n\n```bash\nls\n```\n", "page.md:3: fences around commands"),
    ("<!-- commands: run -->\n```\nmake x\n```\n", "page.md:2: fences around commands"),
    ("- a\n\n      X=1 thinwire demo\n", "page.md:3: commands without a mark"),
    ("<!-- commands: guess -->\n    make x\n", "page.md:1: unknown way 'guess'"),
    ("<!-- commands: check -->\n    make x\n", "page.md:1: say why"),
    ("<!-- commands: run -->\ntext\n\n    make x\n", "page.md:2: no commands follow the mark"),
    ("<!-- commands: run -->\n", "page.md:2: no commands follow the mark"),
])  # fmt: skip
def test_a_block_cannot_slip_by(text, message):
    with pytest.raises(ValueError, match=message):
        find_blocks("page.md", text)


def test_the_pages_have_commands():
    assert {"README.md", "results.md", "codecs.md"} <= {block.page for block in BLOCKS}
    assert {block.way for block in BLOCKS} == {"run", "short", "plan", "check"}
