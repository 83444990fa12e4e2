"""How a run stands: noted as it goes on, and asked for over a socket that is its user's alone."""

import contextlib
import json
import os
import socket
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from records import step_record
from tables import as_text
from thinwire.engine.reports import StageCosts, Step
from thinwire.errors import ConfigError, NotAliveError, WireError
from thinwire.report import EvaluationRecord, MetricsWriter
from thinwire.report.records import LinkRecord
from thinwire.run import protocol as pr
from thinwire.run.alive import FILE, LONGEST_LINE, ControlSocket, ask, ask_status, is_alive
from thinwire.run.checkpoints import claim_folder
from thinwire.run.machine import Machine
from thinwire.run.status import Standing, status_table

NOW = 1_800_000_000.0
RUN_ID = "0123456789abcdef"

REPORT = pr.StatusReport(
    run="code", run_id=RUN_ID, role="host", state="waiting", time=NOW, epoch=3,
    step=120, steps=5000, loss=3.14159, tokens_per_s=1234.5, last_checkpoint=100,
    waiting_for="a peer for stage 1", waiting_since=NOW - 192,
    peers=[
        pr.PeerStatus(
            "ana", "training", [0], "0..5", NOW - 2,
            machine=Machine("ana", 45.5, 24.0, 40.0, 200.0, 15.5, device="cuda (NVIDIA H200)"),
        ),
        pr.PeerStatus("ben", "away", last_word=NOW - 192),
    ],
    links=[pr.LinkStatus(0, "ana", "ben", "relayed", 1.5e6, 0.0), pr.LinkStatus(1, "ben", "carl")],
    notes=["carl was kicked"],
)  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """A folder with a long path: longer than the name of a socket may be."""
    folder = tmp_path / ("a-long-name-" * 8) / "run"
    folder.mkdir(parents=True)
    return folder


def kick(request):
    if request["peer"] != "ben":
        raise ConfigError(f"nobody called {request['peer']} has joined")
    return {"text": "ben was kicked"}


HANDLERS = {"status": lambda request: REPORT, "kick": kick}


@pytest.fixture
def control(folder):
    with ControlSocket(folder, HANDLERS) as control:
        yield control


def test_questions_are_answered(control, folder, monkeypatch):
    assert stat.S_IMODE(control.path.stat().st_mode) == 0o600, "only its user may ask"
    assert is_alive(folder)
    assert ask_status(folder) == REPORT
    assert ask(folder, {"ask": "kick", "peer": "ben"}) == {"text": "ben was kicked"}
    for changed in ({"mood": "good"}, {"peers": [{"name": "a"}]}, {"step": "x"}):
        said = {**REPORT.to_plain(), **changed}
        monkeypatch.setitem(HANDLERS, "status", lambda request, said=said: said)
        with pytest.raises(WireError, match="does not know"):
            ask_status(folder)
    with pytest.raises(ConfigError, match="nobody called eve"):
        ask(folder, {"ask": "kick", "peer": "eve"})
    with pytest.raises(ConfigError, match=r"'leave' cannot be asked here; what can: kick, status"):
        ask(folder, {"ask": "leave"})


def test_nonsense_ends_one_connection_and_no_more(control, folder, monkeypatch):
    monkeypatch.chdir(folder)  # a socket's own name is short
    for said in (b"[1]\n", b"{" * 10_000 + b"\n", b"no end", b"x" * 3 * LONGEST_LINE):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
            caller.connect(FILE)
            with contextlib.suppress(OSError):  # what has no end is cut off
                caller.sendall(said)
                caller.shutdown(socket.SHUT_WR)
                assert caller.recv(100) == b""
    assert is_alive(folder) and ask(folder, {"ask": "status"})


def test_what_a_killed_process_left_is_replaced(folder):
    first = ControlSocket(folder, {})
    os.link(first.path, folder / "kept")
    first.close()
    (folder / "kept").rename(folder / FILE)
    assert not is_alive(folder)
    with pytest.raises(NotAliveError, match="no run is alive in"):
        ask(folder, {"ask": "status"})
    with ControlSocket(folder, {"status": lambda request: {"text": "here"}}):
        assert ask(folder, {"ask": "status"}) == {"text": "here"}
    (folder / FILE).write_text("mine")  # a file of another kind is left alone
    with pytest.raises(ConfigError, match="cannot make"):
        ControlSocket(folder, {})
    assert (folder / FILE).read_text() == "mine"


def test_a_report_in_words():
    text = as_text(status_table(REPORT), width=120)
    for part in (
        "code (0123456789abcdef), seen from its host", "a peer for stage 1, for 3m12s",
        "120 of 5,000, loss 3.1416", "3: the run was re-formed 2 times", "cuda (NVIDIA H200)",
        "40 / 200", "31 ms", "3m12s ago", "relayed", "1.5 MB/s", "not connected",
        "note: carl was kicked",
    ):  # fmt: skip
        assert part in text
    assert text.index("ana") < text.index("ben")
    bad = pr.PeerStatus(
        "ana\x1b[2J", "busy\x1b]0;x\x07", [0], machine=Machine(device="\x1b[31mgpu")
    )
    text = as_text(status_table(pr.StatusReport("r", "0", "host", "training", NOW, peers=[bad])))
    assert "\x1b" not in text and "\x07" not in text, "a terminal would obey"


