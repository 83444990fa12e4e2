"""ResNet-18 through the same engine: what one process computes, saved, resumed and refused."""

import math
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_resume import commit_all, rewrite
from test_verdict import poison
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.codec import Leg, Place, parse_codec
from thinwire.data import ImageSet, prepare_images
from thinwire.data.image_batches import ImageOrder, augmented, normalised
from thinwire.engine import Settings
from thinwire.engine.feed import Feed
from thinwire.errors import CheckpointError, ConfigError, DataError
from thinwire.inference import Model
from thinwire.lab.chain import Chain
from thinwire.model import Stage, architecture
from thinwire.report import PlainDisplay
from thinwire.summary import Ledger

TOLERANCE = 1e-10
CPU = torch.device("cpu")
SIDE, CLASSES, TRAIN, TEST = 8, 3, 40, 21
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@pytest.fixture(scope="module")
def npz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Noise with a bright band that tells the class: a few steps learn something of it."""
    rng = np.random.default_rng(0)
    arrays = {}
    for side, count in (("train", TRAIN), ("test", TEST)):
        labels = np.arange(count) % CLASSES
        images = rng.integers(0, 120, size=(count, SIDE, SIDE, 3), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[2 * label : 2 * label + 2] += 120
        arrays |= {f"x_{side}": images, f"y_{side}": labels}
    path = tmp_path_factory.mktemp("images") / "bands.npz"
    np.savez(path, **arrays)
    return path


@pytest.fixture(scope="module")
def images(npz: Path, tmp_path_factory: pytest.TempPathFactory) -> ImageSet:
    return prepare_images(str(npz), tmp_path_factory.mktemp("cache"))


@pytest.fixture
def settings_of(npz: Path, tmp_path: Path) -> Callable[..., Settings]:
    """A tiny exact run; `section__key=value` changes one key."""

    def make(**changes: Any) -> Settings:
        values: dict[str, dict[str, Any]] = {
            "run": {"name": "test", "out": str(tmp_path), "device": "cpu", "precision": "fp64",
                    "threads": 1},
            "model": {"preset": "resnet18", "dim": 2, "classes": CLASSES, "side": SIDE},
            "data": {"source": "images", "path": str(npz)},
            "pipeline": {"stages": 2, "microbatches": 2, "schedule": "gpipe"},
            "link": {"emulate": False},
            "codec": {"forward": "fp64", "backward": "fp64"},
            "optim": {"name": "sgd", "lr": 0.05, "weight_decay": 0.01, "warmup": 0, "floor": 0.0,
                      "clip": 2.0},
            "train": {"steps": 4, "batch": 10, "eval_every": 2, "eval_batches": 0,
                      "checkpoint_every": 0},
        }  # fmt: skip
        for place, value in changes.items():
            section, key = place.split("__")
            values.setdefault(section, {})[key] = value
        return Settings.from_plain(values)

    return make


@pytest.fixture
def run(run_in_threads: Callable, images: ImageSet) -> Callable:
    def run(settings: Settings, **options: Any) -> Any:
        return run_in_threads(settings, data=images.folder, **options)

    return run


def in_fp32(settings_of: Callable, **changes: Any) -> Settings:
    """Tensors cross as they are in float32; six steps, saved in the middle."""
    return settings_of(
        **{
            "run__precision": "fp32",
            "codec__forward": "fp32",
            "codec__backward": "fp32",
            "train__steps": 6,
            "train__checkpoint_every": 3,
            **changes,
        }
    )


def same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def accuracies(outcome: Any) -> list[float]:
    return [r["accuracy"] for r in outcome.reports[-1] if r["type"] == "evaluation"]


def momentum(outcome: Any) -> dict[str, Tensor]:
    found = {}
    for worker in outcome.workers:
        found |= worker.optimizer.state_tensors()
    return found


# --- the pipeline is an ordinary loop ---


class PlainLoop:
    """The whole model in one module, torch's own SGD and clipping, all test images in one batch."""

    def __init__(self, settings: Settings, images: ImageSet):
        torch.set_num_threads(1)
        self.settings, self.images = settings, images
        self.model = Stage(architecture(settings.model).layers())
        self.model.initialise(settings.model, settings.run.seed)
        self.model.double()
        self.losses: list[float] = []
        self.scores = [self.score()]
        optim, steps = settings.optim, settings.train.steps
        optimizer = torch.optim.SGD(
            self.model.parameters(), momentum=optim.momentum, weight_decay=optim.weight_decay
        )
        for step in range(steps):
            total = sum(self.backward(step, microbatch) for microbatch in range(2))
            nn.utils.clip_grad_norm_(self.model.parameters(), optim.clip)
            for group in optimizer.param_groups:
                group["lr"] = optim.lr * 0.5 * (1 + math.cos(math.pi * step / steps))
            optimizer.step()
            optimizer.zero_grad()
            self.losses.append(total)
            if (step + 1) % settings.train.eval_every == 0:
                self.scores.append(self.score())
        named = self.model.global_parameters().items()
        self.momentum = {n: optimizer.state[p]["momentum_buffer"] for n, p in named}

    def backward(self, step: int, microbatch: int) -> float:
        """Batch norms see one microbatch after the other."""
        order = ImageOrder(self.images.train, self.settings.train.batch, 2, self.settings.run.seed)
        batch = order.microbatch(step, microbatch)
        pixels = augmented(torch.from_numpy(batch.pixels_BCSS), order.seed, batch.place)
        logits = self.model(None, self.normalised(pixels))
        loss = F.cross_entropy(logits, torch.from_numpy(batch.labels_B)) / 2
        loss.backward()
        return loss.item()

    @torch.no_grad()
    def score(self) -> tuple[float, float]:
        self.model.eval()
        logits = self.model(None, self.normalised(torch.tensor(self.images.test.pixels_NCSS)))
        self.model.train()
        labels = torch.tensor(self.images.test.labels_N.astype(np.int64))
        right = (logits.argmax(1) == labels).double().mean().item()
        return F.cross_entropy(logits, labels).item(), right

    def normalised(self, pixels: Tensor) -> Tensor:
        return normalised(pixels, self.images.mean_C, self.images.std_C, torch.float64)


