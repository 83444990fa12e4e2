"""Runs whose stages are on other machines: real processes on loopback that share no folder."""

import json
import re
import shutil
import socket

import pytest

from machines import assert_same_weights
from thinwire.engine.checkpoint import Checkpoint
from thinwire.run.alive import FILE
from thinwire.web.page import RunView
from waiting import PROCESS_PATIENCE, wait_until


def test_three_peers_train_to_the_weights_of_a_run_on_one_machine(machines):
    """Bit for bit, though no peer has the corpus, and none sees the disk of another."""
    config = machines.config(pipeline__stages=3, train__steps=4)
    host = machines.host()
    peers = [machines.join(name) for name in ("ana", "ben", "cleo")]
    alone = machines.run("alone", "train", config, "--set", f"run.out={machines.folder / 'alone'}")
    assert host.wait() == 0, host.text()
    for peer in peers:
        assert peer.wait() == 0, peer.text()
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
    assert summaries[0]["link_utilisation"] > 0, "of the uplinks that its peers measured"
    assert summaries[0]["paths"]["logs"] is None and "logs:" not in host.text()
    kinds = [summary["bytes_sent"]["by_kind"] for summary in summaries]
    assert kinds[0]["FORWARD"] == kinds[1]["FORWARD"]
    for name in ("ana", "ben", "cleo"):
        files = [path for path in (machines.folder / name).rglob("*") if path.is_file()]
        assert not [path for path in files if path.suffix == ".bin"], "a peer holds the corpus"
        keys = [path for path in files if path.name == "key.pem"]
        assert [oct(path.stat().st_mode & 0o777) for path in keys] == ["0o600"]


STEPPING_AGAIN = r"(?s)epoch 2 .*\[train\] step +\d"
SAVED = r"\[save\] +checkpoint of step \d+"
LONG = {"train__steps": 100_000, "train__eval_every": 5, "link__outage": 3.0, "train__log_mb": 0}


def test_a_run_with_fewer_machines_than_stages_trains_to_the_same_weights(machines):
    """One machine holds all three stages, and goes on with them after its host was started anew."""
    config = machines.config(pipeline__stages=3, train__steps=4)
    host = machines.host("--peers", 1, "--set", "train.steps=2")
    first = machines.join("ana")
    assert host.wait() == 0 and first.wait() == 0, host.text() + first.text()
    assert "stages 0: ana, 1: ana, 2: ana" in host.text()
    again = machines.host("--peers", 1)
    alone = machines.run("alone", "train", config, "--set", f"run.out={machines.folder / 'alone'}")
    second = machines.join("ana")
    assert again.wait() == 0 and second.wait() == 0, again.text() + second.text()
    assert "stages [0, 1, 2] of 3" in second.text() and "epoch 2 from step 2" in again.text()
    assert alone.wait() == 0, alone.text()
    assert_same_weights(machines.run_folder, machines.folder / "alone" / "test", 4)
    summary = json.loads((machines.run_folder / "summary.json").read_text())
    assert summary["cuts"] == [], "nothing was sent over a cut"


@pytest.mark.slow
def test_a_peer_and_the_host_are_killed_and_another_machine_leads_the_run_on(machines):
    """Who is killed has its stage again, or a neighbour has; with another host, all begin at the
    last complete checkpoint. It has a copy of the run's folder, and peers know where it may be.
    """
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as two,
    ):
        first, second = (f"127.0.0.1:{place.getsockname()[1]}" for place in (one, two))
    addresses = ("--address", first, "--address", second)
    config = machines.config(
        train__steps=100_000, train__eval_every=0, train__checkpoint_every=10,
        optim__schedule="constant",
    )  # fmt: skip
    host = machines.host("--listen", first, *addresses)
    ana, ben = machines.join("ana"), machines.join("ben")
    host.wait_for(SAVED)
    ben.kill()
    ben = machines.join("ben")
    host.wait_for(r"stage \d is back after")
    assert "was lost at step" in host.text()
    host.kill()

    run = machines.folder / "heir" / "runs" / "test"
    shutil.copytree(machines.run_folder, run, ignore=shutil.ignore_patterns("*.sock"))
    shutil.rmtree(machines.run_folder)
    own = ("--set", f"run.out={run.parent}", "--resume", "--listen", second)
    again = machines.run("heir", "host", run / "config.toml", *own, *addresses)
    again.wait_for(r"epoch 2 from step [1-9]\d*, stages 0: \w+, 1: \w+")
    again.wait_for(STEPPING_AGAIN)
    again.stop()
    for peer in (ana, ben):
        assert peer.wait() == 0, peer.text()
        assert "the host is back after" in peer.text()
    summary = json.loads((run / "summary.json").read_text())
    steps, out = summary["steps"], machines.folder / "alone"
    changes = ("--set", f"run.out={out}", "--set", f"train.steps={steps}")
    alone = machines.run("alone", "train", config, *changes)
    assert alone.wait() == 0, alone.text()
    assert_same_weights(run, out / "test", steps)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    assert [row["step"] for row in rows if row["kind"] == "step"] == [*range(1, steps + 1)]
    validated = [step for step, _ in summary["valid_losses"]]
    assert validated[0] == 0, "of the whole run, though its host was killed"


