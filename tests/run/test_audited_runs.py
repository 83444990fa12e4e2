"""Audits as the coordinator leads them; and machines of a hosted run, of which one lies."""

from pathlib import Path

import pytest
from leading import Lead, ready
from test_hosted_recovery import SAVED, Hosted
from test_replacement import FOUR, report, texts

from thinwire.engine.audit import DRIFTED
from thinwire.engine.reports import Audited
from thinwire.run import events as ev
from thinwire.run.coordinator import Phase
from thinwire.run.protocol import Linked, Ready, Start

LYING = str(Path(__file__).parents[2] / "lab/src/thinwire_lab/lying")
EQUAL, LIE = Audited(9, 40, 0.0, 0.0), Audited(9, 40, 0.05, 0.0, "gradient", 2)


def audited(replaces=False, follower=None):
    """A run in which a process follows stage 1, and audits it."""
    lead = Lead(stages=4, placement=FOUR, audits=True, audit_replaces=replaces)
    lead.until(Phase.TRAINING)
    report(lead, 0)
    lead.on(ev.Said(1, follower or ready(1), follows=True))
    return lead, lead.on(ev.Said(1, Linked(), follows=True))


@pytest.mark.parametrize("differs", ["nothing", "torch", "processor", "device"])
def test_equal_bits_are_expected_of_machines_of_one_kind_alone(differs):
    versions = {"torch": "2", **({} if differs in ("nothing", "device") else {differs: "another"})}
    follower = Ready("at-1", "", "cuda" if differs == "device" else "cpu", versions)
    _, (start, note) = audited(follower=follower)
    is_alike = differs == "nothing"
    assert start == ev.Tell(1, Start(is_alike=is_alike), follows=True)
    expected = "equal bits" if is_alike else "another kind of machine, small differences"
    follows = "stage 1 has a stand-by, which follows it and compares what it sends"
    assert texts([note]) == [f"{follows}; expected: {expected}"]


def test_what_agrees_is_no_news_and_a_difference_is():
    lead, _ = audited()
    assert lead.on(ev.Said(1, EQUAL, follows=True)) == []
    assert lead.on(ev.Said(1, LIE, follows=True)) == [ev.Doubt(1, LIE, replaces=False)]
    assert lead.on(ev.Said(1, LIE, follows=True)) == [], "once is enough"
    assert ev.Replace([1], by_follower=True) in lead.on(ev.Exited(1, -9)), "it still stands by"


def test_who_is_found_to_lie_is_replaced_at_once_if_that_is_wished_and_who_said_so_follows_it():
    lead, _ = audited(replaces=True)
    assert lead.on(ev.Said(2, LIE, follows=True)) == [], "it follows no stage"
    doubt, *rest = lead.on(ev.Said(1, LIE, follows=True))
    assert doubt == ev.Doubt(1, LIE, replaces=True)
    assert ev.Replace([1], by_follower=True) in rest and ev.Replace([1]) not in rest
    assert any("for it sent other values" in c.text for c in rest if isinstance(c, ev.Say))
    assert lead.on(ev.Said(1, LIE, follows=True)) == [], "it follows no more"
    lead, _ = audited(replaces=True)
    lead.on(ev.Exited(3, -9))
    assert lead.on(ev.Said(1, LIE, follows=True)) == [], "others are being replaced"


def test_one_that_has_drifted_away_begins_anew():
    lead, _ = audited()
    close, far = Audited(9, 40, 0.9 * DRIFTED, 0.04), Audited(19, 80, 1.1 * DRIFTED, 0.04)
    assert lead.on(ev.Said(1, close, follows=True)) == []
    assert lead.on(ev.Said(1, far, follows=True)) == [ev.DropFollower([1])]
    assert ev.Replace([1]) in lead.on(ev.Exited(1, -9))


def test_a_machine_that_scales_what_it_sends_is_named_and_replaced(machines):
    begins = machines.folder / "from"
    liar = {"PYTHONPATH": LYING, "THINWIRE_LIE": "scale", "THINWIRE_LIE_FROM": str(begins)}
    hosted = Hosted(machines, pipeline__stages=2, train__audit=True, train__audit_replaces=True)
    hosted.join("ana")
    hosted.join("ben", liar)
    host = hosted.host
    host.wait_for(SAVED)
    stage = hosted.seats.index("ben")
    hosted.join("dan")
    host.wait_for(rf"stage {stage} has a stand-by, which follows it and compares .*equal bits")
    begins.write_text("0")
    host.wait_for(rf"\[audit\] +ben sent something else for stage {stage} than dan")
    host.wait_for(rf"\[form\] +stage {stage}: dan, which stood by")
    hosted.goes_on(stage)
    stages, state = hosted.held()["ben"]
    assert not stages and "dan computed other values than it sent" in state