@pytest.fixture(scope="module")
def reference() -> dict[str, PlainLoop]:
    return {}


@pytest.mark.parametrize(
    ("stages", "schedule", "split"),
    [(1, "gpipe", []), (2, "1f1b", [3, 5]), (4, "gpipe", [])],
)
def test_the_pipeline_equals_a_plain_loop(
    stages: int,
    schedule: str,
    split: list[int],
    settings_of: Callable,
    run: Callable,
    images: ImageSet,
    reference: dict[str, PlainLoop],
) -> None:
    """Losses, scores, weights, momentum and what batch norms have seen."""
    settings = settings_of(
        pipeline__stages=stages, pipeline__schedule=schedule, pipeline__split=split
    )
    if not reference:
        reference["loop"] = PlainLoop(settings, images)
    loop = reference["loop"]
    outcome = run(settings)
    assert outcome.losses() == pytest.approx(loop.losses, abs=TOLERANCE)
    assert outcome.valid_losses() == pytest.approx([s[0] for s in loop.scores], abs=TOLERANCE)
    assert accuracies(outcome) == [accuracy for _, accuracy in loop.scores]
    kept = {f"{name}/momentum_buffer": value for name, value in loop.momentum.items()}
    for found, expected in (
        (outcome.weights(), dict(loop.model.global_parameters())),
        (outcome.buffers(), loop.model.global_buffers()),
        (momentum(outcome), kept),
    ):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert (found[name] - value).abs().max() < TOLERANCE, name
    assert {name.rsplit(".", 1)[1] for name in outcome.buffers()} == set(STATISTICS)
    assert outcome.buffers()["bn1.num_batches_tracked"] == 2 * settings.train.steps


def test_a_rounded_cut_is_noticed(
    settings_of: Callable, run: Callable, images: ImageSet, reference: dict[str, PlainLoop]
) -> None:
    """The failing side of the test above."""
    if not reference:
        reference["loop"] = PlainLoop(settings_of(), images)
    rounded = run(settings_of(codec__forward="bf16", train__steps=1))
    assert abs(rounded.losses()[0] - reference["loop"].losses[0]) > TOLERANCE


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_split_does_not_change_a_bit(
    optimizer: str, settings_of: Callable, run: Callable
) -> None:
    runs = [
        run(in_fp32(settings_of, pipeline__stages=stages, optim__name=optimizer, train__steps=3))
        for stages in (1, 2, 4)
    ]
    for other in runs[1:]:
        assert other.losses() == runs[0].losses()
        assert other.valid_losses() == runs[0].valid_losses()
        assert same_bits(other.weights(), runs[0].weights())
        assert same_bits(other.buffers(), runs[0].buffers())


