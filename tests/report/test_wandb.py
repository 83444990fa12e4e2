"""Weights & Biases gets what TensorBoard gets, offline here; whatever it does, a run goes on."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from thinwire.report import MetricsWriter, read_metrics
from thinwire.report.metrics import ID_FILE, WandbLog
from waiting import wait_until


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """What a user is told; nothing of this machine's own account is used."""
    for name in ("WANDB_API_KEY", "WANDB_DIR", "WANDB_PROJECT", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    yield []
    if package := sys.modules.get("wandb"):
        package.teardown()  # it remembers the environment of the first use


def open_log(folder: Path, notes: list[str]) -> WandbLog:
    return WandbLog("wires", "first", folder, {"run": {"seed": 7}}, notes.append)


def test_metrics_are_logged_and_a_loss_of_the_log_ends_nothing(
    notes: list[str], tmp_path: Path, make_record: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the real package: it writes its file, then its run is finished under our feet."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    log = open_log(tmp_path, notes)
    with MetricsWriter(tmp_path, wandb=log) as writer:
        writer.step(make_record(1))
        log._run.finish()
        writer.step(make_record(2))
        writer.step(make_record(3))
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    for name in (b"loss/train", b"optim/grad_norm", b"seed"):
        wait_until(lambda name=name: name in file.read_bytes())  # a process of its own writes it
    assert f"run-{(tmp_path / ID_FILE).read_text().strip()}.wandb" == file.name
    (note,) = notes
    assert note.startswith("nothing is logged to Weights & Biases, the run continues: ")
    assert [record.step for record in read_metrics(tmp_path)[0]] == [1, 2, 3]


def test_who_is_not_logged_in_is_told_and_never_asked(
    notes: list[str], tmp_path: Path, make_record: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with MetricsWriter(tmp_path, wandb=open_log(tmp_path, notes)) as writer:
        writer.step(make_record(1))
    (note,) = notes
    assert "run `wandb login`, or set WANDB_MODE=offline" in note
    assert len(read_metrics(tmp_path)[0]) == 1


def test_a_missing_package_is_named_with_its_extra(
    notes: list[str], tmp_path: Path, make_record: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with MetricsWriter(tmp_path, wandb=open_log(tmp_path, notes)) as writer:
        writer.step(make_record(1))
    (note,) = notes
    assert 'run.wandb = "wires" needs wandb' in note and "thinwire[wandb]" in note
    assert len(read_metrics(tmp_path)[0]) == 1
