"""Peers as processes on this machine: how they start, what they say, and what is left of them."""

import contextlib
import io
import os
import queue
import time
from pathlib import Path

import pytest
from leading import step

from settings_values import narrow
from thinwire.background import on_daemon_thread
from thinwire.engine.reports import Step
from thinwire.errors import BreachError, ConfigError, StageError, WireError
from thinwire.report import PlainDisplay
from thinwire.run import coordinator as coordinator_module
from thinwire.run import processes
from thinwire.run import protocol as msg
from thinwire.run.channel import Channel
from thinwire.run.coordinator import Coordinator
from thinwire.run.events import Exited, Given, Lost, Record, Said, StopAsked, Tick
from thinwire.run.peers import MOST_UNHEARD, Hearing, LocalPeers, heed, neighbours
from thinwire.run.watch import AT_ONCE, Pace
from thinwire.train import train
from thinwire.wire import memory_pair
from waiting import PATIENCE, wait_until


@pytest.fixture
def make_peers(make_settings, corpus, tmp_path, monkeypatch):
    """Peers whose processes are ended with the test."""
    monkeypatch.setattr(coordinator_module, "SETTLE_SECONDS", 0.05)
    made = []

    def make(resume="", **changes):
        settings, folder = make_settings(**changes), tmp_path / "run"
        order = msg.Assignment([], {}, settings.to_plain(), str(corpus.folder), str(folder), resume)
        held = [[stage] for stage in range(settings.pipeline.stages)]
        made.append(LocalPeers(settings.run.device, order, held))
        return made[-1]

    yield make
    for peers in made:
        peers.__exit__()


def lead(peers, carry_out, stages=2):
    coordinator = Coordinator(stages, patience=1000.0)
    while not coordinator.is_over:
        heed(coordinator, peers, carry_out, peers.next_event(coordinator))


def ignore(command):
    """For a run that ends before anything is to be kept."""


def test_only_an_unforeseen_error_shows_its_log(tmp_path):
    log = tmp_path / "stage-1.log"
    trace = "Traceback (most recent call last):\n  a line\x1b[2J of ours\n"
    log.write_text(trace)
    text = processes.last_lines(log)
    assert f"last lines of {log}" in text and "| Traceback" in text and "\x1b" not in text


def test_stages_are_held_by_neighbours():
    assert neighbours(4, 4) == [[0], [1], [2], [3]]
    assert neighbours(4, 1) == [[0, 1, 2, 3]]
    assert neighbours(5, 2) == [[0, 1], [2, 3, 4]]
    for peers in (0, 5):
        with pytest.raises(ConfigError, match="are held by 1 to 4 peers"):
            neighbours(4, peers)


def test_stages_start_in_any_folder_and_account_for_every_byte(make_peers, tmp_path, monkeypatch):
    """Real processes, in a folder whose files bear the names of modules."""
    for name in ("platform", "safetensors", "thinwire"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('taken from the wrong folder')\n")
    monkeypatch.chdir(tmp_path)
    path = os.environ.get("PYTHONPATH", "")
    absolute = [str(Path(p).absolute()) for p in path.split(os.pathsep) if p]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(absolute))
    peers, commands, began = make_peers(train__steps=2), [], time.monotonic()
    peers.start()
    lead(peers, commands.append)
    reports = [(c.stage, c.report) for c in commands if isinstance(c, Record)]
    finished = {stage: r.meters for stage, r in reports if isinstance(r, msg.Finished)}
    assert sorted(finished) == [0, 1]
    steps = {stage: r.meters for stage, r in reports if isinstance(r, Step)}
    for stage, meters in finished.items():
        assert list(meters) == ["cut-0"]
        sent = meters["cut-0"]["sent"]
        before = steps[stage]["cut-0"]["sent"]
        assert sent["HELLO"]["frames"] == before["HELLO"]["frames"] == 1
        assert "BYE" not in before
        assert sent["total"] == {
            key: sum(kind[key] for name, kind in sent.items() if name != "total")
            for key in ("frames", "header_bytes", "payload_bytes")
        }
    lower, upper = (finished[stage]["cut-0"] for stage in (0, 1))
    assert "BYE" in lower["sent"] or "BYE" in upper["sent"]  # whoever leaves first says it
    for kind in ("HELLO", "FORWARD", "EVALUATE", "VERDICT"):
        assert lower["sent"][kind] == upper["received"][kind]
    orders, hellos = 2 * 4_000, 2 * 1_000  # settings go out once; pulses, every five seconds
    pulses = 2 * 200 * (time.monotonic() - began) / 5
    assert 2 * 64 < peers.meter.moved_bytes() < orders + hellos + 4 * 600 + pulses


def test_nothing_is_heard_of_a_process_whose_place_another_takes(make_peers, monkeypatch):
    """Its end may be in the queue, as where all are killed: the other would be replaced for it. Or
    its first word: that of the other would be the second, and a breach of the contract.
    """
    peers, noted = make_peers(), []
    note = peers.said.note
    monkeypatch.setattr(peers.said, "note", lambda event: (note(event), noted.append(event)))
    peers.start()
    peers._here[1].process.kill()
    wait_until(lambda: any(isinstance(event, Exited) for event in noted))
    peers.replace([1])
    heard = []
    while not heard or not isinstance(getattr(heard[-1], "message", None), msg.Ready):
        event = peers.said.next(PATIENCE)
        heard += [event] if getattr(event, "stage", 0) == 1 or isinstance(event, Given) else []
    assert heard[0] == Given([1])
    assert all(isinstance(event, Said) for event in heard[1:])


