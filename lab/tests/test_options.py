"""Each experiment takes its own options and settings, and refuses all others."""

import json
import tomllib
from pathlib import Path

import pytest

import thinwire_lab
from thinwire.cli import main
from thinwire_lab.experiment import EXPERIMENTS, sheet
from thinwire_lab.outcome import Outcome, write_outcome
from thinwire_lab.plots import Line, Panel

PANELS = [Panel("a", "x", "y", [Line("one", [1, 2], [3, 4])])]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command that is refused says."""
    with pytest.raises(SystemExit) as ended:
        main(["lab", *arguments])
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["lossless", "--mbps", "10"],
        ["lossless", "--set", "model.dim=9999"],
        ["lossless", "--steps", "5"],
        ["bandwidth", "--parallel", "2"],
        ["convergence", "--arms", "dense*"],
        ["convergence", "--seed", "1"],  # not short for --seeds
        ["gap", "--task", "lm"],
    ],
)
def test_an_option_of_another_experiment_is_refused(arguments, capsys):
    name, flag, value = arguments
    text = refused(capsys, *arguments)
    assert f"thinwire lab {name}: error: unrecognized arguments: {flag} {value}" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["convergence", "--set", "link.mbps_up=5"], "lab convergence does not use link.mbps_up"),
        (["codecs", "--task", "lm", "--set", "train.keep=2"], "does not use train.keep"),
        (["convergence", "--set", "optim.lr=0.5"], "chooses optim.lr itself: use --lrs"),
        (["convergence", "--set", "boundary.mode=subspace"], "chooses boundary.mode itself"),
        (["convergence", "--set", "pipeline.stages=8"], "pipeline.stages itself: use --stages"),
        (["convergence", "--set", "run.seed=3"], "run.seed itself: use --seed"),
        (["codecs", "--quick", "--set", "codec.forward=int8"], "codec.forward itself: use --arms"),
        (["bandwidth", "--set", "train.steps=3"], "train.steps itself: use --steps"),
        (["bandwidth", "--set", "run.name=x"], "chooses run.name itself"),
        (["codecs", "--quick", "--steps", "3"], "--steps: no chosen arm of --task cifar uses it"),
        (["codecs", "--task", "lm", "--arms", "scratch/*", "--tune-on", "x"], "--tune-on: no"),
    ],
)
def test_a_setting_that_would_change_nothing_is_refused(
    arguments, words, capsys, tmp_path, monkeypatch
):
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))
    assert words in refused(capsys, *arguments, "--out", str(tmp_path / "lab"))
    assert not (tmp_path / "lab").exists(), "nothing was trained"


def options_of(name: str) -> set[str]:
    options = vars(EXPERIMENTS[name].parse())
    return {f"--{key.replace('_', '-')}" for key in options if key != "name"}


def test_what_experiments_share_is_used():
    used = {option for experiment in EXPERIMENTS.values() for option in experiment.shares}
    assert used == sheet("common")["options"].keys()


def test_a_wheel_holds_the_data_beside_the_code():
    package = Path(thinwire_lab.__file__).parent
    project = tomllib.loads((package.parents[1] / "pyproject.toml").read_text())
    globs = project["tool"]["setuptools"]["package-data"]["thinwire_lab"]
    files = {p for p in package.rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")}
    files |= {*(package / "lying").glob("*.py")}  # no module of the package
    assert files == {path for glob in globs for path in package.glob(glob)}
    assert package / "codecs.toml" in files


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_help_shows_the_options_of_one_experiment(name, capsys):
    with pytest.raises(SystemExit):
        main(["lab", name, "--help"])
    text = capsys.readouterr().out
    flags = {name: options_of(name) for name in EXPERIMENTS}
    every, own = set().union(*flags.values()), flags[name]
    assert {flag for flag in every if f"  {flag} " in text or f"  {flag}\n" in text} == own


def outcome(command: str, verdict: str = "As expected.") -> Outcome:
    return Outcome("map", "?", verdict, None, [{"figure": 1.0}], PANELS, command)


def test_a_report_is_overwritten_by_its_own_command_alone(tmp_path):
    first = write_outcome(outcome("thinwire lab map"), tmp_path)
    other = write_outcome(outcome("thinwire lab map --arms x"), tmp_path)
    assert (first.name, other.name) == ("map", "map-2")
    again = write_outcome(outcome("thinwire lab map", "Once more."), tmp_path)
    assert again == first and "Once more." in (first / "report.md").read_text()
    assert json.loads((other / "result.json").read_text())["command"].endswith("--arms x")
    (first / "result.json").write_text("{half")
    assert write_outcome(outcome("thinwire lab map"), tmp_path).name == "map-3"


def test_what_is_too_small_holds_neither_way():
    found = Outcome("x", "?", "Seen: 3.", True, [], [], too_small="16 steps")
    assert found.holds is None and found.to_plain()["too_small"] == "16 steps"
    assert found.conclusion == "Too small to decide: 16 steps. Seen: 3."


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["convergence", "--steps", "-1"], "--steps: '-1' must be"),
        (["convergence", "--ranks", "abc"], "--ranks: 'abc' must be an integer"),
        (["bandwidth", "--ranks", "8,0"], "--ranks: '0' must be an integer of at least"),
        (["bandwidth", "--mbps", "80,nan"], "--mbps: 'nan' must be a number above 0"),
        (["convergence", "--lrs", "-0.1"], "--lrs: '-0.1' must be a number above 0"),
        (["convergence", "--seeds", "1,x"], "--seeds: 'x' must be an integer"),
        (["headline", "--tflops", "0"], "--tflops: '0' must be"),
    ],
)
def test_values_out_of_range_are_refused(arguments, words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["lab", *arguments])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
