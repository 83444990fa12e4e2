"""The parts of a checkpoint, as the coordinator hears of them: written, travelled, lost."""

import dataclasses

import pytest
from leading import METERS, Lead, part, step

from thinwire.engine.reports import ShardFailed, Versions
from thinwire.run import events as ev
from thinwire.run.coordinator import Phase, disagreement
from thinwire.run.protocol import Finished, Leave
from thinwire.run.signals import Interrupted

LEAVE = [ev.Tell(0, Leave()), ev.Tell(1, Leave())]
WRITTEN = [part(0, 1), part(1, 1)]


def test_a_checkpoint_is_complete_when_all_stages_have_written_it():
    """Stage 1 writes later, also for the next step; nothing is mixed up."""
    lead = Lead().until(Phase.TRAINING)
    assert lead.say(0, part(0, 2), step(0, 2), part(0, 3)) == [ev.Record(0, step(0, 2))]
    assert lead.say(1, part(1, 2)) == [ev.Commit(2, [part(0, 2), part(1, 2)])]
    lead.say(1, step(1, 2))
    assert lead.say(1, part(1, 3)) == [ev.Commit(3, [part(0, 3), part(1, 3)])]


@pytest.mark.parametrize("first", [0, 1])
def test_a_failed_part_waits_for_the_others(first):
    lead = Lead().until(Phase.TRAINING)
    parts = [ShardFailed(2, "disk full"), part(1, 2)]
    assert lead.say(first, parts[first]) == [], "the other stage may be writing still"
    assert lead.say(1 - first, parts[1 - first]) == [ev.Discard(2, "disk full")]
    assert lead.coordinator.phase is Phase.TRAINING


def test_a_part_on_another_machine_counts_when_it_has_arrived():
    lead = Lead(parts_travel=True).until(Phase.TRAINING)
    lead.play(enumerate([step(0, 0), step(1, 0)]))
    assert lead.play(enumerate(WRITTEN)) == [] == lead.on(ev.Travelled(1, 1))
    assert lead.play(enumerate([step(0, 1), step(1, 1)])), "training goes on meanwhile"
    assert lead.on(ev.Travelled(0, 1)) == [ev.Commit(1, WRITTEN)]
    assert lead.on(ev.Travelled(0, 1)) == [], "of what was not awaited nothing follows"
    assert lead.on(ev.Travelled(1, 7, "never heard of")) == []


def test_a_part_that_does_not_arrive_costs_the_checkpoint():
    lead = Lead(parts_travel=True).until(Phase.TRAINING)
    lead.say(0, WRITTEN[0])
    assert lead.on(ev.Travelled(0, 1, "its disk is full")) == [] == lead.say(1, WRITTEN[1])
    assert lead.on(ev.Travelled(1, 1)) == [ev.Discard(1, "its disk is full")]


def test_the_run_ends_when_the_last_part_has_arrived():
    lead, goodbye = Lead(parts_travel=True).until(Phase.TRAINING), Finished(METERS)
    lead.play(enumerate(WRITTEN))
    lead.on(ev.Travelled(0, 1))
    assert lead.say(0, goodbye) == [ev.Record(0, goodbye)]
    waits = ev.Say("all stages have stopped; the host waits for the checkpoint of stage 1")
    assert lead.say(1, goodbye) == [ev.Record(1, goodbye), waits], "nobody leaves before it is here"
    assert lead.coordinator.phase is Phase.COLLECTING
    assert lead.on(ev.Tick(), 1.0) == []
    assert lead.on(ev.Tick(), 500.0) == []
    assert lead.on(ev.Travelled(1, 1)) == [ev.Commit(1, WRITTEN), *LEAVE, ev.End()]


@pytest.mark.parametrize("moment", ["while training goes on", "when all is done"])
def test_a_part_that_is_not_the_state_of_its_stage_convicts_it(moment):
    lead = Lead(parts_travel=True).until(Phase.TRAINING)
    lead.play(enumerate(WRITTEN))
    if moment == "when all is done":
        lead.all_say(Finished(METERS))
    assert lead.on(ev.Travelled(0, 1)) == []
    assert lead.on(ev.Travelled(1, 1, "it holds NaN", at_fault=True)) == []
    lost, discard = ev.Travelled(1, 1, "it holds NaN"), ev.Discard(1, "it holds NaN")
    assert lead.on(lost) == [discard], "and no end"
    end = lead.settled()
    assert (end.culprit.stage, end.culprit.deed) == (1, "broke the contract")
    assert "it holds NaN" in str(end.error)


def test_parts_of_different_updates_make_no_checkpoint():
    """A stage that says it was never updated need not save moments: others know better."""
    lead = Lead().until(Phase.TRAINING)
    lead.say(0, part(0, 2))
    (discard,) = lead.say(1, dataclasses.replace(part(1, 2), versions=Versions(0, 0)))
    assert isinstance(discard, ev.Discard) and "stage 1: weight version 0" in discard.error


def test_whoever_will_not_wait_for_the_last_part_asks_twice():
    lead = Lead(parts_travel=True).until(Phase.TRAINING)
    lead.play(enumerate(WRITTEN))
    lead.all_say(Finished(METERS))
    assert lead.on(ev.StopAsked()) == []
    assert isinstance(lead.ended(lead.on(ev.StopAsked())).error, Interrupted)


def test_ends_that_remember_different_things_end_the_run():
    lead = Lead().until(Phase.TRAINING)
    lead.say(0, part(0, 4, "ab"))
    commands = lead.say(1, part(1, 4, "cd"))
    assert commands[0] == ev.Discard(4)
    end = lead.ended(commands)
    assert "after step 4 the two ends of cut 0" in str(end.error) and end.culprit is None
    assert disagreement(4, [{"0": {"forward": "ab"}}, {"0": {}}]), "what is missing is not equal"
