"""A host's decisions: who holds which stage, whom it blames, and where neighbours meet."""

import errno
import io
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hosting import Joined, hello

from settings_values import narrow
from thinwire.errors import ConfigError, StageError
from thinwire.report import PlainDisplay
from thinwire.run import formation as seating
from thinwire.run import host as host_module
from thinwire.run.events import Away, Back, Lost, Said, StopAsked, Suspect
from thinwire.run.formation import Failures, Formation
from thinwire.run.host import HostOptions, comparable, form, who_is_left_out
from thinwire.run.hosted import is_open, ways_to_meet
from thinwire.run.machine import Machine
from thinwire.run.members import Member
from thinwire.run.peers import StageFailedError
from thinwire.run.placement import is_relayed
from thinwire.run.protocol import Connect, Declined, Hello, Hold, Leaving, News, Pulse, Start
from thinwire.schedule import PipelineConfig
from thinwire.settings import Settings
from thinwire.wire import Door, Route
from trained import trained
from waiting import PATIENCE, wait_until

# Who holds which stage


@pytest.mark.parametrize(("before", "present", "least", "after"), [
    ("ana ben", "dan cleo ben", 2, "dan ben"), ("ana ben", "ben", 2, None),
    ("ana ben cleo", "ana cleo", 2, "ana ana cleo"), ("ana ben cleo", "cleo", 2, None),
    ("ana ben cleo", "cleo", 1, "cleo cleo cleo"), ("ana ben cleo", "cleo dan", 2, "dan dan cleo"),
    ("ana ben cleo", "", 1, None), ("ana ana cleo", "dan cleo", 2, "dan dan cleo"),
    ("ana ana cleo", "ana cleo", 3, None), ("ana ana", "ana ben", 2, "ana ben"),
    ("ana ana", "ana", 2, None), ("ana ana", "ana", 1, "ana ana"),
    ("ana ana ana cleo", "ana ben cleo dan", 2, "ana dan ben cleo"),
    ("ana ben cleo dan", "ben cleo", 2, "ben ben cleo cleo"),
])  # fmt: skip
def test_peers_keep_their_stages_and_those_of_who_is_gone_go_to_others_or_to_neighbours(
    before, present, least, after
):
    seats = seating.fill_seats(before.split(), present.split(), least)
    assert seats == (after.split() if after is not None else None)


def test_a_wait_says_for_whom_and_who_is_there_in_vain():
    assert seating.lacking_peers(2, [], {}) == "waiting for 2 more peers"
    waits = seating.lacking_peers(2, ["ben"], {"ben": "", "eve": "no room"})
    here = "here: ben; eve gets no stage: no room"
    assert waits == f"waiting for 1 more peer; {here}"


def test_how_often_a_run_was_formed_survives(tmp_path):
    assert seating.read_formation(tmp_path) == Formation()
    formed = Formation(3, ["ana", "ben", "ben"], [1, 3], 7000, 4)
    seating.write_formation(tmp_path, formed)
    formation = seating.read_formation(tmp_path)
    assert formation == formed
    assert formation.members() == ["ana", "ben"] and formation.held_by("ben") == [1, 2]
    pipeline = formation.applied(Settings()).pipeline
    assert (pipeline.split, pipeline.window) == ([1, 3], 4)
    unformed, set_by_hand = Settings(), Settings(pipeline=PipelineConfig(window=6))
    assert Formation().applied(unformed) is unformed
    assert formation.applied(set_by_hand).pipeline.window == 6, "a change of the settings counts"
    split_by_hand = Settings(pipeline=PipelineConfig(stages=3, split=[3, 1, 2]))
    kept = seating.fitting(formed, split_by_hand)
    assert kept.applied(split_by_hand).pipeline.split == kept.split == [3, 1, 2], "so does this"
    (tmp_path / "epochs.json").write_text('{"epoch": "many"}')
    with pytest.raises(ConfigError, match=r"cannot read .*epochs.json"):
        seating.read_formation(tmp_path)