def test_pixels_are_for_the_first_stage_and_labels_for_the_last(
    settings_of: Callable, run: Callable
) -> None:
    read: list[tuple[str, int]] = []

    def watch(worker: Any) -> None:
        source = worker.feed._source
        on_device = source._on_device

        def watched(batch: Any, augment: bool) -> Any:
            found = on_device(batch, augment)
            for what in ("_read_inputs", "_read_targets"):
                original = getattr(found, what)

                def note(original: Callable = original, what: str = what) -> Tensor:
                    read.append((what, worker.index))
                    return original()

                setattr(found, what, note)
            return found

        source._on_device = watched

    run(settings_of(pipeline__stages=4), prepare_worker=watch)
    assert set(read) == {("_read_inputs", 0), ("_read_targets", 3)}


def test_compiled_layers_compute_the_same(settings_of: Callable, images: ImageSet) -> None:
    settings = settings_of(pipeline__stages=4)
    chains = [Chain(settings, Feed(images, settings, CPU)) for _ in range(2)]
    for stage in chains[1].stages:
        stage.compile_layers(backend="aot_eager")
    for step in range(2):
        plain, compiled = (chain.train_step(step) for chain in chains)
        assert plain == pytest.approx(compiled, abs=TOLERANCE)
    for mine, theirs in zip(*(chain.stages for chain in chains), strict=True):
        buffers = mine.global_buffers()
        assert buffers.keys() == theirs.global_buffers().keys()
        for name, buffer in theirs.global_buffers().items():
            assert (buffer - buffers[name]).abs().max() < TOLERANCE, name


# --- saved and resumed ---


@pytest.mark.parametrize(("before", "after"), [(4, 4), (4, 2), (1, 3)])
def test_resumed_equals_uninterrupted(
    before: int,
    after: int,
    settings_of: Callable,
    run: Callable,
    images: ImageSet,
    tmp_path: Path,
) -> None:
    settings = in_fp32(settings_of, pipeline__stages=before)
    whole = run(settings)
    middle = commit_all(whole, settings, tmp_path / "run", images)[3]
    resumed = run(
        in_fp32(settings_of, pipeline__stages=after),
        resume=middle,
        folder=tmp_path / "resumed",
    )
    assert resumed.losses() == whole.losses()[3:]
    assert resumed.valid_losses()[1:] == whole.valid_losses()[2:]
    assert accuracies(resumed)[1:] == accuracies(whole)[2:]
    assert same_bits(resumed.weights(), whole.weights())
    assert same_bits(resumed.buffers(), whole.buffers())
    assert same_bits(momentum(resumed), momentum(whole))


def test_a_checkpoint_without_statistics_or_momentum_is_refused(
    settings_of: Callable, run: Callable, images: ImageSet, tmp_path: Path
) -> None:
    settings = in_fp32(settings_of, train__steps=2, train__checkpoint_every=1)
    folder = commit_all(run(settings), settings, tmp_path / "run", images)[1]

    def without(ending: str) -> Callable[[dict[str, Tensor]], None]:
        return lambda tensors: [tensors.pop(n) for n in list(tensors) if n.endswith(ending)]

    rewrite(folder, without("momentum_buffer"))
    with pytest.raises(CheckpointError, match="lacks the optimizer's state"):
        run(settings, resume=folder, folder=tmp_path / "a")
    rewrite(folder, without("running_var"))
    with pytest.raises(CheckpointError, match=r"lacks \d+ tensors, such as bn1.running_var"):
        run(settings, resume=folder, folder=tmp_path / "b")


def test_sgd_without_momentum_resumes_too(
    settings_of: Callable, run: Callable, images: ImageSet, tmp_path: Path
) -> None:
    settings = in_fp32(settings_of, optim__momentum=0.0, train__steps=4, train__checkpoint_every=2)
    whole = run(settings)
    middle = commit_all(whole, settings, tmp_path / "run", images)[2]
    resumed = run(settings, resume=middle, folder=tmp_path / "resumed")
    assert same_bits(resumed.weights(), whole.weights())


