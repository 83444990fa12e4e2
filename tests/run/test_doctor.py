"""What will go wrong is said before it does, with this machine's values and the fix."""

import contextlib
import io
import json
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

import thinwire
from thinwire.run import doctor as checks
from thinwire.run.admission import AuthorityBook, HostSays, Invite, identity_in, serve_enrolment
from thinwire.wire import Door, Listener, Route, Standby, ping
from thinwire.wire.speed import SpeedService
from waiting import PATIENCE, wait_until


def enrolling(book):
    listener = Listener(book.identity, None, 0, 1 << 16, who=book.name_of)
    serve_enrolment(listener, book)
    return listener


@pytest.fixture
def host(tmp_path):
    """A host as others see it: a door, and behind it the enrolment."""
    book = AuthorityBook(tmp_path / "authority", "first")

    def invite(*more, **options):
        return book.invite([door.address, *more], **options)

    with Door("127.0.0.1", 0) as door, contextlib.closing(enrolling(book)) as listener:
        door.admit_by(book.run_id, book.grant_of)
        door.serve(f"{book.run_id}/enrol", listener.take)
        yield SimpleNamespace(book=book, listener=listener, door=door, invite=invite)


@pytest.fixture
def doctor(tmp_path):
    peer = tmp_path / "peer"
    return lambda invite, listen="", folder=peer: checks.Findings(
        checks.examine(str(invite), folder, listen)
    )


def one(found, words):
    """The only finding that has these words."""
    (finding,) = (finding for finding in found.all if words in finding.what)
    return finding


def blocking(found):
    """The only finding that keeps a machine out."""
    (finding,) = (finding for finding in found.all if finding.level == "blocks")
    return finding


def test_a_machine_that_can_join_is_told_so(host, doctor, tmp_path, monkeypatch, command):
    invite = host.invite()
    host.door.serve(f"{host.book.run_id}/speed", SpeedService().take)
    found = doctor(invite, "0.0.0.0:0")
    assert not found.is_blocked, found.text()
    answers = f"the host answers at {host.door.address}"
    reached = "can be reached from outside, at 127.0.0.1:"
    for words in (answers, "would let this machine in", reached):
        assert one(found, words).level == "fine"
    assert "sees this machine as 127.0.0.1" in found.text() and "Mbit/s up" in found.text()
    busy = one(doctor(invite, host.door.address), "no door can be opened here")
    assert busy.level == "note" and "--listen" in busy.fix, "the port is in use"
    # From the input neither the list of processes nor the history of a shell shows the invite.
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{invite}\n"))
    assert "would let this machine in" in command("doctor", "-", "--folder", tmp_path / "peer")[1]
    assert host.book.peers() == [] and not (tmp_path / "peer").exists(), "it changes nothing"
    enrolled = identity_in(tmp_path / "peer", invite.to_service("enrol"), invite)
    assert enrolled.name, "nor is it used up"


def test_a_host_that_is_away_blocks(host, command, tmp_path):
    invite = host.invite(lasts=-7200.0)
    host.door.close()
    code, said, _ = command("doctor", invite, "--folder", tmp_path, "--json")
    plain = json.loads(said)
    assert code == 1 and plain["blocked"] is True
    first, expired, *_ = plain["findings"]
    assert (first["number"], first["level"]) == (1, "blocks")
    assert f"the host does not answer: {host.door.address}: Connection refused" in first["what"]
    assert f"forward TCP port {host.door.port}" in first["fix"]
    assert expired["level"] == "note" and expired["what"] == "the invite expired 2h00m ago"
    assert invite.secret not in said and str(invite) not in said