def peer(name, tflops, bf16=0.0, memory_gb=8.0):
    machine = Machine("", tflops, memory_gb, 50.0, 100.0, 5.0, bf16_tflops=bf16)
    return Member(name, hello=Hello({}, machine, "", "")).machine


def test_stages_follow_the_rate_in_which_a_run_computes(make_settings):
    here = [peer("ana", 1e-4, 1e-3), peer("ben", 1e-3, 1e-4)]
    for precision, fast in (("fp32", "ben"), ("bf16", "ana")):
        settings = make_settings(
            model__layers=8, run__precision=precision, codec__forward="bf16", codec__backward="bf16"
        )
        split = form(settings, here, False)
        blocks = dict(zip([peer.name for peer in split.peers], split.counts, strict=True))
        assert max(blocks, key=lambda name: blocks[name]) == fast
        assert split.settings.pipeline.split == split.counts
        assert is_relayed(*split.peers), "no door was found"


def test_peers_without_figures_count_as_equal_and_what_is_lacking_is_said(make_settings):
    settings = make_settings()
    unknown = comparable([peer("ana", 0.0, memory_gb=0.0), peer("ben", 5.0)])
    split = form(settings, unknown, False)
    assert split.settings == settings.with_window()
    with pytest.raises(ConfigError, match="no split fits"):
        form(settings, [peer("a", 1, 1, 1e-5), peer("b", 1, 1, 1e-5)], False)


NARROW, UNEVEN = narrow("projected", anchor="per-stage"), {"pipeline__split": [3, 1]}


@pytest.mark.parametrize(
    ("changes", "before", "kept"),
    [(NARROW, {}, [2, 2]), (NARROW, UNEVEN, [3, 1]), ({"codec__forward": "int8+ef"}, {}, [2, 2]),
     ({}, UNEVEN, [1, 3])],
    ids=["narrow", "narrow and uneven", "codecs with memory", "dense: the fast peer gets more"],
)  # fmt: skip
def test_cuts_stay_where_the_model_learned_them_whoever_comes(
    changes, before, kept, corpus, make_settings, tmp_path, monkeypatch
):
    """One of these peers is fifty times as fast as the other, and the split is left open."""
    trained(make_settings(**changes, **before, train__steps=2), corpus, tmp_path / "test")
    seating.write_formation(tmp_path / "test", Formation(epoch=1))
    splits = []

    def formed(settings, *arguments):
        here = [peer("ana", 1e-6), peer("ben", 5e-5)]
        splits.append(form(settings, here, arguments[-1]).counts)
        return SimpleNamespace(run=dict)

    monkeypatch.setattr(host_module, "_Hosting", formed)
    monkeypatch.setattr(host_module, "prepare_data", lambda *_: corpus)
    host_module.host(make_settings(**changes), HostOptions(), PlainDisplay(io.StringIO()))
    assert splits == [kept]


# What members say of their stages


@pytest.fixture
def leads(house, make_settings, corpus):
    """Starts a generation of members."""

    def start(formation):
        settings = make_settings(pipeline__stages=len(formation.seats))
        peers = house.peers(formation, settings, corpus)
        peers.start()
        return peers

    return start


def test_each_member_holds_its_stages_and_hears_what_is_for_them(house, leads):
    ana, ben = house.join("ana"), house.join("ben")
    with leads(Formation(3, ["ana", "ana", "ben"])) as peers:
        for joined, stages in ((ana, [0, 1]), (ben, [2])):
            joined.hears(Hold)
            assert [(m.stages, generation) for m, _, generation, _ in joined.heard] == [(stages, 3)]
        peers.tell(1, Start())
        ana.hears(Start())
        assert ana.heard[-1] == (Start(), 1, 3, 0)
        peers.tell(2, Connect("127.0.0.1:1", []))
        ben.hears(Connect)
        assert ben.heard[-1].message.seats == [*map(house.book.key_of, ("ana", "ana", "ben"))]
        ben.say(Pulse(1, "works"), 2, 3)
        assert peers.said.next(PATIENCE) == Said(2, Pulse(1, "works"))
        ben.say(Leaving())
        assert peers.said.next(PATIENCE) == StopAsked("ben leaves") == StopAsked(peers.pauses)
        ben.lose_connection()
        away, back = peers.said.next(PATIENCE), peers.said.next(PATIENCE)
        assert isinstance(away, Away) and isinstance(back, Back) and away.stage == back.stage == 2


