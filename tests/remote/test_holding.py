"""What a machine does about a seat before its process starts: it has what it needs, or says why."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from thinwire.errors import WireError
from thinwire.remote import holding
from thinwire.remote.holding import Holding, Terms
from thinwire.remote.messages import TakeSeat
from thinwire.wire import Pipe


def nowhere() -> Pipe:
    raise AssertionError("nothing is to be fetched")


def test_text_is_not_needed_here(tmp_path: Path, make_settings: Callable) -> None:
    seat = TakeSeat(1, 0, make_settings().to_plain(), False, "abc")
    held = Holding(seat, Terms(), tmp_path)
    held.prepare(nowhere, lambda *_: None)
    assert not held.has_corpus


def test_a_fetch_is_given_up_when_nothing_has_come_for_long(
    tmp_path: Path, make_settings: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it takes in all: each attempt that brings something renews its time."""
    now, attempts = [0.0], []

    def fetch(pipe: None, stage: int, folder: Path, plugins: tuple, tell: Callable) -> Path:
        attempts.append(now[0])
        now[0] += 0.9 * holding.FETCH_SECONDS
        if len(attempts) <= 4:
            tell(len(attempts), 10)
        raise WireError("the connection was lost")

    def wait(seconds: float) -> None:
        now[0] += seconds

    class Clock:
        monotonic, sleep = staticmethod(lambda: now[0]), staticmethod(wait)

    monkeypatch.setattr(holding, "fetch_seat", fetch)
    monkeypatch.setattr(holding, "time", Clock)
    said: list[Any] = []
    seat = TakeSeat(1, 0, make_settings().to_plain(), True, "abc")
    with pytest.raises(WireError, match="lost"):
        Holding(seat, Terms(), tmp_path).prepare(lambda: None, lambda *what: said.append(what))
    assert said == [("fetch", n, 10) for n in (1, 2, 3, 4)]
    assert len(attempts) == 4 + 2
