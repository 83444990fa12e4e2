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

from settings_values import EXACT, TINY_MODEL, narrow, tiny_settings
from thinwire.engine.checkpoint import partial_folder
from thinwire.settings import Settings
from trained import trained_chain

BASE = {**EXACT, "pipeline__stages": 4, "pipeline__microbatches": 8, "train__steps": 3,
        "train__eval_every": 0, "train__eval_batches": 3}  # fmt: skip
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


@dataclass(frozen=True)
class Played:
    """What the ranks did: the settings of each case, and what the example printed."""

    settings: dict[str, Settings]
    output: str


@pytest.fixture(scope="module")
def play(text_folder, corpus, masked, tmp_path_factory):
    """Cases on four processes, and the example on two, in one go."""

    def go(names):
        out, settings = tmp_path_factory.mktemp("runs"), {}
        for name in names:
            changes = {**BASE, "run__name": name, **CASES[name].changes}
            settings[name] = tiny_settings(out, text_folder, changes)
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


@pytest.mark.parametrize("name", [
    *(name for name in QUICK if CASES[name].replicas == 1),
    *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name not in QUICK),
])  # fmt: skip
def test_ranks_train_what_our_own_engine_trains(name, request, corpus, masked):
    played = request.getfixturevalue("played" if name in QUICK else "played_slowly")
    data = masked if CASES[name].is_masked else corpus
    settings = played.settings[name]
    said, weights = results(settings)
    chain = trained_chain(settings, data, 0)
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
    chain = trained_chain(settings, corpus, 0)
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