def test_of_an_older_generation_nothing_is_heard_and_of_a_stage_never_held_it_costs_the_stream(
    house, leads
):
    ana = house.join("ana")
    house.join("ben")
    with leads(Formation(2, ["ana", "ben"])) as peers:
        ana.say(Declined("no room"), generation=1)
        for begun, stage, generation in ((1, 5, 1), (2, 0, 1), (3, 0, 2), (4, 1, 2)):
            ana.say(Pulse(begun, "works"), stage, generation)
        assert peers.said.next(PATIENCE) == Said(0, Pulse(3, "works"))
        lost = peers.said.next(PATIENCE)
        assert isinstance(lost, Lost) and (lost.stage, lost.in_breach) == (0, True)
        assert "ana sent a message of stage 1, which it never held" in lost.error
    assert ana.lost.wait(PATIENCE) and house.here() == ["ben"]
    assert "which it never held" in house.unfit()["ana"]


def test_stages_that_a_member_declines_or_is_not_there_for_are_lost_at_once_with_the_reason(
    house, leads
):
    house.join("ana")
    ben = house.join("ben")
    house.enrol("cleo")
    with leads(Formation(1, ["ana", "ben", "ben", "cleo"])) as peers:
        assert peers.said.next(PATIENCE) == Lost(3, "cleo is away")
        ben.say(Declined("that is not the\ndata of this run"))
        why = "it cannot hold its stage: that is not the data of this run"
        assert [peers.said.next(PATIENCE) for _ in range(2)] == [Lost(1, why), Lost(2, why)]
        assert house.here() == ["ana"]
        house.members.kick("ana")
        assert peers.said.next(PATIENCE) == Lost(0, "the host removed it from the run")


@pytest.fixture
def hosting(house):
    """A host's judgement of the two peers that hold stages, without the rest of a host."""
    made = object.__new__(host_module._Hosting)
    made.members, made._failures = house.members, Failures()
    made.formation = Formation(1, ["ana", "ben"])
    made.display = PlainDisplay(io.StringIO())
    return made


@pytest.mark.parametrize(
    ("deed", "most"), [("failed", 3), ("broke the contract", 3), ("was lost", 10)]
)
def test_a_peer_that_keeps_failing_is_set_aside_and_the_host_goes_on(
    house, hosting, make_settings, deed, most
):
    """Also with an error of settings or data, which is that machine's as long as others have none.

    Steps that are trained again are no progress; a later checkpoint is.
    """
    house.join("ana")
    ben = house.join("ben")
    suspect = Suspect(0, 1, deed, "no such device", known=True)
    for step in (10, *[20] * most):
        assert house.unfit()["ben"] == "", "it gets its stage again"
        hosting._failures.start_from(step)
        hosting._judge(StageFailedError("stage 1 ended", suspect))
    why = (
        f"it {deed} {most} times and the run got no further, last: no such device. It gets one "
        "again when the host is started anew"
    )
    assert house.unfit() == {"ana": "", "ben": why}
    for _ in range(2):
        ben.hears(News(f"this machine gets no stage: {why}"))
        ben = Joined(house.listener.address, ben.identity).arrive()
    wait_until(lambda: ben.heard)
    assert house.unfit()["ben"] == why, "arriving anew does not help"
    status = house.console(Formation(), make_settings).handlers()["status"]({})
    states = {peer.name: peer.state for peer in status.peers}
    assert states == {"ana": "waiting for a stage", "ben": f"gets no stage: {why}"}
    assert house.here() == ["ana"]


