"""How a run stands: noted as it goes on, and asked for over a socket that is its user's alone."""

import contextlib
import json
import os
import socket
import stat
from pathlib import Path

import pytest

from tables import as_text
from thinwire.cli import main
from thinwire.engine.reports import StageCosts, Step
from thinwire.errors import ConfigError, NotAliveError, WireError
from thinwire.report import EvaluationRecord, LinkRecord, MetricsWriter, StepRecord
from thinwire.run import protocol as pr
from thinwire.run.alive import FILE, LONGEST_LINE, ControlSocket, ask, is_alive
from thinwire.run.checkpoints import claim_folder
from thinwire.run.machine import Machine
from thinwire.run.status import Standing, status_from_plain, status_table

NOW = 1_800_000_000.0


RUN_ID = "0123456789abcdef"

REPORT = pr.StatusReport(
    run="code",
    run_id=RUN_ID,
    role="host",
    state="waiting",
    time=NOW,
    epoch=3,
    step=120,
    steps=5000,
    loss=3.14159,
    tokens_per_s=1234.5,
    waiting_for="a peer for stage 1",
    waiting_since=NOW - 192,
    last_checkpoint=100,
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


@pytest.fixture
def control(folder):
    def kick(request):
        if request["peer"] != "ben":
            raise ConfigError(f"nobody called {request['peer']} has joined")
        return {"text": "ben was kicked"}

    handlers = {"status": lambda request: REPORT.to_plain(), "kick": kick}
    with ControlSocket(folder, handlers) as control:
        yield control


def test_questions_are_answered(control, folder):
    assert stat.S_IMODE(control.path.stat().st_mode) == 0o600, "only its user may ask"
    assert is_alive(folder)
    assert status_from_plain(ask(folder, {"ask": "status"})) == REPORT
    assert ask(folder, {"ask": "kick", "peer": "ben"}) == {"text": "ben was kicked"}
    for changed in ({"mood": "good"}, {"peers": [{"name": "a"}]}, {"step": "x"}):
        with pytest.raises(WireError, match="does not know"):
            status_from_plain({**REPORT.to_plain(), **changed})
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
        "code (0123456789abcdef), seen from its host",
        "a peer for stage 1, for 3m12s",
        "120 of 5,000, loss 3.1416",
        "3: the run was re-formed 2 times",
        "cuda (NVIDIA H200)",
        "40 / 200",
        "31 ms",
        "3m12s ago",
        "relayed",
        "1.5 MB/s",
        "not connected",
        "note: carl was kicked",
    ):
        assert part in text
    assert text.index("ana") < text.index("ben")
    bad = pr.PeerStatus(
        "ana\x1b[2J", "busy\x1b]0;x\x07", [0], machine=Machine(device="\x1b[31mgpu")
    )
    text = as_text(status_table(pr.StatusReport("r", "0", "host", "training", NOW, peers=[bad])))
    assert "\x1b" not in text and "\x07" not in text, "a terminal would obey"


def run(*arguments: str) -> int:
    """The exit code of a command."""
    try:
        main(list(arguments))
    except SystemExit as end:
        assert isinstance(end.code, int)
        return end.code
    return 0


