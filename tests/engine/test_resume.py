"""A resumed run is the uninterrupted run, bit for bit, also when it is split anew."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from stopping import stop_in_the_first_step

from thinwire.data import Corpus
from thinwire.engine.checkpoint import Checkpoint, sealed
from thinwire.engine.reports import ShardFailed
from thinwire.errors import CheckpointError
from thinwire.settings import Settings


def commit_all(outcome, folder: Path, corpus: Corpus) -> dict[int, Path]:
    """What the coordinator does once all stages have written their part."""
    return {step: outcome.commit(folder, step, corpus) for step in outcome.shards()}


def exact(make_settings: Callable, **changes) -> Settings:
    settings = {
        "run__precision": "fp32",
        "codec__forward": "fp32",
        "codec__backward": "fp32",
        "train__steps": 6,
        "train__checkpoint_every": 3,
        **changes,
    }
    return make_settings(**settings)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(("before", "after"), [(4, 4), (4, 2), (2, 4), (1, 3)])
def test_resumed_equals_uninterrupted(
    optimizer, before, after, make_settings, run_in_threads, corpus, tmp_path
):
    settings = exact(make_settings, pipeline__stages=before, optim__name=optimizer)
    whole = run_in_threads(settings)
    middle = commit_all(whole, tmp_path / "run", corpus)[3]
    resumed = run_in_threads(
        exact(make_settings, pipeline__stages=after, optim__name=optimizer),
        resume=middle,
        folder=tmp_path / "resumed",
    )
    assert resumed.losses() == whole.losses()[3:]
    weights = resumed.weights()
    assert all(torch.equal(weights[name], weight) for name, weight in whole.weights().items())


def test_optimizer_state_matters(make_settings, run_in_threads, corpus, tmp_path):
    """The failing side: weights alone do not continue the run."""
    settings = exact(make_settings)
    whole = run_in_threads(settings)
    middle = commit_all(whole, tmp_path / "run", corpus)[3]

    def forget(worker):
        worker.update.optimizer.load_state_tensors({})

    forgetful = run_in_threads(
        settings, resume=middle, folder=tmp_path / "other", prepare_worker=forget
    )
    assert forgetful.losses()[0] == whole.losses()[3]
    assert forgetful.losses()[-1] != whole.losses()[-1]


def test_interrupted_run_stops_on_every_stage_and_goes_on(
    make_settings, run_in_threads, corpus, tmp_path
):
    settings = exact(make_settings, pipeline__stages=4, train__checkpoint_every=0)
    whole = run_in_threads(settings, folder=tmp_path / "whole")

    stopped = run_in_threads(settings, prepare_worker=stop_in_the_first_step)
    assert [len(r) for r in (stopped.losses(),)] == [1]
    after_one = commit_all(stopped, tmp_path / "run", corpus)[1]
    resumed = run_in_threads(settings, resume=after_one, folder=tmp_path / "resumed")
    assert resumed.losses() == whole.losses()[1:]


def damaged(folder: Path) -> None:
    path = folder / "stage-1.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def truncated(folder: Path) -> None:
    path = folder / "stage-0.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def lacking(folder: Path) -> None:
    (folder / "stage-1.safetensors").unlink()


def other_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


def test_a_checkpoint_that_is_harmed_or_of_another_shape_is_refused(
    make_settings, run_in_threads, corpus, tmp_path
):
    settings = exact(make_settings, train__checkpoint_every=6)
    outcome = run_in_threads(settings)
    folder = commit_all(outcome, tmp_path / "run", corpus)[6]
    Checkpoint.open(folder).verify()
    for harm, words in (
        (damaged, "stage-1.safetensors is altered"),
        (truncated, "stage-0.safetensors is truncated"),
        (lacking, "has no file stage-1.safetensors"),
        (other_tokenizer, "tokenizer.json is altered"),
    ):
        copy = shutil.copytree(folder, tmp_path / harm.__name__)
        harm(copy)
        with pytest.raises(CheckpointError, match=words):
            Checkpoint.open(copy).verify()
    with pytest.raises(CheckpointError, match="9 tensors are missing"):
        run_in_threads(exact(make_settings, model__layers=5), resume=folder)
    with pytest.raises(CheckpointError, match="has shape"):
        run_in_threads(exact(make_settings, model__ffn=64), resume=folder)


def test_a_failed_write_leaves_the_previous_checkpoint(
    make_settings, run_in_threads, corpus, tmp_path
):
    """Stage 1's disk refuses; training goes on, and nothing is taken for complete."""
    settings = exact(make_settings, train__checkpoint_every=2)
    blocked = tmp_path / "run" / "checkpoints" / ".partial-step-00000004" / "stage-1.safetensors"
    blocked.mkdir(parents=True)  # a folder stands where the file should go
    outcome = run_in_threads(settings)
    failed = [r for r in outcome.reports[1] if isinstance(r, ShardFailed)]
    assert [r.step for r in failed] == [4]
    assert "Earlier checkpoints are untouched" in failed[0].error
    assert len(outcome.losses()) == 6
    complete = {s: r for s, r in outcome.shards().items() if len(r) == 2}
    assert sorted(complete) == [2, 6]


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors of a checkpoint and have its manifest agree with them."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for entry in manifest["shards"]:
        tensors = load_file(folder / entry["file"])
        change(tensors)
        save_file(tensors, folder / entry["file"])
        entry["tensors"] = sorted(tensors)
    (folder / "manifest.json").write_text(json.dumps(sealed(manifest)))


def dropped(ending: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if n.endswith(ending)]:
            del tensors[name]

    return change


def cut(ending: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({n: t[:1].clone() for n, t in tensors.items() if n.endswith(ending)})

    return change


NARROW = {"boundary__mode": "subspace", "boundary__rank": 8}


@pytest.mark.parametrize(
    ("changes", "harm", "words"),
    [
        ({}, lambda t: [t.pop(n) for n in list(t) if n.startswith("optimizer/")], "has no opt"),
        ({}, dropped("q_proj.weight/exp_avg"), "exp_avg_sq.*this optimizer keeps"),
        ({"optim__name": "muon"}, dropped("/momentum_buffer"), "has no optimizer state"),
        (NARROW, cut("down_proj.weight/exp_avg"), "this optimizer keeps"),
    ],
)
def test_a_resume_without_the_optimizers_state_is_refused(
    changes, harm, words, make_settings, run_in_threads, corpus, tmp_path
):
    settings = exact(make_settings, train__steps=2, train__checkpoint_every=1, **changes)
    outcome = run_in_threads(settings)
    folder = commit_all(outcome, tmp_path / "run", corpus)[1]
    run_in_threads(settings, resume=folder, folder=tmp_path / "sound")
    rewrite(folder, harm)
    with pytest.raises(CheckpointError, match=words):
        run_in_threads(settings, resume=folder, folder=tmp_path / "harmed")


def test_state_of_another_optimizer_is_refused(make_settings, run_in_threads, corpus, tmp_path):
    settings = exact(make_settings, train__steps=2, train__checkpoint_every=1)
    folder = commit_all(run_in_threads(settings), tmp_path / "run", corpus)[1]
    other = exact(make_settings, train__steps=2, optim__name="muon")
    with pytest.raises(CheckpointError, match=r"this optimizer keeps.*momentum_buffer"):
        run_in_threads(other, resume=folder, folder=tmp_path / "other")