# --- refused steps ---


@pytest.mark.parametrize("stage", [0, 3])
def test_a_refused_step_leaves_what_norms_have_seen(
    stage: int, settings_of: Callable, run: Callable, images: ImageSet
) -> None:
    settings = settings_of(pipeline__stages=4, train__steps=2)
    refused = run(settings, prepare_worker=poison(stage, {1}))
    once = run(settings_of(pipeline__stages=4, train__steps=2),
               prepare_worker=lambda worker: worker.stop_requested.set())  # fmt: skip
    assert [r["committed"] for r in refused.reports[0] if r["type"] == "step"] == [True, False]
    assert same_bits(refused.buffers(), once.buffers())
    assert same_bits(refused.weights(), once.weights())
    assert refused.valid_losses()[-1] == once.valid_losses()[-1]
    seen = {name: value for name, value in refused.buffers().items() if "mean" in name}
    assert all(bool(value.any()) for value in seen.values()), "the first step has left its mark"

    chain = Chain(settings, Feed(images, settings, CPU))
    chain.train_step(0)
    before = {n: b.clone() for s in chain.stages for n, b in s.global_buffers().items()}
    next(chain.stages[0].parameters()).register_hook(lambda gradient: gradient * math.nan)
    chain.train_step(1)
    after = {n: b for s in chain.stages for n, b in s.global_buffers().items()}
    assert same_bits(before, after)


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
    settings_of: Callable,
    run: Callable,
    images: ImageSet,
) -> None:
    """Losses, scores, statistics, and every byte by its formula."""
    settings = settings_of(
        pipeline__stages=4,
        codec__forward=forward,
        codec__backward=backward,
        train__steps=6,
        train__eval_every=3,
    )
    outcome = run(settings)
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
        last = [r for r in outcome.reports[stage] if r["type"] == "step"][-1]
        sent = last["meters"][f"boundary-{cut}"]["sent"][leg.name]["payload_bytes"]
        per_image = sent / (6 * settings.train.batch)
        assert chain.cuts[cut].payload_bytes_per_token(leg) == pytest.approx(per_image, rel=2e-2)
        codec = parse_codec(settings.codec.names(cut)[leg is Leg.BACKWARD])
        side = SIDE >> cut
        shape = (5, side * side, 2 << cut)
        if not codec.size_varies:
            limit = sum(part.bytes for part in codec.layout(shape, Place(leg, 0, 0)))
            assert sent == 12 * limit


def test_a_lossy_run_resumes_exactly(
    settings_of: Callable, run: Callable, images: ImageSet, tmp_path: Path
) -> None:
    settings = in_fp32(settings_of, codec__forward="topk(0.2)+ef21", codec__backward="int4(tensor)")
    whole = run(settings)
    middle = commit_all(whole, settings, tmp_path / "run", images)[3]
    resumed = run(settings, resume=middle, folder=tmp_path / "resumed")
    assert resumed.losses() == whole.losses()[3:]
    assert same_bits(resumed.weights(), whole.weights())
    assert same_bits(resumed.buffers(), whole.buffers())


# --- a trained model ---


