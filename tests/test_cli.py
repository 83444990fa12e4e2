"""The command line itself: what it refuses, how it ends, and whom it does not need to listen."""

import gc
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

import thinwire.report
import thinwire.train
from thinwire.errors import StageError
from thinwire.settings import Settings


@pytest.mark.parametrize(("arguments", "words"), [
    (["eval", "x", "--batches", "-5"], "--batches: '-5' must be an integer of at least 0"),
    (["generate", "x", "--tokens", "0"], "--tokens: '0' must be an integer of at least 1"),
    (["generate", "x", "--temperature", "nan"], "'nan' must be a number of at least 0"),
    (["generate", "x", "--seed", "-999999999999999999999"], "is too large"),
    (["generate", "x", "--top-p", "1.5"], "'1.5' must be a number above 0 and at most 1"),
    (["plan", "x", "--tflops", "0"], "--tflops: '0' must be a number above 0"),
    (["serve", "x", "--port", "70000"], "at most 65535"),
    (["eval", "x", "--lm-eval", " , "], "needs the name of a task"),
    (["eval", "x", "--lm-eval", "piqa", "--data", "y"], "leave out --data"),
    (["eval", "x", "--lm-eval", "piqa", "--batches", "3"], "leave out --data"),
    (["eval", "x", "--limit", "3"], "--limit and --tasks-folder"),
    (["eval", "x", "--tasks-folder", "y"], "--limit and --tasks-folder"),
    (["watch", "x"], "holds no run"),
    (["host", "x", "--listen", "127.0.0.1"], "--listen: '127.0.0.1' is not an address: write HOST"),
    (["join", "x", "--listen", "nowhere"], "--listen: 'nowhere' is not an address: write HOST"),
])  # fmt: skip
def test_values_out_of_range_and_options_that_contradict_are_refused(arguments, words, command):
    code, _, text = command(*arguments)
    assert code == 2 and words in text and "Traceback" not in text


@pytest.mark.parametrize(
    ("package", "arguments", "ends", "words"),
    [
        ("thinwire_lab", ["lab", "gap", "--logs", "x"], 2, "`pip install ./lab`"),
        ("lm_eval", ["eval", "x", "--lm-eval", "piqa"], 10,
         "--lm-eval needs lm_eval, which is not installed: pip install 'thinwire[eval]'"),
    ],
)  # fmt: skip
def test_a_command_whose_package_is_missing_says_how_to_get_it(
    package, arguments, ends, words, monkeypatch, command
):
    monkeypatch.setitem(sys.modules, package, None)
    code, _, said = command(*arguments)
    assert code == ends and words in " ".join(said.split())


@pytest.fixture
def training(monkeypatch):
    """Instead of training: who was asked to, in `calls`; every run says it was interrupted."""
    calls: list[tuple[Settings, Path | None]] = []

    def interrupted(settings, display, resume=None, allow_plugins=False, peers=0):
        calls.append((settings, resume))
        return {"steps": 3, "interrupted": True, "paths": {"folder": ".", "checkpoint": None}}

    monkeypatch.setattr(thinwire.train, "train", interrupted)
    monkeypatch.setattr(thinwire.report, "print_summary", lambda summary: print(summary))
    before = signal.getsignal(signal.SIGINT)
    yield calls
    signal.signal(signal.SIGINT, before)
    gc.unfreeze()


def test_resume_goes_where_it_is_told(training, config, tmp_path, command):
    """Alone it means this run; a config that it swallows is the config."""
    path = config()
    for arguments in ([], ["--resume", "."], ["--resume", "a/b"], ["--resume"]):
        command("train", path, *arguments)
    command("train", "--resume", path)
    own = tmp_path / "test"
    assert [resume for _, resume in training] == [None, Path(), Path("a/b"), own, own]


@pytest.fixture
def run_folder(config, tmp_path):
    """The folder of a run that wrote one checkpoint, as far as its names tell."""
    folder = tmp_path / "elsewhere" / "a run"
    checkpoint = folder / "checkpoints" / "step-00000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    (folder / "config.toml").write_text(config().read_text())
    return folder


