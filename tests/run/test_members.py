"""The host's streams to joined machines: who may open which, what a loss costs, who counts."""

import contextlib
import os
import random
import string
import threading
from types import SimpleNamespace

import pytest
from hosting import Joined, hello, host_of

from thinwire.background import on_daemon_thread
from thinwire.errors import AdmissionError, WireError
from thinwire.run import events as ev
from thinwire.run import members as members_module
from thinwire.run import protocol as pr
from thinwire.run.doctor import check_outside
from thinwire.run.formation import Formation
from thinwire.run.members import MOST_STREAMS, SESSION_BYTES
from thinwire.run.watch import AT_ONCE
from thinwire.wire import dial
from waiting import PATIENCE, wait_until


def test_nobody_opens_the_stream_of_another_or_what_it_opens_for_its_stage(
    house, make_settings, corpus
):
    house.enrol("ana")
    eve, state = house.enrol("eve"), pr.stream_name("state", 0, 1)
    peers = house.peers(Formation(1, ["ana"]), make_settings(pipeline__stages=1), corpus)
    waiting = on_daemon_thread(
        "ana", lambda: peers._accept(state, "ana", lambda: True, timeout=PATIENCE)
    )

    def refusal(name):
        with pytest.raises(WireError) as refused:
            rest = host_of(eve), PATIENCE, pr.MAX_MESSAGE
            dial(house.listener.address, name, eve, *rest, tries_again=False)
        return str(refused.value)

    for name in (pr.stream_name("peer", "ana"), state):
        # between two looks whether the generation is over, nobody is expected for a moment
        wait_until(lambda name=name: "is expected from ana, not from eve" in refusal(name))
    wait_until(
        lambda: "'state-1@1' is not expected there" in refusal(pr.stream_name("state", 1, 1))
    )
    with peers:
        pass  # its generation is over
    with pytest.raises(WireError, match="nobody waits for 'state-0@1' any more"):
        waiting.result(PATIENCE)


def test_a_connection_that_is_lost_and_comes_back_loses_nothing(house):
    ana, count = house.join("ana"), 0

    def talk():
        nonlocal count
        for _ in range(5):
            ana.say(pr.Pulse(count, "works"), 0)
            assert house.members.tell("ana", pr.News(str(count)))
            count += 1

    talk()
    for outage in (1, 2):
        ana.is_cut_off = True
        ana.lose_connection()
        # What was said before may be heard after it, on another thread.
        wait_until(lambda n=outage: sum(isinstance(w, ev.Away) for _, w in house.happened) == n)
        talk()
        ana.is_cut_off = False
        wait_until(
            lambda: ("ana", pr.Envelope(pr.Pulse(count - 1, "works"), 0, 1)) in house.happened
        )
        talk()
    wait_until(lambda: len(house.happened) == 1 + count + 4)
    said = [what for _, what in house.happened if isinstance(what, pr.Envelope)]
    assert said[1:] == [pr.Envelope(pr.Pulse(n, "works"), 0, 1) for n in range(count)]
    streams = [type(what) for _, what in house.happened if not isinstance(what, pr.Envelope)]
    assert streams == [ev.Away, ev.Back, ev.Away, ev.Back]
    ana.hears(pr.News(str(count - 1)))
    assert [m for m, *_ in ana.heard] == [pr.News(str(n)) for n in range(count)]
    assert len(ana.connections) >= 3 and house.here() == ["ana"]


def works(house, joined):
    """What this machine says is heard."""
    joined.say(pr.Pulse(1, "works"), 0)
    said = joined.identity.name, pr.Envelope(pr.Pulse(1, "works"), 0, 1)
    wait_until(lambda: said in house.happened)


class Deserted(Joined):
    """A machine whose connection is lost at its end, and not at the host's."""

    deserts = False

    def wrap(self, pipe):
        write, is_first = pipe.write, not self.connections

        def lose(message):
            if self.deserts and is_first:
                raise WireError("the network is another")
            write(message)

        if is_first:
            pipe.write, pipe.close = lose, lambda grace=None: None
        return pipe


def test_a_machine_that_connects_again_knows_of_a_loss_before_the_host(house):
    ana = house.join("ana", Deserted)
    ana.deserts = True
    works(house, ana)
    assert len(ana.connections) == 2 and not ana.lost.is_set()


def test_what_a_machine_held_is_lost_when_it_is_away_for_too_long(house):
    house.members._outage = 2.0
    ana = house.join("ana")
    ana.is_cut_off = True
    ana.lose_connection()
    wait_until(lambda: isinstance(house.happened[-1][1], ev.Lost))
    assert "the connection was down for 2 s" in house.happened[-1][1].error
    assert house.here() == [] and not house.members.tell("ana", pr.News("?"))
    ana.is_cut_off = False
    assert ana.lost.wait(PATIENCE), "the host knows nothing of its stream any more"


