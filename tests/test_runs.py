"""Whole runs as a user starts them: real processes, real sockets, signals, and bad input."""

import json
import os
import re
import resource
import signal
import sys

import pytest

from programs import gone, long_run
from thinwire.engine.checkpoint import Checkpoint, checkpoints_folder, list_checkpoints

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="looks at processes through /proc"
)

SUMMARY_KEYS = {
    "final_train_loss", "final_valid_loss", "valid_losses", "tokens_per_s", "steps", "cuts",
    "ratio_vs_bf16", "link_utilisation", "bubble_fraction", "step_seconds_median",
    "simulated_step_seconds", "config_hash", "seed", "versions",
}  # fmt: skip


def test_a_run_from_start_to_finish(thinwire, config, tmp_path, refused, command):
    path = config()
    run = thinwire("train", path)
    assert run.wait() == 0, run.text()
    folder = tmp_path / "test"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary.keys() >= SUMMARY_KEYS
    assert summary["steps"] == 4
    assert [step for step, _ in summary["valid_losses"]] == [0, 2, 4]
    assert summary["final_valid_loss"] < summary["valid_losses"][0][1]
    for name in ("plots/loss.png", "plots/step.png", "metrics.jsonl", "logs/stage-1.log"):
        assert (folder / name).is_file(), name
    assert list((folder / "tensorboard").iterdir())
    assert [p.name for p in list_checkpoints(folder)] == ["step-00000002", "step-00000004"]
    text = run.text()
    assert f"hash {summary['config_hash']}" in text
    assert "loss" in text and "tok/s" in text and str(folder / "plots") in text

    # dense bf16: 2 bytes per channel and token, plus headers, tallies and verdicts
    (row,) = summary["cuts"]
    assert 64 <= row["forward_bytes_per_token"] < 70
    assert 64 <= row["backward_bytes_per_token"] < 72
    assert 0.9 < row["ratio_vs_bf16"] < 1

    # the checkpoint, loaded into one process, has the loss that the pipeline reported
    result = json.loads(command("eval", folder, "--json")[1])
    assert result["valid_loss"] == pytest.approx(summary["final_valid_loss"], rel=1e-3)

    words = ("--prompt", "stage link", "--tokens", 8)
    assert command("generate", folder, *words)[1].startswith("stage link")

    # a second run of the same name is refused and touches nothing
    before = (folder / "metrics.jsonl").read_bytes()
    refused(["train", path], 2, "already holds a run", "--resume")
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_processes_give_what_threads_give_and_resume_into_other_stages(
    thinwire, config, make_settings, run_in_threads, tmp_path, refused
):
    """The transport carries numbers, it does not change them: bitwise, in float32.

    The reader of the first run leaves, as in `thinwire train run.toml | head -1`: it goes on.
    """
    exact = {"codec__forward": "fp32", "codec__backward": "fp32", "run__precision": "fp32"}
    path = config(**exact)
    reading, writing = os.pipe()
    whole = thinwire("train", path, "--set", "run.name=whole", into=writing)
    os.close(writing)
    with os.fdopen(reading) as reader:
        assert reader.readline().startswith("[config]")
    assert whole.wait() == 0
    lines = (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    losses = [r["loss"] for r in map(json.loads, lines) if "grad_norm" in r]
    assert losses == run_in_threads(make_settings(**exact)).losses()
    middle = tmp_path / "whole" / "checkpoints" / "step-00000002"
    resumed = thinwire(
        "train", path, "--set", "run.name=resumed", "--set", "pipeline.stages=1",
        "--resume", middle,
    )  # fmt: skip
    assert resumed.wait() == 0, resumed.text()
    said = resumed.text().replace("\n", " ")
    assert f", from {middle}" in said, "which checkpoint it goes on from"
    assert "1 / 1 stages have their layers" in said, "the start is not silent"
    ends = [Checkpoint.open(tmp_path / name) for name in ("whole", "resumed")]
    assert [end.step for end in ends] == [4, 4]
    names = {n for shard in ends[0].shards for n in shard.tensors}
    left, right = (end.tensors(names) for end in ends)
    assert all(left[name].equal(right[name]) for name in names)
    changed = ["train", path, "--set", "model.ffn=64", "--resume", middle]
    refused(changed, 2, "cannot resume", "model.ffn")


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_stage_that_dies_ends_the_run_by_name(victim, thinwire, config, tmp_path):
    """Where nothing is logged that another process could go on from."""
    run = thinwire("train", long_run(config, train__log_mb=0))
    run.wait_for(r"\[train\] step +\d")
    stages = run.stages()
    os.kill(stages[victim], signal.SIGKILL)
    assert run.wait() == 6, run.text()
    assert re.search(rf"error: stage {victim} died at step \d+: killed by SIGKILL", run.text())
    assert f"logs/stage-{victim}.log" in run.text()
    assert gone(stages)


def test_a_full_disk_keeps_the_previous_checkpoint(thinwire, config, tmp_path):
    """A real refusal by the kernel: stage 1 may write no file past a limit from some step on."""
    run = thinwire("train", long_run(config, train__checkpoint_every=5, train__keep=1000))
    run.wait_for(r"\[save\]")
    stages = run.stages()
    resource.prlimit(stages[1], resource.RLIMIT_FSIZE, (20_000, 20_000))
    run.wait_for("not written, training continues")
    run.stop(code=4)
    assert "Earlier checkpoints are untouched" in run.text()
    saved = list_checkpoints(tmp_path / "test")
    assert saved
    for folder in saved:
        Checkpoint.open(folder).verify()
    assert not list(checkpoints_folder(tmp_path / "test").glob(".partial*"))


@pytest.fixture
def refused(tmp_path, monkeypatch, command):
    """Run a command that must fail with this exit code and say these words (in this process)."""
    monkeypatch.chdir(tmp_path)

    def check(arguments, code, *words):
        ended, *said = command(*arguments)
        text = "".join(said)
        assert ended == code and all(word in text for word in words), text
        assert "Traceback" not in text

    return check


def test_bad_settings_are_refused(refused, config, tmp_path):
    path = config()
    for code, override, words in [
        (2, "model.dimm=64", 'did you mean "dim"?'), (2, "modle.dim=64", 'did you mean "model"?'),
        (3, "data.path=/nowhere/at/all", "/nowhere/at/all"), (3, "train.batch=4000000", "train"),
    ]:  # fmt: skip
        refused(["train", path, "--set", override], code, words)
    assert not (tmp_path / "test" / "metrics.jsonl").exists()


def test_missing_files(refused, command):
    refused(["train", "absent.toml"], 2, "absent.toml does not exist", "thinwire init absent.toml")
    refused(["eval", "absent"], 4, "no such folder")
    command("init", "new.toml")
    refused(["init", "new.toml"], 2, "exists already")
    text = command("plan", "new.toml", "--tflops", 1, "--json")[1]
    assert json.loads(text[text.index("{") :])["step_seconds"] > 0
