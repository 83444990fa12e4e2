"""Images over lossy cuts, what is counted and tested of them, and what is refused."""

from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from image_runs import CPU, SIDE, TEST, TRAIN, accuracies, in_fp32, same_bits
from test_resume import commit_all
from torch import Tensor

from thinwire.codec import Leg, Place, parse_codec
from thinwire.data import ImageSet
from thinwire.engine.build import StageBuilder
from thinwire.engine.chain import Chain
from thinwire.engine.feed import Feed
from thinwire.errors import ConfigError, DataError
from thinwire.inference import Model
from thinwire.report import PlainDisplay
from thinwire.run.ledger import Ledger
from thinwire.run.messages import Ready
from thinwire.settings import Settings

# --- cuts that must not be seen ---


def gradients(settings: Settings, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Of one microbatch that crosses its cuts as tensors of their own, there and back."""
    builder = StageBuilder(settings, CPU)
    stages = [builder.build(index) for index in range(settings.pipeline.stages)]
    received, sent = [pixels], []
    for stage in stages:
        builder.initialise(stage)
        sent.append(stage(received[-1]))
        received.append(sent[-1].detach().clone().requires_grad_())
    stages[-1].loss(sent[-1], labels).backward()
    for output, later in reversed(list(zip(sent[:-1], received[1:-1], strict=True))):
        assert later is not None and later.grad is not None
        output.backward(later.grad.clone(memory_format=torch.contiguous_format))
    return {n: p.grad for s in stages for n, p in s.global_parameters().items()}  # type: ignore[misc]


@pytest.mark.parametrize(
    ("channels", "side", "width", "batch"),
    [(3, 8, 4, 4), (1, 12, 4, 4), (1, 5, 1, 3), (3, 8, 1, 2), (1, 1, 3, 4), (3, 9, 2, 1)],
)
def test_no_shape_of_images_shows_where_the_model_is_cut(
    channels: int, side: int, width: int, batch: int, image_settings: Callable
) -> None:
    """One channel or one pixel has more than one layout, and convolutions tell them apart."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(batch, channels, side, side, generator=generator)
    labels = torch.arange(batch) % 3
    found = [
        gradients(
            in_fp32(
                image_settings,
                pipeline__stages=stages,
                model__channels=channels,
                model__side=side,
                model__dim=width,
            ),
            pixels,
            labels,
        )
        for stages in (1, 2, 4, 8)
    ]
    assert all(same_bits(other, found[0]) for other in found[1:])


# --- lossy cuts ---


LOSSY = [
    ("topk(0.2)+ef21", "int4(tensor)"),
    ("int4+zstd", "topk(0.3)+ef"),
    ("topk(0.3)+aqsgd", "lowrank(1)"),
]


@pytest.mark.parametrize(("forward", "backward"), LOSSY)
def test_lossy_codecs_cross_images_alike_in_processes_and_in_one(
    forward: str,
    backward: str,
    image_settings: Callable,
    run_images: Callable,
    images: ImageSet,
) -> None:
    """Losses, scores, statistics, and every byte by its formula."""
    settings = image_settings(
        pipeline__stages=4,
        codec__forward=forward,
        codec__backward=backward,
        train__steps=6,
        train__eval_every=3,
    )
    outcome = run_images(settings)
    chain = Chain(settings, Feed(images, settings, CPU))
    losses, scores = [], [chain.score()]
    for step in range(6):
        losses.append(chain.train_step(step))
        if step % 3 == 2:
            scores.append(chain.score())
    assert losses == pytest.approx(outcome.losses(), abs=1e-8)
    assert [score.loss for score in scores] == pytest.approx(outcome.valid_losses(), abs=1e-8)
    assert [score.accuracy for score in scores] == accuracies(outcome)
    assert abs(chain.score(compressed=False).loss - scores[-1].loss) > 1e-7
    theirs = {n: b for s in chain.stages for n, b in s.global_buffers().items()}
    assert all((theirs[n] - b).abs().max() < 1e-8 for n, b in outcome.buffers().items())

    for cut, leg, stage in [(c, leg, c + (leg is Leg.BACKWARD)) for c in range(3) for leg in Leg]:
        last = outcome.steps(stage)[-1]
        sent = last.meters[f"cut-{cut}"]["sent"][leg.name]["payload_bytes"]
        per_image = sent / (6 * settings.train.batch)
        assert chain.cuts[cut].payload_bytes_per_token(leg) == pytest.approx(per_image, rel=2e-2)
        codec = parse_codec(settings.codec.names(cut)[leg is Leg.BACKWARD])
        side = SIDE >> cut
        shape = (5, side * side, 2 << cut)
        if not codec.size_varies:
            limit = sum(part.bytes for part in codec.layout(shape, Place(leg, 0, 0)))
            assert sent == 12 * limit


def test_a_lossy_run_resumes_exactly(
    image_settings: Callable, run_images: Callable, images: ImageSet, tmp_path: Path
) -> None:
    settings = in_fp32(
        image_settings, codec__forward="topk(0.2)+ef21", codec__backward="int4(tensor)"
    )
    whole = run_images(settings)
    middle = commit_all(whole, settings, tmp_path / "run", images)[3]
    resumed = run_images(settings, resume=middle, folder=tmp_path / "resumed")
    assert resumed.losses() == whole.losses()[3:]
    assert same_bits(resumed.weights(), whole.weights())
    assert same_bits(resumed.buffers(), whole.buffers())


# --- a trained model ---


def test_a_trained_model_is_tested_with_compression_and_without(
    image_settings: Callable,
    run_images: Callable,
    images: ImageSet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("THINWIRE_CACHE", str(images.folder.parent))
    settings = image_settings(pipeline__stages=3, codec__forward="topk(0.1)")
    outcome = run_images(settings)
    folder = commit_all(outcome, settings, tmp_path / "run", images)[4]
    on, off = (Model(folder, "cpu", c).evaluate(PlainDisplay(StringIO())) for c in (True, False))
    assert on["valid_loss"] == pytest.approx(outcome.valid_losses()[-1], abs=1e-12)
    assert on["accuracy"] == accuracies(outcome)[-1]
    assert abs(off["valid_loss"] - on["valid_loss"]) > 1e-7
    assert on["images"] == off["images"] == TEST and "perplexity" not in on
    few = Model(folder, "cpu").evaluate(PlainDisplay(StringIO()), batches=2)
    assert few["images"] == 2 * settings.microbatch_size
    with pytest.raises(ConfigError, match="classifies images: it has no text to continue"):
        Model(folder, "cpu").generate("def ", 5, temperature=0, top_k=0, seed=0)


def test_the_ledger_counts_images_and_each_cut_by_its_own_size(
    image_settings: Callable, run_images: Callable
) -> None:
    settings = image_settings(
        pipeline__stages=4,
        codec__forward="bf16",
        codec__backward="bf16",
    )
    outcome = run_images(settings)
    ready = [Ready("", **worker.describe()) for worker in outcome.workers]
    ledger = Ledger(settings, ready, 0)
    for stage in range(4):
        for report in outcome.steps(stage):
            ledger.add_step(stage, report)
    for scored in outcome.evaluations():
        ledger.add_evaluation(scored)
    summary = ledger.summary({}, 1.0)
    assert summary["unit"] == "image" and summary["tokens"] == 4 * 10
    assert [accuracy for _, accuracy in summary["accuracies"]] == accuracies(outcome)
    assert summary["final_accuracy"] == accuracies(outcome)[-1]
    # each group has twice the channels and a quarter of the pixels of the one before
    dense = [row["bf16_bytes_per_token"] for row in summary["cuts"]]
    assert dense == [2 * 2 * 64, 2 * 4 * 16, 2 * 8 * 4]
    for row in summary["cuts"]:
        assert row["bf16_bytes_per_token"] < row["forward_bytes_per_token"] < 2000
        assert 0 < row["ratio_vs_bf16"] < 1, "headers and verdicts are not free"
    record = ledger.records[-1]
    assert record.unit == "image" and record.tokens == 40
    assert [stage.layers for stage in record.stages] == ["stem+0..1", "2..3", "4..5", "6..7+head"]


# --- refusals ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"boundary__mode": "subspace", "boundary__rank": 1}, "no subspace holds it. Use dense"),
        ({"boundary__mode": "projected"}, 'boundary.mode = "projected", rank = 0 cannot work'),
        ({"boundary__rank": 2}, "rank = 2 cannot work"),
        ({"pipeline__recompute": True}, "batch norms would count every microbatch twice"),
        ({"optim__name": "muon"}, "for matrices, not convolutions; use sgd or adamw"),
        ({"data__source": "stdlib"}, 'classifies images, but data.source = "stdlib" has none'),
        ({"data__tokenizer": "t.json"}, 'have no effect with data.source = "images"'),
        ({"data__valid_fraction": 0.1}, "has its own test images"),
        ({"train__batch": 9}, "train.batch = 9 images do not divide"),
        ({"train__batch": 2}, "a batch norm sees a single value: raise train.batch"),
        ({"model__layers": 9}, "resnet18 has 8 blocks"),
        ({"pipeline__stages": 9, "pipeline__microbatches": 10}, "stages = 9 .* 8 layers"),
    ],
)
def test_what_cannot_work_with_images_is_refused(
    changes: dict[str, Any], message: str, image_settings: Callable
) -> None:
    image_settings()
    with pytest.raises(ConfigError, match=message):
        image_settings(**changes)


