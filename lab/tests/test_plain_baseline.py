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


def test_windows_come_once_or_by_chance(baseline: ModuleType) -> None:
    def beginnings(windows: str, batches: int) -> list[int]:
        draw = torch.Generator().manual_seed(0)
        found = baseline.batches_of(windows, 22 * 8 + 1, 8, 4, draw)
        return [start for _ in range(batches) for start in next(found)]

    once = beginnings("once", 11)  # a batch may hold the end of one pass and the start of the next
    assert sorted(once[:22]) == sorted(once[22:]) == list(range(0, 176, 8))
    assert once[:22] != once[22:], "every pass has an order of its own"
    by_chance = [start // 8 for start in beginnings("random", 5)]
    assert len(set(by_chance)) < 20, "some text comes twice before other text comes once"


@pytest.mark.parametrize("windows", ["once", "random"])
def test_a_text_without_a_window_is_refused(baseline: ModuleType, windows: str) -> None:
    with pytest.raises(SystemExit, match="8 tokens: too few for one window of 8"):
        next(baseline.batches_of(windows, 8, 8, 5, torch.Generator()))


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
    windows = "once" if optimizer == "muon" else "random"
    line = f"--model {model} --optimizer {optimizer} --windows {windows} --steps 20 --warmup 2"
    log = tmp_path / "log.jsonl"
    baseline.main([*line.split(), "--lr", "5e-3", "--log", str(log), *sets])
    figures = json.loads(capsys.readouterr().out)
    assert figures["loss"] < figures["curve"][0][1] - 0.5 and len(figures["curve"]) == 11
    assert figures["windows"] == windows
    assert figures["tokens"] == 20 * 8 * 32 and json.loads(log.read_text()) == figures
