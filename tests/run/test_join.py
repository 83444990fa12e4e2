"""A joined machine: its stream to the host, and what it does about stages before they train."""

import contextlib
import io
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hosting import House

from proxy import Proxy
from thinwire.background import on_daemon_thread
from thinwire.data import Tokenizer, prepare
from thinwire.engine.checkpoint import Versions, partial_folder
from thinwire.engine.reports import ShardFailed, ShardWritten
from thinwire.engine.worker import scratch_folder
from thinwire.errors import ConfigError, DataError, ThinwireError, WireError, outward
from thinwire.report import EvaluationRecord, PlainDisplay, StepRecord
from thinwire.report.metrics import Row, lines_of
from thinwire.run import join as join_module
from thinwire.run import protocol as msg
from thinwire.run.admission import AuthorityBook
from thinwire.run.join import Holding, JoinedPeer, Terms, own_settings
from thinwire.run.machine import Machine
from thinwire.run.peer import Peer
from thinwire.run.transfer import Want
from thinwire.wire import Door, Identity, Route, Routes
from waiting import PATIENCE, wait_until


def joined_peer(folder, way=None, identity=None, stream=None):
    machine = Machine(tflops=1.0, memory_gb=1.0, device="cpu")
    identity = identity or Identity.create("ana", Identity.create("host").public)
    display = PlainDisplay(stream or io.StringIO())
    return JoinedPeer(folder, way, identity, Terms(), machine, display)


def answer(peer, message, generation=0):
    """The one thing that a peer says to a message, with its stage and generation."""
    said = []
    peer._channel = SimpleNamespace(send=lambda *words: said.append(words))
    peer._on_message(msg.Envelope(message, generation=generation))
    peer._due.get(timeout=PATIENCE)()
    (only,) = said
    return only


# Its stream to the host


def test_a_host_that_was_restarted_has_a_fresh_stream_at_once(tmp_path, monkeypatch):
    """However long an outage may be: it knows nothing of the stream that it had."""
    monkeypatch.setattr(join_module, "_OUTAGE_S", 3600.0)
    monkeypatch.setattr(join_module, "heeding", lambda handler: contextlib.nullcontext())
    house = House(tmp_path)
    way = Routes("", house.listener.address)
    peer = joined_peer(tmp_path / "ana", way, house.enrol("ana"))
    ending = threading.Thread(target=peer.run, daemon=True)
    ending.start()
    wait_until(house.here)
    house.members.tell("ana", msg.Hold([7], {}, False, ""), generation=1)
    wait_until(lambda: "Declined(" in str(house.happened))

    house.listener.close()
    wait_until(lambda: peer._lost_at)
    again = House(tmp_path)
    way.routes = (Route(again.listener.address),)
    wait_until(again.here)
    wait_until(lambda: peer._lost_at is None)
    assert not peer._holdings and again.members.tell("ana", msg.News("back"))
    peer.leave()
    ending.join(PATIENCE)
    assert not ending.is_alive()
    again.listener.close()