def test_an_outage_is_noted_while_nothing_can_take_the_place_of_its_stream(house, monkeypatch):
    """Else a member that is here, in another process, could pass for one that is away."""
    owned = []

    class Guarded(members_module.Member):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            owned.extend([house.members._changed._is_owned()] if name == "is_down" else [])

    monkeypatch.setattr(members_module, "Member", Guarded)
    house.join("ana").lose_connection()
    wait_until(lambda: any(isinstance(what, ev.Back) for _, what in house.happened))
    assert len(owned) >= 3 and all(owned)


@pytest.mark.parametrize("process", ["one", "two"])
def test_a_stream_begun_anew_takes_the_place_of_one_that_is_lost(process, house, monkeypatch):
    """The host has not noticed the loss, and asks whether another process still answers."""
    monkeypatch.setattr(members_module, "ALIVE_SECONDS", 0.1)
    identity = house.enrol("ana")
    first = Joined(house.listener.address, identity, "one", is_frozen=True).arrive()
    wait_until(lambda: house.happened)  # its hello is counted before it is told of
    house.happened.clear()
    again = Joined(house.listener.address, identity, process).arrive()
    assert first.lost.wait(PATIENCE)
    wait_until(lambda: len(house.happened) == 2)
    assert [what for _, what in house.happened] == [
        ev.Lost(-1, "it was started anew"), pr.Envelope(hello(process=process), -1, 0)
    ]  # fmt: skip
    assert house.members.tell("ana", pr.News("?"))
    again.hears(pr.News("?"))


def test_a_second_process_with_a_peers_key_is_refused_while_the_first_lives(house, monkeypatch):
    monkeypatch.setattr(members_module, "ALIVE_SECONDS", PATIENCE)
    notes: list[str] = []
    house.members.note = notes.append
    identity = house.enrol("ana")
    first = Joined(house.listener.address, identity, "one").arrive()
    wait_until(house.here)
    second = Joined(house.listener.address, identity, "two").arrive()
    assert second.lost.wait(PATIENCE)
    why = (
        "ana takes part in this run already (place one; this is place two): end that one "
        "first, or join as a further peer with another --folder and --name"
    )
    assert [m for m, *_ in second.heard] == [pr.Dismiss(why, "refused")]
    wait_until(lambda: notes)
    said = "two processes join with the key of ana: place one stays, place two was refused"
    assert notes == [said]
    works(house, first)
    assert not first.lost.is_set()


def test_a_removed_peer_hears_it_and_its_certificate_opens_nothing(house):
    ana = house.join("ana")
    house.members.kick("ana")
    ana.hears(pr.Dismiss("the host removed this peer from the run", "refused"))
    assert house.happened[-1] == ("ana", ev.Lost(-1, "the host removed it from the run"))
    assert house.members.all() == []
    with pytest.raises(AdmissionError, match="is not welcome there"):
        Joined(house.listener.address, ana.identity)


def test_who_declines_leaves_or_has_another_version_gets_no_stage_until_it_arrives_anew(house):
    ana, ben = house.join("ana"), house.join("ben")
    ana.say(pr.Declined("no\nroom"))
    ben.say(pr.Leaving())
    wait_until(lambda: not house.here())
    assert house.unfit() == {"ana": "no room", "ben": ""}
    old = Joined(house.listener.address, house.enrol("old")).arrive("0.0.9")
    wait_until(lambda: house.unfit().get("old"))
    why = house.unfit()["old"]
    assert "it runs thinwire 0.0.9" in why and "install the same version there" in why
    old.hears(pr.News(f"this machine gets no stage: {why}"))
    assert house.here() == []
    ana.arrive()
    again = Joined(house.listener.address, ben.identity).arrive()
    wait_until(lambda: house.here() == ["ben"])
    assert house.unfit()["ana"] == "no room", "it has said hello on this stream before"
    Joined(house.listener.address, ana.identity).arrive()
    wait_until(lambda: house.here() == ["ben", "ana"])
    again.channel.close()


@pytest.mark.parametrize(
    ("arrives", "stage"), [(True, -1), (True, 0), (True, -7), (False, -1)],
    ids=["of itself", "of a stage that nobody asked for", "of nothing", "before its hello"],
)  # fmt: skip
def test_a_flood_costs_a_peer_its_stream(house, arrives, stage):
    ada, bob = Joined(house.listener.address, house.enrol("ada")), house.join("bob")
    if arrives:
        ada.arrive()
        wait_until(lambda: "ada" in house.here())
    with contextlib.suppress(WireError):
        for _ in range(20 * AT_ONCE):
            ada.say(pr.Alive() if stage == -1 else pr.Pulse(1, "floods"), stage)
    assert ada.lost.wait(PATIENCE)
    if arrives:
        wait_until(lambda: "peer 'ada' sent " in house.unfit()["ada"])
    works(house, bob)
    assert house.here() == ["bob"]


