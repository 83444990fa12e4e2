"""What a run may continue from, and whose folder it writes to."""

from io import StringIO
from typing import Any

import pytest

from test_train import silent
from thinwire.engine.checkpoint import Checkpoint, partial_folder
from thinwire.errors import CheckpointError, ConfigError
from thinwire.report import PlainDisplay
from thinwire.run.checkpoints import claim_folder
from thinwire.run.start import adopted, open_resume
from thinwire.train import train
from trained import save_tensor


def save(run, settings):
    return save_tensor(run, 2, settings=settings.to_plain())


def test_what_the_weights_mean_cannot_change_on_resume(make_settings, tmp_path):
    """Everything else may."""
    saved = save(tmp_path, make_settings())
    fixed: dict[str, dict[str, Any]] = {
        "model.ffn": {"model__ffn": 64},
        "boundary.mode": {"boundary__mode": "subspace", "boundary__rank": 4},
        "data.tokenizer": {"data__tokenizer": "other.json"},
        "run.precision": {"run__precision": "fp32"},
        "train.batch": {"train__batch": 16},
    }
    for place, change in fixed.items():
        with pytest.raises(ConfigError, match=f"other values of .*{place}"):
            open_resume(saved, make_settings(**change), silent())
    free: list[dict[str, Any]] = [
        {"train__steps": 9, "train__eval_every": 3, "train__keep": 1},
        {"optim__lr": 1e-4, "optim__clip": 1.0, "optim__warmup": 1, "optim__schedule": "wsd"},
        {"codec__forward": "bf16", "link__emulate": True, "link__mbps_up": 5.0},
        {"run__name": "other", "run__threads": 2, "data__path": "moved"},
        {"pipeline__stages": 4, "pipeline__microbatches": 8, "pipeline__window": 6},
    ]
    for change in free:
        assert open_resume(saved, make_settings(**change), silent()).folder == saved


def said_of(saved, settings):
    """What a person is told who continues from this with these settings."""
    stream = StringIO()
    open_resume(saved, settings, PlainDisplay(stream))
    return stream.getvalue()


FOUR = {"pipeline__stages": 4}


@pytest.mark.parametrize(("before", "after", "noted"), [
    ({}, FOUR, ""),
    ({"codec__forward": "fp32"}, FOUR, "codecs"),
    ({"codec__backward": "bf16"}, {"pipeline__stages": 2}, ""),
    ({}, {"pipeline__stages": 3, "codec__cuts": ["1: forward=bf16"]}, "codecs"),
    ({"run__precision": "fp32", "codec__forward": "fp32"}, FOUR, ""),
    # Shared out over more stages, a machine's cores are fewer for each, and round otherwise.
    ({"run__threads": 0}, FOUR, "threads"),
    ({"run__threads": 2}, FOUR, ""), ({}, {"pipeline__microbatches": 8}, "another sum"),
])  # fmt: skip
def test_a_split_anew_says_whether_it_is_exact(
    before, after, noted, make_settings, tmp_path, monkeypatch
):
    monkeypatch.setattr("thinwire.settings.tree.machine_cores", lambda: 4)
    saved = save(tmp_path, make_settings(**before))
    said = said_of(saved, make_settings(**before, **after))
    assert ("not bit for bit" in said) == bool(noted)
    assert ("run.threads = 2" in said) == (noted == "threads")


NARROW = {
    "projected": {"boundary__mode": "projected", "boundary__anchor": "per-stage"},
    "subspace": {"boundary__mode": "subspace"},
    "around the embedding": {"boundary__mode": "reparam", "boundary__anchor": "embedding"},
}