def test_a_peer_tries_the_addresses_of_its_invite(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        shut = "{}:{}".format(*free.getsockname())
    with Door("127.0.0.1", 0) as door:
        door.admit("ab" * 8, "ana.secret")
        routes = [Route(address, "direct", "ana.secret") for address in (door.address, shut)]
        peer = joined_peer(tmp_path, Routes(f"{'ab' * 8}/control", routes))
        tried, *_ = answer(peer, msg.TryDoor())
    assert tried == msg.Tried({door.address: "", shut: f"{shut}: Connection refused"})


# What it decides itself


def test_a_host_decides_nothing_about_the_machine_of_a_peer(make_settings):
    """Paths, device and threads are the peer's own; plugins only those that it allows."""
    plain = make_settings(run__out="/etc", run__device="cuda", run__threads=7).to_plain()
    own = own_settings(plain, Terms(device="cpu", threads=2), 1 << 30)
    assert (own.run.out, own.run.device, own.run.threads) == ("runs", "cpu", 2)
    assert own.data.path == "" and own.link.emulate is False and own.codec.memory_mb == 128
    assert own.hash == make_settings().hash

    plain["codec"]["plugins"] = ["os"]
    with pytest.raises(ConfigError, match=r"plugins, which are code: os\. .* --allow-plugin"):
        own_settings(plain, Terms(), 1 << 30)
    plain["train"]["speed"] = "of another version"
    with pytest.raises(ConfigError, match=r"\"train.speed\".*install the version of thinwire"):
        own_settings(plain, Terms(), 1 << 30)


@pytest.mark.parametrize(("options", "said"), [
    (Terms(data=Path("gone")), "--data gone: there is no such file or"),
    (Terms(template=Path()), "--template goes with --data: name the run's data too"),
])  # fmt: skip
def test_an_option_that_cannot_work_is_refused_before_the_host_is_asked(options, said, tmp_path):
    invite = AuthorityBook(tmp_path / "book", "test").invite(("127.0.0.1:1",))
    options = replace(options, folder=tmp_path / "ben")
    with pytest.raises(ThinwireError, match=said):
        join_module.join(invite, options, PlainDisplay(io.StringIO()))
    assert not (tmp_path / "ben").exists()


# What its stages need


def prepared(held):
    def nowhere(name):
        raise AssertionError("nothing is to be fetched")

    way = Routes("", "127.0.0.1:1")
    return held.prepare(nowhere, Identity.create("ana"), way, lambda *_: None)


@pytest.mark.parametrize("stages", [[], [2], [0, 1, 2]])
def test_stages_that_the_run_does_not_have_are_declined(stages, tmp_path, make_settings):
    with pytest.raises(ConfigError, match="stages that the run does not have"):
        Holding(msg.Hold(stages, make_settings().to_plain(), False, "abc"), 1, Terms(), tmp_path)


@pytest.mark.parametrize("key", ["template", "tokenizer", "valid_path"])
def test_a_path_of_the_host_is_not_opened_here(key, tmp_path, make_settings):
    """A file that exists and one that does not give the same answer, which holds nothing of it."""
    secret = tmp_path / "secret.jsonl"
    secret.write_text('{% hunter2 %} {"text": ')
    chat = tmp_path / "chat.jsonl"
    chat.write_text('{"messages": [{"role": "user", "content": "a"}]}\n' * 9)
    answers = set()
    for path in (secret, tmp_path / "absent"):
        asked = make_settings(**{"data__source": "chat", f"data__{key}": str(path)})
        held = Holding(msg.Hold([0], asked.to_plain(), False, ""), 1, Terms(data=chat), tmp_path)
        assert held.settings.hash == asked.hash, "neighbours agree on it"
        assert held.settings.data.valid_path == ""
        with pytest.raises(DataError, match="leave out --data") as refused:
            prepared(held)
        answers |= {str(refused.value), outward(refused.value)}
        assert str(path) not in str(refused.value)
    assert len(answers) == 2 and "hunter2" not in str(answers)


TALK = '{"messages": [{"role": "user", "content": "%d"}, {"role": "assistant", "content": "b"}]}'
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_what_a_peer_names_itself_takes_the_place_of_the_hosts_paths(
    tmp_path, make_settings, monkeypatch
):
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))

    def files_of(machine):
        folder = tmp_path / machine
        folder.mkdir()
        (folder / "data.jsonl").write_text("\n".join(TALK % n for n in range(99)))
        (folder / "valid.jsonl").write_text("\n".join(TALK % n for n in range(100, 199)))
        Tokenizer.train(["a b c"], 270).save(folder / "tokenizer.json")
        (folder / "own.jinja").write_text(TEMPLATE)
        names = "data.jsonl", "valid.jsonl", "tokenizer.json", "own.jinja"
        return [folder / name for name in names]

    data, valid, tokenizer, template = hosts = files_of("host")
    asked = make_settings(
        data__source="chat", data__path=str(data), data__valid_path=str(valid), model__vocab=300,
        data__tokenizer=str(tokenizer), data__template=str(template), train__init_from="/etc",
    )  # fmt: skip
    seen = prepare(asked.data, 300, tmp_path / "host" / "cache").fingerprint
    for path in hosts:
        path.unlink()
    terms = Terms("", None, "", "cpu", 1, (), *files_of("peer"))
    held = Holding(msg.Hold([0], asked.to_plain(), False, seen), 1, terms, tmp_path)
    assert Path(prepared(held).corpus).is_relative_to(tmp_path / "cache")
    assert held.settings.hash == asked.hash and held.settings.train.init_from != "/etc"


