"""Weights & Biases gets what TensorBoard gets, offline here; whatever it does, a run goes on."""

import contextlib
import json
import math
import resource
import signal
import sys

import pytest

from records import step_record
from thinwire.errors import ConfigError, MissingPackageError
from thinwire.report import EvaluationRecord, MetricsWriter, metrics
from waiting import PATIENCE, wait_until


@contextlib.contextmanager
def limited_to(size):
    """No file of this process may grow beyond so many bytes: a write is cut short, then fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def rows(folder):
    """What the file holds: JSON, which has neither NaN nor infinity."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    lines = (folder / metrics.FILE_NAME).read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def steps(folder):
    return [row["step"] for row in rows(folder) if row["kind"] == "step"]


def write_run(folder, last_step, first_step=1, resume_step=0):
    with MetricsWriter(folder, resume_step=resume_step) as writer:
        for step in range(first_step, last_step + 1):
            writer.step(step_record(step))
            if step % 2 == 0:
                writer.evaluation(EvaluationRecord(step, 4.0 + step, 1.5))


@pytest.fixture
def without_tensorboard(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)


def test_what_is_written_is_read(tmp_path, without_tensorboard, monkeypatch):
    """At once, while the run goes on; what is not finite is null on disk and NaN in memory."""
    record = step_record(7, loss=math.nan, stage_count=2)
    with MetricsWriter(tmp_path) as writer:
        writer.step(record)
        writer.evaluation(EvaluationRecord(7, 4.5, 1.25))
        writer.evaluation(EvaluationRecord(8, 4.25))
        size = (tmp_path / metrics.FILE_NAME).stat().st_size
        monkeypatch.setattr(metrics, "_END_BYTES", size - 9)
        assert metrics.last_step(tmp_path) is None, "only the end of a long file is read"
        writer.step(record)
        last = metrics.last_step(tmp_path)
        assert last is not None and (last.loss, last.step, last.steps) == (None, 7, record.steps)
        evaluations = [EvaluationRecord(7, 4.5, 1.25), EvaluationRecord(8, 4.25, None)]
        assert metrics.Curves.read(tmp_path).valid == evaluations
        assert rows(tmp_path)[0]["loss"] is None
    curves = metrics.Curves.read(tmp_path)
    points = curves.points()
    assert points["step"] == [7] and math.isnan(points["loss"][0])


def test_a_torn_line_is_left_out_and_so_is_one_of_something_else(tmp_path, without_tensorboard):
    write_run(tmp_path, 3)
    path = tmp_path / metrics.FILE_NAME
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], '{"kind": "st' + lines[1], *lines[2:], ""]))
    assert metrics.Curves.read(tmp_path).points()["step"] == [1, 3]
    MetricsWriter(tmp_path, resume_step=1).close()
    assert steps(tmp_path) == [1]
    low, bad = (f'{{"kind": "{kind}", "step": 1, "loss": "low"}}' for kind in ("step", "\xff"))
    for line in ("[1]", '"text"', "{}", low, bad):
        path.write_text(line + "\n", encoding="latin-1")
        assert metrics.Curves.read(tmp_path).points()["step"] == []
        assert metrics.last_step(tmp_path) is None and metrics.Curves.read(tmp_path).valid == []


def test_tensorboard_holds_the_scalars_and_forgets_the_future_on_resume(tmp_path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    write_run(tmp_path, 6)
    (first,) = (tmp_path / "tensorboard").iterdir()
    first.rename(first.with_name("events.out.tfevents.0000000001"))  # read by name, a second apart
    with MetricsWriter(tmp_path, resume_step=4) as writer:
        writer.step(step_record(5, loss=1.5))
        writer.close()
    events = accumulators.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    losses = [(event.step, event.value) for event in events.Scalars("loss/train")]
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5] and losses[-1][1] == 1.5
    assert [event.step for event in events.Scalars("loss/valid")] == [2, 4]
    tags = set(events.Tags()["scalars"])
    assert {"speed/tokens_per_s", "speed/step_seconds", "optim/lr", "optim/grad_norm"} <= tags
    assert {"link/0/forward_bytes", "link/1/backward_bytes", "link/0/utilisation"} <= tags
    assert {"stage/2/compute_s", "stage/0/wait_s", "stage/1/update_s"} <= tags
    assert "link/1/utilisation" not in tags  # nan all along


