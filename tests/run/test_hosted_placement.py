"""Who holds stages that are lost or crowded, and what members and the coordinator hear of it: no
processes; test_hosted_recovery.py has them.
"""

import shutil
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hosting import Joined, host_of
from leading import Lead, part, ready, step

from proxy import Proxy
from thinwire.engine.audit import DRIFTED
from thinwire.engine.reports import Audited, ShardFailed
from thinwire.errors import WireError
from thinwire.run import events as ev
from thinwire.run import formation, hosted
from thinwire.run import protocol as msg
from thinwire.run.coordinator import Phase
from thinwire.run.formation import Formation, Placing, next_holder
from thinwire.run.machine import Machine
from thinwire.run.peer import Peer
from thinwire.run.transfer import fetch_seat
from thinwire.wire import Route, dial
from trained import trained
from waiting import PATIENCE, wait_until


@pytest.mark.parametrize(("stages", "seats", "here", "chosen"), [
    ([1], "ana ben cleo", {"ana": 8, "ben": 1, "dan": 8}, "ben"),
    ([1], "ana ben cleo", {"ana": 8, "dan": 4, "eva": 6}, "eva"),
    ([1], "ana ben cleo", {"ana": 8, "dan": 1e-5, "cleo": 6}, "ana"),
    ([0], "ana ben cleo", {"ben": 4, "cleo": 8}, "ben"),
    ([0], "ana ben cleo", {"ben": 1e-5, "cleo": 8}, "cleo"),
    ([1, 2], "ana ben ben cleo", {"cleo": 8, "ana": 6}, "cleo"),
    ([0], "ana ben cleo", {"ben": 1e-5, "cleo": 1e-5}, None),
    ([0], "ana ben cleo", {"ben": 0}, "ben"), ([0], "ana ben cleo", {}, None),
], ids=["who is back", "the freer spare", "no spare with the memory", "a neighbour", "anyone",
        "the freer neighbour", "nobody", "memory that is not known", "nobody is here"])  # fmt: skip
def test_lost_stages_go_to_who_had_them_a_spare_a_neighbour_or_anyone_with_the_memory(
    stages, seats, here, chosen, make_settings
):
    held = seats.split()
    settings = make_settings(pipeline__stages=len(held))
    machines = [Machine(name, 1.0, memory) for name, memory in here.items()]
    assert next_holder(stages, held, machines, settings) == chosen


@pytest.mark.parametrize(("stages", "followed", "here", "chosen"), [
    ([0], {}, {"dan": (8, 1)}, "dan"), ([0], {2: "dan"}, {"dan": (8, 1)}, "dan"),
    ([0], {2: "dan"}, {"dan": (1e-5, 1)}, None), ([0], {2: "dan"}, {"dan": (8, 0.1)}, None),
    ([0], {2: "dan"}, {"dan": (8, 0)}, None), ([0], {1: "dan"}, {"dan": (8, 1)}, None),
    ([0], {2: "dan"}, {"dan": (8, 1), "eva": (4, 1)}, "eva"), ([0], {}, {}, None),
], ids=["one", "two that take as long as the longest", "no memory", "too slow", "of unknown speed",
        "with the longest one none", "first who holds nothing", "nobody does"])  # fmt: skip
def test_a_machine_stands_by_for_as_many_stages_as_it_has_memory_and_time_for(
    stages, followed, here, chosen, make_settings
):
    seats, split = ["ana", "ben", "cleo", "ben"], [1, 4, 1, 1]
    settings = make_settings(pipeline__stages=4, model__layers=7, pipeline__split=split)
    own = [Machine(name, 1.0, 8.0) for name in ("ana", "ben", "cleo")]
    others = [Machine(name, tflops, memory) for name, (memory, tflops) in here.items()]
    standbys = {(stage,): name for stage, name in followed.items()}
    placing = Placing(settings, [[0], [1], [2], [3]], seats, standbys, [*own, *others])
    assert placing.follower(stages) == chosen