def test_the_folder_of_a_run_is_enough_to_go_on(training, run_folder, command):
    checkpoint = run_folder / "checkpoints" / "step-00000002"
    for words in ((run_folder, "--resume"), ("--resume", run_folder), ("--resume", checkpoint)):
        command("train", *words)
    assert [resume for _, resume in training] == [run_folder, run_folder, checkpoint]
    folders = {Path(settings.run.out) / settings.run.name for settings, _ in training}
    assert folders == {run_folder}


def test_a_folder_does_not_run_the_plugins_that_it_names(
    training, run_folder, tmp_path, monkeypatch, command
):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "strange_plugin.py").write_text("")
    config = run_folder / "config.toml"
    config.write_text(config.read_text().replace("plugins = []", 'plugins = ["strange_plugin"]'))
    for verb in ("train", "plan"):
        code, _, said = command(verb, run_folder)
        assert code == 2 and "--allow-plugins" in said
    assert "strange_plugin" not in sys.modules and training == []
    code, _, said = command("train", run_folder, "--resume", "--allow-plugins")
    assert code == 130 and "strange_plugin" in sys.modules and len(training) == 1
    assert said.endswith("--resume --allow-plugins\n")


def test_an_interrupted_run_names_the_command_that_goes_on(training, run_folder, command):
    code, _, shown = command("train", run_folder, "--resume")
    way = f"interrupted\nto continue: thinwire train '{run_folder}' --resume\n"
    assert (code, shown) == (130, way)
    assert command(*shlex.split(shown.splitlines()[1])[3:])[0] == 130, "and it is a command"


def test_a_run_that_ended_early_says_how_it_goes_on(run_folder, monkeypatch, command):
    """With its checkpoint, or without one; what an error quotes does not command the terminal."""

    def dies(*_):
        raise StageError("the plugin \x1b[2J\x1b]0;owned\x07evil\r\ndied")

    monkeypatch.setattr(thinwire.train, "train", dies)
    died = "error: the plugin [2J]0;ownedevil\ndied\n"
    way = f"to continue: thinwire train '{run_folder}' --resume\n"
    assert command("train", run_folder, "--resume") == (6, "", died + way)
    shutil.rmtree(run_folder / "checkpoints")
    (run_folder / "metrics.jsonl").write_text("{}\n")
    way = f"no checkpoint was saved: to start again, delete {run_folder} or set another run.name\n"
    assert command("train", run_folder, "--resume") == (6, "", died + way)


def test_an_interrupted_run_shows_its_summary_and_says_so(training, config, command):
    gc.unfreeze()
    code, shown, said = command("train", config())
    assert (code, said) == (130, "interrupted\n")
    assert "'steps': 3" in shown and "folder" in shown
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN, "one more cannot change the code"
    assert gc.get_freeze_count() > 0, "a search for garbage at Python's end would take seconds"


def test_whoever_interrupts_while_the_command_line_is_read_sees_no_traceback(command, monkeypatch):
    monkeypatch.setattr("thinwire.cli.make_parser", Mock(side_effect=KeyboardInterrupt))
    assert command("status") == (130, "", "interrupted\n")


def test_an_interrupted_demo_does_not_start_its_second_arm(training, tmp_path, command):
    assert command("demo", "--set", f"run.out={tmp_path}")[0] == 130
    assert [settings.run.name for settings, _ in training] == ["demo-thin"]


def test_commands_that_compute_nothing_do_not_wait_for_torch(tmp_path):
    lines = ["--help", "lab --help", "lab codecs --help", "completion bash",
             "init b.toml --set model.preset=8b --set train.steps=9"]  # fmt: skip
    program = (
        "import sys\nfrom thinwire.cli import main\n"
        f"for line in {lines}:\n"
        "    try:\n        main(line.split())\n"
        "    except SystemExit as end:\n        assert not end.code\n"
        "print([name for name in ('torch', 'matplotlib') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