def test_a_field_with_a_default_may_be_missing(tmp_path, without_tensorboard):
    write_run(tmp_path, 2)
    step, old = rows(tmp_path)[1:]
    del old["bits_per_byte"]
    (tmp_path / metrics.FILE_NAME).write_text(json.dumps(step) + "\n" + json.dumps(old) + "\n")
    assert metrics.last_step(tmp_path) is not None
    assert metrics.Curves.read(tmp_path).valid == [EvaluationRecord(2, 6.0, None)]


@pytest.mark.parametrize("cut", [0, 1, 20])
def test_a_record_that_ends_anywhere_is_continued_on_a_line_of_its_own(
    tmp_path, without_tensorboard, cut
):
    write_run(tmp_path, 3)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[: -cut or None])
    write_run(tmp_path, 5, first_step=4, resume_step=3)
    kept = [1, 2] if cut else [1, 2, 3]
    assert steps(tmp_path) == [*kept, 4, 5]
    write_run(tmp_path, 4, first_step=3, resume_step=2)
    assert steps(tmp_path) == [1, 2, 3, 4], "what came after the resumed step is dropped"
    assert [file.name for file in tmp_path.iterdir()] == [metrics.FILE_NAME]


@pytest.fixture
def quiet_wandb(monkeypatch, tmp_path):
    """Nothing of this machine's own account is used."""
    for name in ("WANDB_API_KEY", "WANDB_DIR", "WANDB_PROJECT", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    own = {"HOME": tmp_path, "NETRC": tmp_path / "netrc", "WANDB__SERVICE_WAIT": PATIENCE}
    for name, value in own.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(metrics, "INIT_SECONDS", PATIENCE)
    yield
    if package := sys.modules.get("wandb"):
        package.teardown()  # it remembers the environment of the first use


def test_metrics_are_logged_and_a_loss_of_the_log_ends_nothing(quiet_wandb, tmp_path, monkeypatch):
    """With the real package: it writes its file, then its run is finished under our feet."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    with MetricsWriter(tmp_path) as writer:
        writer.log_to_wandb("wires", "first", {"run": {"seed": 7}})
        writer.step(step_record(1))
        sys.modules["wandb"].run.finish()
        with pytest.raises(Exception, match="finished"):
            writer.step(step_record(2))
        writer.step(step_record(3))
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    for name in (b"loss/train", b"optim/grad_norm", b"seed"):
        wait_until(lambda name=name: name in file.read_bytes())  # a process of its own writes it
    assert f"run-{(tmp_path / metrics.ID_FILE).read_text().strip()}.wandb" == file.name
    assert steps(tmp_path) == [1, 2, 3]


def test_who_is_not_logged_in_is_told_and_never_asked(quiet_wandb, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with MetricsWriter(tmp_path) as writer:
        with pytest.raises(ConfigError, match="run `wandb login`, or set WANDB_MODE=offline"):
            writer.log_to_wandb("wires", "first", {})
        monkeypatch.setitem(sys.modules, "wandb", None)  # nor is who has not installed it
        with pytest.raises(
            MissingPackageError, match=r'run.wandb = "wires" needs wandb.*\[wandb\]'
        ):
            writer.log_to_wandb("wires", "first", {})
        writer.step(step_record(1))
    assert len(rows(tmp_path)) == 1


def test_a_full_disk_leaves_a_hole_and_no_half_line(tmp_path, without_tensorboard):
    """The file may grow to a size and no further, as on a full disk; then there is space again."""
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(tmp_path) as writer:
        writer.step(step_record(1))
        size = path.stat().st_size
        with limited_to(size + 40):
            for step in (2, 3):
                with pytest.raises(OSError):
                    writer.step(step_record(step))
                assert path.stat().st_size == size, "no half line stays"
        writer.step(step_record(4))
    assert steps(tmp_path) == [1, 4]