def test_what_is_forgotten_of_stages_leaves_the_rest_in_order_and_makes_room():
    hearing = Hearing(2)
    hearing.note(Lost(0, "gone"))
    for begun in range(MOST_UNHEARD):
        hearing.hear(1, step(1, begun))
    kept = [Said(1, msg.Follows(3), follows=True), Given([1]), StopAsked()]
    for event in (kept[0], Exited(1, -9), *kept[1:]):
        hearing.note(event)
    waiting = on_daemon_thread("stream", lambda: hearing.hear(1, step(1, MOST_UNHEARD)))
    wait_until(lambda: hearing._room[1]._cond._waiters)
    hearing.forget([1])
    hearing.hear(1, step(1, 0))  # else it would wait for ever
    late = [Said(1, step(1, 0))]
    assert [hearing.next(0) for _ in range(6)] == [Lost(0, "gone"), *kept, *late, Tick()]
    assert waiting.result(PATIENCE) is None and hearing.next(0) == Tick(), "nor what had no room"


def test_stages_in_fewer_processes_give_the_same_bits_and_send_less(make_settings, tmp_path):
    """With codecs that remember and a basis that moves: all that crosses a cut is computed."""
    thin = {**narrow("subspace", basis_update_every=2), "codec__forward": "int8",
            "codec__backward": "int4+ef"}  # fmt: skip
    shards, summaries = [], []
    for peers in (3, 2, 1):
        settings = make_settings(
            run__out=str(tmp_path), run__name=f"in-{peers}", pipeline__stages=3, train__steps=4,
            train__checkpoint_every=4, **thin
        )  # fmt: skip
        summaries.append(train(settings, PlainDisplay(io.StringIO()), peers=peers))
        folder = tmp_path / f"in-{peers}" / "checkpoints" / "step-00000004"
        shards.append({path.name: path.read_bytes() for path in folder.glob("*.safetensors")})
    assert shards[0] == shards[1] == shards[2] and len(shards[0]) == 3
    assert [[cut["cut"] for cut in summary["cuts"]] for summary in summaries] == [[0, 1], [0], []]
    logs = sorted(path.name for path in (tmp_path / "in-2" / "logs").iterdir())
    assert logs == ["stage-0.log", "stage-1-2.log"]


def test_a_place_for_logs_that_is_none_is_named(make_peers, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "logs").write_text("a file where the folder should be")
    with pytest.raises(ConfigError, match=r"cannot create the folder .*/logs for the stages' logs"):
        make_peers().start()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_full_disk_under_the_logs_hides_no_reason(make_peers, tmp_path):
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    (logs / "stage-0.log").symlink_to("/dev/full")
    peers = make_peers(resume=str(tmp_path / "absent"), pipeline__stages=1)
    peers.start()
    absent = r"failed at the start: there is no checkpoint at .*absent"
    with pytest.raises(StageError, match=absent):
        lead(peers, ignore, stages=1)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("program", ["/bin/false", "/nowhere/python"])
def test_a_stage_that_cannot_start_is_named(program, stages, make_peers, monkeypatch):
    """A real process that is dead before its order is written, and one that never was."""
    monkeypatch.setattr(processes.sys, "executable", program)
    peers = make_peers(pipeline__stages=stages)
    with pytest.raises(StageError, match=r"stage [01a]? ?(died at the start|cannot be started)"):
        peers.start()
        lead(peers, ignore, stages)


def flood(lost=ignore):
    """What a coordinator hears, and the end at which stage 1 talks to it."""
    ours, theirs = memory_pair(limit=4)
    heard = Hearing(2)
    Channel(ours, "stage 1", msg.FROM_PEER, lambda said: heard.hear(1, said.message), lost)
    return heard, Channel(theirs, "flood", msg.FROM_PEER, ignore, ignore)


def test_a_flood_of_messages_ends_with_its_own_stream():
    """Without end it would keep the coordinator from hearing anyone else."""
    lost = queue.SimpleQueue()
    heard, flooding = flood(lost.put)
    with contextlib.suppress(WireError):
        for sent in range(100 * AT_ONCE):
            flooding.send(msg.LinkDown(0, "x") if sent % 2 else msg.LinkUp(0, 0.1))
            if heard._queue.qsize():
                heard.next(0.0)
    while lost.empty():
        heard.next(0.05)
    error = lost.get()
    assert isinstance(error, BreachError) and "stage 1 sent " in str(error)
    assert "at most 25 a second" in str(error)
    heard.hear(0, msg.Pulse(1, "works"))  # another stage is heard as before


def test_a_coordinator_that_was_suspended_takes_what_was_said_meanwhile_for_no_flood(monkeypatch):
    pace, started = Pace("stage 1"), time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: started + 86_400.0)
    for _ in range(86_400):
        pace.count()


def test_a_stage_that_talks_without_end_is_held_back_at_its_own_end():
    """What waits to be heard is bounded, for each stage; notes of our own never wait."""
    (heard, flooding), total = flood(), 4 * MOST_UNHEARD
    for number in range(total):
        flooding.send(msg.Pulse(number, "floods"))
    wait_until(lambda: heard._queue.qsize() >= MOST_UNHEARD)
    time.sleep(0.2)  # for those that must not come
    assert heard._queue.qsize() == MOST_UNHEARD
    heard.note(StopAsked())
    events = [heard.next(PATIENCE) for _ in range(total + 1)]
    assert [e.message.begun for e in events if isinstance(e, Said)] == [*range(total)]
    assert StopAsked() in events
