"""A calibrated basis loses least of what crosses: a trained model survives it, not a random one."""

from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from thinwire.boundary import ProjectedBoundary
from thinwire.data import Corpus
from thinwire.engine import Checkpoint
from thinwire.engine.calibrate import Calibration
from thinwire.engine.chain import Chain
from thinwire.engine.feed import Feed
from thinwire.engine.state import restore_weights
from thinwire.errors import ConfigError
from thinwire.inference import Model
from thinwire.report import PlainDisplay
from thinwire.run.start import adopted, make_start, open_origin
from thinwire.settings import Settings
from thinwire.subspace import orthonormality_error, random_basis
from thinwire.subspace.principal import PRIOR, narrowed, principal_basis, token_means
from trained import trained

CPU = torch.device("cpu")
RANK = 12
CUT = {"boundary__mode": "projected", "boundary__rank": RANK, "pipeline__stages": 4}
CALIBRATED = {**CUT, "boundary__basis": "calibrated", "boundary__calibrate": 1024}


def best_error(x_ND: torch.Tensor, rank: int) -> float:
    """The squares that the best approximation of that rank loses, by singular values."""
    return float(torch.linalg.svdvals(x_ND.double())[rank:].square().sum())


def test_a_principal_basis_loses_no_more_than_singular_vectors_do() -> None:
    torch.manual_seed(0)
    x_ND = torch.randn(300, 24, dtype=torch.float64) @ torch.randn(24, 24, dtype=torch.float64)
    basis_DK = principal_basis(x_ND.T @ x_ND, 7)
    assert orthonormality_error(basis_DK) < 1e-12
    lost = float((x_ND - x_ND @ basis_DK @ basis_DK.T).square().sum())
    assert lost == pytest.approx(best_error(x_ND, 7), rel=1e-9)
    other_DK = random_basis(24, 7, seed=0)
    assert float((x_ND - x_ND @ other_DK @ other_DK.T).square().sum()) > 1.5 * lost
    sizes_K = (x_ND @ basis_DK).std(0)
    assert sizes_K.max() < 4 * sizes_K.min(), "coordinates are of about one size"


def test_a_token_seen_often_has_its_mean_and_one_never_seen_that_of_all() -> None:
    x_ND = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 8.0]], dtype=torch.float64)
    means_VD = token_means(x_ND, torch.tensor([1, 1, 2]), 4)
    overall_D = x_ND.mean(0)
    assert torch.allclose(means_VD[0], overall_D) and torch.allclose(means_VD[3], overall_D)
    assert torch.allclose(means_VD[1], (x_ND[:2].sum(0) + PRIOR * overall_D) / (2 + PRIOR))


def test_a_narrow_table_is_the_best_of_its_width() -> None:
    torch.manual_seed(0)
    table_VD, counts_V = torch.randn(30, 10, dtype=torch.float64), torch.arange(30)
    table_VW, widen_DW = narrowed(table_VD, counts_V, 4)
    weights_V1 = counts_V.double().sqrt()[:, None]
    lost = float(((table_VD - table_VW @ widen_DW.T) * weights_V1).square().sum())
    assert lost == pytest.approx(best_error(table_VD * weights_V1, 4), rel=1e-9)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus) -> Path:
    """A model that has learned its text."""
    values = {
        "run": {"device": "cpu", "precision": "fp64", "threads": 1},
        "model": {"layers": 4, "dim": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 300,
                  "context": 16},
        "data": {"source": "text", "path": "x", "valid_fraction": 0.1},
        "pipeline": {"stages": 1, "microbatches": 1},
        "optim": {"lr": 1e-2, "warmup": 2},
        "train": {"steps": 80, "batch": 16, "eval_batches": 4},
    }  # fmt: skip
    return trained(Settings.from_plain(values), corpus, tmp_path_factory.mktemp("source"))


def started(settings: Settings, corpus: Corpus, folder: Path) -> Checkpoint:
    display = PlainDisplay(StringIO())
    origin = open_origin(settings, display)
    assert origin is not None
    return make_start(origin, adopted(settings, origin.settings), folder, corpus, display)


def loss_of(place: Path, corpus: Corpus) -> float:
    model = Model(place, "cpu")
    return model.validate(Feed(corpus, model.settings, CPU), 0, compressed=True).loss