# What it says of what went wrong


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (DataError("notes, line 7: hunter2"), "it says why there"),
        (UnicodeDecodeError("utf-8", b"hunter2", 0, 1, "hunter2"),
         "an unexpected UnicodeDecodeError, which its terminal explains"),
    ],
)  # fmt: skip
def test_whatever_goes_wrong_with_a_stage_is_answered_and_says_nothing_of_a_file(
    error, told, tmp_path, make_settings, monkeypatch
):
    def fail(*_):
        raise error

    monkeypatch.setattr(Holding, "prepare", fail)
    peer = joined_peer(tmp_path, Routes("", "127.0.0.1:1"))
    hold = msg.Hold([0], make_settings().to_plain(), False, "", again=2)
    declined, *about = answer(peer, hold, generation=4)
    assert isinstance(declined, msg.Declined) and about == [-1, 4, 2] and not peer._holdings
    assert told in declined.reason and "hunter2" not in declined.reason


def test_where_a_part_of_a_checkpoint_cannot_be_written_stays_on_its_machine(tmp_path):
    said, shown = [], io.StringIO()
    peer = joined_peer(tmp_path, Routes("", "127.0.0.1:1"), stream=shown)
    held = SimpleNamespace(generation=2, hold=SimpleNamespace(again=5))
    peer._holdings, peer._say = [held], lambda *what: said.append(what)
    peer._say_of(peer._holdings[0], 1, ShardFailed(4, "no space left in /home/ana"))
    told = ShardFailed(4, "stage 1 cannot write its part; its machine says why")
    assert said == [(told, 1, 2, 5)] and "no space left in /home/ana. Mend that" in shown.getvalue()


@pytest.mark.parametrize(("error", "told"), [
    (DataError("/home/ana/notes, line 7: hunter2"), "it says why there"),
    (ValueError("hunter2 is no number"), "ValueError"),
    (FileNotFoundError(2, "no such file", "hunter2"), "FileNotFoundError"),
    (RuntimeError("out of memory"), "RuntimeError: out of memory"),
    (WireError("the neighbour has left"), "the neighbour has left"),
])  # fmt: skip
def test_what_a_stage_says_of_its_end_quotes_no_file_of_its_machine(error, told):
    said = []
    peer = SimpleNamespace(order=SimpleNamespace(host={"routes": []}), _links={}, say=said.append)
    Peer.fail(peer, error)
    assert told in said[0].error and "hunter2" not in str(said[0])
    peer.order.host = {}  # on the machine of its coordinator
    Peer.fail(peer, error)
    assert str(error) in said[1].error


def test_states_and_logs_of_stages_that_others_hold_now_are_removed(tmp_path, make_settings):
    """A host that gives one stage after the other does not fill this disk."""
    peer, plain = joined_peer(tmp_path), make_settings().to_plain()
    held = Holding(msg.Hold([1], plain, True, ""), 1, Terms(), tmp_path)
    held.here = SimpleNamespace(begin=lambda *_: None)
    peer._holdings = [held]
    fetched = [tmp_path / "run" / "checkpoints" / f"step-00000003-{stage}" for stage in (0, 1)]
    kept = [scratch_folder(tmp_path / "run") / f"stage-{stage}" / "sent-0" for stage in (0, 1)]
    for folder in fetched + kept:
        folder.mkdir(parents=True)
    prepared = on_daemon_thread("prepare", lambda: msg.Assignment([1], {}, {}, "", ""))
    peer._on_prepared(held, prepared)
    assert [folder.exists() for folder in fetched + kept] == [False, True, False, True]


def test_what_a_stage_writes_after_its_run_went_back_is_kept_for_the_host(
    tmp_path, make_settings, monkeypatch
):
    """The host wanted step 40, and has this peer hold a stage again, from step 20 on."""
    monkeypatch.setattr(Holding, "prepare", lambda *_: msg.Assignment([0], {}, {}, "", ""))
    peer = joined_peer(tmp_path, Routes("", "127.0.0.1:1"))
    peer._serves_shards = True
    peer._shards._find(Want(40, 0, "ab", 1))
    peer._on_message(
        msg.Envelope(msg.Hold([0], make_settings().to_plain(), False, ""), generation=2)
    )
    written = partial_folder(tmp_path / "run", 22)
    written.mkdir(parents=True)
    peer._say_of(peer._holdings[0], 0, ShardWritten(22, Versions(22, 0), None, {}))
    assert written.exists()


def test_a_machine_that_took_a_place_stands_by_no_more(tmp_path, make_settings):
    """Its own status said so for as long as it trained."""
    peer = joined_peer(tmp_path)
    hold = msg.Hold([1], make_settings().to_plain(), False, "", began=0, follows=True)
    held = Holding(hold, 2, Terms(), tmp_path)
    process = SimpleNamespace(poll=lambda: None)
    channel = SimpleNamespace(send=lambda *_: None)
    held.here = SimpleNamespace(process=process, has_begun=True, channel=channel)
    peer._holdings = [held]
    status = peer.handlers(SimpleNamespace(run_name="code", run_id="ab"))["status"]
    state = lambda: status({}).peers[0].state  # noqa: E731
    for message in (msg.Connect("", [0], follower=1), msg.Connect("", [0], 0, 2), msg.Start()):
        peer._on_message(msg.Envelope(message, 1, 2))
        assert state() == "stands by"
    peer._on_message(msg.Envelope(msg.Connect("", [1]), 1, 2))
    assert state() == "training"


