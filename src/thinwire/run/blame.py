"""Which stage really ended a run: not always the first that reports a failure."""

import signal
from collections.abc import Sequence

from thinwire.engine.reports import Step
from thinwire.engine.trace import BACKWARD, FORWARD, GRADIENT, INPUT, NORMS
from thinwire.run.events import Exited, Lost, Said, Suspect
from thinwire.run.protocol import Failed

Evidence = Said | Exited | Lost
"""What shows that something is wrong; of what stages say, only that they failed."""


def blame(heard: list[Evidence]) -> Suspect:
    """The stage that really failed first, with the evidence.

    A stage whose link broke accuses the neighbour at its other end. A stage that was
    accused and has said nothing is lost; one that has complained too was a victim, and its exit
    proves nothing. A stage that sent what the contract forbids is convicted by its neighbour,
    whatever it says itself.
    """
    said = [(e.stage, e.message) for e in heard if isinstance(e, Said)]
    complaints = {stage: message for stage, message in said if isinstance(message, Failed)}
    victims = [e for e in heard if isinstance(e, Exited) and e.stage in complaints]
    suspects = [_suspect(event) for event in heard if event not in victims]
    for stage, complaint in complaints.items():
        witness = f"stage {stage} says: {complaint.error}"
        suspects += [_lost(s, witness) for s in complaint.accuses if s not in complaints]
        suspects += [_in_breach(s, witness) for s in complaint.convicts]
    return min(suspects, key=lambda suspect: suspect.doubt)


def first_not_finite(reports: Sequence[Step]) -> str:
    """Where in a step non-finite values first appeared, by the reports of all stages in order.

    They spread upward with the activations, then downward with the gradients, and at last with the
    tallies. A stage that sends them and does not say so is named by the stage that received them.
    """
    seen = [(report.not_finite, stage) for stage, report in enumerate(reports) if report.not_finite]
    if not seen:
        return ""
    place, stage = min(seen, key=lambda sighting: _moment(*sighting))
    where = {
        INPUT: f"the activations that stage {stage - 1} sent",
        FORWARD: "its own forward pass",
        GRADIENT: f"the gradient that stage {stage + 1} sent",
        BACKWARD: "its own backward pass",
        NORMS: f"the gradient norms that stage {stage + 1} sent",
    }
    return f"non-finite values first appeared in stage {stage}, in {where[place]}"


def _moment(place: str, stage: int) -> tuple[int, int, bool]:
    if place in (INPUT, FORWARD):
        return 0, stage, place == FORWARD
    return (2 if place == NORMS else 1), -stage, place == BACKWARD


def _suspect(event: Evidence) -> Suspect:
    match event:
        case Lost(stage, error, in_breach):
            return _in_breach(stage, error) if in_breach else _lost(stage, error)
        case Exited(stage, code):
            reason = f"killed by {_signal_name(-code)}" if code < 0 else f"exit code {code}"
            return Suspect(1 if code else 6, stage, "died", reason)
        case Said(stage, Failed() as said):
            by_itself = said.kind not in ("WireError", "BreachError")
            doubt = 2 if by_itself else 5 if said.accuses else 4
            return Suspect(doubt, stage, "failed", said.error, said.known)
    raise AssertionError(f"{event} is no evidence")


def _in_breach(stage: int, error: str) -> Suspect:
    return Suspect(0, stage, "broke the contract", error, known=True)


def _lost(stage: int, error: str) -> Suspect:
    return Suspect(3, stage, "was lost", error)


def _signal_name(number: int) -> str:
    """Not every signal has a name, and on another machine it is what a peer says."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