def test_a_failure_that_no_peer_caused_ends_the_host_when_it_goes_on(hosting):
    error = StageError("the two ends of cut 0 no longer remember the same")
    for _ in range(2):
        hosting._judge(error)
    with pytest.raises(StageError, match="no longer remember"):
        hosting._judge(error)


def test_a_host_without_room_to_write_down_a_new_number_waits_for_it(
    hosting, monkeypatch, tmp_path
):
    """All peers ended with it, and what they had trained since the last checkpoint was lost."""
    full = OSError(errno.ENOSPC, "No space left on device")
    write = Mock(side_effect=[full, full, None, OSError(errno.EACCES, "Permission denied")])
    monkeypatch.setattr(seating, "replace_file", write)
    monkeypatch.setattr(host_module, "REMIND_SECONDS", 0.01)
    hosting.folder, hosting.display = tmp_path, Mock()
    hosting._form_and_run = lambda: hosting.keep(hosting.formation) or {}
    assert hosting.run() == {} and write.call_count == 3
    with pytest.raises(ConfigError, match="Permission denied"):
        hosting.run()


# Where neighbours meet, and where a host is found

SEATS = ["ana", "ben", "cleo"]


def test_a_link_is_direct_where_either_end_can_be_reached():
    doors = [("127.0.0.1:1", "192.0.2.1:1"), ("127.0.0.1:2", ""), ("127.0.0.1:3", "")]
    meeting = [[Route("192.0.2.9:9", "relayed", f"{name}.secret")] for name in SEATS]
    told = [ways_to_meet(stage, doors, meeting[stage], "token") for stage in range(3)]
    reach, wait = zip(*told, strict=True)
    own, relay = ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"], "192.0.2.9:9"
    addresses = lambda ways: [[way.address for way in one] for one in ways]  # noqa: E731
    assert addresses(reach) == [[], ["192.0.2.1:1", own[1], relay], [own[2], relay]]
    assert addresses(wait) == [[own[0], relay], [own[1], relay], []]
    assert [one[-1].token for one in reach[1:]] == ["ben.secret", "cleo.secret"]


def test_a_peers_door_is_tried_only_where_the_peer_comes_from():
    """Nonsense must not end the host, which tries the address."""
    for outside in ("", "a..b:1", "x" * 70 + ".net:1", "1.2.3.4:" + "9" * 5000):
        said = Hello({}, hello().machine, "127.0.0.1:1", outside)
        assert not is_open(said, outside.rpartition(":")[0], "ab" * 8, "token"), outside
    with Door("127.0.0.1", 0) as door:
        door.admit("ab" * 8, "ben.secret")
        said = Hello({}, hello().machine, "127.0.0.1:1", door.address)
        assert is_open(said, "127.0.0.1", "ab" * 8, "ben.secret")
        for origin in ("127.0.0.2", ""):
            assert not is_open(said, origin, "ab" * 8, "ben.secret")


@pytest.mark.parametrize(("addresses", "relay", "said"), [
    (("127.0.0.1:7600",), "", "only this machine can use the invite: 127.0.0.1 is its own"),
    (("localhost:7600", "[::1]:7600"), "", "only this machine can use the invite"),
    (("127.0.0.1:7600", "192.168.1.5:7600"), "", "is an address of this network alone"),
    (("192.168.1.5:7600",), "relay.example:4617", ""),
    (("192.168.1.5:7600", "ana.example.org:7600"), "", ""),
    (("8.8.8.8:7600",), "", ""),
])  # fmt: skip
def test_a_host_says_whom_its_addresses_leave_out(addresses, relay, said):
    text = who_is_left_out(addresses, relay)
    assert said in text and bool(said) == bool(text)
    assert not text or ("--address" in text and "port 7600" in text and "--relay" in text)


def test_a_wrong_address_or_number_is_refused():
    with pytest.raises(ConfigError, match="--address no address: write a name or an address"):
        HostOptions(addresses=("no address",)).check(4)
    with pytest.raises(ConfigError, match=r"--peers 9: the 4 stages .* are held by 1 to 4 peers"):
        HostOptions(peers=9).check(4)
