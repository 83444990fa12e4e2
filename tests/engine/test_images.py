"""ResNet-18 through the same engine: what one process computes, saved and resumed."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_runs import CPU, accuracies, in_fp32, momentum, same_bits
from stopping import stop_in_the_first_step
from test_resume import commit_all, rewrite
from test_verdict import poison
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.data import ImageSet
from thinwire.data.image_batches import ImageOrder, augmented, normalised
from thinwire.engine.chain import Chain
from thinwire.engine.feed import Feed
from thinwire.errors import CheckpointError
from thinwire.model import Stage, architecture
from thinwire.settings import Settings

TOLERANCE = 1e-10
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


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
        logits = self.model(self.normalised(pixels))
        loss = F.cross_entropy(logits, torch.from_numpy(batch.labels_B)) / 2
        loss.backward()
        return loss.item()

    @torch.no_grad()
    def score(self) -> tuple[float, float]:
        self.model.eval()
        logits = self.model(self.normalised(torch.tensor(self.images.test.pixels_NCSS)))
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
    image_settings: Callable,
    run_images: Callable,
    images: ImageSet,
    reference: dict[str, PlainLoop],
) -> None:
    """Losses, scores, weights, momentum and what batch norms have seen."""
    settings = image_settings(
        pipeline__stages=stages, pipeline__schedule=schedule, pipeline__split=split
    )
    if not reference:
        reference["loop"] = PlainLoop(settings, images)
    loop = reference["loop"]
    outcome = run_images(settings)
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
    image_settings: Callable,
    run_images: Callable,
    images: ImageSet,
    reference: dict[str, PlainLoop],
) -> None:
    """The failing side of the test above."""
    if not reference:
        reference["loop"] = PlainLoop(image_settings(), images)
    rounded = run_images(image_settings(codec__forward="bf16", train__steps=1))
    assert abs(rounded.losses()[0] - reference["loop"].losses[0]) > TOLERANCE


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_split_does_not_change_a_bit(
    optimizer: str, image_settings: Callable, run_images: Callable
) -> None:
    runs = [
        run_images(
            in_fp32(image_settings, pipeline__stages=stages, optim__name=optimizer, train__steps=3)
        )
        for stages in (1, 2, 4, 8)  # with eight, the last cuts carry a single pixel
    ]
    for other in runs[1:]:
        assert other.losses() == runs[0].losses()
        assert other.valid_losses() == runs[0].valid_losses()
        assert same_bits(other.weights(), runs[0].weights())
        assert same_bits(other.buffers(), runs[0].buffers())


def test_pixels_are_for_the_first_stage_and_labels_for_the_last(
    image_settings: Callable, run_images: Callable
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

    run_images(image_settings(pipeline__stages=4), prepare_worker=watch)
    assert set(read) == {("_read_inputs", 0), ("_read_targets", 3)}


@pytest.mark.slow
def test_compiled_layers_compute_the_same(image_settings: Callable, images: ImageSet) -> None:
    settings = image_settings(pipeline__stages=4)
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
    image_settings: Callable,
    run_images: Callable,
    images: ImageSet,
    tmp_path: Path,
) -> None:
    settings = in_fp32(image_settings, pipeline__stages=before)
    whole = run_images(settings)
    middle = commit_all(whole, settings, tmp_path / "run", images)[3]
    resumed = run_images(
        in_fp32(image_settings, pipeline__stages=after),
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
    image_settings: Callable, run_images: Callable, images: ImageSet, tmp_path: Path
) -> None:
    settings = in_fp32(image_settings, train__steps=2, train__checkpoint_every=1)
    folder = commit_all(run_images(settings), settings, tmp_path / "run", images)[1]

    def without(ending: str) -> Callable[[dict[str, Tensor]], None]:
        return lambda tensors: [tensors.pop(n) for n in list(tensors) if n.endswith(ending)]

    rewrite(folder, without("momentum_buffer"))
    with pytest.raises(CheckpointError, match="has no optimizer state"):
        run_images(settings, resume=folder, folder=tmp_path / "a")
    rewrite(folder, without("running_var"))
    with pytest.raises(
        CheckpointError, match=r"\d+ tensors are missing .*, such as bn1.running_var"
    ):
        run_images(settings, resume=folder, folder=tmp_path / "b")


def test_sgd_without_momentum_resumes_too(
    image_settings: Callable, run_images: Callable, images: ImageSet, tmp_path: Path
) -> None:
    settings = in_fp32(
        image_settings, optim__momentum=0.0, train__steps=4, train__checkpoint_every=2
    )
    whole = run_images(settings)
    middle = commit_all(whole, settings, tmp_path / "run", images)[2]
    resumed = run_images(settings, resume=middle, folder=tmp_path / "resumed")
    assert same_bits(resumed.weights(), whole.weights())


# --- refused steps ---


@pytest.mark.parametrize("stage", [0, 3])
def test_a_refused_step_leaves_what_norms_have_seen(
    stage: int, image_settings: Callable, run_images: Callable, images: ImageSet
) -> None:
    settings = image_settings(pipeline__stages=4, train__steps=2)
    refused = run_images(settings, prepare_worker=poison(stage, {1}))
    once = run_images(settings, prepare_worker=stop_in_the_first_step)
    assert [r.committed for r in refused.steps(0)] == [True, False]
    assert same_bits(refused.buffers(), once.buffers())
    assert same_bits(refused.weights(), once.weights())
    seen = {name: value for name, value in refused.buffers().items() if "mean" in name}
    assert all(bool(value.any()) for value in seen.values()), "the first step has left its mark"

    chain = Chain(settings, Feed(images, settings, CPU))
    chain.train_step(0)
    before = {n: b.clone() for s in chain.stages for n, b in s.global_buffers().items()}
    next(chain.stages[0].parameters()).register_hook(lambda gradient: gradient * math.nan)
    chain.train_step(1)
    after = {n: b for s in chain.stages for n, b in s.global_buffers().items()}
    assert same_bits(before, after)