class Led:
    """Members that hold stages, and what their coordinator would hear."""

    def __init__(self, peers):
        self.peers = peers

    def event(self):
        return self.peers.next_event(SimpleNamespace(rest=lambda now: 0.02))

    def next(self, kind):
        """The next event of a kind."""
        found = []
        wait_until(lambda: found.append(self.event()) or isinstance(found[-1], kind))
        return found[-1]

    def gives(self, name, stages):
        """Wait until a member holds these stages."""
        wait_until(
            lambda: self.event() and {*stages} <= {*self.peers._base.formation.held_by(name)}
        )

    def is_quiet(self, seconds=0.3):
        heard = [self.event() for _ in range(int(seconds / 0.02))]
        return not any(isinstance(event, ev.Lost | ev.MoveAsked) for event in heard)


@pytest.fixture
def leads(house, make_settings, corpus):
    """Members that hold stages; while they do not train, nobody moves or stands by."""
    joined = {}

    @contextmanager
    def start(*seats, trains=False, **changes):
        for name in seats:
            joined[name] = joined.get(name) or house.join(name)
        settings = make_settings(pipeline__stages=len(seats), **changes)
        peers = house.peers(Formation(1, [*seats]), settings, corpus)
        peers.start()
        peers.is_training = trains
        with peers:
            yield Led(peers), *(joined[name] for name in seats)

    return start


def test_lost_stages_are_given_to_a_spare_and_the_old_holder_is_not_heard_any_more(
    house, leads, monkeypatch
):
    with leads("ana", "ben") as (led, ana, ben):
        cleo = house.join("cleo")
        # The host's disk is full: who holds what is read only by a host that is started anew.
        monkeypatch.setattr(formation, "replace_file", Mock(side_effect=OSError))
        ben.say(msg.Pulse(1, "works"), 1)
        assert led.next(ev.Said) == ev.Said(1, msg.Pulse(1, "works"))
        ben.is_cut_off = True
        ben.lose_connection()  # it lives, and cannot be reached
        led.peers.replace([1])
        led.gives("cleo", [1])
        cleo.hears(msg.Hold)
        (hold,) = (said.message for said in cleo.heard if isinstance(said.message, msg.Hold))
        assert (hold.stages, hold.began, hold.again) == ([1], 0, 1)
        ben.is_cut_off = False
        ben.hears(msg.Release("cleo holds stage 1 now", [1]))
        ben.say(msg.Pulse(2, "works"), 1)
        cleo.say(msg.Pulse(3, "works"), 1)
        assert led.next(ev.Said) == ev.Said(1, msg.Pulse(3, "works"))
        led.peers.tell(1, msg.Start())
        cleo.hears(msg.Start())
        assert not any(said.message == msg.Start() for said in ben.heard + ana.heard)


def test_stages_of_who_does_not_answer_are_given_to_who_does(leads, monkeypatch):
    """A frozen machine's stream is open."""
    monkeypatch.setattr(hosted, "ANSWER_SECONDS", 0.2)
    with leads("ana", "ben") as (led, _, ben):
        ben._is_frozen = True
        led.peers.replace([1])
        led.gives("ana", [0, 1])
        assert not ben.again


def test_who_takes_a_stage_is_not_asked_for_what_was_written_before(house, leads, monkeypatch):
    """It would refuse, and the checkpoint would be given up."""
    with leads("ana", "ben") as (led, *_):
        base, collector, asked = led.peers._base, led.peers.collector, []
        for stage in (0, 1):
            collector.announce(stage, part(stage, 4))
        job = lambda: collector._next_job(lambda: base.formation.held_by("ben"))  # noqa: E731
        monkeypatch.setattr(hosted, "write_formation", lambda *kept: asked.append(job()))
        house.members.kick("ana")
        led.peers.replace([0])
        led.gives("ben", [0, 1])
        assert asked == [(1, part(1, 4))]


def test_what_a_lost_process_said_is_not_of_the_next_on_the_same_machine(leads):
    with leads("ana", "ben") as (led, _, ben):
        led.peers.replace([1])  # the process ended, and its machine is there
        wait_until(lambda: led.event() and ben.again)
        ben.say(msg.Ended(1, "late"), 1, again=0)
        ben.say(msg.Declined("late", [1]), again=0)
        ben.say(msg.Pulse(1, "works"), 1)
        assert led.next(ev.Said | ev.Lost) == ev.Said(1, msg.Pulse(1, "works"))


