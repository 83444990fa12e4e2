"""What narrow ends cost a stage: the table of `python -m thinwire_lab.cost`."""

import math

import pytest
import torch

from thinwire_lab import cost

COMMAND = ["cost", "--microbatches", "4"]
ON_THE_GPU = "kernels alone"


def test_every_part_is_timed_and_extras_are_shares_of_a_dense_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [*COMMAND, "--device", "cpu", "--sequences", "2"])
    cost.main()
    shown = capsys.readouterr().out
    assert "256 tokens per microbatch" in shown
    for part in ("stage with narrow ends, per microbatch", "update with AdamW", "all extras"):
        assert f"| {part} |" in shown
    assert ON_THE_GPU not in shown, "there is no GPU to watch"


def test_what_a_gpu_computes_is_held_against_dense_ends() -> None:
    dense, narrow = cost.GpuWork(0.004, 74, 0.005), cost.GpuWork(0.005, 85, 0.0055)
    rows = {row["part"]: row for row in cost._on_the_gpu(dense, narrow)}
    assert rows["kernels alone with narrow ends, 85 per microbatch"]["seconds"] == 0.005
    assert rows["narrow ends, 10 microbatches in a row, each"]["seconds"] == 0.0055
    kernels = rows["encode and decode, kernels alone"]
    queued = rows["encode and decode, 10 microbatches in a row, each"]
    assert math.isclose(kernels["seconds"], 0.001) and math.isclose(kernels[cost.SHARE], 0.25)
    assert math.isclose(queued["seconds"], 0.0005) and math.isclose(queued[cost.SHARE], 0.1)
    assert cost._on_the_gpu() == []


def test_settings_that_cannot_work_are_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["cost", "--microbatches", "2"])
    with pytest.raises(SystemExit) as stopped:
        cost.main()
    told = capsys.readouterr().err
    assert stopped.value.code == 2 and "at least one microbatch per stage" in told


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_take_less_than_waiting_for_them() -> None:
    device = torch.device("cuda")
    x = torch.randn(512, 512, device=device)

    def work() -> None:
        x @ x

    seen = cost.watched(work, device)
    assert seen.launches >= 1
    assert 0 < seen.kernels_s < cost.timed(work, device)
