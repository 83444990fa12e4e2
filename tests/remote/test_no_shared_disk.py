"""Peers without the corpus and without a common folder: what they fetch, and what they send."""

import json
from pathlib import Path

import pytest
import torch
from machines import Machines, machines, weights  # noqa: F401

from thinwire.data import Corpus
from thinwire.engine import Checkpoint
from thinwire.engine.chain import Chain
from thinwire.engine.feed import Feed
from thinwire.engine.state import OPTIMIZER
from thinwire.inference import Model

STEPS = 60


def stage_files(home: Path) -> dict[str, int]:
    """The files of states that a machine has fetched, with their sizes."""
    found = home.rglob("checkpoints/step-*/stage-*.safetensors")
    return {path.name: path.stat().st_size for path in found}


@pytest.mark.slow
def test_a_peer_that_takes_a_seat_fetches_its_stage_and_trains_on_bit_for_bit(
    machines: Machines,  # noqa: F811
    corpus: Corpus,
) -> None:
    machines.config(
        boundary__mode="projected",
        boundary__rank=6,
        boundary__anchor="per-stage",
        train__steps=STEPS,
        train__eval_every=30,
        train__checkpoint_every=20,
        train__keep=100,
        link__outage=2.0,
    )
    host = machines.host()
    ana, ben = machines.join("ana"), machines.join("ben")
    host.wait_for(r"checkpoint of step 20 in ")
    ben.kill()
    cleo = machines.join("cleo")
    cleo.wait_for(rf"step +\d+/{STEPS}")
    fetched = stage_files(cleo.home)
    assert host.wait() == 0, host.text()
    for peer in (ana, cleo):
        assert peer.wait() == 0, peer.text()

    run = machines.run_folder
    checkpoint = Checkpoint.open(run)
    checkpoint.verify()
    whole = {shard.file: shard.bytes for shard in checkpoint.shards}
    summary = json.loads((run / "summary.json").read_text())

    settings, device = checkpoint.settings, torch.device("cpu")
    feed = Feed(corpus, settings, device)
    chain = Chain(settings, feed)
    for step in range(STEPS):
        chain.train_step(step)
    kept = weights(run, STEPS)
    for stage, update in zip(chain.stages, chain.updates, strict=True):
        moments = update.optimizer.state_tensors()
        expected = {**stage.global_parameters(), **{OPTIMIZER + k: v for k, v in moments.items()}}
        assert len(expected) > 10
        for name, tensor in expected.items():
            assert torch.equal(tensor, kept[name]), name
    scored = Model(run, "cpu").validate(feed, STEPS, True)
    assert [STEPS, scored.loss] == summary["valid_losses"][-1]

    seat = json.loads((run / "epochs.json").read_text())["seats"].index("cleo")
    own = f"stage-{seat}.safetensors"
    assert fetched[own] == whole[own]
    if seat == 0:
        assert len(fetched) == 1, "exactly one file"
    else:
        assert fetched["stage-0.safetensors"] < 8192, "of the other stage only the shared basis"
    sent = summary["beside_bytes"]
    # Ana, who was there before, had her own shard; at most she lacked the basis.
    assert whole[own] < sent["states"] < whole[own] + 20_000
    assert sent["checkpoints"] > (STEPS - summary["first_step"]) // 20 * sum(whole.values())
    tokens = (STEPS - summary["first_step"]) * 8 * (16 + 17) * 2
    assert tokens < sent["token ids"]
    assert not list((run / "checkpoints").glob(".[ip]*")), "nothing is left over"
    assert stage_files(cleo.home) == stage_files(ana.home) == {}, "neither there"