def test_a_trained_model_survives_calibrated_cuts_and_no_random_ones(
    source: Path, make_settings: Callable[..., Settings], corpus: Corpus, tmp_path: Path
) -> None:
    def loss(name: str, **changes: Any) -> float:
        settings = make_settings(**changes, train__init_from=str(source))
        return loss_of(started(settings, corpus, tmp_path / name).folder, corpus)

    whole = loss("whole", pipeline__stages=4)
    random = loss("random", **CUT)
    calibrated = loss("calibrated", **CALIBRATED)
    table = loss("table", **CALIBRATED, boundary__anchor="trainable")
    narrow = loss("narrow", **CALIBRATED, boundary__anchor="trainable", boundary__table=8)
    fixed = loss("fixed", **CALIBRATED, boundary__anchor="fixed")
    assert random > whole + 0.5, "a random basis ruins it"
    for kept in (calibrated, table, narrow, fixed):
        assert kept - whole < 0.5 * (random - whole)
    assert table - whole < 0.1 * (random - whole)


@pytest.mark.parametrize("anchor", ["none", "trainable"])
def test_a_calibrated_cut_reconstructs_as_well_as_any_of_its_rank(
    anchor: str, source: Path, make_settings: Callable[..., Settings], corpus: Corpus,
    tmp_path: Path,
) -> None:  # fmt: skip
    """On the very activations, against singular values in float64."""
    settings = make_settings(
        **{**CALIBRATED, "pipeline__stages": 2, "boundary__calibrate": 9999},
        boundary__anchor=anchor,
        train__init_from=str(source),
    )  # fmt: skip
    made = started(settings, corpus, tmp_path / "new")
    model = Model(made.folder, "cpu")
    below, above = model.stages
    assert isinstance(above.incoming, ProjectedBoundary) and below.outgoing is not None
    ids = Calibration(settings, corpus, CPU, lambda done, of: None)._ids
    assert sum(batch.numel() for batch in ids) <= len(corpus.train), "all there is, once"
    with torch.no_grad():
        x_ND = torch.cat([below.stream(batch).flatten(0, 1) for batch in ids])
        back = [above.incoming.decode(below(batch), batch).flatten(0, 1) for batch in ids]
    lost = float((x_ND - torch.cat(back)).square().sum())
    ids_N = torch.cat([batch.flatten() for batch in ids])
    known_ND = torch.zeros_like(x_ND)
    if anchor == "trainable":
        known_ND = F.embedding(ids_N, token_means(x_ND, ids_N, 300))
    assert lost == pytest.approx(best_error(x_ND - known_ND, RANK), rel=1e-9)


@pytest.mark.parametrize("learn", [False, True])
def test_a_calibrated_basis_is_trained_only_where_that_is_asked_for(
    learn: bool, source: Path, make_settings: Callable[..., Settings], corpus: Corpus,
    tmp_path: Path, run_in_threads: Callable,
) -> None:  # fmt: skip
    """Stages as threads: saved by the sender alone, loaded by both ends, kept by a later start."""
    changes = {**CALIBRATED, "boundary__learn": learn, "train__checkpoint_every": 2}
    settings = make_settings(**changes, train__steps=2, train__init_from=str(source))
    made = started(settings, corpus, tmp_path / "new")
    names = [name for shard in made.shards for name in shard.tensors if "basis" in name]
    assert len(names) == len(set(names)) == 3
    outcome = run_in_threads(settings, resume=made.folder)
    before, after = made.tensors(names), outcome.weights()
    for name in names:
        assert torch.equal(before[name], after[name]) == (not learn)
    chain = Chain(settings, Feed(corpus, settings, CPU))
    for stage in chain.stages:
        restore_weights(stage, chain.builder.space, made)
    assert [chain.train_step(step) for step in range(2)] == pytest.approx(outcome.losses())
    again = make_settings(**changes, train__init_from=str(made.folder), run__seed=5)
    kept = started(again, corpus, tmp_path / "again").tensors(names)
    assert all(torch.equal(kept[name], before[name]) for name in names)


def test_calibration_needs_trained_weights(make_settings: Callable[..., Settings]) -> None:
    with pytest.raises(ConfigError, match=r"needs train\.init_from"):
        make_settings(**CALIBRATED)
