"""The host's side of joined peers: who may open which stream, who gets which seat, and when."""

import io
import random
import string
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from thinwire.remote.check_way import check_outside
from thinwire.remote.epoch import Base, Epoch
from thinwire.remote.holding import Terms, own_settings
from thinwire.remote.host import host, lacking_peers
from thinwire.remote.host_console import HostConsole
from thinwire.remote.lobby import Gone, Lobby
from thinwire.remote.messages import (
    LOBBY,
    Alive,
    Arrive,
    AskAlive,
    Declined,
    Dismiss,
    Doing,
    Figures,
    FromHost,
    Launch,
    Leaving,
    News,
    Prepared,
    TakeSeat,
    Tried,
    TryDoor,
    Vacate,
    code_of,
    lobby_name,
    returncode_of,
)
from thinwire.remote.news import SharedDisplay
from thinwire.remote.opening import HostOptions
from thinwire.remote.peers import RemotePeers
from thinwire.remote.reception import Reception
from thinwire.remote.seats import Failures, Formation, fill_seats, read_formation, write_formation
from thinwire.remote.standing import Standing
from thinwire.remote.store import ShardCollector
from thinwire.run.compact import as_text, deflate
from thinwire.run.control import Channel
from thinwire.run.order import control_name
from thinwire.run.vocabulary import MAX_MESSAGE

import thinwire
from thinwire.data import Corpus
from thinwire.errors import AdmissionError, ConfigError, DataError, StageError, WireError
from thinwire.remote import host as host_module
from thinwire.remote import lobby as lobby_module
from thinwire.remote import peers as peers_module
from thinwire.remote.authority import AuthorityBook
from thinwire.report import PlainDisplay
from thinwire.run.events import Lost, Suspect
from thinwire.run.peers import StageFailedError
from thinwire.schedule import PipelineConfig
from thinwire.settings import Settings
from thinwire.wire import Frame, FrameKind, Identity, Listener, dial
from thinwire.wire.background import on_daemon_thread
from thinwire.wire.frame import encode
from thinwire.wire.keys import fingerprint_of


class Joined:
    """A peer's end of its stream to the host, without the rest of a peer."""

    def __init__(
        self, listener: Listener, identity: Identity, process: str = "", is_frozen: bool = True
    ):
        self.process, self._is_frozen = process, is_frozen
        name, host = lobby_name(identity.name), fingerprint_of(identity.host)
        pipe = dial(listener.address, name, identity, host, 10, MAX_MESSAGE)
        self.heard: list[object] = []
        self.lost = threading.Event()
        self.channel = Channel(
            pipe,
            "lobby",
            FromHost,
            on_message=self._hear,
            on_lost=lambda error: self.lost.set(),
            words=LOBBY,
            on_end=self.lost.set,
        )

    def _hear(self, message: object) -> None:
        self.heard.append(message)
        if message == AskAlive() and not self._is_frozen:
            self.channel.send(Alive())

    def arrive(self, epoch: int = 0, is_running: bool = False, version: str = "") -> None:
        said = arrival(epoch, is_running, version)
        self.channel.send(replace(said, process=self.process, place=f"place {self.process}"))

    def hears(self, wanted: object) -> None:
        until(lambda: wanted in self.heard)


def arrival(epoch: int = 0, is_running: bool = False, version: str = "") -> Arrive:
    versions = {"thinwire": version or thinwire.__version__}
    figures = Figures(1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0)
    return Arrive(versions, "cpu", figures, "", "", epoch, 0, is_running)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.01)


class House:
    """A host's book, listener and lobby in this process, and peers that were let in."""

    def __init__(self, folder: Path):
        self.book = AuthorityBook(folder / "authority", "test")
        self.listener = Listener(
            self.book.identity, "127.0.0.1", 0, MAX_MESSAGE, who=self.book.name_of
        )
        self.lobby = Lobby(self.listener, self.book)
        self.invite = self.book.invite(["127.0.0.1:1"], machines=9)

    def enrol(self, name: str) -> Identity:
        identity = Identity.create(name, self.book.identity.public)
        self.book.enrol(self.invite.invite_id, self.invite.secret, identity.public, name)
        return identity

    def join(self, name: str) -> Joined:
        joined = Joined(self.listener, self.enrol(name))
        joined.arrive()
        until(lambda: name in [guest.name for guest in self.lobby.here()])
        return joined


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path)
    with made.lobby:
        yield made
    made.listener.close()


def seat(epoch: int, stage: int = 0) -> TakeSeat:
    return TakeSeat(epoch, stage, {}, False, "abc")


