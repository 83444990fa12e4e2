"""The coordinator, driven by plain events: each phase, each failure, each request to stop."""

import pytest
from leading import METERS, Lead, failed, part, step

from thinwire.engine.reports import Evaluation
from thinwire.errors import StageError
from thinwire.run import events as ev
from thinwire.run import protocol as msg
from thinwire.run.coordinator import MOST_AHEAD, Phase
from thinwire.run.signals import Interrupted
from thinwire.run.watch import TOLD_A_MINUTE


def test_a_run_from_its_layers_to_the_last_goodbye():
    lead = Lead()
    ready = [msg.Ready("at-0", "0..1", "cpu", {"torch": "2"}), msg.Ready("", "2..3", "cpu")]
    assert lead.say(0, ready[0]) == [ev.Starting(1, "stages have their layers")]
    connect = ev.Tell(0, msg.Connect("", [0])), ev.Tell(1, msg.Connect("at-0", [0]))
    assert lead.say(1, ready[1]) == [ev.Starting(2, "stages have their layers"), *connect]
    start = ev.Tell(0, msg.Start()), ev.Tell(1, msg.Start())
    assert lead.all_say(msg.Linked()) == [*start, ev.Begin(ready)]
    goodbye, scored = msg.Finished(METERS), Evaluation(0, 2.0, 0.1)
    for stage, report in [(1, scored), (0, step(0, 0)), (1, step(1, 0)), (0, goodbye)]:
        assert lead.say(stage, report) == [ev.Record(stage, report)]
    leave = ev.Tell(0, msg.Leave()), ev.Tell(1, msg.Leave())
    assert lead.say(1, goodbye) == [ev.Record(1, goodbye), *leave, ev.End()]
    assert lead.coordinator.is_over and not lead.coordinator.stop_asked


def test_before_the_first_step_nobody_can_say_that_the_run_stops():
    lead = Lead().until(Phase.LINKING)
    told = lead.say(0, msg.Linked()) + lead.say(1, msg.Linked(decided=9, stops=True))
    assert told[:2] == [ev.Tell(0, msg.Start()), ev.Tell(1, msg.Start())]


def test_a_link_that_breaks_again_and_again_does_not_bury_the_rest():
    lead = Lead().until(Phase.TRAINING)
    told = []
    for _ in range(100):
        told += lead.say(1, msg.LinkDown(0, "it broke"), msg.LinkUp(0, 0.1))
    notes = [command.text for command in told if isinstance(command, ev.Say)]
    assert len(notes) == 2 * TOLD_A_MINUTE and "it breaks often" in notes[-1]
    assert sum(isinstance(command, ev.Record) for command in told) == 100, "all are counted"
    lead.on(ev.Tick(), after=61.0)
    assert len(lead.say(1, msg.LinkDown(0, "it broke"))) == 1


def test_reports_that_run_ahead_without_end_are_refused():
    lead = Lead().until(Phase.TRAINING)
    for number in range(MOST_AHEAD):
        lead.say(1, step(1, number))
    assert lead.coordinator.phase is Phase.TRAINING
    lead.say(0, step(0, 0))
    lead.say(1, step(1, MOST_AHEAD), step(1, MOST_AHEAD + 1))
    end = lead.settled()
    assert end.culprit is not None and end.culprit.stage == 1
    assert f"reported {MOST_AHEAD + 2} steps, but stage 0 only 1" in str(end.error)


@pytest.mark.parametrize("phase", [Phase.LINKING, Phase.TRAINING, Phase.STOPPING])
def test_an_outage_is_told_and_recorded_and_is_no_failure(phase):
    lead = Lead().until(phase)
    link, stream = "the link between stages 0 and 1", "the control stream of stage 1"
    (away,) = lead.on(ev.Away(1, "the connection was lost"))
    assert away == ev.Say(f"{stream} is down: the connection was lost; it may come back")
    assert lead.on(ev.Back(1, 2.5)) == [ev.Say(f"{stream} is back after 2.5 s; nothing was lost")]
    (down,) = lead.say(1, msg.LinkDown(0, "it rains"))
    assert down == ev.Say(f"{link} is down: it rains; connecting again")
    back, *kept = lead.say(1, msg.LinkUp(0, 2.5))
    assert back == ev.Say(f"{link} is back after 2.5 s; nothing was lost")
    assert kept == ([] if phase is Phase.LINKING else [ev.Record(1, msg.LinkUp(0, 2.5))])
    assert lead.coordinator.phase is phase
    lead.say(0, msg.LinkDown(0, "it is not its to tell"))
    error = lead.settled().error
    assert "stage 0 broke the contract" in str(error) and "of cut 0" in str(error)