def test_a_way_that_does_not_answer_is_a_note_where_another_works(host, doctor, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent, Door("127.0.0.1", 0) as other:
        address = "{}:{}".format(*silent.getsockname())
        monkeypatch.setattr(
            "thinwire.wire.door.ping",
            lambda route, name: ping(route, name, 0.5 if route.address == address else PATIENCE),
        )
        found = doctor(host.invite(address, other.address, "no-such-host.invalid:7000"))
    assert not found.is_blocked, found.text()
    swallowed = one(found, f"{address}: no answer within")
    assert swallowed.level == "note" and "firewall" in swallowed.fix
    assert "thinwire relay" in swallowed.fix and "proxy" in swallowed.fix
    refused = one(found, f"{other.address}: the door refused")
    assert refused.level == "note" and "ask the host for a new invite" in refused.fix
    assert one(found, "no-such-host.invalid").level == "note"


def test_a_host_behind_a_relay_is_reached(host, doctor):
    with Door("127.0.0.1", 0) as relay:
        relay.admit_any("open-sesame")
        route = Route(relay.address, "relayed", "open-sesame")
        invite = host.book.invite([], route)
        away = doctor(invite)
        assert one(away, "the relay answers at").level == "fine"
        assert one(away, "the host does not enrol peers").level == "blocks"
        assert "nobody waits for it" in away.text()
        name, prover = f"{invite.run_id}/enrol", host.book.identity.prove
        with Standby(name, route, host.listener.take, prover=prover) as standby:
            wait_until(lambda: standby.waiting)
            found = doctor(invite)
    assert not found.is_blocked and "would let this machine in" in found.text()
    assert "open-sesame" not in away.text() + found.text()


def test_an_invite_that_lets_in_nobody_blocks(host, doctor, tmp_path):
    invite, folder = host.invite(), tmp_path / "other"
    name = identity_in(folder, invite.to_service("enrol"), invite).name
    assert not doctor(invite, folder=folder).is_blocked, "who joined before is let in again"
    assert "refuses this invite: this invite was for one" in blocking(doctor(invite)).what
    host.book.kick(name)
    assert "was removed from this run" in blocking(doctor(invite, folder=folder)).what


def test_what_a_host_says_of_a_machine():
    invite = Invite("first", "ab" * 32, ("h:1",), "deadbeef", "00" * 16, 1)
    says = HostSays("9.8.7", reached="no")
    _, other, unreached = checks.check_answer(invite, says, "198.51.100.7:7000")
    assert other.level == "blocks" and other.fix == "pip install thinwire==9.8.7"
    assert other.what == f"thinwire {thinwire.__version__} here, 9.8.7 at the host"
    assert unreached.level == "note" and "at 198.51.100.7:7000" in unreached.what
    assert "--listen 0.0.0.0:7000" in unreached.fix


def test_an_invite_that_cannot_be_read_is_a_finding(command):
    code, said, _ = command("doctor", "tw1-abc")
    unusable = " 1. BLOCKS: this invite cannot be used: it was altered or cut off\n"
    assert code == 1 and unusable in said
    assert "fix: copy the whole line" in said and said.endswith("keeps this machine out.\n")


def test_without_an_invite_the_machine_is_examined(command):
    _, said, _ = command("doctor")
    for words in (f"thinwire {thinwire.__version__}, Python 3.", "torch 2", "memory free", "disk:"):
        assert words in said
    assert "With an invite (thinwire doctor INVITE)" in said


def test_a_machine_without_torch_is_told_so():
    lines = "import sys, thinwire.cli; sys.modules['torch'] = None; thinwire.cli.main(['doctor'])"
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True)
    assert done.returncode == 1 and "torch cannot be imported" in done.stdout


@pytest.mark.parametrize(("finding", "level", "words"), [
    (checks.check_memory(100_000_000, "cpu"), "blocks", "No stage"),
    (checks.check_memory(1_000_000_000, "cpu"), "note", "Only a small stage"),
])  # fmt: skip
def test_thresholds(finding, level, words):
    assert finding.level == level and words in finding.trouble
    assert bool(finding.fix) == (level != "fine")


def test_an_impostor_behind_the_right_door_blocks(host, doctor, tmp_path):
    other = AuthorityBook(tmp_path / "other", "first")
    with contextlib.closing(enrolling(other)) as impostor:
        host.door.serve(f"{host.book.run_id}/enrol", impostor.take)
        finding = blocking(doctor(host.invite()))
    assert "the host cannot be trusted: another run answers" in finding.what
