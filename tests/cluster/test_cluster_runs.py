"""A run under torchrun: its records, its checkpoints in either engine, and what is refused."""

import contextlib
import json
import os
import subprocess
import sys

import pytest
import torch

from settings_values import narrow
from thinwire.cluster import Crossing
from thinwire.cluster.__main__ import main
from thinwire.cluster.grid import lay_out
from thinwire.codec import Leg, TensorSpec, build_codecs
from thinwire.engine.build import StageBuilder, choose_device
from thinwire.engine.checkpoint import list_checkpoints
from thinwire.engine.cut import CutEnd
from thinwire.errors import ConfigError, WireError
from thinwire.settings import Settings
from thinwire.typed import to_toml
from waiting import PROCESS_PATIENCE

EXACT = {
    "run__precision": "fp32", "codec__forward": "int8", "codec__backward": "int4",
    "train__steps": 6, "train__checkpoint_every": 2,
    "optim__floor": 1.0,  # else the rate would depend on the number of steps
}  # fmt: skip


def torchrun(*words, ranks=2, cwd, cache):
    """torchrun with a free port of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    paths = os.pathsep.join([str(cwd), *filter(None, [os.environ.get("PYTHONPATH")])])
    command += ["--nproc-per-node", str(ranks), *map(str, words)]
    own = {"THINWIRE_CACHE": str(cache), "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    outputs = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=cwd, env={**os.environ, **own}, **outputs)


def metrics(folder, kind):
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["kind"] == kind]


@pytest.mark.slow
def test_either_engine_continues_the_others_run(
    make_settings, run_in_threads, corpus, tmp_path, cache
):
    settings: Settings = make_settings(**EXACT)
    folder = tmp_path / settings.run.name
    whole = run_in_threads(settings, folder=folder)
    whole.commit(folder, 2, corpus)
    (tmp_path / "run.toml").write_text(to_toml(settings))
    program = torchrun("-m", "thinwire.cluster", "run.toml", "--resume", "--set", "train.steps=4",
                       cwd=tmp_path, cache=cache)  # fmt: skip
    output, _ = program.communicate(timeout=PROCESS_PATIENCE)
    assert program.returncode == 0, output
    steps, evaluations = (metrics(folder, kind) for kind in ("step", "evaluation"))
    assert [row["step"] for row in steps] == [3, 4]
    assert [row["loss"] for row in steps] == whole.losses()[2:4]
    assert f"step    4/4  loss  {steps[-1]['loss']:.4f}" in output, "the first rank shows the loss"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["final_valid_loss"] == evaluations[-1]["loss"]
    assert summary["bytes_sent"]["by_kind"].keys() == {"BACKWARD", "EVALUATE", "FORWARD"}
    assert [path.name for path in list_checkpoints(folder)] == ["step-00000002", "step-00000004"]
    back = run_in_threads(settings, resume=folder / "checkpoints/step-00000004")
    assert back.losses() == whole.losses()[4:]


@pytest.mark.slow
def test_a_rank_that_dies_is_started_again_from_the_last_checkpoint(make_settings, tmp_path, cache):
    settings: Settings = make_settings(**EXACT)
    (tmp_path / "dying.py").write_text(
        "import os, sys, time, threading\n"
        "from pathlib import Path\n"
        "def die():\n"
        "    while not list(Path().glob('*/checkpoints/step-00000002')):\n"
        "        time.sleep(0.01)\n"
        "    os._exit(9)\n"
        "if os.environ.get('RANK') == '1' and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    threading.Thread(target=die, daemon=True).start()\n"
    )
    (tmp_path / "run.toml").write_text(to_toml(settings))
    program = torchrun("--max-restarts", 1, "-m", "thinwire.cluster", "run.toml",
                       "--set", "train.steps=40", "--set", "codec.plugins=dying",
                       cwd=tmp_path, cache=cache)  # fmt: skip
    output, _ = program.communicate(timeout=PROCESS_PATIENCE)
    assert program.returncode == 0, output
    steps = metrics(tmp_path / settings.run.name, "step")
    assert [row["step"] for row in steps] == list(range(1, 41))
    assert ", from " in output


FOUR = {"pipeline__stages": 4, "pipeline__microbatches": 8}


@pytest.mark.parametrize(
    ("changes", "world", "schedule", "replicas", "words"),
    [
        ({}, 3, "", 0, "torchrun started 3 processes, but pipeline.stages = 2"),
        ({}, 6, "", 0, "microbatches = 4 do not divide over 3 replicas"),
        ({}, 8, "", 0, "1f1b cannot order 1 microbatches of each replica on 2 ranks"),
        ({"pipeline__delay": 1}, 2, "", 0, "pipeline.delay = 1 does not work on a cluster"),
        ({"pipeline__stages": 4}, 1, "zbv", 0, "exactly two stages"),
        ({**FOUR, "pipeline__recompute": True}, 2, "zbv", 0,
         "pipeline.recompute = true does not work with zbv"),
        ({**FOUR, **narrow("projected", anchor="per-stage")}, 2, "zero-bubble", 0,
         '"per-stage" does not work with zero-bubble'),
        (narrow("subspace", basis_update_every=2), 4, "", 0,
         "basis_update_every does not work with replicas"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(changes, world, schedule, replicas, words, make_settings):
    with pytest.raises(ConfigError) as refused:
        lay_out(make_settings(**changes), world, schedule, replicas)
    assert words in str(refused.value)


@pytest.mark.parametrize(("codec", "world", "words"), [
    ("step(3)+zstd", 2, "always receives the same number of bytes"),
    ("topk(0.1)+aqsgd", 2, "always receives the same number of bytes"),
    ("int4+ef", 4, "does not work with replicas"),
])  # fmt: skip
def test_codecs_are_refused_before_anything_is_made(codec, world, words, make_settings):
    settings = make_settings(codec__forward=codec)
    with pytest.raises(ConfigError, match=words):
        lay_out(settings, world, "", 0)
    builder = StageBuilder(settings, choose_device("cpu", 0))
    end = CutEnd.build(settings, 0, True, builder.wire_spec)
    with pytest.raises(ConfigError, match=words) if world == 2 else contextlib.nullcontext():
        Crossing(end, "cpu")


@pytest.mark.parametrize("shape", [(2, 4), (1, 4), (4, 2)])
def test_what_was_not_agreed_does_not_cross(shape, monkeypatch):
    codecs = build_codecs("fp32", "fp64")  # whose carrier has room for more
    if shape == (2, 4):  # a codec that makes fewer numbers than it promised
        short = torch.ones(7)
        monkeypatch.setattr(codecs[Leg.FORWARD], "encode", lambda tensor, place: (short,))
    spec = TensorSpec((2, 4), torch.float32, torch.device("cpu"))
    with pytest.raises(WireError, match="layout says" if shape == (2, 4) else "was agreed"):
        Crossing(CutEnd(codecs, spec), "cpu").send(torch.ones(shape), 0)


def test_only_torchrun_starts_a_rank(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["run.toml"])
    assert ended.value.code == ConfigError.exit_code
    start = "error: this is for torchrun, which starts one process for each stage: torchrun "
    assert capsys.readouterr().err.startswith(start + "--nproc-per-node 4 -m thinwire.cluster")