def test_a_request_to_stop_leaves_at_once_before_training_and_else_when_it_is_repeated():
    for phase in (Phase.BUILDING, Phase.LINKING):
        lead = Lead().until(phase)
        assert isinstance(lead.ended(lead.on(ev.StopAsked())).error, Interrupted)
    lead = Lead().until(Phase.TRAINING)
    first, second, told, note = lead.on(ev.StopAsked())
    assert (first, second) == (ev.Tell(0, msg.Stop()), ev.Tell(1, msg.Stop()))
    assert told == ev.Say("stopping after this step, with a checkpoint")
    assert note == ev.Say("press Ctrl-C again to exit now", for_us=True), "not for peers"
    assert lead.coordinator.phase is Phase.STOPPING and lead.coordinator.stop_asked
    assert lead.say(0, step(0, 0)) == [ev.Record(0, step(0, 0))], "the step under way is finished"
    assert isinstance(lead.ended(lead.on(ev.StopAsked())).error, Interrupted)


def test_who_leaves_is_named_to_all_no_key_is_to_be_pressed_and_the_run_ends_in_good_order():
    lead = Lead().until(Phase.TRAINING)
    *_, told = commands = lead.on(ev.StopAsked("ben leaves"))
    assert told == ev.Say("ben leaves: the run stops after this step, with a checkpoint")
    assert len([command for command in commands if isinstance(command, ev.Say)]) == 1
    assert lead.ended(lead.all_say(msg.Finished(METERS))) == ev.End()


def test_a_late_request_to_stop_disturbs_nothing():
    """Stage 0 has said goodbye, later stages still drain: their checkpoint must survive."""
    lead = Lead().until(Phase.TRAINING)
    lead.say(0, part(0, 4), msg.Finished(METERS))
    assert lead.on(ev.StopAsked()) == []
    assert lead.say(1, part(1, 4)) == [ev.Commit(4, [part(0, 4), part(1, 4)])]
    assert lead.say(1, msg.Finished(METERS))[-1] == ev.End()


def test_a_request_to_stop_while_a_cause_is_sought_ends_nothing_sooner_unless_repeated():
    lead = Lead().until(Phase.TRAINING)
    lead.on(ev.Exited(1, -9))
    lead.on(ev.StopAsked())
    assert "killed by SIGKILL" in str(lead.settled().error)
    lead = Lead().until(Phase.STOPPING)
    lead.on(ev.Exited(1, -9))
    assert isinstance(lead.ended(lead.on(ev.StopAsked())).error, Interrupted)


def found(end):
    """Who was blamed, and whether its error was known."""
    assert isinstance(end.culprit, ev.Suspect)
    return end.culprit.stage, end.culprit.known


LOST = ev.Lost(1, "link control of stage 1 is broken")
BREACH = ev.Lost(1, "a 'step' message has no field 'loss'", in_breach=True)


@pytest.mark.parametrize("phase", [Phase.BUILDING, Phase.LINKING, Phase.TRAINING, Phase.STOPPING])
@pytest.mark.parametrize(
    ("event", "words", "culprit"),
    [
        (ev.Exited(1, -9), "stage 1 died at the start: killed by SIGKILL", (1, False)),
        (ev.Exited(1, 3), "stage 1 died at the start: exit code 3", (1, False)),
        (LOST, f"stage 1 was lost at the start: {LOST.error}", (1, False)),
        (BREACH, f"stage 1 broke the contract at the start: {BREACH.error}", (1, True)),
        (ev.Said(1, failed("no such device", "ConfigError")),
         "stage 1 failed at the start: no such device", (1, True)),
        (ev.Said(1, failed("odd", "ValueError")),
         "stage 1 failed at the start: odd", (1, False)),
        (ev.Said(1, failed("link cut-0 is broken", accuses=(0,))),
         "stage 0 was lost at the start: stage 1 says: link cut-0 is broken", (0, False)),
        (ev.Said(1, failed("odd frame", "BreachError", convicts=(0,))),
         "stage 0 broke the contract at the start: stage 1 says: odd frame", (0, True)),
    ],
)  # fmt: skip
def test_every_failure_ends_every_phase_with_the_stage_and_the_reason(event, words, culprit, phase):
    lead = Lead().until(phase)
    assert lead.on(event) == [], "a moment is left for a surer sign"
    end = lead.settled()
    assert isinstance(end.error, StageError) and str(end.error) == words
    assert found(end) == culprit