def test_the_commands_on_a_host(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("THINWIRE_DATA", str(tmp_path / "data"))
    folder = tmp_path / "runs" / "code"
    folder.mkdir(parents=True)
    assert run("status") == 9
    assert "no run is alive on this machine" in capsys.readouterr().err
    assert run("status", str(folder)) == 9
    handlers = {
        "status": lambda request: REPORT.to_plain(),
        "kick": lambda request: {"text": f"{request['peer']} was kicked"},
    }
    with ControlSocket(folder, handlers):
        assert run("status") == 0
        assert "waiting for" in capsys.readouterr().out
        assert run("status", "runs/code", "--json") == 0
        assert json.loads(capsys.readouterr().out) == REPORT.to_plain()
        assert run("kick", "ben") == 0
        assert capsys.readouterr().out == "ben was kicked\n"
        assert run("leave") == 9, "a host does not leave"
        assert "it hosts the one in runs/code" in capsys.readouterr().err
        assert run("kick", "runs/code", "ben") == 2
        assert "the peer comes first: thinwire kick ben runs/code" in capsys.readouterr().err
        (tmp_path / "run.toml").write_text('[run]\nname = "code"\n')
        assert run("status", "run.toml") == 0


def test_the_commands_on_a_peer(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("THINWIRE_DATA", str(tmp_path / "data"))
    folders = [tmp_path / "data" / "peers" / name for name in ("0123456789abcdef", "f" * 16)]
    for folder in folders:
        folder.mkdir(parents=True)
    left = lambda request: {"text": "leaving after this step"}  # noqa: E731
    with ControlSocket(folders[0], {"leave": left}):
        assert run("kick", "ben") == 9, "only a host can"
        assert f"it is a peer of the run in {folders[0]}" in capsys.readouterr().err
        assert run("kick", "ben", str(folders[0])) == 2
        assert "A host answers kick and invite" in capsys.readouterr().err
        with ControlSocket(folders[1], {"leave": left}):
            assert run("leave") == 2
            assert "several runs are alive" in capsys.readouterr().err
        assert run("leave") == 0
        assert capsys.readouterr().out == "leaving after this step\n"


def test_a_local_run_under_way_is_shown_by_what_it_has_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("THINWIRE_DATA", str(tmp_path / "data"))
    folder = Path("runs") / "mine"
    with claim_folder(folder, None):
        assert run("status") == 0
        assert "starting" in capsys.readouterr().out
        with MetricsWriter(folder) as metrics:
            for step in (1, 2):
                record = StepRecord(step, 200, 3.5, 0.1, 1.0, 64, 700.0, 0.5, 9.0, [], [])
                metrics.step(record)
            metrics.evaluation(EvaluationRecord(2, 3.25))
        assert run("status", str(folder)) == 0
        shown = capsys.readouterr().out
        assert "mine, seen from its folder" in shown and "2 of 200, loss 3.5000" in shown
        assert run("kick", "ben") == 9
        assert "has no peers: it is a local one" in capsys.readouterr().err
    assert run("status", str(folder)) == 9
    assert "it has ended" in capsys.readouterr().err


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def standing(clock):
    return Standing("code", RUN_ID, _now=clock)


def news(step: int, loss: float = 2.5) -> StepRecord:
    return StepRecord(step, 100, loss, 0.1, 1.0, 50, 700.0, 0.5, 9.0, [], [])


def test_a_wait_has_one_beginning_and_ends_with_a_step(standing, clock):
    standing.waits("2 more peers")
    clock.now += 30
    standing.waits("1 more peer")
    report = standing.report(0, [], [])
    assert (report.state, report.waiting_for) == ("waiting", "1 more peer")
    assert report.waiting_since == 1000.0 and report.time == 1030.0
    standing.forms()
    assert standing.report(0, [], []).waiting_for == ""
    standing.waits("a peer that prepares")
    standing.stepped(news(7))
    report = standing.report(1, [], [])
    assert (report.state, report.waiting_for, report.waiting_since) == ("training", "", 0.0)
    assert (report.step, report.steps, report.loss, report.tokens_per_s) == (7, 100, 2.5, 700.0)
    standing.stepped(news(8, float("nan")))
    assert standing.report(1, [], []).loss is None, "JSON has no such number"


def test_links_and_words_of_stages(standing, clock):
    seats = ["ana", "ben", "cleo"]
    standing.heard(1, pr.Linked("direct"))
    standing.heard(2, pr.Linked("relayed"))
    links = [LinkRecord(1, 3000, 1000, 0.5)]
    standing.stepped(StepRecord(1, 9, 2.5, 0.1, 1.0, 50, 700.0, 2.0, 9.0, [], links))
    clock.now += 5
    standing.heard(1, pr.Pulse(3, "computes F0 of step 2"))
    assert standing.word_of(1) == (1005.0, "computes F0 of step 2")
    assert standing.word_of(0) == (0.0, "")
    costs = StageCosts(0.1, 0.1, 0.1)  # pulses come every few seconds, steps may come more often
    standing.heard(1, Step(6, None, 0.1, 1.0, True, 0.0, 1.0, 0.0, costs, [], {}, {}, 0))
    assert standing.word_of(1)[1] == "has done step 7"
    first, second = standing.report(1, seats, []).links
    assert (first.below, first.above, first.way) == ("ana", "ben", "direct")
    assert (second.way, second.forward_bytes_per_s) == ("relayed", 1500.0)
    standing.heard(1, pr.LinkDown(0, "no answer"))
    clock.now += 9
    report = standing.report(1, seats, [])
    assert report.waiting_for == "the link between ana and ben, which is down (no answer)"
    assert report.waiting_since == 1005.0 and report.links[0].way == ""
    standing.heard(1, pr.LinkUp(0, 9.0, "relayed"))
    report = standing.report(1, seats, [])
    assert report.waiting_for == "" and report.links[0].way == "relayed", "the way may change"
    standing.heard(0, pr.Pulse(4, "", trip_above=0.0001))  # to the door of its own machine
    standing.heard(1, pr.Pulse(4, "", 0.03, 0.02))  # to that door, and to where it meets cleo
    standing.heard(2, pr.Pulse(4, "", trip_below=0.05))
    trips = [link.round_trip_ms for link in standing.report(1, seats, []).links]
    assert trips == pytest.approx([30.1, 70.0])
    standing.heard(2, pr.Pulse(4, "", trip_below=1e308))
    standing.heard(1, pr.Pulse(4, "", trip_above=1e308))
    assert standing.report(1, seats, []).links[1].round_trip_ms == 0.0, "JSON has no such number"
    standing.forms()
    assert standing.report(2, seats, []).links[0].way == "", "nothing of an earlier epoch stays"
