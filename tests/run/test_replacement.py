"""Stages that are lost and replaced, as the coordinator leads it: plain events, no processes."""

import pytest
from leading import Lead, failed, meters, part, ready, step

from thinwire.engine.reports import Evaluation, Step
from thinwire.run import events as ev
from thinwire.run.coordinator import MOST_DEATHS, SETTLE_SECONDS, Phase
from thinwire.run.protocol import Await, Connect, Finished, Leave, Linked, Pulse, Start

FOUR = [[0], [1], [2], [3]]
KILLED = "killed by SIGKILL"


def training(placement=FOUR, steps=0, parts_travel=False):
    """A run of four stages that trains, and of which all have reported so many steps."""
    lead = Lead(parts_travel=parts_travel, stages=4, placement=placement).until(Phase.TRAINING)
    for number in range(steps):
        report(lead, number)
    return lead


def report(lead, number, *stages):
    said = [lead.say(s, step(s, number, 4, frames=number + 1)) for s in stages or range(4)]
    return [command for commands in said for command in commands]


def link(lead, *stages):
    """Those who take the place of these stages are built, and link; what was told at each point."""
    built = [command for s in stages for command in lead.say(s, ready(s))]
    linked = [command for s in stages for command in lead.say(s, Linked())]
    return [*built, *linked]


def texts(commands):
    return [command.text for command in commands if isinstance(command, ev.Say)]


def replaced(commands):
    return [command.stages for command in commands if isinstance(command, ev.Replace)]


@pytest.mark.parametrize(("stage", "ends"), [(0, [(1, 0)]), (1, [(0, 0), (2, 1)]), (3, [(2, 2)])])
def test_a_stage_that_dies_is_replaced_while_its_neighbours_wait(stage, ends):
    lead = training(steps=2)
    *told, note, replace = lead.on(ev.Exited(stage, -9))
    assert told == [ev.Tell(neighbour, Await(cut)) for neighbour, cut in ends]
    said = f"stage {stage} died at step 2: {KILLED}; another process takes its place, and the rest"
    assert replace == ev.Replace([stage]) and texts([note]) == [f"{said} waits"]
    again = [int(cut in (stage - 1, stage)) for cut in range(3)]  # links that are opened anew
    below = {s: f"at-{s - 1}" if s else "" for s in range(4)}
    assert lead.say(stage, ready(stage)) == [
        *(ev.Tell(s, Connect(below[s], again, cut)) for s, cut in ends),
        ev.Tell(stage, Connect(below[stage], again)),
    ]
    assert lead.say(stage, Linked()) == [ev.Tell(stage, Start(4))]
    assert report(lead, 0, stage) == report(lead, 1, stage) == [], "it was heard before"
    back, recorded = report(lead, 2, stage)
    said = f"stage {stage} is back after 0.0 s; no other stage trained a step again"
    assert texts([back]) == [said]
    assert isinstance(recorded, ev.Record) and recorded.report.step == 2
    assert lead.coordinator.phase is Phase.TRAINING


def test_each_step_is_recorded_once_and_meters_add_up():
    """What a lost process had moved was moved; so was what its successor sends beside it."""
    lead, recorded = training(), list[ev.Command]()
    for number in range(4):
        recorded += report(lead, number)
        recorded += lead.say(3, Evaluation(number + 1, 1.0, 0.1))
    lead.on(ev.Exited(3, -9))
    link(lead, 3)
    for number in range(2, 6):  # from a checkpoint of step 2
        recorded += report(lead, number, 3)
        recorded += lead.say(3, Evaluation(number + 1, 1.0, 0.1))
    of_last = [c.report for c in recorded if isinstance(c, ev.Record) and c.stage == 3]
    assert [r.step for r in of_last if isinstance(r, Step)] == [*range(6)]
    assert [r.step for r in of_last if isinstance(r, Evaluation)] == [*range(1, 7)]
    (latest,) = (r for r in of_last if isinstance(r, Step) and r.step == 5)
    assert latest.meters["cut-2"]["sent"] == {"FORWARD": {"frames": 4 + 6, "payload_bytes": 100}}
    (goodbye,) = lead.say(3, Finished(meters(3, 4, frames=7)))
    assert isinstance(goodbye, ev.Record) and isinstance(goodbye.report, Finished)
    assert goodbye.report.meters["cut-2"]["sent"]["FORWARD"]["frames"] == 4 + 7