def test_nobody_opens_the_stream_of_another_or_holds_the_seat_of_another(house: House) -> None:
    house.enrol("ana")
    eve, reception = house.enrol("eve"), Reception(house.listener)
    waiting = on_daemon_thread("ana", lambda: reception.accept(control_name(0, 1), "ana", 30.0))

    def refusal(name: str) -> str:
        with pytest.raises(WireError) as refused:
            dial(house.listener.address, name, eve, house.book.fingerprint, 0.5, MAX_MESSAGE)
        return str(refused.value)

    for name in (lobby_name("ana"), control_name(0, 1)):
        # between two looks whether the epoch is over, nobody is expected for a moment
        until(lambda name=name: "is expected from ana, not from eve" in refusal(name))
    until(lambda: "'control-1@1' is not expected there" in refusal(control_name(1, 1)))
    reception.close()
    with pytest.raises(WireError, match="nobody waits for 'control-0@1' any more"):
        waiting.result(10)


def test_a_peer_is_told_again_what_it_is_to_do_when_its_stream_is_back(house: House) -> None:
    identity = house.enrol("ana")
    first = Joined(house.listener, identity)
    first.arrive()
    until(house.lobby.here)
    house.lobby.give_seats({"ana": seat(3)})
    first.hears(seat(3))
    again = Joined(house.listener, identity)  # the host has not noticed that the first is lost
    again.arrive()
    again.hears(seat(3))
    assert first.lost.wait(10)
    again.channel.send(Prepared(3, False))
    assert house.lobby.wait(lambda: house.lobby.here()[0].is_prepared, 10)
    house.lobby.launch()
    again.hears(Launch(3))
    third = Joined(house.listener, identity)
    third.arrive(epoch=3)  # it was told before it could start its process
    third.hears(Launch(3))
    happened: list[object] = []
    house.lobby.on_happening = lambda name, what: happened.append((name, what))
    fourth = Joined(house.listener, identity)
    fourth.arrive()  # a new process: the stage of the old one is lost
    until(lambda: happened == [("ana", Gone(3, "it was started anew"))])
    house.lobby.vacate(3, "formed again")
    fourth.hears(Vacate(3, "formed again"))
    fifth = Joined(house.listener, identity)
    fifth.arrive(epoch=3, is_running=True)  # it was away when the epoch ended
    fifth.hears(Vacate(3, "the run was formed again meanwhile"))


def test_a_second_process_with_the_key_of_a_peer_is_refused_while_the_first_lives(
    house: House,
) -> None:
    notes: list[str] = []
    house.lobby.note = notes.append
    identity = house.enrol("ana")
    first = Joined(house.listener, identity, "one", is_frozen=False)
    first.arrive()
    until(house.lobby.here)
    house.lobby.give_seats({"ana": seat(1)})
    second = Joined(house.listener, identity, "two", is_frozen=False)
    second.arrive()
    assert second.lost.wait(20)
    (told,) = second.heard
    assert told == Dismiss(
        "ana takes part in this run already (place one; this is place two): end that one first, or "
        "join as a further peer with another --folder and --name",
        in_order=False,
    )
    until(lambda: notes)
    assert notes == [
        "two processes join with the key of ana: place one stays, place two was refused"
    ]
    first.channel.send(Prepared(1, False))
    assert house.lobby.wait(lambda: house.lobby.here()[0].is_prepared, 20), "the first is heard"
    assert not first.lost.is_set()


def test_a_process_that_was_started_anew_takes_the_place_of_one_that_does_not_answer(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lobby_module, "ALIVE_SECONDS", 0.1)
    identity = house.enrol("ana")
    first = Joined(house.listener, identity, "one", is_frozen=True)
    first.arrive()
    until(house.lobby.here)
    house.lobby.give_seats({"ana": seat(1)})
    second = Joined(house.listener, identity, "two", is_frozen=False)
    second.arrive()
    second.hears(seat(1))
    assert first.lost.wait(20)


def test_a_kick_names_who_came_by_the_same_invite_and_removes_them_if_asked(house: House) -> None:
    for name in ("ana", "ben", "eve"):
        house.enrol(name)
    console = HostConsole(
        Standing("test", house.book.run_id, "host"),
        house.lobby,
        house.book,
        lambda: Formation(seats=["eve", "ben"]),
        Settings,
        lambda machines: house.invite,
    )
    kick = console.handlers()["kick"]
    said = kick({"peer": "ana"})["text"]
    assert said.startswith("ana was removed") and "and stay: ben, eve" in said
    assert "`thinwire kick ana --by-invite`" in said and house.book.is_welcome("eve")
    said = kick({"peer": "ana", "by_invite": True})["text"]
    assert said.startswith("ana, ben, eve were removed") and "stage 0 waits" in said
    assert [peer.name for peer in house.book.peers() if not peer.kicked] == []