def test_text_models_read_no_images(npz: Path) -> None:
    with pytest.raises(ConfigError, match=r'reads text, but data\.source = "images"'):
        Settings.from_plain({"data": {"source": "images", "path": str(npz)}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__side": 16}, "images are 3 x 8 x 8, but the model reads 3 x 16 x 16: set"),
        ({"model__channels": 1}, "model.channels = 3 and model.side = 8"),
        ({"model__classes": 2}, "have 3 classes, but model.classes = 2: set it to 3"),
        ({"train__batch": 42}, "40 training images, fewer than one batch of 42"),
    ],
)
def test_images_that_the_model_is_not_made_for_are_refused(
    changes: dict[str, Any], message: str, image_settings: Callable, images: ImageSet
) -> None:
    with pytest.raises(DataError, match=message):
        Feed(images, image_settings(**changes), CPU)
    Feed(images, image_settings(model__classes=7), CPU)


def test_images_that_never_come_back_are_not_remembered(
    image_settings: Callable, images: ImageSet
) -> None:
    once = {"codec__forward": "int8+aqsgd", "train__batch": 10}
    with pytest.raises(ConfigError, match="10 images see 40 of 40 examples, each once"):
        Feed(images, image_settings(train__steps=4, **once), CPU)
    feed = Feed(images, image_settings(train__steps=5, **once), CPU)
    assert feed.example_count == TRAIN
    visited = [e for step in range(4) for m in range(2) for e in feed.examples(step, m)]
    assert sorted(visited) == list(range(TRAIN))


def test_augmentation_is_for_training_and_can_be_left_out(
    image_settings: Callable, images: ImageSet
) -> None:
    varied, plain = (
        Feed(images, image_settings(data__augment=augment), CPU) for augment in (True, False)
    )
    assert torch.equal(varied.training(0, 0).targets, plain.training(0, 0).targets)
    assert not torch.equal(varied.training(0, 0).inputs, plain.training(0, 0).inputs)
    assert torch.equal(varied.validation(1).inputs, plain.validation(1).inputs)
    assert varied.validation(4).targets.tolist().count(-100) == 25 - TEST
