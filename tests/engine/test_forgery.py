"""A stage that passes on what others say cannot change it, where they sign it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from thinwire.engine.port import Port
from thinwire.engine.rows import FROM_ABOVE
from thinwire.engine.step_end import Verdict
from thinwire.engine.worker import Worker
from thinwire.errors import WireError
from thinwire.run.blame import blame
from thinwire.run.events import Said
from thinwire.run.protocol import Failed
from thinwire.wire import Authority, FrameKind, Identity, KeySeal
from thinwire.wire.seal import SIGNATURE_BYTES

NAMES = ["anna", "ben", "carla"]
FORGER = 1


@pytest.fixture(scope="module")
def identities() -> list[Identity]:
    authority = Authority.create("test")
    return [authority.issue(name) for name in NAMES]


def seal_of(stage: int, identities: list[Identity]) -> KeySeal:
    pems = [identity.certificate_pem for identity in identities]
    return KeySeal.of_seats(identities[stage], stage, 1, NAMES, pems)


def other_norm(content: bytes) -> bytes:
    """Stage 2 would clip its gradients as no other stage does."""
    told = Verdict.from_bytes(content)
    return Verdict(told.grad_norm * 50, told.commit, told.checkpoint, told.stop).to_bytes()


def large_norms(content: bytes) -> bytes:
    """All stages would clip their gradients to next to nothing."""
    return (np.frombuffer(content, "<f8") * 1e6).tobytes()


def turned_basis(content: bytes) -> bytes:
    """Stage 0 would write in other coordinates than the others read."""
    return (-np.frombuffer(content, "<f8")).tobytes()


def turned_rows(content: bytes) -> bytes:
    """Stage 2 would have another embedding than the others."""
    return (-np.frombuffer(content, "<f8")).tobytes()


def early_stop(content: bytes) -> bytes:
    return Verdict(0.0, commit=False, checkpoint=False, stop=True).to_bytes()


def forge(worker: Worker, forged: FrameKind, change: Callable[[bytes], bytes]) -> None:
    """Have a stage change one kind of message, as well as it can, wherever it passes one on."""
    make_port = worker._port

    def forging_port(*arguments: Any) -> Port | None:
        port = make_port(*arguments)
        if port is None:
            return None
        send = port.send_message

        def send_forged(kind: FrameKind, step: int, payload: bytes, number: int = 0) -> None:
            # Gradients of rows are its own to add to; only what it passes on is a forgery.
            is_own = kind is FrameKind.ROWS and number % 2 == FROM_ABOVE
            if kind is forged and step == 1 and not is_own:
                payload = forgery(worker, kind, payload, number, change)
            send(kind, step, payload, number)

        port.send_message = send_forged  # type: ignore[method-assign]
        return port

    worker._port = forging_port  # type: ignore[method-assign]


def forgery(
    worker: Worker, kind: FrameKind, payload: bytes, number: int, change: Callable[[bytes], bytes]
) -> bytes:
    """A changed message; the forger has no key but its own, and keeps its own part of a tally."""
    if not isinstance(worker.seal, KeySeal):
        return change(payload)
    own = 0
    if kind is FrameKind.TALLY:
        own = 4 + int.from_bytes(payload[:4], "little") + SIGNATURE_BYTES
    content = change(payload[own + 4 : -SIGNATURE_BYTES])
    return payload[:own] + worker.seal.sign(kind, 1, content, number)


KINDS = [
    (FrameKind.VERDICT, other_norm, 2, "stage 0 has not signed this"),
    (FrameKind.TALLY, large_norms, 0, "stage 2 has not signed this"),
    (FrameKind.BASIS, turned_basis, 0, "stage 2 has not signed this"),
    (FrameKind.ROWS, turned_rows, 2, "stage 0 has not signed this"),
]
MOVING = {"boundary__mode": "subspace", "boundary__rank": 6, "boundary__basis_update_every": 2}
SHARING = {
    "boundary__mode": "subspace",
    "boundary__rank": 6,
    "boundary__anchor": "embedding",
    "boundary__row_tokens": 1,
    "codec__rows": "fp64",
}


@pytest.fixture
def run_with_forger(
    make_settings: Callable, run_in_threads: Callable, identities: list[Identity]
) -> Callable[..., tuple[Any, list[Worker]]]:
    """Three stages whose basis moves after step 2, or that share the embedding; the middle one may
    forge, all may sign.
    """

    def run(sealed: bool, *forgery: Any, **changes: Any) -> tuple[Any, list[Worker]]:
        workers: list[Worker] = []

        def prepare(worker: Worker) -> None:
            workers.append(worker)
            if sealed:
                worker.seal = seal_of(worker.index, identities)
            if forgery and worker.index == FORGER:
                forge(worker, *forgery)

        mode = SHARING if FrameKind.ROWS in forgery else MOVING
        settings = make_settings(pipeline__stages=3, train__steps=3, **(mode | changes))
        try:
            return run_in_threads(settings, prepare_worker=prepare), workers
        except WireError as error:
            return error, workers

    return run


@pytest.mark.parametrize("kind, change, victim, words", KINDS, ids=lambda v: getattr(v, "name", ""))
def test_without_signatures_a_middle_stage_forges_unnoticed(
    kind: FrameKind,
    change: Callable[[bytes], bytes],
    victim: int,
    words: str,
    run_with_forger: Callable,
) -> None:
    honest, _ = run_with_forger(False, kind, lambda content: content)
    forged, _ = run_with_forger(False, kind, change)
    assert [report.committed for report in forged.steps(0)] == [True] * 3
    ours, theirs = honest.weights(), forged.weights()
    assert not all(torch.equal(weight, theirs[name]) for name, weight in ours.items())


@pytest.mark.parametrize(
    "kind, change, victim, words",
    [*KINDS, (FrameKind.VALIDATED, early_stop, 2, "stage 0 has not signed this")],
    ids=lambda v: getattr(v, "name", ""),
)
def test_a_forged_message_ends_the_run_in_the_name_of_the_forger(
    kind: FrameKind,
    change: Callable[[bytes], bytes],
    victim: int,
    words: str,
    run_with_forger: Callable,
) -> None:
    changes = {"train__eval_every": 1} if kind is FrameKind.VALIDATED else {}
    error, workers = run_with_forger(True, kind, change, **changes)
    assert isinstance(error, WireError)
    convicted = [
        (worker.index, port.link)
        for worker in workers
        for port in worker._ports
        if port.link.other_end_at_fault
    ]
    assert [(stage, link.name) for stage, link in convicted] == [(victim, f"cut-{victim // 2}")]
    reason = str(convicted[0][1]._failure)
    assert f"{kind.name} of step 1" in reason and words in reason
    complaint = Failed("BreachError", True, reason, "", accuses=[], convicts=[FORGER])
    assert blame([Said(victim, complaint)]).stage == FORGER


def test_signatures_change_no_weight(run_with_forger: Callable) -> None:
    plain, _ = run_with_forger(False)
    signed, _ = run_with_forger(True)
    ours, theirs = plain.weights(), signed.weights()
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())
    assert plain.losses() == signed.losses()
