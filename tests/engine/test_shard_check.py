"""A part of a checkpoint counts only once it was opened: what stages save passes, nothing else."""

import dataclasses
import json
import re

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from settings_values import EXACT, narrow
from thinwire.engine.checkpoint import partial_folder, write_shard
from thinwire.engine.state import ShardCheck, most_shard_bytes

EMBEDDING = {**narrow("subspace", anchor="embedding", row_tokens=1), **EXACT, "codec__rows": "fp32"}


def objections(outcome, settings, data, folder):
    """What is said of all that the stages of a run have saved."""
    check = ShardCheck(settings, data, folder / "scratch")
    return [
        check.objection(stage, part, partial_folder(folder / "run", step) / part.shard.file)
        for step, parts in outcome.shards().items()
        for stage, part in enumerate(parts)
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"run__precision": "bf16", "lora__rank": 3, "optim__name": "muon"},
        narrow("subspace", basis_update_every=4), narrow("projected", anchor="per-stage"),
        EMBEDDING, {"codec__forward": "topk(0.2)+ef21", "codec__backward": "randk(0.3)+ef-mixed"},
        {"codec__forward": "int8+aqsgd", "codec__backward": "int4+ef", "train__batch": 160},
    ],
)  # fmt: skip
def test_what_stages_save_passes(changes, make_settings, run_in_threads, corpus, tmp_path):
    settings = make_settings(pipeline__stages=3, train__checkpoint_every=3, **changes)
    outcome = run_in_threads(settings)
    assert objections(outcome, settings, corpus, tmp_path) == [""] * 6
    for parts in outcome.shards().values():
        for stage, part in enumerate(parts):
            limit, size = most_shard_bytes(settings, stage), part.shard.bytes
            examples = settings.codec.memory_mb << 21 if "aqsgd" in settings.codec.forward else 0
            assert size <= limit < 100 * size + examples, "none is larger, nor much smaller"


KINDS = {"weight": re.compile("[^/]+"), "moment": re.compile(".*exp_avg"),
         "memory": re.compile("codec/.*")}  # fmt: skip


def first(tensors, kind):
    return min(name for name in tensors if KINDS[kind].fullmatch(name))


def changed(kind, change):
    """Changes the first tensor of a kind."""

    def harm(tensors):
        name = first(tensors, kind)
        tensors[name] = change(tensors[name])

    return harm


def with_last(value):
    return lambda tensor: torch.cat([tensor.view(-1)[:-1], torch.tensor([value])]).view_as(tensor)


HARMS = {
    "a weight is missing": (lambda t: t.pop(first(t, "weight")), "1 tensors are missing, such as"),
    "no moments": (lambda t: [t.pop(name) for name in [*t] if name.startswith("optimizer/")],
                   "tensors are missing, such as optimizer/"),
    "one too many": (lambda t: t.update({"embedding.weight": torch.zeros(2, 2)}),
                     "1 tensors that its stage does not save, such as embed"),
    "another type": (changed("moment", Tensor.float), "is torch.float32 of shape"),
    "a memory of another shape": (changed("memory", lambda m: m[:1]), "does not fit this run"),
    "a memory of another course": (changed("memory", lambda m: m + 1),
                                   "do not remember what its stage reported"),
    "NaN": (changed("weight", with_last(float("nan"))), "has values that are not finite"),
    "infinity": (changed("weight", with_last(float("inf"))), "has values that are not finite"),
}  # fmt: skip


def test_all_else_is_refused(make_settings, run_in_threads, corpus, tmp_path):
    settings = make_settings(codec__forward="topk(0.2)+ef21")
    ((_, honest),) = run_in_threads(settings).shards().values()
    folder = partial_folder(tmp_path / "run", 4)
    path = folder / honest.shard.file
    check = ShardCheck(settings, corpus, tmp_path / "scratch")

    def said(part):
        return check.objection(1, part, path)

    saved = load_file(path)
    for harm, (change, words) in HARMS.items():
        tensors = {name: tensor.clone() for name, tensor in saved.items()}
        change(tensors)
        shard = write_shard(folder, 1, tensors)
        assert words in said(dataclasses.replace(honest, shard=shard)), harm
    write_shard(folder, 1, saved)
    assert said(honest) == ""
    listed = dataclasses.replace(honest.shard, tensors=honest.shard.tensors[1:])
    assert "other tensors than its stage listed" in said(dataclasses.replace(honest, shard=listed))
    for content in (bytes(800), b"\xff" * 800, json.dumps({}).encode()):
        path.write_bytes(content)
        assert said(honest), "it cannot even be opened"
