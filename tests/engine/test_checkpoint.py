"""Checkpoints on disk: whole or absent, told apart, set aside, and read with suspicion."""

import json
import os
import shutil
from pathlib import Path

import pytest

from thinwire.engine.checkpoint import Checkpoint, checkpoints_folder, list_checkpoints, sealed
from thinwire.errors import CheckpointError
from thinwire.run.checkpoints import discard_partial, prune, set_aside_later
from trained import save_tensor


def altered(folder, change, seal=True):
    """The manifest says something else, and has the hash of that, or not."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(sealed(manifest) if seal else manifest))
    return path


def names(run):
    return sorted(path.name for path in checkpoints_folder(run).iterdir())


def test_only_checkpoints_count_as_checkpoints(tmp_path):
    save_tensor(tmp_path, 2).rename(checkpoints_folder(tmp_path) / "step-best")
    save_tensor(tmp_path, 3).rename(checkpoints_folder(tmp_path) / "step-00000003-copy")
    assert list_checkpoints(tmp_path) == []
    newest = save_tensor(tmp_path, 1)
    assert Checkpoint.open(tmp_path).folder == newest
    assert Checkpoint.open(checkpoints_folder(tmp_path)).folder == newest
    assert Checkpoint.open(checkpoints_folder(tmp_path) / "step-best").step == 2
    beside = shutil.copytree(newest, tmp_path / "step-00000004")
    assert list_checkpoints(tmp_path) == [newest]
    prune(tmp_path, 1, newest)
    assert names(tmp_path) == ["step-00000001", "step-00000003-copy", "step-best"]
    assert beside.exists()


@pytest.mark.parametrize(
    ("keep", "latest", "left"),
    [(1, 2, [2]), (2, 2, [2, 6]), (1, 6, [6]), (3, 6, [2, 4, 6]), (9, 6, [1, 2, 4, 6])],
)
def test_pruning_spares_the_latest_whatever_its_number(keep, latest, left, tmp_path):
    saved = {step: save_tensor(tmp_path, step) for step in (1, 2, 4, 6)}
    prune(tmp_path, keep, saved[latest])
    assert names(tmp_path) == [saved[step].name for step in left]


def test_later_checkpoints_are_set_aside_and_kept(tmp_path):
    for step, value in ((2, 2.0), (4, 4.0), (6, 6.0)):
        save_tensor(tmp_path, step, value)
    assert [p.name for p in set_aside_later(tmp_path, 4)] == ["abandoned-step-00000006"]
    assert Checkpoint.open(tmp_path).step == 4
    save_tensor(tmp_path, 6, 7.0)
    set_aside_later(tmp_path, 4)  # abandoned once more: the first one stays as it is
    assert names(tmp_path) == ["abandoned-step-00000006", "abandoned-step-00000006-2",
                               "step-00000002", "step-00000004"]  # fmt: skip
    kept = Checkpoint.open(checkpoints_folder(tmp_path) / "abandoned-step-00000006")
    assert kept.tensors(["w"])["w"][1] == 6.0
    assert set_aside_later(tmp_path, 4) == []


def test_a_replacement_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    save_tensor(tmp_path, 2, 1.0)
    rename = Path.rename

    def fails(self, target):
        if self.name.startswith(".partial"):
            raise OSError("no")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fails)
        with pytest.raises(CheckpointError, match="cannot be completed"):
            save_tensor(tmp_path, 2, 9.0)
    discard_partial(tmp_path)
    assert names(tmp_path) == ["step-00000002"]
    assert Checkpoint.open(tmp_path).tensors(["w"])["w"][1] == 1.0
    save_tensor(tmp_path, 2, 9.0)
    assert names(tmp_path) == ["step-00000002"]
    assert Checkpoint.open(tmp_path).tensors(["w"])["w"][1] == 9.0


def test_leftovers_are_removed_by_step_or_all(tmp_path):
    save_tensor(tmp_path, 1)
    for name in (".partial-step-00000002", ".partial-step-00000004", ".pruned-step-00000004"):
        (checkpoints_folder(tmp_path) / name).mkdir()
    discard_partial(tmp_path, 4)
    assert names(tmp_path) == [".partial-step-00000002", "step-00000001"]
    discard_partial(tmp_path)
    assert names(tmp_path) == ["step-00000001"]


def without(key):
    return lambda manifest: manifest.pop(key)


def put(key, value):
    return lambda manifest: manifest.update({key: value})


def put_shard(key, value):
    return lambda manifest: manifest["shards"][0].update({key: value})


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (without("settings"), "missing required field `settings`"),
        (without("weight_version"), "missing required field `weight_version`"),
        (without("manifest_sha256"), "does not match its hash"),
        (lambda manifest: put("format", 1)(manifest) or without("manifest_sha256")(manifest),
         "format 1, this thinwire reads format 2"),
        (put("step", -2), r">= 0 - at `\$.step`"),
        (put("shards", {}), r"at `\$.shards`"),
        (put("tokenizer_sha256", 5), r"at `\$.tokenizer_sha256`"),
        (put_shard("tensors", [1]), r"at `\$.shards\[0\].tensors\[0\]`"),
        (put_shard("file", "../outside.safetensors"), r"regex.* at `\$.shards\[0\].file`"),
        (put_shard("more", 1), "does not match its hash"),
        (lambda manifest: manifest["shards"][0].pop("sha256"), "sha256"),
    ],
)  # fmt: skip
def test_each_fact_of_a_manifest_is_checked(harm, words, tmp_path):
    path = altered(save_tensor(tmp_path, 1), harm, seal=False)
    with pytest.raises(CheckpointError, match=words) as caught:
        Checkpoint.open(tmp_path)
    assert str(path) in str(caught.value)


def test_tensors_listed_but_absent_are_refused(tmp_path):
    folder = save_tensor(tmp_path, 1)
    altered(folder, lambda manifest: manifest["shards"][0]["tensors"].append("ghost"))
    checkpoint = Checkpoint.open(folder)
    with pytest.raises(CheckpointError, match="other tensors than the manifest lists"):
        checkpoint.verify()
    with pytest.raises(CheckpointError, match="ghost"):
        checkpoint.tensors(["ghost"])
    (folder / "stage-0.safetensors").write_bytes(b"no tensors at all")
    with pytest.raises(CheckpointError, match=r"stage-0\.safetensors cannot be read"):
        checkpoint.tensors(["w"])


def test_a_file_is_opened_once_for_all_that_is_read_of_it(tmp_path, monkeypatch):
    checkpoint, opened = Checkpoint.open(save_tensor(tmp_path, 1, others=("v", "u"))), []
    unwatched = Checkpoint._opened
    monkeypatch.setattr(Checkpoint, "_opened", lambda *at: (opened.append(at), unwatched(*at))[1])
    assert len(checkpoint.tensors("uvw")) == len(checkpoint.tensors_under("")) == 3
    assert len(opened) == 2


def test_a_checkpoint_that_its_run_removes_meanwhile_is_not_called_damaged(tmp_path):
    checkpoint = Checkpoint.open(folder := save_tensor(tmp_path, 1))
    folder.rename(tmp_path / ".pruned")
    for reads in (checkpoint.verify, lambda: checkpoint.tensors(["w"])):
        with pytest.raises(CheckpointError, match=r"was removed meanwhile.*[Tt]ry again"):
            reads()


def test_settings_of_another_version_name_the_manifest(tmp_path):
    folder = save_tensor(tmp_path, 1)
    altered(folder, put("settings", {"model": {"wings": 2}}))
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be used.*wings"):
        _ = Checkpoint.open(folder).settings


def test_a_flipped_bit_of_a_manifest_is_refused_or_changes_nothing(tmp_path):
    folder = save_tensor(tmp_path, 1, settings={"run": {"seed": 7, "name": "a\\b é"}})
    path = folder / "manifest.json"
    whole, content = path.read_bytes(), Checkpoint.open(folder).manifest
    passed = 0
    for place in range(len(whole)):  # one bit of each byte, each of the eight in turn
        harmed = bytearray(whole)
        harmed[place] ^= 1 << place % 8
        path.write_bytes(harmed)
        try:
            found = Checkpoint.open(folder)
            found.verify()
        except CheckpointError:
            continue
        passed += 1
        assert found.manifest == content, f"byte {place} of the manifest changed what it says"
    assert passed < len(whole) / 50, "only white space and the like may differ"


def test_settings_that_came_later_mean_what_they_meant_when_it_was_written(tmp_path):
    muon = {"optim": {"name": "muon"}}
    settings = Checkpoint.open(save_tensor(tmp_path, 1, settings=muon)).settings
    assert (settings.model.embed_std, settings.optim.table_lr) == (0.02, 1.0)
    named = {"optim": {"name": "muon", "table_lr": 7.0}, "model": {"embed_std": 0.5}}
    settings = Checkpoint.open(save_tensor(tmp_path, 2, settings=named)).settings
    assert (settings.model.embed_std, settings.optim.table_lr) == (0.5, 7.0)


def test_all_that_is_renamed_is_on_the_disk_before(corpus, tmp_path, monkeypatch):
    flushed: set[int] = set()
    before_rename: list[set[int]] = []
    fsync, rename = os.fsync, Path.rename

    def noted_fsync(descriptor):
        flushed.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def noted_rename(self, target):
        before_rename.append(set(flushed))
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    folder = save_tensor(tmp_path, 1, tokenizer=corpus.tokenizer())
    (seen,) = before_rename
    files = {path.name for path in folder.iterdir()}
    assert files == {"manifest.json", "stage-0.safetensors", "tokenizer.json"}
    assert {path.stat().st_ino for path in (folder, *folder.iterdir())} <= seen
    assert folder.parent.stat().st_ino in flushed, "the new name, after the rename"