def page_of(folder):
    """What a page of this folder is sent, beside its curve."""
    view = RunView(folder)
    view.refresh()
    sections = ("state", "progress", "valid", "events")
    parts = {name: json.loads(view.sections.get(name, b"null")) for name in sections}
    return {**parts, "losses": view.curves.points()["loss"]}


def is_whole(parts):
    state, events = parts["state"] or {}, parts["events"] or []
    links = state.get("links") or [{}]
    saved = any(event["kind"] == "save" for event in events)
    told = links[0].get("round_trip_ms") and state.get("last_checkpoint")
    return bool(told and parts["progress"] and parts["valid"] and saved)


def check_pages(machines, *peers):
    """Peers see the run as its host does: peers, links, a typical step and what happened; but
    neither invites nor addresses.
    """
    folders = [next((peer.home / "data" / "peers").iterdir()) for peer in peers]
    for folder in folders:
        wait_until((folder / FILE).exists, PROCESS_PATIENCE)
        wait_until(lambda folder=folder: is_whole(page_of(folder)), PROCESS_PATIENCE)
    member, whole = page_of(folders[0]), page_of(machines.run_folder)  # the host's is the later one
    for parts in (whole, member):
        state = parts["state"]
        assert state["epoch"] == 1 and state["step"] > 0 and len(parts["losses"]) > 0
        assert state["waiting_for"] == ""
        assert sorted(peer["name"] for peer in state["peers"]) == ["ana", "ben"]
        assert sorted(peer["stages"] for peer in state["peers"]) == [[0], [1]]
        for peer in state["peers"]:
            assert peer["state"] not in ("", "away", "kicked")
            assert peer["machine"]["device"].startswith("cpu")
            assert all(peer["machine"][key] > 0 for key in ("tflops", "mbps_up", "memory_gb"))
        (link,) = state["links"]
        # A machine under load may answer a dial too late, and the link then passes the host.
        assert link["way"] in ("direct", "relayed") and link["round_trip_ms"] > 0
        assert link["forward_bytes_per_s"] > 0 and state["crossed"][0]["forward_bytes"] > 0
        assert parts["progress"]["timeline"]["spans"] and parts["progress"]["planned"]
        assert state["last_checkpoint"] >= 5 and parts["valid"]
    heard = [whole["state"]["time"] - peer["last_word"] for peer in whole["state"]["peers"]]
    assert all(0 <= seconds < 60 for seconds in heard)
    roles = [(parts["state"]["role"], parts["state"]["state"]) for parts in (whole, member)]
    assert roles == [("host", "training"), ("member", "training")]
    assert [p["name"] for p in member["state"]["peers"] if p["is_this_machine"]] == ["ana"]
    assert {row[0] for row in member["valid"]} <= {row[0] for row in whole["valid"]}
    text = json.dumps(member)
    others = "".join(path.read_text() for path in folders[1].glob("*.json"))
    for secret in (machines.invite, "127.0.0.1:", str(machines.run_folder), others):
        assert secret and secret not in text


def test_a_seat_passes_from_peer_to_peer_and_who_was_removed_stays_out(machines):
    """Without logs of what was sent, each time all stages begin at the last checkpoint."""
    machines.config(**LONG, train__checkpoint_every=5)
    host = machines.host()
    ana, ben = machines.join("ana"), machines.join("ben")
    host.wait_for(SAVED)
    check_pages(machines, ana, ben)
    ben.kill()
    cleo = machines.join("cleo")
    host.wait_for(r"epoch 2 from step [1-9]\d*, stages (0: ana, 1: cleo|0: cleo, 1: ana)")
    host.wait_for(r"stage \d was lost at step")
    host.wait_for(STEPPING_AGAIN)

    assert "Traceback" not in ana.text() and 'File "' not in ana.text(), "that another was lost"
    ana.stop(code=0)
    assert "left the run" in ana.text(), ana.text()
    host.wait_for(r"ana leaves: the run pauses after step \d+")
    cleo.wait_for(r"ana leaves: the run stops after this step")
    assert "Ctrl-C" not in cleo.text() and "training is done" not in cleo.text()
    host.wait_for(r"waiting for 1 more peer")
    left = int(re.findall(r"ana leaves: the run pauses after step (\d+)", host.text())[0])
    ana = machines.join("ana")
    host.wait_for(rf"epoch 3 from step {left}, ")

    kick = machines.run("host", "kick", "cleo", machines.run_folder)
    assert kick.wait() == 0 and "cleo was removed" in kick.text(), kick.text()
    assert cleo.wait() == 8, cleo.text()
    assert "the host removed this peer from the run" in cleo.text()
    host.wait_for(r"waiting for 1 more peer; here: ana")  # who was removed is not named
    returned, fresh = machines.join("cleo"), machines.join("dan")
    assert returned.wait() == fresh.wait() == 8, returned.text() + fresh.text()
    assert "'cleo' was removed from this run by its host" in returned.text()
    assert "this invite was closed" in fresh.text()

    host.stop()
    assert "peers have to join again" in host.text(), host.text()
    assert ana.wait() == 0, ana.text()
    assert "the host was stopped; join again when it is back" in ana.text()