def test_nobody_is_blamed_for_leaving_after_the_goodbye():
    lead = Lead().until(Phase.TRAINING)
    lead.say(0, msg.Finished(METERS))
    assert lead.on(ev.Lost(0, "gone")) == [] == lead.on(ev.Exited(0, 0))
    assert lead.coordinator.phase is Phase.TRAINING
    lead.on(ev.Exited(1, 1))
    assert "stage 1 died" in str(lead.settled().error)


def test_last_words_may_be_heard_after_the_end_of_a_process():
    """They wait their turn where many are unheard; the end of a process does not."""
    lead = Lead().until(Phase.TRAINING)
    lead.say(0, msg.Finished(METERS))
    assert lead.on(ev.Exited(1, 0)) == []
    assert lead.say(1, step(1, 0)) == [ev.Record(1, step(1, 0))]
    assert lead.say(1, msg.Finished(METERS))[-1] == ev.End()
    lead = Lead().until(Phase.TRAINING)
    assert lead.on(ev.Exited(1, 0)) == []
    assert lead.on(ev.Tick(), 1.0) == [], "nothing is left to be heard"
    assert str(lead.settled().error) == "stage 1 died at the start: exit code 0"


@pytest.mark.parametrize(("phase", "said"), [
    (Phase.BUILDING, [step(1, 0)]), (Phase.BUILDING, [msg.Linked()]),
    (Phase.BUILDING, [msg.Ready("", "", "cpu"), msg.Ready("", "", "cpu")]),
    (Phase.LINKING, [msg.Linked(), step(1, 0)]), (Phase.TRAINING, [msg.Leaving()]),
    (Phase.TRAINING, [msg.Linked()]),
    (Phase.TRAINING, [msg.Finished(METERS), step(1, 0)]),
])  # fmt: skip
def test_a_message_that_is_not_due_is_its_sender_s_error(phase, said):
    lead = Lead().until(phase)
    lead.say(1, *said)
    end = lead.settled()
    assert str(end.error).startswith("stage 1 broke the contract at the start: stage 1 sent a ")
    assert f"while the run {phase.value}" in str(end.error)
    assert found(end) == (1, True)


@pytest.mark.parametrize("phase", [Phase.BUILDING, Phase.LINKING, Phase.TRAINING, Phase.STOPPING])
def test_a_stage_that_falls_silent_is_told_of_and_ends_every_phase(phase):
    lead = Lead(patience=100.0).until(phase)
    commands = []
    for _ in range(101):
        commands += lead.say(0, msg.Pulse(1, "waits for the others")) + lead.on(ev.Tick(), 1.0)
    told = [command.text.split(":")[0] for command in commands if isinstance(command, ev.Say)]
    assert told[:2] == ["no progress for 30 s", "no progress for 60 s"]
    end = lead.ended(commands)
    assert str(end.error).startswith("stage 1 is stuck: no progress for 100 s")
    assert found(end) == (1, True)


def test_it_is_known_who_is_waited_for():
    lead = Lead()
    lead.say(0, msg.Ready("", "", "cpu"))
    assert lead.coordinator.waiting_for() == [1]
    lead = Lead().until(Phase.TRAINING)
    lead.say(0, msg.Finished(METERS))
    assert lead.coordinator.waiting_for() == [1]


def test_a_coordinator_that_was_suspended_blames_nobody_for_it():
    lead = Lead(patience=100.0).until(Phase.TRAINING)
    assert lead.on(ev.Tick(), 36_000.0) == []
    assert lead.say(0, step(0, 0)) == [ev.Record(0, step(0, 0))]
