"""Ranks on PyTorch's pipelining train what our own engine trains, bit for bit."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from settings_values import TINY_MODEL, narrow, with_changes
from thinwire.engine.checkpoint import partial_folder
from thinwire.engine.feed import Feed
from thinwire.settings import Settings
from thinwire_lab.chain import Chain

STEPS = 3
LOSSY = {"codec__forward": "int8", "codec__backward": "int4"}
TABLES, NARROW = (narrow("projected", anchor=anchor) for anchor in ("per-stage", "none"))
EIGHT = {"pipeline__stages": 8, "model__layers": 8}


@dataclass(frozen=True)
class Case:
    """A run on four ranks."""

    changes: dict[str, Any]
    schedule: str = ""
    replicas: int = 1
    is_masked: bool = False


CASES = {
    "dense": Case({"pipeline__schedule": "gpipe"}), "lossy": Case({**LOSSY, "optim__name": "muon"}),
    "subspace": Case(narrow("subspace", basis_update_every=2)),
    "tables": Case({**TABLES, **LOSSY, "pipeline__schedule": "gpipe"}),
    "remembering": Case({"codec__forward": "topk(0.2)+ef21", "codec__backward": "topk(shared)"}),
    "bf16": Case({"run__precision": "bf16", "codec__forward": "bf16", "codec__backward": "bf16"}),
    "interleaved": Case({**EIGHT, **TABLES, **LOSSY}, "interleaved"),
    "zero-bubble": Case({**EIGHT, **NARROW, **LOSSY}, "zero-bubble"),
    "zbv": Case({**EIGHT, **NARROW, **LOSSY}, "zbv"), "masked": Case(LOSSY, is_masked=True),
    "replicas": Case({"pipeline__stages": 2}, replicas=2),
}  # fmt: skip
QUICK = ("lossy", "tables", "interleaved", "zbv", "replicas")
"""Of these one launch is in every run of the suite; the others are played by `make bench`."""


@pytest.fixture(scope="module")
def cluster_settings(tmp_path_factory, text_folder):
    out = tmp_path_factory.mktemp("runs")

    def make(name, changes):
        values: dict[str, dict[str, Any]] = {
            "run": {"name": name, "out": str(out), "device": "cpu", "threads": 1},
            "model": dict(TINY_MODEL),
            "data": {"source": "text", "path": str(text_folder), "valid_fraction": 0.1},
            "pipeline": {"stages": 4, "microbatches": 8},
            "codec": {"forward": "fp32", "backward": "fp32"},
            "optim": {"lr": 1e-2, "warmup": 2, "clip": 0.5},
            "train": {"steps": STEPS, "batch": 8, "eval_every": 0, "eval_batches": 3,
                      "checkpoint_every": 0},
        }  # fmt: skip
        return with_changes(values, dict(changes))

    return make


@dataclass(frozen=True)
class Played:
    """What the ranks did: the settings of each case, and what the example printed."""

    settings: dict[str, Settings]
    output: str


@pytest.fixture(scope="module")
def play(cluster_settings, corpus, masked, tmp_path_factory):
    """Cases on four processes, and the example on two, in one go."""

    def go(names):
        settings = {name: cluster_settings(name, CASES[name].changes) for name in names}
        cases = [
            {"settings": settings[name].to_plain(), "schedule": CASES[name].schedule,
             "replicas": CASES[name].replicas,
             "data": str((masked if CASES[name].is_masked else corpus).folder)}
            for name in names
        ]  # fmt: skip
        path = tmp_path_factory.mktemp("cases") / "cases.json"
        path.write_text(json.dumps(cases))
        here = Path(__file__)
        program = here.parents[2] / "examples" / "pipelining.py"
        command = [sys.executable, str(here.with_name("ranks.py")), str(path), str(program)]
        single = {**os.environ, "OMP_NUM_THREADS": "1"}  # as torchrun sets it
        finished = subprocess.run(command, capture_output=True, text=True, env=single)
        assert finished.returncode == 0, finished.stdout + finished.stderr
        return Played(settings, finished.stdout)

    return go


@pytest.fixture(scope="module")
def played(play):
    return play(QUICK)


@pytest.fixture(scope="module")
def played_slowly(play):
    return play(CASES.keys() - QUICK)


def results(settings):
    """What a case left: its losses, and its weights by their global names."""
    folder = Path(settings.run.out) / settings.run.name
    weights: dict[str, Tensor] = {}
    for shard in partial_folder(folder, settings.train.steps).glob("*.safetensors"):
        weights |= load_file(shard)
    return json.loads((folder / "results.json").read_text()), weights


@pytest.mark.parametrize("name", [name for name in QUICK if CASES[name].replicas == 1])
def test_ranks_train_what_our_own_engine_trains(name, played, corpus):
    check_equality(name, played, corpus)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in QUICK])
def test_ranks_train_the_same_in_every_mode(name, played_slowly, corpus, masked):
    check_equality(name, played_slowly, masked if CASES[name].is_masked else corpus)


def check_equality(name, played, data):
    settings = played.settings[name]
    said, weights = results(settings)
    chain = Chain(settings, Feed(data, settings, torch.device("cpu")))
    first = chain.evaluate()
    losses = [chain.train_step(step) for step in range(settings.train.steps)]
    assert said["losses"] == losses
    assert said["valid"] == [first, chain.evaluate()]
    for stage in chain.stages:
        for parameter, tensor in stage.owned_parameters().items():
            assert torch.equal(weights[parameter], tensor), parameter


def test_replicas_share_a_batch(played, corpus):
    """The first loss is the same bit for bit; then gradients are added up in another order."""
    settings = played.settings["replicas"]
    said, weights = results(settings)
    chain = Chain(settings, Feed(corpus, settings, torch.device("cpu")))
    losses = [chain.train_step(step) for step in range(settings.train.steps)]
    assert said["losses"][0] == losses[0]
    assert said["losses"] == pytest.approx(losses, abs=1e-6)
    for stage in chain.stages:
        for parameter, tensor in stage.owned_parameters().items():
            torch.testing.assert_close(weights[parameter], tensor, atol=1e-5, rtol=0)


def test_ranks_send_what_codecs_make(played):
    """Of each leg its own bytes, rounded up to a float, without what the other leg needs."""
    said, _ = results(played.settings["lossy"])
    tokens, dim = TINY_MODEL["context"], TINY_MODEL["dim"]
    kinds = {kind: moved["payload_bytes"] / moved["frames"] for kind, moved in said["sent"].items()}
    assert kinds == {"FORWARD": tokens * (dim + 2), "EVALUATE": tokens * (dim + 2)}


def test_the_example_learns(played):
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", played.output, re.M)]
    assert len(losses) == 6
    assert losses[-1] < losses[0] / 4