def test_a_host_learns_from_its_peers_whether_others_reach_it(house: House) -> None:
    ana, published = house.join("ana"), ("192.0.2.7:7600", "192.0.2.8:7600")
    console = HostConsole(
        Standing("test", house.book.run_id, "host"),
        house.lobby,
        house.book,
        Formation,
        lambda: SimpleNamespace(run=SimpleNamespace(name="test")),  # type: ignore[arg-type,return-value]
        lambda machines: house.invite,
        published,
    )
    asked = on_daemon_thread("doctor", lambda: console.handlers()["outside"]({}))
    ana.hears(TryDoor())
    house.lobby.guests()[0].origin = "198.51.100.7"  # else it would tell nothing
    ana.channel.send(Tried({published[0]: "", published[1]: "no answer within 4 s", "x:1": "no"}))
    told = asked.result(20)
    assert told["peers"] == {"ana": {published[0]: "", published[1]: "no answer within 4 s"}}
    reached, lost = check_outside(told)
    assert reached.level == "fine" and "at 192.0.2.7:7600: ana did" in reached.what
    assert lost.level == "note" and "ana tried (no answer within 4 s)" in lost.what
    assert "--address" in lost.fix and "thinwire relay" in lost.fix
    (alone,) = check_outside({**told, "addresses": published[:1], "peers": {}})
    assert "no peer on another machine" in alone.what


def test_a_removed_peer_hears_it_and_its_key_opens_nothing(house: House) -> None:
    ana = house.enrol("ana")
    joined = Joined(house.listener, ana)
    joined.arrive()
    until(house.lobby.here)
    house.lobby.give_seats({"ana": seat(1)})
    happened: list[object] = []
    house.lobby.on_happening = lambda name, what: happened.append((name, what))
    house.lobby.kick("ana")
    joined.hears(Dismiss("the host removed this peer from the run", in_order=False))
    assert happened == [("ana", Gone(1, "the host removed it from the run"))]
    assert house.lobby.guests() == []
    with pytest.raises(AdmissionError, match="is not welcome there"):
        Joined(house.listener, ana)


def test_who_declines_or_leaves_gets_no_seat_until_it_arrives_anew(house: House) -> None:
    ana, ben = house.join("ana"), house.join("ben")
    house.lobby.give_seats({"ana": seat(1, 0), "ben": seat(1, 1)})
    ben.channel.send(Doing(1, "fetch\n[save]  all is well" + 400 * "!"))
    until(lambda: house.lobby.guests()[1].doing.startswith("fetch [save] all is well!"))
    assert len(house.lobby.guests()[1].doing) < 350
    ana.channel.send(Declined(1, "no\nroom"))
    ben.channel.send(Leaving())
    until(lambda: not house.lobby.here())
    assert {guest.name: guest.why_unfit for guest in house.lobby.guests()} == {
        "ana": "no room",
        "ben": "",
    }
    ana.arrive()
    until(lambda: [guest.name for guest in house.lobby.here()] == ["ana"])


def test_a_declined_seat_ends_the_forming_at_once_with_the_reason(
    house: House, make_settings: Callable[..., Settings], corpus: Corpus, tmp_path: Path
) -> None:
    house.join("ana")
    ben = house.join("ben")
    display = SharedDisplay(
        PlainDisplay(io.StringIO()), house.lobby.tell_all, Standing("test", "abc", "host")
    )
    base = Base(house.lobby, house.listener, "abc", "", "", [], tmp_path, corpus, display)
    epoch = Epoch(base, Formation(1, ["ana", "ben"]), make_settings(), None)
    gathering = on_daemon_thread("gather", epoch.gather)
    until(lambda: any(isinstance(message, TakeSeat) for message in ben.heard))
    ben.channel.send(Declined(1, "that is not the data of this run"))
    assert gathering.result(20) == "ben cannot take its seat: that is not the data of this run"