def test_a_spare_that_answers_later_than_a_neighbour_is_waited_for(house, leads, monkeypatch):
    monkeypatch.setattr(hosted, "ANSWER_SECONDS", PATIENCE)
    with leads("ana", "ben") as (led, ana, _):
        cleo = Joined(house.listener.address, house.enrol("cleo"), is_frozen=True).arrive()
        wait_until(lambda: "cleo" in house.here())
        house.members.kick("ben")
        led.next(ev.Lost)
        led.peers.replace([1])
        ana.hears(msg.AskAlive)
        led.next(ev.Tick)
        assert led.is_quiet() and led.peers._base.formation.seats == ["ana", "ben"]
        cleo.say(msg.Alive())
        led.gives("cleo", [1])


@pytest.mark.parametrize("log_mb", [64, 0])
def test_who_cannot_be_reached_is_given_up_with_a_spare_and_never_without_logs(
    house, leads, monkeypatch, log_mb
):
    monkeypatch.setattr(formation, "SPARE_SECONDS", 0.1)
    with leads("ana", "ben", train__log_mb=log_mb) as (led, _, ben):
        house.join("cleo")
        ben.is_cut_off = True
        ben.lose_connection()
        wait_until(lambda: "ben" not in house.here())
        if log_mb:
            lost = led.next(ev.Lost)
            assert lost.stage == 1 and "ben could not be reached for 0." in lost.error
        else:
            led.next(ev.Tick)
            assert led.is_quiet()
        ben.is_cut_off = False


def test_nobody_is_given_up_for_the_time_in_which_all_were_away(house, leads, monkeypatch):
    """The host's own way was lost, or the relay: whoever is back first would get all stages."""
    monkeypatch.setattr(formation, "NEIGHBOUR_SECONDS", 1.5)
    with leads("ana", "ben") as (led, ana, ben):
        for joined in (ana, ben):
            joined.is_cut_off = True
            joined.lose_connection()
        wait_until(lambda: not house.here())
        assert led.is_quiet(1.6)
        ana.is_cut_off = False
        wait_until(lambda: led.event() and house.here())
        assert led.is_quiet(0.04) and led.next(ev.Lost).stage == 1
        ben.is_cut_off = False


def test_who_leaves_gives_its_stages_to_another_and_without_logs_stops_the_run(leads):
    with leads("ana", "ben", trains=True) as (led, _, ben):
        ben.say(msg.Leaving())
        assert led.next(ev.Lost) == ev.Lost(1, "ben leaves") and not led.peers.pauses
    with leads("ana", "ben", trains=True) as (led, _, ben):
        led.peers.ask_to_stop()
        assert led.next(ev.StopAsked) == ev.StopAsked("")
        ben.say(msg.Leaving())
        wait_until(lambda: led.peers.pauses == "ben leaves")
        led.next(ev.Tick)
        assert led.is_quiet(), "the run stops: whoever leaves stays until then"
    with leads("ana", "cleo", trains=True, train__log_mb=0) as (led, _, cleo):
        cleo.say(msg.Leaving())
        assert led.next(ev.StopAsked) == ev.StopAsked("cleo leaves")
        assert led.peers.pauses == "cleo leaves"


@pytest.mark.parametrize(("log_mb", "has_memory"), [(64, True), (64, False), (0, True)])
def test_who_cannot_write_its_part_of_a_checkpoint_gets_no_stage_and_others_write_it(
    house, leads, log_mb, has_memory, monkeypatch
):
    monkeypatch.setattr(formation, "next_holder", lambda *how: "ana" if has_memory else None)
    with leads("ana", "ben", train__log_mb=log_mb) as (led, _, ben):
        failed = ShardFailed(4, "stage 1 cannot write its part;\nits machine says why")
        ben.say(failed, 1)
        why = "stage 1 cannot write its part; its machine says why"
        ben.hears(msg.News(f"this machine gets no stage: {why}"))
        heard = led.next(ev.Lost | ev.Said)
        others_take_it = bool(log_mb and has_memory)
        assert heard == (ev.Lost(1, why) if others_take_it else ev.Said(1, failed))
        assert led.peers.unsaved == {4}
        if others_take_it:
            ben.say(msg.Pulse(1, "works"), 1)
            heard = [led.event() for _ in range(20)]
            assert not any(isinstance(event, ev.Said) for event in heard), "or it would be blamed"
            led.peers.replace([1])
            led.gives("ana", [0, 1])
        ben.arrive()
        assert "its machine says why" in house.unfit()["ben"], "it has said hello before"
        Joined(house.listener.address, ben.identity).arrive()
        wait_until(lambda: "ben" in house.here())


