"""Processes that follow a stage: linked, promoted or let go, as the coordinator leads it; and one
machine that stands by for another.
"""

import re

import pytest
from leading import ready, step
from test_hosted_recovery import Hosted
from test_replacement import link, report, texts, training

from thinwire.engine.reports import Audited
from thinwire.run import events as ev
from thinwire.run import protocol as pr
from thinwire.run.coordinator import SETTLE_SECONDS
from waiting import wait_until


def followed(*stages):
    """A run of four stages in which a process follows these, which share one."""
    lead = training(steps=2)
    told = [command for s in stages for command in lead.on(ev.Said(s, ready(s), follows=True))]
    for stage in stages:
        told += lead.on(ev.Said(stage, pr.Linked(), follows=True))
    return lead, told


def test_who_follows_a_stage_is_fed_by_its_neighbours_and_takes_its_place_at_once():
    lead, told = followed(1)
    own, below, above, start, note = told
    links = [0, 0, 0]
    connect = pr.Connect("at-0", links, follower=1)
    assert own == ev.Tell(1, connect, follows=True)
    assert below == ev.Tell(0, pr.Connect("", links, 0, follower=1))
    assert above == ev.Tell(2, pr.Connect("at-1", links, 1, follower=1))
    assert start == ev.Tell(1, pr.Start(), follows=True)
    assert texts([note]) == ["stage 1 has a stand-by, which follows it"]
    *awaits, _, promote, below, above, own = lead.on(ev.Exited(1, -9))
    assert awaits == [ev.Tell(0, pr.Await(0)), ev.Tell(2, pr.Await(1))]
    assert promote == ev.Replace([1], by_follower=True)
    assert below == ev.Tell(0, pr.Connect("", [1, 1, 0], 0))
    assert above == ev.Tell(2, pr.Connect("at-1", [1, 1, 0], 1))
    assert own == ev.Tell(1, pr.Connect("at-0", [1, 1, 0])), "it keeps what it has computed"
    last = lead.say(1, step(1, 2, 4)) + lead.say(1, Audited(2, 4, 0.0, 0.0))
    assert last == [], "last words of who was replaced are not those of its stand-by"
    (start,) = lead.say(1, pr.Linked())
    assert isinstance(start, ev.Tell) and isinstance(start.message, pr.Start)
    assert lead.say(1, step(1, 1, 4)) == [], "the lost one had said that"
    assert "stage 1 is back" in texts(report(lead, 2))[0], "it says so itself"


def test_one_that_follows_beside_a_lost_stage_is_fed_by_who_takes_its_place():
    lead, _ = followed(1)
    assert lead.on(ev.Exited(2, -9))[-2:] == [
        ev.Replace([2]),
        ev.Tell(1, pr.Await(1), follows=True),
    ]
    *_, start, relink, feed = link(lead, 2)
    links = [0, 1, 1]
    assert start == ev.Tell(2, pr.Start(4))
    assert relink == ev.Tell(1, pr.Connect("at-0", links, 1, follower=2), follows=True)
    assert feed == ev.Tell(2, pr.Connect("at-1", links, 1, follower=2))
    fed = lead.on(ev.Said(1, pr.Linked(follower=2), follows=True))
    assert texts(fed) == ["the stand-by of stage 1 follows on"]
    assert ev.Replace([1], by_follower=True) in lead.on(ev.Exited(1, -9))


def test_one_that_is_not_fed_is_not_promoted():
    """It may be behind the checkpoint at which whoever is to feed it began."""
    lead, _ = followed(1)
    lead.on(ev.Exited(2, -9))
    assert ev.Replace([1]) in lead.on(ev.Exited(1, -9)), "nobody feeds it"
    for late in (1, 2):
        lead, _ = followed(1)
        for _ in range(2):
            lead.on(ev.Exited(2, -9))
            link(lead, 2)
        lead.on(ev.Said(1, pr.Linked(follower=late), follows=True))
        assert ev.Replace([1]) in lead.on(ev.Exited(1, -9)), "that was of streams of before"


def test_neighbours_that_are_lost_together_and_promoted_wait_for_each_other():
    """They were fed by those who are lost; and another that is lost may take long to be built."""
    lead, _ = followed(0)
    lead.on(ev.Said(1, ready(1), follows=True))
    lead.on(ev.Said(1, pr.Linked(), follows=True))
    lost = [lead.on(ev.Lost(stage, "gone")) for stage in (0, 1, 3)]
    assert lost == [[], [], []]
    told = lead.on(ev.Tick(), SETTLE_SECONDS)
    for command in (
        ev.Replace([0], by_follower=True),
        ev.Replace([1], by_follower=True),
        ev.Replace([3]),
        ev.Tell(0, pr.Await(0)),
        ev.Tell(1, pr.Await(0)),
    ):
        assert command in told


def test_one_that_fails_or_is_lost_or_is_not_linked_is_not_promoted():
    for gone in (
        ev.Said(1, pr.Failed("StageError", True, "no", [], []), follows=True),
        ev.Said(1, pr.Ended(0, ""), follows=True),
        ev.FollowerLost([1]),
    ):
        lead, _ = followed(1)
        assert lead.on(gone) == [ev.DropFollower([1])]
        assert ev.Replace([1]) in lead.on(ev.Exited(1, -9))
    lead = training(steps=1)
    lead.on(ev.Said(1, ready(1), follows=True))
    commands = lead.on(ev.Exited(1, -9))
    assert ev.Replace([1]) in commands and ev.DropFollower([1]) in commands


@pytest.mark.parametrize("delay", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_machine_that_stands_by_takes_the_place_of_one_that_is_killed(delay, machines, corpus):
    changes = {"pipeline__stages": 2, "pipeline__delay": delay, "train__checkpoint_every": 20}
    hosted = Hosted(machines, "ana", "ben", "cleo", **changes)
    host, (spare,) = hosted.host, {*hosted.peers} - {*hosted.seats}
    host.wait_for(r"stage \d has a stand-by, which follows it")
    stage = int(re.search(r"stage (\d) has a stand-by", host.text())[1])

    def stands_by():
        held, state = hosted.held()[spare]
        return not held and bool(re.match(rf"stands by for stage .*{stage}", state))

    wait_until(stands_by)
    hosted.peers[hosted.seats[stage]].kill()
    host.wait_for(rf"\[form\] +stage {stage}: \w+, which stood by")
    hosted.goes_on(stage)
    hosted.ends_as_if_undisturbed(corpus)
    assert hosted.peers[spare].wait() == 0, hosted.peers[spare].text()
