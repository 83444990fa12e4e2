"""Lines of the grid as arms, the edge of the map, and a tiny one from the command line."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from thinwire.cli import main
from thinwire.errors import ConfigError
from thinwire_lab import frontier as lab
from thinwire_lab.experiment import sheet
from thinwire_lab.pool import Trained

TINY = {
    "model.layers": 2, "model.dim": 32, "model.heads": 4, "model.kv_heads": 2, "model.ffn": 48,
    "model.vocab": 300, "model.context": 16, "run.threads": 1, "pipeline.stages": 2,
    "train.batch": 4, "train.eval_batches": 2, "data.source": "text", "data.valid_fraction": 0.1,
}  # fmt: skip


def tiny(text_folder: Path, **changes: Any) -> list[str]:
    """Options that make an experiment take seconds."""
    values = {**TINY, "data.path": text_folder, **changes}
    return [part for key, value in values.items() for part in ("--set", f"{key}={value}")]


def test_every_line_of_the_grid_is_an_arm_that_can_work() -> None:
    base = {"model": {"preset": "160m"}, "pipeline": {"microbatches": 1, "schedule": "gpipe"}}
    arms = lab.make_arms(lab.specs(None, False), 768, [3e-4], [0, 1], 400)
    grids = sheet("frontier")["grid"]
    assert len(arms) == len(grids["usual"]) + 1  # dense has a second seed
    for arm in arms:
        settings = arm.settings(base)
        assert settings.codec.names(0) == (arm.get("codec.forward"), arm.get("codec.backward"))
        assert settings.boundary.rank == arm.get("boundary.rank")
    by_spec = {arm.label: arm for arm in arms}
    assert by_spec["projected d/8 int4/int8"].get("boundary.rank") == 96
    grouped = by_spec["dense int4(group=64,hadamard)/int8"]
    assert grouped.get("codec.forward") == "int4(group=64,hadamard)"
    packed = by_spec["projected d/8 step(3)+zstd/step(5)+zstd"]
    assert packed.get("codec.backward") == "step(5)+zstd"
    assert set(grids["quick"]) <= set(grids["usual"])
    assert grids["quick"][0] == grids["usual"][0] == lab.DENSE_BF16


def test_arms_are_chosen_by_pattern_or_spelled_out() -> None:
    assert lab.specs("reparam*", False)[0] == lab.DENSE_BF16
    assert all(line.startswith("reparam") for line in lab.specs("reparam*", False)[1:])
    own = "subspace 12 int4(group=4)/int8"
    assert lab.specs(own, False) == [lab.DENSE_BF16, own]
    assert lab.make_arms([own], 96, [1e-3], [0], 5)[0].get("boundary.rank") == 12
    with pytest.raises(ConfigError, match=r"matches no arm .*MODE \[RANK\] FORWARD/BACKWARD"):
        lab.specs("projekted*", False)


def row(spec: str, bytes_: float, loss: float | None, lr: float = 1e-3, seed: int = 0) -> Trained:
    figures = {
        "loss": loss, "loss_off": loss, "seconds": 1.0, "ratio": 3072 / bytes_,
        "bytes_forward": bytes_ / 4, "bytes_backward": 3 * bytes_ / 4,
    }  # fmt: skip
    return Trained(lab.make_arms([spec], 96, [lr], [seed], 100)[0], figures)


ROWS = [
    row(lab.DENSE_BF16, 3072, 4.0),
    row(lab.DENSE_BF16, 3072, 4.4, seed=1),
    row("projected d/8 int4/int8", 100, 4.2),
    row("projected d/8 int4/int8", 100, 4.8, lr=2e-3),
    row("projected d/16 int8/int8", 96, 4.4),
    row("projected d/32 bf16/bf16", 90, 4.3),
    row("reparam d/32 int4/int8", 40, 4.1),
    row("reparam d/96 bf16/bf16", 30, None),
]


def test_the_map_compares_with_dense_of_the_same_seed() -> None:
    lines = {line["arm"]: line for line in lab.table(ROWS)}
    assert lines[lab.DENSE_BF16]["gap"] == 0 and lines[lab.DENSE_BF16]["spread"] == pytest.approx(
        0.4
    )
    best = lines["projected d/8 int4/int8"]
    assert best["lr"] == 1e-3 and best["gap"] == pytest.approx(0.05)
    assert [name for name, line in lines.items() if line["edge"]] == [
        lab.DENSE_BF16,
        "reparam d/32 int4/int8",
    ]
    assert lines["reparam d/96 bf16/bf16"]["gap"] is None  # diverged
    with pytest.raises(ConfigError, match="nothing to compare with"):
        lab.table(ROWS[2:])


def test_the_report_names_the_best_for_each_ratio() -> None:
    found = lab.outcome(ROWS)
    tied = "reparam d/32 int4/int8 (77x, +2.5%, within the noise of"
    assert found.verdict == (
        f"Least loss at 10x or more: {tied} 3 others); at 30x or more: {tied} 3 others); "
        "at 60x or more: reparam d/32 int4/int8 (77x, +2.5%)."
    )
    assert found.conclusion.startswith("Too small to decide: 100 steps, where at least 200")
    assert any(note.startswith("noise: the dense seeds differ by 9.52%") for note in found.notes)
    json.dumps(found.to_plain(), allow_nan=False)


def test_a_small_map_from_the_command_line(
    text_folder: Path,
    tmp_path: Path,
    in_this_process: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["lab", "frontier", "--quick", "--steps", "3", "--seeds", "0", "--device", "cpu",
               "--out", str(tmp_path), "--json", "--arms", "projected d/8 int4/int4",
               *tiny(text_folder)]  # fmt: skip
    main([*command, "--parallel", "2"])
    plain = json.loads(capsys.readouterr().out)
    dense, narrow = plain["rows"]
    header = 2 * 64 / (4 * 16)  # both ways, of 4 sequences of 16 tokens
    assert dense["bytes per token"] == 2 * 2 * 32 + header
    assert narrow["bytes per token"] == 2 * (4 / 2 + 2) + header
    assert narrow["ratio"] == pytest.approx(128 / narrow["bytes per token"])
    with (tmp_path / "frontier" / "table.csv").open() as file:
        assert [line["arm"] for line in csv.DictReader(file)] == [dense["arm"], narrow["arm"]]
    assert (tmp_path / "frontier" / "plot.png").stat().st_size > 10_000
    main([*command, "--from-log"])  # the log is enough
    again = json.loads(capsys.readouterr().out)
    assert again["rows"] == plain["rows"]
