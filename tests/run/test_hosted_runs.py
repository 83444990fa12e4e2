"""Hosted runs as people use them: a host and peers that are processes and share no folder."""

import json
import re

import pytest

from machines import assert_same_weights
from settings_values import narrow
from thinwire.cli import main
from thinwire.engine.checkpoint import Checkpoint
from thinwire.errors import NotAliveError
from thinwire.run.admission import AuthorityBook, Invite
from thinwire.run.alive import ask
from trained import trained
from waiting import PROCESS_PATIENCE, wait_until

UNREACHED, REFUSED, NOT_ALIVE = 5, 8, 9


@pytest.fixture
def fails_to_join(tmp_path, monkeypatch, command):
    """Tries to join from another home, in this process, and is refused; returns what was said."""

    def attempt(invite, home, code, words):
        monkeypatch.setenv("THINWIRE_DATA", str(tmp_path / home))
        ended, *said = command("join", invite, "--no-listen")
        assert ended == code and words in "".join(said), said
        return "".join(said)

    return attempt


def test_whoever_has_no_good_invite_or_was_removed_stays_outside(machines, fails_to_join, tmp_path):
    machines.config(pipeline__stages=2)
    host = machines.host("--machines", 1, "--address", "localhost", "--address", "127.0.0.1")
    host.wait_for("only this machine can use the invite")
    assert "for the next 24 hours, one machine joins with" in host.text()
    line = machines.invite
    good = Invite.parse(line)
    names, ports = zip(*(address.rsplit(":", 1) for address in good.addresses), strict=True)
    assert names == ("localhost", "127.0.0.1") and ports[0] == ports[1], "that of the door"
    other = AuthorityBook(tmp_path / "another run", "test").invite(good.addresses[1:])

    altered = line[:60] + ("A" if line[60] != "A" else "B") + line[61:]
    unusable = "this invite cannot be used: it was altered or cut off"
    said = [  # the first leads to this host, whose run is another
        fails_to_join(other, "dan", UNREACHED, f"run {other.run_id} is not known at this door"),
        fails_to_join(altered, "ben", REFUSED, unusable),
    ]
    ana = machines.join("ana")
    ana.wait_for("enrolled as ana")
    used = "this invite was for one machine and has been used"
    said.append(fails_to_join(line, "eve", REFUSED, used))
    main(["kick", "ana", str(machines.run_folder)])
    assert ana.wait() == REFUSED, ana.text()
    # With the key and the certificate that it has.
    said += [fails_to_join(line, "ana/data", REFUSED, "'ana'"), ana.text()]
    assert not [text for text in said if good.secret in text or line in text]
    peers = [peer.name for peer in AuthorityBook(machines.run_folder / "authority").peers()]
    assert peers == ["ana"]


@pytest.mark.slow
def test_a_run_is_asked_on_its_host_and_on_a_peer_and_peers_leave(machines):
    machines.config(
        pipeline__stages=2, train__steps=100_000, train__checkpoint_every=0, train__log_mb=0
    )  # without logs, the run waits for who left
    host = machines.host()

    def asked(question, **more):
        return ask(machines.run_folder, {"ask": question, **more})

    def waits_for():
        """For whom the run waits, once it does."""
        wait_until(lambda: asked("status")["state"] == "waiting")
        return str(asked("status")["waiting_for"])

    assert "2 more peers" in waits_for()
    ana, ben = machines.join("ana"), machines.join("ben")
    host.wait_for(r"step +2/")
    assert "split" in host.text() and "a step takes" in host.text()

    def told():
        status = machines.run("ana", "status", "--json")
        assert status.wait() == 0, status.text()
        return dict(json.loads(status.text()))

    wait_until(lambda: told()["state"] == "training", PROCESS_PATIENCE)  # it hears it now and then
    own = told()
    assert own["role"] == "member" and own["step"] > 0
    assert own["peers"][0]["name"] == "ana" and own["peers"][0]["is_this_machine"]
    left = machines.run("ana", "leave")
    assert left.wait() == 0 and "leaves the run once others have its stages" in left.text()
    assert ana.wait() == 0, ana.text()
    host.wait_for(r"ana leaves: the run pauses after step \d+")
    assert "1 more peer" in waits_for()

    assert "ben was removed from the run" in asked("kick", peer="ben")["text"]
    assert ben.wait() == REFUSED and "the host removed this peer" in ben.text()
    (machines.invite,) = re.findall(r"tw1-\S+", asked("invite")["text"])
    machines.join("cleo").wait_for("enrolled as cleo")
    states = {peer["name"]: peer["state"] for peer in asked("status")["peers"]}
    assert states["ben"] == "kicked" and states["ana"] == "away"

    host.stop()
    with pytest.raises(NotAliveError):
        asked("status")
    assert machines.run("ana", "status").wait() == NOT_ALIVE


def stage_files(home):
    """The files of states that a machine has fetched, with their sizes."""
    found = home.rglob("checkpoints/step-*/stage-*.safetensors")
    return {path.name: path.stat().st_size for path in found}


@pytest.mark.slow
def test_a_peer_that_takes_a_stage_fetches_it_and_a_restarted_host_goes_on_bit_for_bit(
    machines, make_settings, corpus
):
    """A run that starts from weights, which are gone when its host and a peer are replaced."""
    tables = narrow("projected", anchor="per-stage")
    source = trained(make_settings(**tables, train__steps=2), corpus, machines.folder / "source")
    config = machines.config(
        **tables, train__steps=100_000, train__eval_every=30, train__checkpoint_every=20,
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
    host.stop()
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


def test_peers_on_the_machine_of_the_host_hear_that_the_run_is_complete(machines):
    machines.config(pipeline__stages=2)
    host = machines.host("--stages-here", 2)
    assert host.wait() == 0, host.text()
    for log in (machines.run_folder / "logs").glob("here-*.log"):
        assert "the run is complete" in log.read_text()
    for here in (machines.run_folder / "here").iterdir():
        assert not (here / "run").exists(), "what a peer no longer needs is removed"
