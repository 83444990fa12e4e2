"""Text across a live pipeline is the text of one process; stages load their own tensors only."""

import dataclasses
import itertools
import json
import tempfile
from io import StringIO

import pytest
import torch
from variants import BY_TOKEN

from thinwire.engine.checkpoint import Checkpoint
from thinwire.errors import CheckpointError, StageError, WireError
from thinwire.inference import Model, Sampling
from thinwire.inference.pipeline import PipelineModel
from thinwire.inference.stage import TextStage
from thinwire.inference.text import Choice, crosses_by_token, extensions
from thinwire.report import PlainDisplay
from thinwire.run.protocol import Read
from thinwire.wire import HEADER_BYTES

VARIANTS = [
    *BY_TOKEN,
    {**BY_TOKEN[-1], "boundary__table": 0},
    {"codec__forward": "randk(0.5)", "codec__cuts": ["1: forward=int4(tensor)"]},
]


def stages_of(folder):
    checkpoint = Checkpoint.open(folder)
    count = checkpoint.settings.pipeline.stages
    return [TextStage(checkpoint.settings, index, checkpoint) for index in range(count)]


def passed_on(stages, message):
    """What the last stage says, after activations have crossed each cut as frames."""
    said = stages[0].read(message, None)
    for below, stage in itertools.pairwise(stages):
        said = stage.read(message, stage.unpacked(below.packed(said, message.number), message))
    return said


@pytest.mark.parametrize("changes", VARIANTS)
def test_stages_one_after_the_other_say_what_the_model_says(changes, trained):
    """26 tokens with a context of 16: the window begins anew twice."""
    folder, _ = trained(**changes)
    model, stages = Model(folder, "cpu"), stages_of(folder)
    ids, sampling = model.encode("stage link "), Sampling(0.9, 0, 0.95, 3)
    wanted = model.tokens_behind([*ids], sampling)
    choose = Choice(sampling)
    parts = extensions(ids, 16, crosses_by_token(model.settings))
    for number, (part, is_new) in zip(range(26), parts, strict=False):
        said = passed_on(stages, Read(part, number, is_new))
        ids.append(choose(said[0, -1].float()))
        assert ids[-1] == next(wanted), number


def test_a_stage_reads_its_own_tensors_only(trained, monkeypatch):
    folder, _ = trained(codec__forward="fp64")
    read: list[set[str]] = []
    whole = Checkpoint._read

    def noted(self, names):
        read.append(names)
        return whole(self, names)

    monkeypatch.setattr(Checkpoint, "_read", noted)
    stages_of(folder)
    ends = [("model.embed_tokens.weight" in n, "lm_head.weight" in n) for n in read]
    assert ends == [(True, False), (False, False), (False, True)]
    assert not set.intersection(*read)


def test_a_live_pipeline_writes_the_same_text(trained):
    """Three processes, real links; a window that begins anew; two texts one after the other."""
    folder, _ = trained(codec__forward="int8(group=8)", boundary__mode="subspace",
                        boundary__rank=12)  # fmt: skip
    model, told = Model(folder, "cpu"), StringIO()
    with PipelineModel(folder, PlainDisplay(told), "cpu").running() as pipeline:
        greedy = pipeline.generate("stage link ", 20, 0.0, 0, 0)
        drawn = pipeline.generate("frame", 5, 1.0, 0, -7, top_p=0.9)
        traffic = pipeline.finish()
    assert greedy == model.generate("stage link ", 20, 0.0, 0, 0)
    assert drawn == model.generate("frame", 5, 1.0, 0, -7, top_p=0.9)
    assert traffic.chosen == 25 and traffic.seconds > 0 and 0 < traffic.control_bytes < 25 * 1000
    assert traffic.links.keys() == {0, 1}
    for sent in traffic.links.values():
        assert sent["frames"] == 25 and sent["header_bytes"] == 25 * HEADER_BYTES
        # 12 numbers in two groups of at most 8: 12 bytes, and a scale of each group
        assert sent["payload_bytes"] % traffic.read == 0 and traffic.read >= 25
        assert 12 < sent["payload_bytes"] / traffic.read < 12 * 4
    assert "3 / 3 stages have their layers" in told.getvalue()
    assert "cut 1:" in traffic.text() and "bytes per token" in traffic.text()


@pytest.mark.slow
def test_a_stage_that_fails_is_named_and_its_log_is_kept(trained, tmp_path, monkeypatch):
    """The file of the last stage is gone, after it was verified: only its process finds that."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder, _ = trained(codec__forward="fp64")
    pipeline = PipelineModel(folder, PlainDisplay(StringIO()), "cpu")  # which has verified it
    (folder / "stage-2.safetensors").unlink()
    with pytest.raises(StageError, match=r"stage 2 .* cannot be read") as failure:
        pipeline.running().__enter__()
    (log,) = tmp_path.glob("thinwire-text-*/logs/stage-2.log")
    assert f"its log is {log}" in str(failure.value) and "cannot be read" in log.read_text()


def test_a_frame_of_another_size_is_refused(trained):
    folder, _ = trained(codec__forward="fp64")
    stages, message = stages_of(folder), Read([1, 2, 3])
    frame = stages[0].packed(stages[0].read(message, None), 0)
    assert torch.isfinite(stages[1].unpacked(frame, message)).all()
    with pytest.raises(WireError, match="but 0 arrived"):
        stages[1].unpacked(dataclasses.replace(frame, payload=b""), message)


def test_a_damaged_checkpoint_starts_nothing(trained):
    folder, _ = trained(codec__forward="fp64")
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / manifest["shards"][1]["file"]).write_bytes(b"x")
    with pytest.raises(CheckpointError, match="truncated or altered"):
        PipelineModel(folder, PlainDisplay(StringIO()), "cpu")
