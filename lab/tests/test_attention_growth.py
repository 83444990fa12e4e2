"""The tool that records attention logits: what it notes is what attention computes."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parent.parent / "tools" / "attention_growth.py"
SMALL = (
    "model.layers=2 model.dim=32 model.heads=4 model.kv_heads=2 model.ffn=48 model.vocab=300 "
    "model.context=32 data.source=text data.valid_fraction=0.1 train.eval_batches=1 "
    "train.batch=4 pipeline.microbatches=1"
)


@pytest.mark.parametrize("has_norms", [True, False])
def test_norms_bound_the_logits_that_it_records(
    has_norms: bool, text_folder: Path, tmp_path: Path
) -> None:
    """Queries and keys of length sqrt(E) have logits of at most sqrt(E); without they grow."""
    recipe = f"thin32 model.qk_norm={str(has_norms).lower()} optim.matrix_lr=500"
    changes = [*SMALL.split(), f"data.path={text_folder}"]
    out = tmp_path / "growth.jsonl"
    options = ["--recipe", recipe, "--stages", "2", "--steps", "6", "--every", "3"]
    options += [word for change in changes for word in ("--set", change)]
    command = [sys.executable, "-P", str(TOOL), str(out), "--device", "cpu", *options]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["step"] for row in rows if "attention" in row] == [0, 3, 6]
    assert [row["step"] for row in rows if "loss" in row] == list(range(6))
    last = rows[-1]["attention"]
    assert list(last) == ["model.layers.0", "model.layers.1"]
    bound = 1.3 * math.sqrt(32 / 4)  # gains have moved a little
    largest = max(block["largest_logit"] for block in last.values())
    assert (largest <= bound) == has_norms
    assert all(0 <= block["least_entropy"] <= math.log(32) for block in last.values())