def test_a_machine_has_a_few_streams_at_a_time_however_it_drops_them(house):
    bob, ada = house.join("bob"), house.enrol("ada")

    def answer():
        name = pr.stream_name("peer", "ada")
        pipe = dial(house.listener.address, name, ada, host_of(ada), PATIENCE, pr.MAX_MESSAGE)
        pipe.write(os.urandom(SESSION_BYTES))
        try:
            return pipe.read()
        except WireError:
            return None
        finally:
            pipe.close(0)

    answers = [answer() for _ in range(MOST_STREAMS + 2)]
    assert all(answers[:MOST_STREAMS]) and not any(answers[MOST_STREAMS:])
    assert house.members.tell("bob", pr.News("?"))
    bob.hears(pr.News("?"))


class Deaf(Joined):
    """A machine that answers the transport's pings, but never reads."""

    def _hear(self, said):
        threading.Event().wait()


def test_what_a_peer_does_not_take_piles_up_to_a_bound_only(house, monkeypatch):
    bound = 50
    monkeypatch.setattr(members_module, "MOST_UNTAKEN", bound)
    house.join("ana", Deaf)
    ben = house.join("ben")
    news = pr.News("".join(random.Random(0).choices(string.ascii_letters, k=200_000)))
    for _ in range(100 * bound):
        house.members.tell_all(news)
        wait_until(lambda: ben.heard)
        ben.heard.clear()
        if len(house.here()) == 1:
            break
    assert house.here() == ["ben"]
    assert house.happened[-1] == ("ana", ev.Lost(-1, "it takes nothing of what it is told"))


def test_members_are_told_what_the_hosts_page_shows_but_not_where_others_are(house, make_settings):
    ana, _ = house.join("ana"), house.join("eve")
    console = house.console(Formation(seats=["eve", "ben"]), make_settings)
    house.book.kick("eve")
    ana.say(pr.Declined("it cannot reach 192.0.2.7:99"))
    wait_until(lambda: house.unfit()["ana"])
    console.standing.heard(1, pr.LinkDown(0, "192.0.2.7:99 does not answer"))
    console.tell_now()
    wait_until(lambda: any(isinstance(said.message, pr.RunNews) for said in ana.heard))
    told = ana.heard[-1].message.report
    assert [(peer.name, peer.state) for peer in told.peers] == [("ana", "gets no stage")]
    assert told.peers[0].machine and told.links[0].above == "ben"
    assert told.waiting_for == "the link between eve and ben, which is down"
    own = str(console.handlers()["status"]({}))
    for secret in ("192.0.2.7", house.invite.secret, house.listener.address):
        assert secret not in repr(told)
    assert own.count("192.0.2.7") == 2 and "kicked" in own, "which the host itself is told"


def test_a_kick_names_who_came_by_the_same_invite_and_removes_them_if_asked(house):
    for name in ("ana", "ben", "eve"):
        house.enrol(name)
    kick = house.console(Formation(seats=["eve", "ben"])).handlers()["kick"]
    said = kick({"peer": "ana"})["text"]
    assert said.startswith("ana was removed") and "and stay: ben, eve" in said
    assert "`thinwire kick ana --by-invite`" in said and house.book.is_welcome("eve")
    said = kick({"peer": "ana", "by_invite": True})["text"]
    assert said.startswith("ana, ben, eve were removed") and "stage 0 gets another peer" in said
    assert [peer.name for peer in house.book.peers() if not peer.kicked] == []


def test_a_host_learns_from_its_peers_whether_others_reach_it(house):
    ana, published = house.join("ana"), ("192.0.2.7:7600", "192.0.2.8:7600")
    settings = SimpleNamespace(run=SimpleNamespace(name="test"))
    outside = house.console(Formation(), lambda: settings, published).handlers()["outside"]
    house.members.all()[0].origin = "192.0.2.9"
    asked = on_daemon_thread("doctor", lambda: outside({}))
    ana.hears(pr.TryDoor())
    ana.say(pr.Tried({published[0]: "", published[1]: "no answer within 4 s", "x:1": "no"}))
    told = asked.result(PATIENCE)
    assert told["peers"] == {"ana": {published[0]: "", published[1]: "no answer within 4 s"}}
    reached, lost = check_outside(told)
    assert reached.level == "fine" and "at 192.0.2.7:7600: ana did" in reached.what
    assert lost.level == "note" and "ana tried (no answer within 4 s)" in lost.what
    assert "--address" in lost.fix and "thinwire relay" in lost.fix
    (alone,) = check_outside({**told, "addresses": published[:1], "peers": {}})
    assert "no peer on another machine" in alone.what