def test_a_machine_that_stands_by_keeps_a_few_of_the_parts_that_it_writes(tmp_path):
    """It says of each that it is so far, and the host asks for none of them."""
    peer, held = joined_peer(tmp_path), SimpleNamespace()
    for step in range(9):
        partial_folder(tmp_path / "run", step).mkdir(parents=True)
        peer._say_of(held, 1, msg.Follows(step))
    kept = [partial_folder(tmp_path / "run", step).exists() for step in range(9)]
    assert kept == [False] * 5 + [True] * 4


def test_whoever_nobody_asks_for_its_parts_offers_them_now_and_then(
    tmp_path, make_settings, monkeypatch
):
    """A host asks nothing of who stands by, and each attempt costs it a handshake."""
    monkeypatch.setattr(Holding, "prepare", lambda *_: msg.Assignment([0], {}, {}, "", ""))
    monkeypatch.setattr(Holding, "begin", lambda held: None)
    monkeypatch.setattr("thinwire.run.transfer.REDIAL_S", PATIENCE)
    house = House(tmp_path)
    proxy = Proxy(house.listener.address)
    peer = joined_peer(tmp_path / "ana", Routes("", proxy.address), house.enrol("ana"))
    hold = msg.Hold([0], make_settings().to_plain(), False, "", follows=True)
    peer._on_message(msg.Envelope(hold, generation=2))
    wait_until(lambda: proxy.connections)
    time.sleep(1.5)
    assert proxy.connections == 1
    peer._shards.close()
    house.listener.close()
    proxy.close()


@pytest.mark.parametrize(
    ("left", "step", "stays"), [(True, 3, False), (False, 9, False), (False, 3, True)]
)
def test_a_peer_that_leaves_for_good_takes_its_part_of_the_run_along(left, step, stays, tmp_path):
    """It left, the run is complete, or the host ended and may come back."""
    fetched = tmp_path / "run" / "checkpoints" / "step-00000003" / "stage-0.safetensors"
    for path in (fetched, tmp_path / "identity.json"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    peer = joined_peer(tmp_path)
    peer._is_leaving = left
    peer.news = SimpleNamespace(step=step, steps=9)
    peer._clean_up()
    assert fetched.exists() == stays and (tmp_path / "identity.json").exists()


def test_a_member_keeps_what_the_host_tells_it_and_says_what_it_knows_better(
    tmp_path, make_settings
):
    """Its folder holds then what its page and `thinwire status` show."""
    peer = joined_peer(tmp_path)
    status = peer.handlers(SimpleNamespace(run_name="code", run_id="ab"))["status"]
    alone = status({})
    assert [one.name for one in alone.peers] == ["ana"] and alone.waiting_for == "a stage"
    step = StepRecord(3, 9, 2.5, 0.1, 1.0, 50, 700.0, 0.5, 9.0, [], [])
    peers = [msg.PeerStatus("ben", "computes F0", [0]), msg.PeerStatus("ana", "old", [1])]
    links = [msg.LinkStatus(0, "ben", "ana", "direct", round_trip_ms=31.0)]
    report = msg.StatusReport(
        "code", "ab", "host", "training", 10.0, step=3, peers=peers, links=links, last_checkpoint=2
    )
    for _ in range(2):  # the step is still the same
        peer._on_message(msg.Envelope(msg.RunNews(report, step)))
    peer._on_message(msg.Envelope(EvaluationRecord(3, 2.25, None)))
    assert [Row.read(line).step for line in lines_of(tmp_path)] == [3, 3], "a step and a validation"
    told = status({})
    assert (told.role, told.state, told.last_checkpoint) == ("member", "training", 2)
    assert told.links == links and abs(told.time - time.time()) < PATIENCE
    assert {one.name: one.state for one in told.peers} == {
        "ana": "waiting for a stage", "ben": "computes F0"
    }  # fmt: skip
    assert [one.is_this_machine for one in told.peers if one.machine] == [True]
    peer._note_loss("the connection was lost")
    assert "the host" in status({}).waiting_for
