"""The coordinator: whom it blames, what it relays, and how it starts its stages."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import pytest

from thinwire.data import Corpus
from thinwire.errors import ConfigError, StageError, WireError
from thinwire.run import coordinator as coordinator_module
from thinwire.run.control import Channel, Message
from thinwire.run.coordinator import Coordinator, blame
from thinwire.run.hearing import MOST_UNHEARD, Hearing
from thinwire.wire import memory_pair


def failed(
    error: str,
    kind: str = "WireError",
    accuses: tuple[int, ...] = (),
    convicts: tuple[int, ...] = (),
) -> Message:
    """What a peer sends before it leaves."""
    known = kind.endswith("Error") and kind != "ValueError"
    blames = {"accuses": [*accuses], "convicts": [*convicts]}
    return {"type": "failed", "kind": kind, "known": known, "error": error, **blames}


def exit_with(code: int) -> Message:
    return {"type": "exit", "code": code}


LOST = {"type": "lost", "error": "link control of stage 1 is broken"}
STEP = {"type": "step", "step": 3}


@pytest.mark.parametrize(
    ("heard", "culprit"),
    [
        # a frozen stage is silent: its neighbours accuse it, theirs accuse them
        ([(1, failed("boundary-0", accuses=(0,)))], 0),
        ([(0, failed("boundary-0", accuses=(1,))), (0, exit_with(1))], 1),
        ([(0, failed("b-0", accuses=(1,))), (2, failed("b-1", accuses=(1,)))], 1),
        ([(2, failed("b-1", accuses=(1,))), (1, failed("b-0", accuses=(0,)))], 0),
        ([(0, failed("b-0", accuses=(1,))), (1, failed("b-1", accuses=(2,)))], 2),
        ([(2, failed("b-1", accuses=(1,))), (1, LOST)], 1),
        # a death without a word is the surest sign
        ([(1, failed("b-0", accuses=(0,))), (0, exit_with(-9)), (1, exit_with(1))], 0),
        ([(1, failed("b-0", accuses=(0,))), (0, exit_with(1))], 0),
        ([(0, failed("b-0", accuses=(1,))), (1, LOST), (1, exit_with(-11))], 1),
        # whoever failed by itself says so, and its neighbours' complaints follow from that
        ([(0, failed("b-0", accuses=(1,))), (1, failed("x", "StageError")), (1, exit_with(1))], 1),
        ([(0, failed("b-0", accuses=(1,))), (1, failed("x", "ValueError"))], 1),
        # a frame outside the contract breaks the link at the end that objects
        ([(0, failed("b-0", accuses=(1,))), (1, failed("b-0: unexpected frame"))], 1),
        # ... and says who sent it, whatever the sender complains of
        ([(0, failed("b-0", accuses=(1,))), (1, failed("b", "BreachError", convicts=(0,)))], 0),
        ([(1, failed("b", "BreachError", convicts=(0,))), (1, exit_with(1))], 0),
        ([(1, {"type": "breach", "error": "a 'step' message has no field"}), (1, exit_with(1))], 1),
        ([(0, STEP), (1, exit_with(0))], 0),
    ],
)
def test_the_stage_that_failed_first_is_blamed(
    heard: list[tuple[int, Message]], culprit: int
) -> None:
    assert blame(heard)[0] == culprit


@pytest.fixture
def make_host(
    make_settings: Callable, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Coordinator]]:
    """A coordinator whose processes are ended with the test."""
    monkeypatch.setattr(coordinator_module, "SETTLE_SECONDS", 0.05)
    coordinators: list[Coordinator] = []

    def make(**changes: object) -> Coordinator:
        coordinators.append(
            Coordinator(make_settings(**changes), tmp_path / "run", corpus.folder, None)
        )
        return coordinators[-1]

    yield make
    for coordinator in coordinators:
        coordinator.__exit__(None, None, None)


def test_an_accused_stage_is_named_with_the_witness(make_host: Callable) -> None:
    text = str(make_host()._explain(0, failed("link boundary-0 is broken", accuses=(1,))))
    assert text.startswith("stage 1 was lost at the start: stage 0 says: link boundary-0 is broken")


def test_only_an_unforeseen_error_shows_its_traceback(make_host: Callable, tmp_path: Path) -> None:
    coordinator = make_host()
    log = tmp_path / "run" / "logs" / "stage-1.log"
    log.parent.mkdir(parents=True)
    log.write_text("Traceback (most recent call last):\n  a line of ours\n")
    known = str(coordinator._explain(1, failed("no such device", "ConfigError")))
    assert known == f"stage 1 failed at the start: no such device\n  its log is {log}"
    unknown = str(coordinator._explain(1, failed("ValueError: odd", "ValueError")))
    assert f"last lines of {log}" in unknown and "| Traceback" in unknown
    assert "| Traceback" in str(coordinator._explain(1, exit_with(-11)))


@pytest.mark.parametrize("order", ["after it finished", "while it leaves"])
def test_a_late_request_to_stop_disturbs_nothing(order: str, make_host: Callable) -> None:
    """Stage 0 has said goodbye, later stages still drain: their checkpoint must survive."""
    coordinator = make_host()
    ours, theirs = memory_pair()
    coordinator._channels[0] = Channel(ours, "control of stage 0")
    Channel(theirs, "control").close()
    with pytest.raises(WireError, match="said goodbye"):  # as soon as the goodbye has come
        while True:
            coordinator._channels[0].send({"type": "stop"})
    finished, shard = {"type": "finished", "meters": {}}, {"type": "shard", "step": 4}
    if order == "after it finished":
        coordinator._said.note(0, finished)
        coordinator.interrupt()
    else:
        coordinator.interrupt()
        coordinator._said.note(0, finished)
    coordinator._said.note(1, shard)
    coordinator._said.note(1, finished)
    heard = [said for said in coordinator.messages() if said[1]["type"] != "stopping"]
    assert heard == [(0, finished), (1, shard), (1, finished)]


def test_stages_start_in_any_folder_and_account_for_every_byte(
    make_host: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real processes, in a folder whose files bear the names of modules."""
    for name in ("platform", "safetensors", "thinwire"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('taken from the wrong folder')\n")
    monkeypatch.chdir(tmp_path)
    path = os.environ.get("PYTHONPATH", "")
    absolute = [str(Path(p).absolute()) for p in path.split(os.pathsep) if p]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(absolute))
    coordinator = make_host(train__steps=2)
    coordinator.launch()
    messages = list(coordinator.messages())
    finished = {stage: m for stage, m in messages if m["type"] == "finished"}
    assert sorted(finished) == [0, 1]
    steps = {stage: m for stage, m in messages if m["type"] == "step"}
    for stage, message in finished.items():
        assert list(message["meters"]) == ["boundary-0"]
        sent = message["meters"]["boundary-0"]["sent"]
        before = steps[stage]["meters"]["boundary-0"]["sent"]
        assert sent["HELLO"]["frames"] == before["HELLO"]["frames"] == 1
        assert "BYE" not in before
        assert sent["total"] == {
            key: sum(kind[key] for name, kind in sent.items() if name != "total")
            for key in ("frames", "header_bytes", "payload_bytes")
        }
    lower, upper = (finished[stage]["meters"]["boundary-0"] for stage in (0, 1))
    assert "BYE" in lower["sent"] or "BYE" in upper["sent"]  # whoever leaves first says it
    for kind in ("HELLO", "FORWARD", "EVALUATE", "VERDICT"):
        assert lower["sent"][kind] == upper["received"][kind]
    assert json.dumps(messages)
    orders, hellos = 2 * 3_000, 2 * 1_000  # settings go out once
    assert 2 * 64 < coordinator.control_bytes() < orders + hellos + 4 * 600


