"""What a machine does about a seat before its process starts: it has what it needs, or says why."""

import queue
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from thinwire.remote.holding import Holding, Terms
from thinwire.remote.member import Member
from thinwire.remote.messages import TakeSeat

from thinwire.data import Tokenizer, prepare
from thinwire.errors import DataError, StageError, WireError, outward
from thinwire.remote import holding
from thinwire.run.peer import Peer
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

    def fetch(pipe: None, stage: int, folder: Path, *others: Any) -> Path:
        attempts.append(now[0])
        now[0] += 0.9 * holding.FETCH_SECONDS
        if len(attempts) <= 4:
            others[-1](len(attempts), 10)
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


def test_whatever_goes_wrong_with_a_seat_is_answered_and_says_nothing_of_a_file() -> None:
    def prepare(*_: object) -> None:
        raise UnicodeDecodeError("utf-8", b"secret", 0, 1, "a secret line")

    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    Member._prepare(
        SimpleNamespace(_events=events),  # type: ignore[arg-type]
        SimpleNamespace(stage=0, epoch=1, prepare=prepare),  # type: ignore[arg-type]
    )
    error = events.get_nowait().error
    assert isinstance(error, StageError)
    assert str(error) == "an unexpected UnicodeDecodeError, which its terminal explains"


@pytest.mark.parametrize("key", ["template", "tokenizer", "valid_path"])
def test_a_path_of_the_host_is_not_opened_here(
    key: str, tmp_path: Path, make_settings: Callable
) -> None:
    """A file that exists and one that does not give the same answer, which holds nothing of it."""
    secret = tmp_path / "secret.jsonl"
    secret.write_text('{% hunter2 %} {"text": ')
    chat = tmp_path / "chat.jsonl"
    chat.write_text('{"messages": [{"role": "user", "content": "a"}]}\n' * 9)
    answers = set()
    for path in (secret, tmp_path / "absent"):
        asked = make_settings(**{"data__source": "chat", f"data__{key}": str(path)})
        held = Holding(TakeSeat(1, 0, asked.to_plain(), False, ""), Terms(data=chat), tmp_path)
        assert held.settings.hash == asked.hash, "neighbours agree on it"
        assert held.settings.data.valid_path == ""
        with pytest.raises(DataError, match="leave out --data") as refused:
            held.prepare(nowhere, lambda *_: None)
        answers |= {str(refused.value), outward(refused.value)}
        assert str(path) not in str(refused.value)
    assert len(answers) == 2 and "hunter2" not in str(answers)


TALK = '{"messages": [{"role": "user", "content": "%d"}, {"role": "assistant", "content": "b"}]}'
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_what_a_peer_names_itself_takes_the_place_of_the_hosts_paths(
    tmp_path: Path, make_settings: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))

    def files_of(machine: str) -> list[Path]:
        folder = tmp_path / machine
        folder.mkdir()
        (folder / "data.jsonl").write_text("\n".join(TALK % n for n in range(99)))
        (folder / "valid.jsonl").write_text("\n".join(TALK % n for n in range(100, 199)))
        Tokenizer.train(["a b c"], 270).save(folder / "tokenizer.json")
        (folder / "own.jinja").write_text(TEMPLATE)
        names = "data.jsonl", "valid.jsonl", "tokenizer.json", "own.jinja"
        return [folder / name for name in names]

    data, valid, tokenizer, template = hosts = files_of("host")
    asked = make_settings(
        data__source="chat", data__path=str(data), data__valid_path=str(valid), model__vocab=300,
        data__tokenizer=str(tokenizer), data__template=str(template), train__init_from="/etc",
    )  # fmt: skip
    seen = prepare(asked.data, 300, tmp_path / "host" / "cache").fingerprint
    for path in hosts:
        path.unlink()
    seat = TakeSeat(1, 0, asked.to_plain(), False, seen)
    held = Holding(seat, Terms("cpu", 1, (), *files_of("peer")), tmp_path)
    held.prepare(nowhere, lambda *_: None)
    assert held.has_corpus and held.settings.hash == asked.hash
    assert held.settings.train.init_from != "/etc"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (DataError("/home/ana/notes, line 7: hunter2"), "it says why there"),
        (ValueError("hunter2 is no number"), "ValueError"),
        (FileNotFoundError(2, "no such file", "hunter2"), "FileNotFoundError"),
        (RuntimeError("out of memory"), "RuntimeError: out of memory"),
        (WireError("the neighbour has left"), "the neighbour has left"),
    ],
)
def test_what_a_stage_says_of_its_end_quotes_no_file_of_its_machine(
    error: Exception, told: str
) -> None:
    said: list[Any] = []
    control = SimpleNamespace(send=said.append, close=lambda: None)
    peer = SimpleNamespace(order=SimpleNamespace(epoch=1), _links={}, control=control)
    Peer.fail(peer, error)  # type: ignore[arg-type]
    assert told in said[0].error and "hunter2" not in str(said[0]) and said[0].trace == ""
    peer.order.epoch = 0  # on the machine of its coordinator
    Peer.fail(peer, error)  # type: ignore[arg-type]
    assert str(error) in said[1].error


def test_the_host_hears_of_data_that_does_not_fit_but_not_what_is_in_it() -> None:
    noted: list[str] = []
    said: list[Any] = []
    display = SimpleNamespace(note=noted.append)
    member = SimpleNamespace(_display=display, _say=said.append, _give_up_seat=lambda: None)
    Member._decline(member, 1, DataError("notes, line 7: hunter2"))  # type: ignore[arg-type]
    assert "hunter2" in noted[0] and "hunter2" not in said[0].reason


@pytest.mark.parametrize(
    ("left", "step", "stays"), [(True, 3, False), (False, 9, False), (False, 3, True)]
)
def test_a_peer_that_leaves_for_good_takes_its_part_of_the_run_along(
    left: bool, step: int, stays: bool, tmp_path: Path
) -> None:
    """It left, the run is complete, or the host ended and may come back."""
    fetched = tmp_path / "run" / "checkpoints" / "step-00000003" / "stage-0.safetensors"
    for path in (fetched, tmp_path / "identity.json"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    noted: list[str] = []
    member = SimpleNamespace(
        _place=SimpleNamespace(folder=tmp_path),
        _display=SimpleNamespace(note=noted.append),
        _is_leaving=left,
        news=SimpleNamespace(step=step, steps=9),
    )
    Member._clean_up(member)  # type: ignore[arg-type]
    assert fetched.exists() == stays == bool(noted) and (tmp_path / "identity.json").exists()