@pytest.mark.parametrize("narrow", NARROW.values(), ids=NARROW)
@pytest.mark.parametrize("before", [{}, {"pipeline__split": [1, 3]}])
def test_narrow_cuts_stay_where_the_model_learned_them(before, narrow, make_settings, tmp_path):
    """Refused before any process starts, and before anything in the folder changes."""
    narrow = {**narrow, "boundary__rank": 4}
    settings = make_settings(**narrow, **before)
    saved = save(tmp_path / "test", settings)
    assert open_resume(saved, settings, silent()).folder == saved
    files = sorted(tmp_path.rglob("*"))
    three = {"pipeline__stages": 3, "pipeline__split": [1, 1, 2]}
    for other in (FOUR, {"pipeline__split": [3, 1]}, three):
        changed = make_settings(**narrow, **other)
        if changed.split() == settings.split():
            continue
        with pytest.raises(ConfigError, match=r"cannot resume .* blocks") as caught:
            train(changed, silent(), saved)
        kept = [len(blocks) for blocks in settings.split()]
        assert f"pipeline.split = {kept}" in str(caught.value)
        assert f"--init-from {saved}" in str(caught.value)
        assert "free_layers" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == files


def test_a_split_that_is_left_open_is_that_of_the_model(make_settings, tmp_path):
    """A hosted run was split by what its peers measured, which its run.toml does not say."""
    narrow = {"boundary__mode": "projected", "boundary__rank": 4}
    saved = make_settings(**narrow, pipeline__split=[1, 3])
    kept = make_settings(**narrow)
    open_resume(save(tmp_path, saved), kept, silent())
    assert adopted(kept, saved).split() == saved.split() != kept.split()
    dense = make_settings()
    assert adopted(dense, make_settings(pipeline__split=[1, 3])) == dense


def test_codecs_that_remember_are_not_split_anew(make_settings, tmp_path):
    remembering = {"codec__forward": "int8+ef21"}
    saved = save(tmp_path, make_settings(**remembering))
    open_resume(saved, make_settings(**remembering), silent())
    with pytest.raises(CheckpointError, match=r"int8\+ef21 .* before block 2, .* no cut there"):
        open_resume(saved, make_settings(**remembering, pipeline__split=[1, 3]), silent())
    open_resume(saved, make_settings(codec__forward="int8", pipeline__split=[1, 3]), silent())
    open_resume(saved, make_settings(**remembering, pipeline__stages=4), silent())  # finer
    said = said_of(saved, make_settings(codec__forward="int4+ef21"))
    assert "int4+ef21 is new on the forward leg of the cut before block 2" in said
    assert "the learning rate was" not in said
    changed = make_settings(codec__forward="int8", optim__lr=1e-4)
    assert "the learning rate was" in said_of(saved, changed)


def test_a_folder_is_held_by_what_is_in_it_and_no_other_run_takes_it_over(make_settings, tmp_path):
    folder = tmp_path / "run"
    partial = partial_folder(folder, 3)
    partial.mkdir(parents=True)
    with claim_folder(folder, None):
        assert not partial.exists(), "leftovers go when a folder is claimed"
        partial.mkdir()
        (folder / "metrics.jsonl").touch()  # as a launch that failed may leave it
    assert not partial.exists(), "and when it is left"
    with claim_folder(folder, None):
        (folder / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="already holds a run: choose another"):
        claim_folder(folder, None).__enter__()
    (folder / "metrics.jsonl").unlink()
    saved = save(folder, make_settings())
    with pytest.raises(ConfigError, match="already holds a run: continue it with --resume"):
        claim_folder(folder, None).__enter__()
    other = Checkpoint.open(save(tmp_path / "other", make_settings()))
    with pytest.raises(ConfigError, match=r"but not that of .*choose a new name"):
        claim_folder(folder, other).__enter__()
    with claim_folder(tmp_path / "free", other), claim_folder(folder, Checkpoint.open(saved)):
        pass


def test_one_process_at_a_time_trains_in_a_folder(tmp_path):
    """A lock holds between any two openings; test_hosted_runs.py kills who has it."""
    with (
        claim_folder(tmp_path, None),
        pytest.raises(ConfigError, match="another process is at work in"),
    ):
        claim_folder(tmp_path, None).__enter__()
    with claim_folder(tmp_path, None):
        pass