def test_where_nobody_can_save_the_holder_of_before_goes_on(house, leads, monkeypatch):
    """Both disks are full: the second to fail keeps its stages, and so does the first then."""
    monkeypatch.setattr(hosted, "ANSWER_SECONDS", 0.1)
    with leads("ana", "ben") as (led, ana, ben):
        ana.say(ShardFailed(4, "full"), 0)
        assert led.next(ev.Lost) == ev.Lost(0, "full")
        ben.say(ShardFailed(4, "full"), 1)
        assert led.next(ev.Said) == ev.Said(1, ShardFailed(4, "full"))
        led.peers.replace([0])
        wait_until(lambda: led.event() and ana.again)
        ana.say(msg.Declined("no room for its state", [0]))
        led.next(ev.Lost)
        led.peers.replace([0])
        wait_until(lambda: led.event() and led.peers._is_waiting)
        ben.say(msg.Leaving())
        why = "ben leaves"  # no step can end: said twice, it is at once
        assert [led.next(ev.StopAsked) for _ in range(2)] == 2 * [ev.StopAsked(why)]


def test_a_run_of_one_machine_is_formed_again_for_another(house, leads):
    """Nobody could follow its stages or replace them; a second process of it would not help."""
    with leads("ana", "ana", "ana", trains=True) as (led, *_):
        led.next(ev.Tick)
        assert led.is_quiet() and not led.peers.pauses
        house.join("ben")
        why = "ben takes some of the stages, which one machine holds"
        assert led.next(ev.StopAsked) == ev.StopAsked(why)
        assert led.is_quiet() and led.peers.pauses == why, "asked once"
    with leads("ana", "cleo", "cleo", trains=True) as (led, *_):
        led.next(ev.Tick)
        assert led.is_quiet() and not led.peers.pauses, "ben stands by"


@pytest.mark.parametrize(("seats", "here", "chosen"), [
    ("ana ana ana", {"ben": 8}, "ben"), ("ana ana", {"ben": 1e-5, "cleo": 8}, "cleo"),
    ("ana ana", {"ben": 1e-5}, None), ("ana", {"ben": 8}, None), ("ana ana", {}, None),
])  # fmt: skip
def test_one_with_the_memory_for_half_of_all_stages_is_worth_a_pause(
    seats, here, chosen, make_settings
):
    held = seats.split()
    machines = [Machine(name, 1.0, memory) for name, memory in {"ana": 8, **here}.items()]
    settings = make_settings(pipeline__stages=len(held))
    assert Placing(settings, [[*range(len(held))]], held, {}, machines).next_share() == chosen


def test_a_member_that_holds_nothing_takes_over_after_a_checkpoint_what_another_holds_beside(
    house, leads
):
    with leads("ana", "ben", trains=True) as (led, ana, ben):
        ben.say(msg.Leaving())
        led.next(ev.Lost)
        led.peers.replace([1])
        led.gives("ana", [0, 1])
        house.join("cleo")
        led.next(ev.Tick)
        assert led.is_quiet(), "it waits for a checkpoint"
        led.peers.tell(0, msg.Saved(4))
        assert led.next(ev.MoveAsked) == ev.MoveAsked([0], "stage 0 moves from ana to cleo")
        led.peers.replace([0])
        led.gives("cleo", [0])
        assert led.peers._base.formation.seats == ["cleo", "ana"]
        ana.hears(msg.Release("cleo holds stage 0 now", [0]))
        led.peers.tell(0, msg.Saved(8))
        assert led.is_quiet(), "one group each"