@pytest.fixture
def said(tmp_path, monkeypatch, command):
    """Runs a command that ends with this exit code; what it said of it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("THINWIRE_DATA", str(tmp_path / "data"))

    def said(code, *arguments):
        ended, out, err = command(*arguments)
        assert ended == code, out + err
        return err if code else out

    return said


def test_the_commands_on_a_host(said, tmp_path):
    folder = tmp_path / "runs" / "code"
    folder.mkdir(parents=True)
    assert "no run is alive in runs/ and " in said(9, "status")
    said(9, "status", str(folder))
    with ControlSocket(folder, HANDLERS):
        assert "waiting for" in said(0, "status")
        assert json.loads(said(0, "status", "runs/code", "--json")) == REPORT.to_plain()
        assert said(0, "kick", "ben") == "ben was kicked\n"
        assert "it hosts the one in runs/code" in said(9, "leave"), "a host does not leave"
        words = said(2, "kick", "runs/code", "ben")
        assert "the peer comes first: thinwire kick ben runs/code" in words
        (tmp_path / "run.toml").write_text('[run]\nname = "code"\n')
        said(0, "status", "run.toml")
    assert "no run is alive in runs/code/" in said(9, "status", "run.toml")


def test_the_commands_on_a_peer(said, tmp_path):
    folders = [tmp_path / "data" / "peers" / name for name in ("0123456789abcdef", "f" * 16)]
    for folder in folders:
        folder.mkdir(parents=True)
    left = lambda request: {"text": "leaving after this step"}  # noqa: E731
    with ControlSocket(folders[0], {"leave": left}):
        where = f"it is a peer of the run in {folders[0]}"
        assert where in said(9, "kick", "ben"), "only a host can"
        assert "A host answers kick and invite" in said(2, "kick", "ben", str(folders[0]))
        with ControlSocket(folders[1], {"leave": left}):
            assert "several runs are alive" in said(2, "leave")
        assert said(0, "leave") == "leaving after this step\n"


def test_a_local_run_under_way_is_shown_by_what_it_has_written(said):
    folder = Path("runs") / "mine"
    with claim_folder(folder, None):
        assert "starting" in said(0, "status")
        with MetricsWriter(folder) as metrics:
            for step in (1, 2):
                metrics.step(step_record(step, 100, loss=3.5))
            metrics.evaluation(EvaluationRecord(2, 3.25))
        shown = said(0, "status", str(folder))
        assert "mine, seen from its folder" in shown and "2 of 100, loss 3.5000" in shown
        assert "has no peers: it is a local one" in said(9, "kick", "ben")
    assert "it has ended" in said(9, "status", str(folder))


@pytest.fixture
def clock():
    return SimpleNamespace(now=1000.0)


@pytest.fixture
def standing(clock):
    return Standing("code", RUN_ID, _now=lambda: clock.now)


def test_a_wait_has_one_beginning_and_ends_with_a_step(standing, clock):
    standing.waits("2 more peers")
    clock.now += 30
    standing.waits("1 more peer")
    report = standing.report(0, [])
    assert (report.state, report.waiting_for) == ("waiting", "1 more peer")
    assert report.waiting_since == 1000.0 and report.time == 1030.0
    standing.forms()
    assert standing.report(0, []).waiting_for == ""
    standing.waits("a peer that prepares")
    standing.stepped(step_record(7, 100))
    report = standing.report(1, [])
    assert (report.state, report.waiting_for, report.waiting_since) == ("training", "", 0.0)
    assert (report.step, report.steps, report.loss, report.tokens_per_s) == (7, 100, 5.1234, 3412.4)
    standing.stepped(step_record(8, loss=float("nan")))
    assert standing.report(1, []).loss is None, "JSON has no such number"


def test_links_and_words_of_stages(standing, clock):
    seats = ["ana", "ben", "cleo"]
    standing.heard(1, pr.Linked("direct"))
    standing.heard(2, pr.Linked("relayed"))
    standing.stepped(step_record(1, step_seconds=2.0, links=[LinkRecord(1, 3000, 1000, 0.5)]))
    clock.now += 5
    standing.heard(1, pr.Pulse(3, "computes F0 of step 2"))
    assert standing.word_of(1) == (1005.0, "computes F0 of step 2")
    assert standing.word_of(0) == (0.0, "")
    costs = StageCosts(0.1, 0.1, 0.1)  # pulses come every few seconds, steps may come more often
    standing.heard(1, Step(6, None, 0.1, 1.0, True, 0.0, 1.0, 0.0, costs, [], {}, {}, 0))
    assert standing.word_of(1)[1] == "has done step 7"
    first, second = standing.report(1, seats).links
    assert (first.below, first.above, first.way) == ("ana", "ben", "direct")
    assert (second.way, second.forward_bytes_per_s) == ("relayed", 1500.0)
    standing.heard(1, pr.LinkDown(0, "no answer"))
    clock.now += 9
    report = standing.report(1, seats)
    assert report.waiting_for == "the link between ana and ben, which is down (no answer)"
    assert report.waiting_since == 1005.0 and report.links[0].way == ""
    standing.heard(1, pr.LinkUp(0, 9.0, "relayed"))
    report = standing.report(1, seats)
    assert report.waiting_for == "" and report.links[0].way == "relayed", "the way may change"
    standing.heard(0, pr.Pulse(4, "", trip_above=0.0001))  # to the door of its own machine
    standing.heard(1, pr.Pulse(4, "", 0.03, 0.02))  # to that door, and to where it meets cleo
    standing.heard(2, pr.Pulse(4, "", trip_below=0.05))
    trips = [link.round_trip_ms for link in standing.report(1, seats).links]
    assert trips == pytest.approx([30.1, 70.0])
    standing.heard(2, pr.Pulse(4, "", trip_below=1e308))
    standing.heard(1, pr.Pulse(4, "", trip_above=1e308))
    assert standing.report(1, seats).links[1].round_trip_ms == 0.0, "JSON has no such number"
    standing.forms()
    assert standing.report(2, seats).links[0].way == "", "nothing of an earlier epoch stays"
