"""Runs whose stages are on other machines: real processes on loopback that share no folder."""

import json

from machines import Machines, assert_same_weights, machines  # noqa: F401

from thinwire.engine import Checkpoint


def test_four_peers_train_to_the_weights_of_a_run_on_one_machine(
    machines: Machines,  # noqa: F811
) -> None:
    """Bit for bit, though no peer has the corpus, and none sees the disk of another."""
    config = machines.config(pipeline__stages=4, train__steps=4)
    host = machines.host()
    peers = [machines.join(name) for name in ("ana", "ben", "cleo", "dan")]
    alone = machines.run("alone", "train", config, "--set", f"run.out={machines.folder / 'alone'}")
    assert host.wait() == 0, host.text()
    for peer in peers:
        assert peer.wait(30) == 0, peer.text()
        assert "the run is complete: 4 steps" in peer.text()
        assert "step    4/4  loss" in peer.text(), "the loss is visible to everyone"
    assert alone.wait() == 0, alone.text()
    assert_same_weights(machines.run_folder, machines.folder / "alone" / "test", 4)
    Checkpoint.open(machines.run_folder).verify()
    summaries = [
        json.loads((folder / "summary.json").read_text())
        for folder in (machines.run_folder, machines.folder / "alone" / "test")
    ]
    assert summaries[0]["valid_losses"] == summaries[1]["valid_losses"]
    kinds = [summary["bytes_sent"]["by_kind"] for summary in summaries]
    assert kinds[0]["FORWARD"] == kinds[1]["FORWARD"]
    for name in ("ana", "ben", "cleo", "dan"):
        files = [path for path in (machines.folder / name).rglob("*") if path.is_file()]
        assert not [path for path in files if path.suffix == ".bin"], "a peer holds the corpus"
        keys = [path for path in files if path.name == "key.pem"]
        assert [oct(path.stat().st_mode & 0o777) for path in keys] == ["0o600"]