def test_a_peer_that_goes_away_before_its_stage_dials_is_lost(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "LEAST_ABSENCE_S", 0.3)
    monkeypatch.setattr(peers_module, "LOOK_S", 0.05)
    ana = house.join("ana")
    house.lobby.give_seats({"ana": seat(1)})
    peers = RemotePeers(
        Formation(1, ["ana"]),
        house.lobby,
        Reception(house.listener),
        0.1,
        lambda stage, told: told,
        partial(ShardCollector, tmp_path, [1], lambda *_: ""),
        Standing("test", "abc", "host"),
    )
    with peers:
        peers.start()
        ana.hears(Launch(1))
        ana.channel.close()
        event = peers.said.next(20)
        assert isinstance(event, Lost) and event.stage == 0
        assert "ana has been away for" in event.error


def test_a_peer_of_another_version_gets_no_seat_and_hears_why(house: House) -> None:
    ana = Joined(house.listener, house.enrol("ana"))
    ana.arrive(version="0.0.9")
    until(lambda: house.lobby.guests() and house.lobby.guests()[0].is_here)
    assert house.lobby.here() == []
    why = house.lobby.guests()[0].why_unfit
    assert "it runs thinwire 0.0.9" in why and "install the same version there" in why
    ana.hears(News(f"this machine gets no seat: {why}"))


def test_a_folder_of_another_run_is_not_hosted_over(
    make_settings: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings()
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "metrics.jsonl").write_text('{"kind": "step"}\n')
    with pytest.raises(ConfigError, match="already holds a run"):
        host(settings, HostOptions(), PlainDisplay(io.StringIO()))

    def reached(*arguments: object) -> None:
        raise DataError("the folder was taken")

    monkeypatch.setattr(host_module, "prepare_data", reached)
    with pytest.raises(DataError, match="the folder was taken"):
        host(settings, HostOptions(resume=True), PlainDisplay(io.StringIO()))


@pytest.mark.parametrize("memory_gb", [1e308, -1.0])
def test_figures_that_no_machine_measures_are_refused(memory_gb: float) -> None:
    said = {"type": "arrive", **asdict(arrival())}
    assert LOBBY.unpack(deflate(as_text(said))) == arrival()
    said["figures"] = {**asdict(arrival().figures), "memory_gb": memory_gb}
    with pytest.raises(WireError, match=r"figures = .* must be numbers from 0 to 1e\+09"):
        LOBBY.unpack(deflate(as_text(said)))


