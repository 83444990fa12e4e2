"""A resumed run is the uninterrupted run, bit for bit, also when it is split anew."""

import json
import shutil

import pytest
from engine_runs import assert_same_course, stop_in_the_first_step
from safetensors.torch import load_file, save_file

from settings_values import EXACT, narrow
from thinwire.engine.checkpoint import Checkpoint, sealed
from thinwire.engine.reports import ShardFailed
from thinwire.errors import CheckpointError


@pytest.fixture
def exact(make_settings):
    """Six float32 steps, saved in the middle."""
    own = {**EXACT, "train__steps": 6, "train__checkpoint_every": 3}
    return lambda **changes: make_settings(**{**own, **changes})


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(("before", "after"), [(4, 4), (4, 2), (2, 4), (1, 3)])
@pytest.mark.parametrize("rank", [0, 3])
def test_resumed_equals_uninterrupted(optimizer, before, after, rank, exact, saved_run, resumed):
    """Also adapters, and then with layers recomputed in the backward pass, which changes no bit."""
    changes = {"optim__name": optimizer, "lora__rank": rank}
    whole, saved = saved_run(exact(pipeline__stages=before, **changes))
    other = exact(pipeline__stages=after, pipeline__recompute=rank > 0, **changes)
    assert_same_course(resumed(other, saved[3]), whole, 3)


def test_optimizer_state_matters(exact, saved_run, resumed):
    """The failing side: weights alone do not continue the run; nor does another optimizer."""
    whole, saved = saved_run(exact())
    forgetful = resumed(exact(), saved[3], lambda w: w.update.optimizer.load_state_tensors({}))
    assert forgetful.losses()[0] == whole.losses()[3]
    assert forgetful.losses()[-1] != whole.losses()[-1]
    with pytest.raises(CheckpointError, match=r"this optimizer keeps.*momentum_buffer"):
        resumed(exact(optim__name="muon"), saved[3])


@pytest.mark.parametrize("delay", [0, 1])
def test_interrupted_run_stops_on_every_stage_and_goes_on(delay, exact, saved_run, resumed):
    settings = exact(pipeline__stages=4, pipeline__delay=delay, train__checkpoint_every=0)
    whole, _ = saved_run(settings, "whole")
    stopped, saved = saved_run(settings, prepare_worker=stop_in_the_first_step)
    assert [len(stopped.steps(stage)) for stage in range(4)] == [1 + delay] * 4
    assert_same_course(resumed(settings, saved[1 + delay]), whole, 1 + delay)


HARMS = [
    ("stage-1.safetensors", lambda old: old[:-5] + bytes([old[-5] ^ 1]) + old[-4:], "is altered"),
    ("stage-0.safetensors", lambda old: old[:-100], "is altered"),
    ("tokenizer.json", lambda old: b"{}", "is altered"),
]


def test_a_checkpoint_that_is_harmed_or_of_another_shape_is_refused(
    exact, saved_run, resumed, tmp_path
):
    folder = saved_run(exact(train__checkpoint_every=6))[1][6]
    Checkpoint.open(folder).verify()
    for number, (name, change, words) in enumerate(HARMS):
        copy = shutil.copytree(folder, tmp_path / f"copy-{number}")
        (copy / name).write_bytes(change((copy / name).read_bytes()))
        with pytest.raises(CheckpointError, match=f"{name} {words}"):
            Checkpoint.open(copy).verify()
    (copy / "stage-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"stage-1\.safetensors is altered or missing"):
        Checkpoint.open(copy).verify()
    for changes, words in (({"model__layers": 5}, "9 tensors are missing"),
                           ({"model__ffn": 64}, "has shape")):  # fmt: skip
        with pytest.raises(CheckpointError, match=words):
            resumed(exact(**changes), folder)


def test_a_failed_write_leaves_the_previous_checkpoint(exact, run_in_threads, tmp_path):
    """Stage 1's disk refuses; training goes on, and nothing is taken for complete."""
    settings = exact(train__checkpoint_every=2)
    blocked = tmp_path / "run" / "checkpoints" / ".partial-step-00000004" / "stage-1.safetensors"
    blocked.mkdir(parents=True)  # a folder stands where the file should go
    outcome = run_in_threads(settings)
    failed = [r for r in outcome.reports[1] if isinstance(r, ShardFailed)]
    assert [r.step for r in failed] == [4]
    assert "Earlier checkpoints are untouched" in failed[0].error
    assert len(outcome.losses()) == 6
    complete = {s: r for s, r in outcome.shards().items() if len(r) == 2}
    assert sorted(complete) == [2, 6]


def rewrite(folder, change):
    """Change the tensors of a checkpoint and have its manifest agree with them."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for entry in manifest["shards"]:
        tensors = load_file(folder / entry["file"])
        change(tensors)
        save_file(tensors, folder / entry["file"])
        entry["tensors"] = sorted(tensors)
    (folder / "manifest.json").write_text(json.dumps(sealed(manifest)))


def dropped(ending):
    def change(tensors):
        for name in [n for n in tensors if n.endswith(ending)]:
            del tensors[name]

    return change


def cut(ending):
    def change(tensors):
        tensors.update({n: t[:1].clone() for n, t in tensors.items() if n.endswith(ending)})

    return change


NARROW = narrow("subspace")


@pytest.mark.parametrize(("changes", "harm", "words"), [
    ({}, lambda t: [t.pop(n) for n in list(t) if n.startswith("optimizer/")], "has no opt"),
    ({}, dropped("q_proj.weight/exp_avg"), "exp_avg_sq.*this optimizer keeps"),
    ({"optim__name": "muon"}, dropped("/momentum_buffer"), "has no optimizer state"),
    (NARROW, cut("down_proj.weight/exp_avg"), "this optimizer keeps"),
])  # fmt: skip
def test_a_resume_without_the_optimizers_state_is_refused(
    changes, harm, words, exact, saved_run, resumed
):
    settings = exact(train__steps=2, train__checkpoint_every=1, **changes)
    folder = saved_run(settings)[1][1]
    resumed(settings, folder)
    rewrite(folder, harm)
    with pytest.raises(CheckpointError, match=words):
        resumed(settings, folder)