def test_a_trained_model_is_tested_with_compression_and_without(
    settings_of: Callable,
    run: Callable,
    images: ImageSet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("THINWIRE_CACHE", str(images.folder.parent))
    settings = settings_of(pipeline__stages=3, codec__forward="topk(0.1)")
    outcome = run(settings)
    folder = commit_all(outcome, settings, tmp_path / "run", images)[4]
    on, off = (Model(folder, "cpu", c).evaluate(PlainDisplay(StringIO())) for c in (True, False))
    assert on["valid_loss"] == pytest.approx(outcome.valid_losses()[-1], abs=1e-12)
    assert on["accuracy"] == accuracies(outcome)[-1]
    assert abs(off["valid_loss"] - on["valid_loss"]) > 1e-7
    assert on["images"] == off["images"] == TEST and "perplexity" not in on
    few = Model(folder, "cpu").evaluate(PlainDisplay(StringIO()), batches=2)
    assert few["images"] == 2 * settings.microbatch_size
    with pytest.raises(ConfigError, match="tells images apart: it has no text to continue"):
        Model(folder, "cpu").generate("def ", 5, temperature=0, top_k=0, seed=0)


def test_the_ledger_counts_images_and_each_cut_by_its_own_size(
    settings_of: Callable, run: Callable
) -> None:
    settings = settings_of(
        pipeline__stages=4,
        codec__forward="bf16",
        codec__backward="bf16",
    )
    outcome = run(settings)
    ledger = Ledger(settings, [worker.describe() for worker in outcome.workers], 0)
    for stage, reports in enumerate(outcome.reports):
        for report in reports:
            if report["type"] == "step":
                ledger.add_step(stage, report)
            elif report["type"] == "evaluation":
                ledger.add_evaluation(report["step"], report["loss"], report["accuracy"])
    summary = ledger.summary({}, 1.0)
    assert summary["unit"] == "image" and summary["tokens"] == 4 * 10
    assert [accuracy for _, accuracy in summary["accuracies"]] == accuracies(outcome)
    assert summary["final_accuracy"] == accuracies(outcome)[-1]
    # each group has twice the channels and a quarter of the pixels of the one before
    dense = [row["bf16_bytes_per_token"] for row in summary["boundaries"]]
    assert dense == [2 * 2 * 64, 2 * 4 * 16, 2 * 8 * 4]
    for row in summary["boundaries"]:
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
        ({"data__source": "stdlib"}, 'tells images apart, but data.source = "stdlib" has none'),
        ({"data__tokenizer": "t.json"}, 'of no use with data.source = "images"'),
        ({"data__valid_fraction": 0.1}, "brings its own test images"),
        ({"train__batch": 9}, "train.batch = 9 images do not divide"),
        ({"train__batch": 2}, "leave a batch norm a single value: raise train.batch"),
        ({"model__layers": 9}, "resnet18 has 8 blocks"),
        ({"pipeline__stages": 9, "pipeline__microbatches": 10}, "stages = 9 .* 8 layers"),
    ],
)
def test_what_cannot_work_with_images_is_refused(
    changes: dict[str, Any], message: str, settings_of: Callable
) -> None:
    settings_of()
    with pytest.raises(ConfigError, match=message):
        settings_of(**changes)


def test_text_models_read_no_images(npz: Path) -> None:
    with pytest.raises(ConfigError, match=r'reads text, but data\.source = "images"'):
        Settings.from_plain({"data": {"source": "images", "path": str(npz)}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__side": 16}, "images are of 3 x 8 x 8, but the model reads 3 x 16 x 16: set"),
        ({"model__channels": 1}, "model.channels = 3 and model.side = 8"),
        ({"model__classes": 2}, "of 3 classes, but model.classes = 2: set it to 3"),
        ({"train__batch": 42}, "fewer training images than one batch takes, 40 of 42"),
    ],
)
def test_images_that_the_model_is_not_made_for_are_refused(
    changes: dict[str, Any], message: str, settings_of: Callable, images: ImageSet
) -> None:
    with pytest.raises(DataError, match=message):
        Feed(images, settings_of(**changes), CPU)
    Feed(images, settings_of(model__classes=7), CPU)


def test_images_that_never_come_back_are_not_remembered(
    settings_of: Callable, images: ImageSet
) -> None:
    once = {"codec__forward": "int8+aqsgd", "train__batch": 10}
    with pytest.raises(ConfigError, match="10 images see 40 of 40 examples, each once"):
        Feed(images, settings_of(train__steps=4, **once), CPU)
    feed = Feed(images, settings_of(train__steps=5, **once), CPU)
    assert feed.example_count == TRAIN
    visited = [e for step in range(4) for m in range(2) for e in feed.examples(step, m)]
    assert sorted(visited) == list(range(TRAIN))


def test_augmentation_is_for_training_and_can_be_left_out(
    settings_of: Callable, images: ImageSet
) -> None:
    varied, plain = (
        Feed(images, settings_of(data__augment=augment), CPU) for augment in (True, False)
    )
    assert torch.equal(varied.training(0, 0).targets, plain.training(0, 0).targets)
    assert not torch.equal(varied.training(0, 0).inputs, plain.training(0, 0).inputs)
    assert torch.equal(varied.validation(1).inputs, plain.validation(1).inputs)
    assert varied.validation(4).targets.tolist().count(-100) == 25 - TEST
