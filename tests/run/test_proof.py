"""Which checkpoints are known to be good, and what is resumed when nobody says from where."""

import io
import math

import pytest

from thinwire.engine.checkpoint import Checkpoint, checkpoints_folder
from thinwire.errors import CheckpointError
from thinwire.report import PlainDisplay
from thinwire.run.checkpoints import Proof, begin_proof, open_newest, prune, read_proof
from thinwire.train import train
from trained import save_tensor


@pytest.fixture
def saved(tmp_path):
    """Checkpoints of steps 2, 4 and 6 of a run in `tmp_path`."""
    return {step: save_tensor(tmp_path, step) for step in (2, 4, 6)}


@pytest.mark.parametrize(("proof", "chosen", "words"), [
    (None, None, ""),  # written before there were proofs
    (Proof(6), None, ""),
    (Proof(5), 4, "--resume"),
    (Proof(4), 4, "--resume"),
    (Proof(2, ended=6), None, ""),  # nothing followed it, and nothing was wrong with it
    (Proof(2, ended=4), 4, "--resume"),
    (Proof(0), None, "there is no other"),
])  # fmt: skip
def test_the_newest_good_checkpoint_is_resumed(proof, chosen, words, saved, tmp_path):
    if proof is not None:
        proof.write(tmp_path)
        assert read_proof(tmp_path) == proof
    for place in (tmp_path, checkpoints_folder(tmp_path)):
        found, notes = open_newest(place)
        assert found.folder == saved[chosen or 6]
        assert words in "".join(notes) and bool(words) == bool(notes)
    found, notes = open_newest(saved[6])
    assert (found.folder, notes) == (saved[6], []), "what is named is taken"


def test_a_checkpoint_that_does_not_open_is_passed_over(saved, tmp_path):
    """A lost file, and NaN: the run goes on from the one before, and says so."""
    ruined = save_tensor(tmp_path, 8, math.nan)
    Proof(8).write(tmp_path)
    (saved[6] / "stage-0.safetensors").unlink()
    checkpoint, notes = open_newest(tmp_path)
    assert checkpoint.folder == saved[4]
    for path, note in zip((ruined, saved[6], saved[4]), notes, strict=True):
        assert str(path) in note
    assert "w in" in notes[0] and "not finite" in notes[0] and "missing" in notes[1]
    with pytest.raises(CheckpointError, match="not finite"):
        open_newest(ruined)  # what is named is not replaced by another
    for step in (2, 4):
        (saved[step] / "manifest.json").write_text("{")
    Proof(2).write(tmp_path)
    saved[8] = save_tensor(tmp_path, 8)
    with pytest.raises(CheckpointError, match=f"name it: --resume {saved[8]}"):
        open_newest(tmp_path)  # weights that may be ruined are used by name alone
    assert open_newest(saved[8])[0].folder == saved[8]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"step": "6", "ended": 0}'])
def test_a_record_that_cannot_be_read_accuses_nobody(content, saved, tmp_path):
    (checkpoints_folder(tmp_path) / "proven.json").write_text(content)
    assert read_proof(tmp_path).step > 6
    found, notes = open_newest(tmp_path)
    assert (found.folder, notes) == (saved[6], [])


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_proven_checkpoint_is_never_pruned(keep, saved, tmp_path):
    prune(tmp_path, keep, saved[6], Proof(3).newest(tmp_path))
    assert saved[2].exists() and saved[6].exists()
    assert saved[4].exists() == (keep > 1)


def test_a_course_that_is_left_proves_nothing(saved, tmp_path):
    Proof(6).write(tmp_path)
    assert begin_proof(tmp_path, Checkpoint.open(saved[4])) == Proof(4)
    Proof(2).write(tmp_path)
    assert begin_proof(tmp_path, Checkpoint.open(saved[4])) == Proof(2), "named, not proven"
    assert begin_proof(tmp_path / "other", Checkpoint.open(saved[4])) == Proof(0)
    assert begin_proof(tmp_path, None) == Proof(0)


@pytest.mark.parametrize(("delay", "proven"), [(0, 2), (1, 1)])
def test_weights_are_proven_by_the_step_that_is_computed_with_them(
    delay, proven, make_settings, tmp_path
):
    """With delayed updates that is not the next step, but the one after it."""
    changes = {"pipeline__stages": 1, "pipeline__delay": delay, "train__checkpoint_every": 1}
    train(make_settings(train__steps=3, **changes), PlainDisplay(io.StringIO()))
    proof = read_proof(tmp_path / "test")
    assert (proof.step, proof.ended) == (proven, 3)