def test_both_ends_of_what_feeds_a_stand_by_hear_the_same_word_also_with_two_of_them(house, leads):
    with leads("ana", "ben", trains=True) as (led, ana, ben):
        joined = {"ana": ana, "ben": ben, "cleo": house.join("cleo"), "dan": house.join("dan")}
        wait_until(lambda: led.event() and len(led.peers._standbys) == 2)
        names = {stage: led.peers._standbys[stage,] for stage in (0, 1)}
        for stage in (0, 1):  # each end of one, then each end of the other
            led.peers.tell(stage, msg.Connect("at", [0], follower=stage + 1), follows=True)
        for stage in (0, 1):
            led.peers.tell(1 - stage, msg.Connect("", [0], 0, follower=stage + 1))
        for stage, holder in ((0, "ben"), (1, "ana")):
            ends = [joined[names[stage]], joined[holder]]
            for end in ends:
                end.hears(msg.Connect)
            own, fed = (next(m for m, *_ in e.heard if isinstance(m, msg.Connect)) for e in ends)
            assert own.word and own.word == fed.word


def audits(led, cleo, *found):
    """What a stand-by says of its stage, and that stage."""
    wait_until(lambda: led.event() and led.peers._standbys)
    ((stage,),) = led.peers._standbys
    cleo.hears(msg.Hold)
    for one in found:
        cleo.say(one, stage)
    return stage


def test_what_agrees_is_no_news_and_who_has_drifted_away_begins_anew(house, leads):
    close, far = Audited(9, 40, 0.9 * DRIFTED, 0.04), Audited(19, 80, 1.1 * DRIFTED, 0.04)
    with leads("ana", "ben", trains=True, train__audit=True) as (led, _, _):
        stage = audits(led, house.join("cleo"), close, far)
        assert led.next(ev.FollowerLost) == ev.FollowerLost([stage])
        assert led.peers._base.display.standing.audits == {"cleo": far}
        led.peers.drop_follower([stage])
        assert not led.peers._standbys and led.is_quiet()


@pytest.mark.parametrize("replaces", [False, True])
def test_who_is_found_to_lie_is_named_once_and_replaced_if_that_is_wished(house, leads, replaces):
    lie = Audited(9, 40, 0.05, 0.0, "gradient", 2)
    changes = {"train__audit": True, "train__audit_replaces": replaces}
    with leads("ana", "ben", trains=True, **changes) as (led, *_):
        led.peers._base.display.announce = told = Mock()
        stage = audits(led, house.join("cleo"), lie, lie)
        liar = led.peers._base.formation.seats[stage]
        why = f"stage {stage} is replaced by its stand-by, for it sent other values"
        for _ in range(2 * replaces):  # it may be that others are replaced at the time
            assert led.next(ev.MoveAsked) == ev.MoveAsked([stage], why, at_once=True)
        assert led.is_quiet() and told.call_count == 1
        assert f"{liar} sent something else for stage {stage} than cleo" in told.call_args.args[1]
        assert ("cleo computed other values" in house.unfit()[liar]) == replaces


def test_a_stand_by_whose_checkpoint_is_kept_no_more_is_to_begin_at_a_newer_one(
    house, leads, make_settings, corpus, tmp_path
):
    """It fetches it for long while the run goes on. To be refused would be its own failure: it
    would decline, and get no stage any more.
    """
    saved = trained(make_settings(), corpus, tmp_path / "run", 1)
    with leads("ana", "ben", trains=True) as (led, _, _):
        led.peers.saved = saved
        cleo = house.join("cleo")
        wait_until(lambda: led.event() and led.peers._standbys)
        (stage,) = next(iter(led.peers._standbys))
        shutil.rmtree(saved)
        name = msg.stream_name("state", stage, 1, led.peers._again)
        whom, address = host_of(cleo.identity), house.listener.address
        pipe = dial(address, name, cleo.identity, whom, PATIENCE, msg.MAX_MESSAGE)
        with pytest.raises(WireError):  # upon which it asks again, until it is told otherwise
            fetch_seat(pipe, [stage], tmp_path / "cleo", 1 << 30)
        assert led.next(ev.FollowerLost) == ev.FollowerLost([stage])


