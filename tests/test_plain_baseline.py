"""The baseline in a trainer of its own: it runs, it learns, and its models are one model."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from thinwire.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
SMALL = (
    "model.layers=2 model.dim=32 model.heads=4 model.kv_heads=2 model.ffn=48 model.vocab=300 "
    "model.context=32 data.source=text data.valid_fraction=0.1 train.eval_batches=1 "
    "run.device=cpu train.batch=8 pipeline.stages=1 pipeline.microbatches=2 pipeline.window=1"
)


@pytest.fixture(scope="module")
def baseline() -> ModuleType:
    path = ROOT / "tools" / "plain_baseline.py"
    spec = importlib.util.spec_from_file_location("plain_baseline", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_plain_model_is_the_stock_one(baseline: ModuleType) -> None:
    shape = Settings.from_plain({"model": {"preset": "tiny"}, "pipeline": {"stages": 1}}).model
    plain, stock = baseline.PlainLlama(shape), baseline.StockLlama(shape)
    stock.llama.load_state_dict(plain.state_dict())
    ids = torch.randint(shape.vocab, (2, shape.context))
    torch.testing.assert_close(plain(ids), stock(ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("model", "optimizer"), [("transformers", "muon"), ("torch", "adamw")])
def test_it_trains_on_the_same_text_and_prints_its_loss(
    baseline: ModuleType,
    model: str,
    optimizer: str,
    text_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))
    sets = [part for one in [*SMALL.split(), f"data.path={text_folder}"] for part in ("--set", one)]
    line = f"--model {model} --optimizer {optimizer} --steps 20 --warmup 2 --lr 5e-3"
    log = tmp_path / "log.jsonl"
    baseline.main([*line.split(), "--log", str(log), *sets])
    figures = json.loads(capsys.readouterr().out)
    assert figures["loss"] < figures["curve"][0][1] - 0.5 and len(figures["curve"]) == 11
    assert figures["tokens"] == 20 * 8 * 32 and json.loads(log.read_text()) == figures