def test_a_place_for_logs_that_is_none_is_named(make_host: Callable, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "logs").write_text("a file where the folder should be")
    with pytest.raises(ConfigError, match=r"cannot create the folder .*/logs for the stages' logs"):
        make_host().launch()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_full_disk_under_the_logs_hides_no_reason(make_host: Callable, tmp_path: Path) -> None:
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    (logs / "stage-0.log").symlink_to("/dev/full")
    coordinator = make_host(pipeline__stages=1)
    coordinator._resume = tmp_path / "absent"
    with pytest.raises(
        StageError, match=r"failed at the start: there is no checkpoint at .*absent"
    ):
        coordinator.launch()


def test_a_traceback_is_shown_though_the_log_is_lost(make_host: Callable) -> None:
    trace = "Traceback (most recent call last):\n  a line of ours\n"
    text = str(make_host()._explain(0, {**failed("odd", "ValueError"), "trace": trace}))
    assert "its last words:\n  | Traceback" in text and "  |   a line of ours" in text


@pytest.mark.parametrize("program", ["/bin/false", "/nowhere/python"])
def test_a_stage_that_cannot_start_is_named(
    program: str, make_host: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real process that is dead before its order is written, and one that never was."""
    monkeypatch.setattr(coordinator_module.sys, "executable", program)
    coordinator = make_host(pipeline__stages=1)
    start = coordinator._start

    def start_and_die(output: BinaryIO) -> subprocess.Popen[bytes]:
        process = start(output)
        process.wait()
        return process

    coordinator._start = start_and_die
    with pytest.raises(StageError, match=r"stage 0 (died at the start|cannot be started)"):
        coordinator.launch()


def test_a_stage_that_talks_without_end_is_held_back_at_its_own_end() -> None:
    """What waits to be heard is bounded, for each stage; notes of our own never wait."""
    ours, theirs = memory_pair(limit=4)
    said = Hearing(2)
    Channel(ours, "control of stage 1", lambda message: said.hear(1, message))
    flooding = Channel(theirs, "flood")
    total = 4 * MOST_UNHEARD
    for number in range(total):
        flooding.send({"type": "pulse", "begun": number, "doing": "floods"})
    deadline = time.monotonic() + 60
    while said.waiting < MOST_UNHEARD and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)  # for those that must not come
    assert said.waiting == MOST_UNHEARD
    said.note(0, {"type": "stopping"})
    heard = [said.next(60) for _ in range(total + 1)]
    assert [m["begun"] for stage, m in heard if stage == 1] == list(range(total))
    assert (0, {"type": "stopping"}) in heard