def test_a_stand_by_that_begins_again_and_again_leaves_nothing_waiting_at_the_host(
    house, leads, make_settings, corpus, tmp_path, monkeypatch
):
    monkeypatch.setattr(hosted, "STANDBY_PAUSE", 0.0)
    saved = trained(make_settings(), corpus, tmp_path / "run", 1)

    def waiting():
        names = [thread.name for thread in threading.enumerate()]
        return sum(name.startswith(("thinwire state", "thinwire tokens")) for name in names)

    with leads("ana", "ben", trains=True) as (led, _, _):
        led.peers.saved = saved
        house.join("cleo")
        for _ in range(20):
            wait_until(lambda: led.event() and led.peers._standbys)
            for stages in [*led.peers._standbys]:
                led.peers.drop_follower(list(stages))
        wait_until(lambda: waiting() <= 2)  # of the two holders


def test_a_host_that_is_away_for_longer_than_a_link_may_be_ends_no_stage(
    house, leads, make_settings, corpus
):
    """As with a member's own stream: the stage would be said to have failed, and its member to
    have been the cause.
    """
    with leads("ana", "ben", link__outage=0.5) as (_, ana, _):
        proxy = Proxy(house.listener.address)
        way = [Route(proxy.address)]
        order = msg.Assignment([0], ana.identity, {}, "", "", generation=1, host=way)
        settings = make_settings(link__outage=0.5)
        far = Peer(order, {}, 0, lambda message: None)._data(settings)
        far.read(0)
        proxy.is_refusing = True
        proxy.cut()
        time.sleep(1.5)
        proxy.is_refusing = False
        far.read((0, 0))
        proxy.close()


# What the coordinator makes of it


@pytest.fixture
def run():
    """A coordinator of two stages that train, whose parts of checkpoints travel."""
    return Lead(parts_travel=True, placement=[[0], [1]]).until(Phase.TRAINING)


def both(number):
    return [(stage, step(stage, number)) for stage in (0, 1)]


def test_a_move_is_no_death_however_often_it_comes(run):
    move, urgent = (ev.MoveAsked([1], "from ana to ben", at_once) for at_once in (False, True))
    for number in range(5):
        run.play(both(number))
        assert run.on(move) == [], "nobody follows it"
        for message in (ready(1), msg.Linked()):
            run.on(ev.Said(1, message, follows=True))
        assert run.on(move) == [], "who does may be far behind"
        run.on(ev.Said(1, msg.Follows(number), follows=True))
        told = run.on(move)
        assert told[0] == ev.Tell(0, msg.Await(0)) and ev.Replace([1], by_follower=True) in told
        assert run.on(move) == run.on(urgent) == [], "not while it is on its way"
        assert isinstance(run.say(1, msg.Linked())[-1].message, msg.Start)
    run.play(both(5))
    assert ev.Replace([1]) in run.on(urgent), "by whomever"


def test_late_words_of_a_process_that_was_given_up_are_not_heard(run):
    run.play(both(0))
    assert ev.Replace([1]) in run.on(ev.Exited(1, -9))
    assert run.say(1, step(1, 1), msg.Finished({})) == []
    assert isinstance(run.say(1, ready(1), msg.Linked())[-1].message, msg.Start)
    recorded = run.say(1, step(1, 0), step(1, 1))
    assert [command.report.step for command in recorded if hasattr(command, "report")] == [1]
    assert not run.coordinator.is_over


def test_a_part_that_another_machine_writes_anew_counts_as_it_was_written_there(run):
    """Other machines may round differently; what is complete has the hashes of its files."""
    run.play([*both(0), (0, part(0, 1)), (1, part(1, 1))])
    run.on(ev.Exited(1, -9))
    anew = part(1, 1)
    anew.shard.tensors.append("another")
    run.say(1, ready(1), msg.Linked(), step(1, 0), anew)
    told = [*run.on(ev.Travelled(0, 1)), *run.on(ev.Travelled(1, 1)), *run.say(1, step(1, 1))]
    (commit,) = (command for command in told if isinstance(command, ev.Commit))
    assert commit.parts[1] is anew
