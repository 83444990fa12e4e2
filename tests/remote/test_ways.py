"""Where neighbours meet, and who can wait there in another's place."""

import pytest
from thinwire.remote.messages import Arrive
from thinwire.remote.ways import DoorOf, Ways, probe
from thinwire.run.messages import Connect, Way

from thinwire.run.machine import Machine
from thinwire.wire import Door

SEATS = ["ana", "ben", "cleo"]


def make_ways() -> Ways:
    doors = [
        DoorOf("127.0.0.1:1", "192.0.2.1:1"),
        DoorOf("127.0.0.1:2"),
        DoorOf("127.0.0.1:3"),
    ]
    meeting = [[Way("192.0.2.9:9", "relayed", f"{name}.secret")] for name in SEATS]
    return Ways("ab" * 8, "token", doors, meeting, [f"key of {name}" for name in SEATS])


def test_a_link_is_direct_where_either_end_can_be_reached() -> None:
    ways = make_ways()
    told = [ways.connect(stage, Connect("")) for stage in range(3)]
    reach = [[way.address for way in one.reach] for one in told]
    wait = [[way.address for way in one.wait] for one in told]
    assert reach == [
        [],
        ["192.0.2.1:1", "127.0.0.1:2", "192.0.2.9:9"],
        ["127.0.0.1:3", "192.0.2.9:9"],
    ]
    assert wait == [["127.0.0.1:1", "192.0.2.9:9"], ["127.0.0.1:2", "192.0.2.9:9"], []]
    assert {tuple(one.seats) for one in told} == {("key of ana", "key of ben", "key of cleo")}
    assert [one.reach[-1].token for one in told[1:]] == ["ben.secret", "cleo.secret"]


def test_each_epoch_has_a_word_that_all_its_stages_are_told() -> None:
    first, second = make_ways(), make_ways()
    words = {first.connect(stage, Connect("")).word for stage in range(3)}
    assert len(words) == 1 and words != {second.word}
    assert first.word not in repr(first) + repr(first.connect(1, Connect("")))


def arrival(outside: str) -> Arrive:
    machine = Machine(tflops=1.0, memory_gb=1.0)
    return Arrive({}, machine, "127.0.0.1:1", outside, 0, 0, False)


@pytest.mark.parametrize("outside", ["", "a..b:1", "x" * 70 + ".net:1", "1.2.3.4:" + "9" * 5000])
def test_a_peer_that_says_nonsense_of_its_door_has_none(outside: str) -> None:
    """It must not end the host, which tries the address."""
    origin = outside.rpartition(":")[0]
    assert probe(arrival(outside), origin, "ab" * 8, "token") == DoorOf("127.0.0.1:1")


def test_a_peers_door_is_tried_only_where_the_peer_comes_from() -> None:
    with Door("127.0.0.1", 0) as door:
        door.admit("ab" * 8, "ben.secret")
        said = arrival(door.address)
        assert probe(said, "127.0.0.1", "ab" * 8, "ben.secret").outside == door.address
        for origin in ("127.0.0.2", ""):
            assert probe(said, origin, "ab" * 8, "ben.secret").outside == ""