def test_a_stage_that_dies_without_end_ends_the_run():
    lead = training(steps=1)
    for _ in range(MOST_DEATHS):
        assert replaced(lead.on(ev.Exited(1, -9))) == [[1]]
        link(lead, 1)
    end = lead.ended(lead.on(ev.Exited(1, -9)))
    assert str(end.error) == f"stage 1 died at step 1: {KILLED}"


def test_a_stage_that_is_lost_before_its_last_part_has_arrived_writes_it_again():
    lead = training(steps=2, parts_travel=True)
    parts = [part(s, 2) for s in range(4)]
    for stage in range(4):
        commands = lead.say(stage, parts[stage], Finished(meters(stage, 4)))
    assert texts(commands)[-1].startswith("all stages have stopped; the host waits")
    for stage in range(3):
        assert lead.on(ev.Travelled(stage, 2)) == [], "nobody leaves before"
    assert replaced(lead.on(ev.Lost(0, "gone"), 0) + lead.on(ev.Tick(), 2.0)) == [], (
        "its part is here"
    )
    assert replaced(lead.on(ev.Exited(3, -9))) == [[3]]
    assert lead.on(ev.Travelled(3, 2, "nothing came")) == []
    link(lead, 3)
    lead.say(3, step(3, 0, 4), step(3, 1, 4), parts[3], Finished(meters(3, 4)))
    commit, *_, leave, end = lead.on(ev.Travelled(3, 2))
    assert commit == ev.Commit(2, parts) and leave == ev.Tell(3, Leave()) and end == ev.End()


NO_FAULT: list[list[ev.Event]] = [
    [ev.Exited(1, 3)],
    [ev.Lost(1, "gone")],
    [ev.Said(1, failed("out of memory", "ValueError"))],
    [ev.Said(2, failed("link cut-1 is broken", accuses=(1,)))],
]


@pytest.mark.parametrize("events", NO_FAULT, ids=["exit", "lost", "unforeseen", "accused"])
def test_who_fails_without_a_fault_is_replaced_after_a_moment(events):
    lead = training(steps=1)
    assert [lead.on(event) for event in events] == [[]]
    commands = lead.on(ev.Tick(), SETTLE_SECONDS)
    assert [1] in replaced(commands) and not lead.coordinator.is_over


@pytest.mark.parametrize("event", [
    ev.Lost(1, "odd", in_breach=True),
    ev.Said(1, failed("no such device", "ConfigError")),
    ev.Said(2, failed("odd frame", "BreachError", convicts=(1,))),
])  # fmt: skip
def test_who_is_at_fault_or_would_fail_again_ends_the_run(event):
    lead = training(steps=1)
    lead.on(event)
    assert "stage 1" in str(lead.ended(lead.on(ev.Tick(), SETTLE_SECONDS)).error)


@pytest.mark.parametrize("phase", [Phase.BUILDING, Phase.LINKING])
def test_a_death_before_training_ends_the_run(phase):
    lead = Lead(stages=4, placement=FOUR).until(phase)
    assert KILLED in str(lead.ended(lead.on(ev.Exited(1, -9))).error)


def test_a_wait_for_a_new_process_is_no_stuck_run():
    """Until it speaks no time counts; then the others wait for it, and it works."""
    lead = training(steps=1)
    lead.on(ev.Exited(1, -9))
    for _ in range(500):
        assert lead.on(ev.Tick(), 1.0) == []
    assert "stage 1 is lost, and waits for a peer" in lead.coordinator._watch.doing()
    for begun in range(500):
        for s in range(4):
            assert lead.say(s, Pulse(begun if s == 1 else 7, "builds its layers")) == []
        assert lead.on(ev.Tick(), 1.0) == []


def test_two_neighbours_that_die_are_linked_to_each_other():
    lead = training(steps=1)
    lead.on(ev.Exited(1, -9))
    assert replaced(lead.on(ev.Exited(2, -9))) == [[2]], "the first is not begun anew"
    assert lead.say(2, ready(2)) == [], "the other is not built"
    again = [1, 2, 1]
    assert lead.say(1, ready(1)) == [
        ev.Tell(0, Connect("", again, 0)),
        ev.Tell(3, Connect("at-2", again, 2)),
        ev.Tell(1, Connect("at-0", again)),
        ev.Tell(2, Connect("at-1", again)),
    ]
    assert lead.say(1, Linked()) == []
    assert lead.say(2, Linked()) == [ev.Tell(1, Start(2)), ev.Tell(2, Start(2))]
