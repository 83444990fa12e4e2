"""Audits as the coordinator leads them; and machines of a hosted run, of which one lies."""

from pathlib import Path

import pytest
from leading import Lead
from test_hosted_recovery import SAVED, Hosted
from test_replacement import FOUR, report, texts

from thinwire.run import events as ev
from thinwire.run.coordinator import Phase
from thinwire.run.protocol import Linked, Ready, Start

LYING = str(Path(__file__).parents[2] / "lab/src/thinwire_lab/lying")


@pytest.mark.parametrize("differs", ["nothing", "torch", "processor", "device"])
def test_equal_bits_are_expected_of_machines_of_one_kind_alone(differs):
    versions = {"torch": "2", **({} if differs in ("nothing", "device") else {differs: "another"})}
    follower = Ready("at-1", "", "cuda" if differs == "device" else "cpu", versions)
    lead = Lead(stages=4, placement=FOUR, audits=True).until(Phase.TRAINING)
    report(lead, 0)
    lead.on(ev.Said(1, follower, follows=True))
    start, note = lead.on(ev.Said(1, Linked(), follows=True))
    is_alike = differs == "nothing"
    assert start == ev.Tell(1, Start(is_alike=is_alike), follows=True)
    expected = "equal bits" if is_alike else "another kind of machine, small differences"
    follows = "stage 1 has a stand-by, which follows it and compares what it sends"
    assert texts([note]) == [f"{follows}; expected: {expected}"]


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
