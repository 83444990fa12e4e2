"""Runs whose stages are on other machines: real processes on loopback that share no folder."""

import json
import re

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


LONG = {"train__steps": 100_000, "train__eval_every": 0, "train__checkpoint_every": 5}
STEPPING = r"\[train\] step +\d"
SAVED = r"\[save\] +checkpoint of step \d+"


def test_a_peer_that_is_killed_and_joins_again_takes_its_seat_again(
    machines: Machines,  # noqa: F811
) -> None:
    """The run goes on from its last complete checkpoint, and ends with the weights of an
    undisturbed one.
    """
    machines.config(train__steps=60, train__eval_every=0, train__checkpoint_every=10)
    host = machines.host()
    ana, ben = machines.join("ana"), machines.join("ben")
    host.wait_for(SAVED)
    ben.kill()
    again = machines.join("ben")
    host.wait_for(r"epoch 2 from step [1-9]\d*, stages 0: \w+, 1: \w+")
    seats = re.findall(r"epoch \d from step \d+, (stages .*)", host.text())
    assert seats[0] == seats[1], "each peer has the seat that it had"
    assert "was lost at step" in host.text() and "it was started anew" in host.text()
    assert host.wait() == 0, host.text()
    for peer in (ana, again):
        assert peer.wait(30) == 0, peer.text()
    alone = machines.run("alone", "train", machines.folder / "host" / "run.toml",
                         "--set", f"run.out={machines.folder / 'alone'}")  # fmt: skip
    assert alone.wait() == 0, alone.text()
    assert_same_weights(machines.run_folder, machines.folder / "alone" / "test", 60)


def test_a_seat_passes_to_another_peer_and_a_removed_one_stays_out(
    machines: Machines,  # noqa: F811
) -> None:
    machines.config(**LONG, link__outage=2.0)
    host = machines.host()
    machines.join("ana")
    ben = machines.join("ben")
    host.wait_for(SAVED)
    ben.kill()
    cleo = machines.join("cleo")
    host.wait_for(r"epoch 2 from step [1-9]\d*, stages (0: ana, 1: cleo|0: cleo, 1: ana)")
    host.wait_for(STEPPING, times=3)
    assert "was lost at step" in host.text()

    kick = machines.run("host", "kick", "cleo", machines.run_folder)
    assert kick.wait() == 0 and "cleo was removed" in kick.text(), kick.text()
    assert cleo.wait(30) == 6, cleo.text()
    assert "the host removed this peer from the run" in cleo.text()
    host.wait_for(r"waiting for 1 more peer \(cleo or another\)")
    returned = machines.join("cleo")
    assert returned.wait(60) == 8, returned.text()
    assert "is not welcome there" in returned.text()
    fresh = machines._start("dan", "join", "-", "--name", "dan", said=machines.invite)
    assert fresh.wait(60) == 8, fresh.text()
    assert "this invite was closed" in fresh.text()
    status = machines.run("host", "status", machines.run_folder, "--json")
    assert status.wait() == 0, status.text()
    report = json.loads(status.text())
    assert report["state"] == "waiting" and "cleo or another" in report["waiting_for"]
    states = {peer["name"]: peer["state"] for peer in report["peers"]}
    assert states["ben"] == "away" and states["cleo"] == "kicked"
    assert states["ana"] == "waiting for a seat"
    host.interrupt()
    assert host.wait(30) == 130, host.text()


def test_a_host_that_is_killed_and_started_again_goes_on_with_its_peers(
    machines: Machines,  # noqa: F811
) -> None:
    machines.config(**LONG)
    host = machines.host()
    peers = [machines.join("ana"), machines.join("ben")]
    host.wait_for(SAVED)
    host.kill()
    again = machines.host()
    again.wait_for(r"epoch 2 from step [1-9]\d*, stages 0: \w+, 1: \w+")
    again.wait_for(STEPPING)
    assert all("the host is back after" in peer.text() for peer in peers)
    again.interrupt()
    assert again.wait(60) == 130, again.text()
    assert "start the same command again" in again.text()
    for peer in peers:
        assert peer.wait(30) == 0, peer.text()
        assert "the host stopped the run after step" in peer.text()


def test_a_peer_leaves_with_a_checkpoint_and_the_run_waits_for_another(
    machines: Machines,  # noqa: F811
) -> None:
    machines.config(**{**LONG, "train__checkpoint_every": 0})
    host = machines.host()
    ana, ben = machines.join("ana"), machines.join("ben")
    host.wait_for(STEPPING, times=2)
    ana.interrupt()
    assert ana.wait(60) == 0, ana.text()
    assert "left the run" in ana.text()
    host.wait_for(r"ana left after step \d+")
    host.wait_for(r"waiting for 1 more peer \(ana or another\)")
    assert len(list((machines.run_folder / "checkpoints").glob("step-*"))) == 1
    cleo = machines.join("cleo")
    host.wait_for(r"epoch 2 from step [1-9]\d*, ")
    host.wait_for(STEPPING, times=3)
    host.interrupt()
    assert host.wait(60) == 130, host.text()
    assert cleo.wait(30) == ben.wait(30) == 0, cleo.text() + ben.text()
