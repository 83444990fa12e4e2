"""Hosted runs as people use them: a host and peers that are processes and share no folder."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from machines import Machines, assert_same_weights
from thinwire.data import Corpus
from thinwire.engine import Checkpoint
from thinwire.settings import Settings
from trained import trained


def stage_files(home: Path) -> dict[str, int]:
    """The files of states that a machine has fetched, with their sizes."""
    found = home.rglob("checkpoints/step-*/stage-*.safetensors")
    return {path.name: path.stat().st_size for path in found}


@pytest.mark.slow
def test_a_peer_that_takes_a_stage_fetches_it_and_a_restarted_host_goes_on_bit_for_bit(
    machines: Machines, make_settings: Callable[..., Settings], corpus: Corpus
) -> None:
    """A run that starts from weights, which are gone when its host and a peer are replaced."""
    narrow = {
        "boundary__mode": "projected", "boundary__rank": 6, "boundary__anchor": "per-stage"
    }  # fmt: skip
    source = trained(make_settings(**narrow, train__steps=2), corpus, machines.folder / "source")
    config = machines.config(
        **narrow, train__steps=100_000, train__eval_every=30, train__checkpoint_every=20,
        train__keep=100, link__outage=2.0, optim__schedule="constant",
    )  # fmt: skip
    start = ("--init-from", source)
    host = machines.host(*start)
    ana, ben = machines.join("ana"), machines.join("ben")
    host.wait_for(r"\[save\] +checkpoint of step", times=2)  # a step after the first is proof of it
    ben.kill()
    host.kill()
    source.rename(source.with_name("gone"))
    host = machines.host(*start)
    cleo = machines.join("cleo")
    host.wait_for(r"epoch 2 from step [1-9]")
    cleo.wait_for(r"step +\d+/")
    fetched = stage_files(cleo.home)
    host.interrupt()
    assert host.wait() == 130, host.text()
    for peer in (ana, cleo):
        assert peer.wait() == 0, peer.text()

    run, out = machines.run_folder, machines.folder / "alone"
    summary = json.loads((run / "summary.json").read_text())
    steps, begun = summary["steps"], summary["first_step"]
    source.with_name("gone").rename(source)
    changes = ("--set", f"run.out={out}", "--set", f"train.steps={steps}")
    alone = machines.run("alone", "train", config, *start, *changes)
    assert alone.wait() == 0, alone.text()
    assert_same_weights(run, out / "test", steps)
    checkpoint = Checkpoint.open(run)
    checkpoint.verify()
    whole = {shard.file: shard.bytes for shard in checkpoint.shards}
    expected = json.loads((out / "test" / "summary.json").read_text())["valid_losses"]
    seen = summary["valid_losses"]
    assert [score for score in expected if score[0] < steps and score not in seen] == []

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
    assert sent["checkpoints"] >= sum(whole.values())
    assert sent["token ids"] > (steps - begun) * 8 * (16 + 17) * 2