def test_what_a_peer_does_not_take_piles_up_to_a_bound_only(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers the transport's pings, but never reads."""
    bound = 50
    monkeypatch.setattr(lobby_module, "MOST_UNTAKEN", bound)
    ana, ben = house.enrol("ana"), house.join("ben")
    deaf = dial(
        house.listener.address, lobby_name("ana"), ana, house.book.fingerprint, 10, MAX_MESSAGE
    )
    frame = Frame(FrameKind.CONTROL, payload=LOBBY.pack(arrival()))
    deaf.write(encode(frame))
    until(lambda: len(house.lobby.here()) == 2)
    news = News("".join(random.Random(0).choices(string.ascii_letters, k=20_000)))
    for _ in range(100 * bound):
        house.lobby.tell_all(news)
        until(lambda: len(ben.heard) > 0)
        ben.heard.clear()
        if len(house.lobby.here()) == 1:
            break
    assert [guest.name for guest in house.lobby.here()] == ["ben"]


def test_peers_keep_their_seats_and_others_come_in_order_of_arrival() -> None:
    assert fill_seats([], 2, ["ana"]) is None
    assert fill_seats([], 2, ["ana", "ben", "cleo"]) == ["ana", "ben"]
    assert fill_seats(["ana", "ben"], 2, ["dan", "cleo", "ben"]) == ["dan", "ben"]
    assert fill_seats(["ana", "ben"], 2, ["ben"]) is None


def test_a_wait_says_for_whom_and_who_is_there_in_vain() -> None:
    assert lacking_peers([], 2, [], {}) == "waiting for 2 more peers"
    waits = lacking_peers(["ana", "ben"], 2, ["ben"], {"ben": "", "eve": "no room"})
    assert waits == (
        "waiting for 1 more peer (ana or another); here: ben; eve gets no seat: no room"
    )


def test_how_often_a_run_was_formed_survives(tmp_path: Path) -> None:
    assert read_formation(tmp_path) == Formation()
    write_formation(tmp_path, Formation(3, ["ana", "ben"], [1, 3], 7000, 4))
    formation = read_formation(tmp_path)
    assert formation == Formation(3, ["ana", "ben"], [1, 3], 7000, 4)
    pipeline = formation.applied(Settings()).pipeline
    assert (pipeline.split, pipeline.window) == ([1, 3], 4)
    unformed, set_by_hand = Settings(), Settings(pipeline=PipelineConfig(window=6))
    assert Formation().applied(unformed) is unformed
    assert formation.applied(set_by_hand).pipeline.window == 6, "a change of the settings counts"
    (tmp_path / "epochs.json").write_text('{"epoch": "many"}')
    with pytest.raises(ConfigError, match=r"cannot read .*epochs.json"):
        read_formation(tmp_path)


@pytest.mark.parametrize("returncode", [0, 1, 3, -9, -15])
def test_how_a_process_ended_arrives_as_it_was(returncode: int) -> None:
    assert returncode_of(code_of(returncode)) == returncode


def test_a_host_decides_nothing_about_the_machine_of_a_peer(
    make_settings: Callable[..., Settings],
) -> None:
    """Paths, device and threads are the peer's own; plugins only those that it allows."""
    plain = make_settings(run__out="/etc", run__device="cuda", run__threads=7).to_plain()
    own = own_settings(TakeSeat(1, 0, plain, False, ""), Terms("cpu", 2), 1 << 30)
    assert (own.run.out, own.run.device, own.run.threads) == ("runs", "cpu", 2)
    assert own.data.path == "" and own.link.emulate is False and own.codec.memory_mb == 128
    assert own.hash == make_settings().hash

    plain["codec"]["plugins"] = ["os"]
    with pytest.raises(ConfigError, match=r"plugins, which are code: os\. .* --allow-plugin"):
        own_settings(TakeSeat(1, 0, plain, False, ""), Terms(), 1 << 30)


def test_settings_of_another_version_are_refused_with_the_cause(
    make_settings: Callable[..., Settings],
) -> None:
    plain = make_settings().to_plain()
    plain["train"]["speed"] = "ludicrous"
    with pytest.raises(ConfigError, match=r"\"train.speed\".*install the version of thinwire"):
        own_settings(TakeSeat(1, 0, plain, False, ""), Terms(), 1 << 30)


@pytest.fixture
def hosting(house: House) -> Any:
    """A host's judgement of the two peers in its seats, without the rest of a host."""
    made = object.__new__(host_module._Hosting)
    made._lobby, made._failures = house.lobby, Failures()
    made._formation = Formation(1, ["ana", "ben"])
    made._display = PlainDisplay(io.StringIO())  # type: ignore[assignment]
    return made


def failure(deed: str) -> StageFailedError:
    return StageFailedError("stage 1 ended", Suspect(0, 1, deed, "no such device", known=True))


def unfit(house: House) -> dict[str, str]:
    return {guest.name: guest.why_unfit for guest in house.lobby.guests()}


@pytest.mark.parametrize(
    ("deed", "most"), [("failed", 3), ("broke the contract", 3), ("was lost", 10)]
)
def test_a_peer_that_keeps_failing_is_set_aside_and_the_host_goes_on(
    house: House, hosting: Any, make_settings: Callable[..., Settings], deed: str, most: int
) -> None:
    """Also with an error of settings or data, which is that machine's as long as others have none.

    Steps that are trained again are no progress; a later checkpoint is.
    """
    house.join("ana")
    ben = house.join("ben")
    for step in (10, *[20] * most):
        assert unfit(house)["ben"] == "", "it gets its seat again"
        hosting._failures.start_from(step)
        hosting._judge(failure(deed))
    why = (
        f"it {deed} {most} times and the run got no further, last: no such device. It gets one "
        "again when the host is started anew"
    )
    assert unfit(house) == {"ana": "", "ben": why}
    ben.hears(News(f"this machine gets no seat: {why}"))
    ben.arrive()
    ben.hears(News(f"this machine gets no seat: {why}"))
    assert unfit(house)["ben"] == why, "arriving anew does not help"
    console = HostConsole(
        Standing("test", "abc", "host"),
        house.lobby,
        house.book,
        lambda: hosting._formation,
        make_settings,
        lambda: house.invite,
    )
    states = {peer["name"]: peer["state"] for peer in console.handlers()["status"]({})["peers"]}
    assert states == {"ana": "waiting for a seat", "ben": f"gets no seat: {why}"}
    assert [guest.name for guest in house.lobby.here()] == ["ana"]


def test_a_failure_that_no_peer_caused_ends_the_host_when_it_goes_on(hosting: Any) -> None:
    error = StageError("the two ends of cut 0 no longer remember the same")
    hosting._judge(error)
    hosting._judge(error)
    with pytest.raises(StageError, match="no longer remember"):
        hosting._judge(error)
