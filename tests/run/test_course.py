"""When checkpoints are saved and a run ends: the first stage cannot decide that otherwise."""

from dataclasses import replace

import pytest
from leading import METERS, Lead, part, step

from thinwire.run.conduct import Course
from thinwire.run.coordinator import Phase
from thinwire.run.events import Commit, End, StopAsked
from thinwire.run.protocol import Finished

END = Finished(METERS)
ENDS = [(1, END), (0, END)]


@pytest.fixture
def lead(make_settings):
    """A run that goes on from step 2 to step 6, with a checkpoint after every second step."""
    settings = make_settings(train__steps=6, train__checkpoint_every=2)
    return Lead(course=Course(settings, 2, 2)).until(Phase.TRAINING)


def both(*numbers):
    return [(stage, step(stage, number)) for number in numbers for stage in (1, 0)]


def saved(number):
    return [(stage, part(stage, number)) for stage in (1, 0)]


@pytest.mark.parametrize(("script", "culprit", "deed"), [
    (both(2) + ENDS, 0, "it ended the run after step 3 of 6, and nobody had"),
    (both(2) + saved(3), 0, "it had a checkpoint saved after step 3, where none is due"),
    (both(2, 3, 4), 0, "it had no checkpoint saved after step 4, where one is due"),
    (both(2, 3) + ENDS, 0, "it ended the run after step 4 of 6"),
    (both(2, 3) + saved(4) + both(4, 5) + [(0, END)], 0, "it had no checkpoint saved after"),
    (both(1), 1, "it reported step 2 after step 2 of 6"),
    (both(2, 3) + saved(4) + both(4, 5) + saved(6) + both(6), 1, "it reported step 7 after"),
    ([*both(2, 3), (0, part(0, 4)), *both(4)], 1, "stage 0 saved a checkpoint after step 4"),
    ([*both(2), (1, part(1, 3)), *both(3)], 1, "it saved a checkpoint after step 3, and st"),
    ([*both(2), (1, END), (0, step(0, 3))], 1, "it ended after step 3, and stage 0 did not"),
    (saved(2), 1, "it saved a checkpoint of step 2 after step 2"),
])  # fmt: skip
def test_whoever_saves_or_ends_when_it_is_not_due_is_named(lead, script, culprit, deed):
    """The others follow the first stage, and what they say may be heard before what it says."""
    commands = lead.play(script)
    assert not [c for c in commands if isinstance(c, Commit) and c.step % 2], "that is not kept"
    end = lead.settled()
    assert end.culprit is not None and end.culprit.stage == culprit
    assert f"stage {culprit} broke the contract" in str(end.error) and deed in str(end.error)


@pytest.mark.parametrize(
    ("is_asked", "script", "kept"),
    [(False, both(3) + saved(4) + both(4, 5) + saved(6), [4, 6]), (True, saved(3), [3])],
)
def test_a_run_to_its_last_step_is_in_order_and_so_is_one_that_is_asked_to_stop_and_saves(
    lead, is_asked, script, kept
):
    commands = lead.play(both(2))
    if is_asked:
        lead.on(StopAsked())
    commands += lead.play(script + ENDS)
    assert [c.step for c in commands if isinstance(c, Commit)] == kept
    assert lead.ended(commands) == End()


def test_whoever_is_asked_to_stop_and_does_not_save_is_named(lead):
    lead.on(StopAsked())
    lead.play(both(2) + ENDS)
    assert "stage 0 broke the contract" in str(lead.settled().error)


def test_steps_that_nobody_commits_end_a_run_without_a_checkpoint(make_settings):
    settings = make_settings(train__steps=9, train__checkpoint_every=2)
    lead = Lead(course=Course(settings, 0, 2)).until(Phase.TRAINING)
    steps = ((stage, replace(report, committed=False)) for stage, report in both(*range(5)))
    assert lead.ended(lead.play([*steps, *ENDS])) == End()
