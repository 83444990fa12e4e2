"""Calibrated cuts: each basis from what a trained model sends over its cut, on training data.

The stages come by one after the other, as a run that starts from weights makes them, and the same
tokens go through each. A cut is calibrated behind those below it: what it sees is what will cross.

Shapes: B sequences, T positions, N tokens of all batches, D model width, V vocabulary.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.boundary import ProjectedBoundary
from thinwire.data import Corpus
from thinwire.engine.build import autocast_for
from thinwire.engine.feed import Feed
from thinwire.model import Stage
from thinwire.settings import Settings
from thinwire.subspace.principal import narrowed, principal_basis, token_means

Told = Callable[[int, int], None]
"""Called after every batch that a stage has computed: how many tokens are done, of how many."""


@dataclass(frozen=True)
class Fit:
    """How well a calibrated cut carries what crosses it."""

    block: int  # the first above the cut
    rank: int
    kept: float  # of the squares of what crosses, on the tokens of the calibration


class Calibration:
    """Goes with the stages of a new run from the first to the last."""

    def __init__(self, settings: Settings, data: Corpus, device: torch.device, told: Told):
        self.fits: list[Fit] = []
        self.device = device
        self._settings = settings
        self._told = told
        self._autocast = autocast_for(settings.run.precision, device)
        self._ids = _batches(settings, data, device)
        self._inputs = self._ids  # of the stage that comes next
        self._below: ProjectedBoundary | None = None  # the sender's end of the cut below
        self._table: Tensor | None = None  # for the receiver of that cut

    @torch.no_grad()
    def pass_through(self, index: int, stage: Stage, fresh: Collection[str]) -> None:
        """Calibrate the cut above a stage, unless its basis came along with the weights.

        `fresh` are the names of what did not.
        """
        self._complete(stage)
        outgoing = stage.outgoing
        if outgoing is None:
            return
        assert isinstance(outgoing, ProjectedBoundary) and outgoing.basis is not None
        streams = []
        for inputs, ids_BT in zip(self._inputs, self._ids, strict=True):
            with self._autocast():
                streams.append(stage.stream(inputs, ids_BT))
            self._told(len(streams), len(self._ids))
        name = next(n for n, p in stage.global_parameters().items() if p is outgoing.basis)
        self._table = None  # that of the cut below is in place
        if name in fresh:
            self._calibrate(index, streams, outgoing)
        self._below = outgoing
        self._inputs = [
            outgoing.encode(x_BTD, ids_BT) for x_BTD, ids_BT in zip(streams, self._ids, strict=True)
        ]

    def _complete(self, stage: Stage) -> None:
        """Give the receiver of the cut below its copy of the basis, and its token table."""
        incoming, below, table_VD = stage.incoming, self._below, self._table
        if below is None:
            return
        assert isinstance(incoming, ProjectedBoundary)
        assert incoming.basis is not None and below.basis is not None
        incoming.basis.copy_(below.basis)
        if incoming.table is None or table_VD is None:
            return
        if incoming.widen is None:
            incoming.table.copy_(table_VD)
            return
        ids_N = torch.cat([ids_BT.flatten() for ids_BT in self._ids])
        counts_V = torch.bincount(ids_N, minlength=len(table_VD))
        table_VW, widen_DW = narrowed(table_VD, counts_V, incoming.table.shape[1])
        incoming.table.copy_(table_VW)
        incoming.widen.copy_(widen_DW)

    def _calibrate(self, index: int, streams: list[Tensor], end: ProjectedBoundary) -> None:
        """The basis that loses least of what the receiver does not know by itself."""
        assert end.basis is not None
        boundary, model = self._settings.boundary, self._settings.model
        known_VD = None
        if boundary.anchor == "trainable":
            x_ND = torch.cat([x_BTD.flatten(0, 1) for x_BTD in streams])
            ids_N = torch.cat([ids_BT.flatten() for ids_BT in self._ids])
            known_VD = token_means(x_ND, ids_N, model.vocab)
        elif boundary.anchor == "fixed":
            known_VD = end.space.table_VD
        square_DD = torch.zeros(model.dim, model.dim, dtype=torch.float64, device=end.basis.device)
        total = 0.0
        for x_BTD, ids_BT in zip(streams, self._ids, strict=True):
            rest_ND = x_BTD.flatten(0, 1).double()
            total += float(rest_ND.square().sum())
            if known_VD is not None:
                rest_ND = rest_ND - known_VD[ids_BT.flatten()].double()
            square_DD += rest_ND.T @ rest_ND
        basis_DK = principal_basis(square_DD, end.basis.shape[1])
        end.basis.copy_(basis_DK)
        lost = float(square_DD.trace() - (basis_DK * (square_DD @ basis_DK)).sum())
        self.fits.append(
            Fit(self._settings.split()[index].stop, basis_DK.shape[1], 1 - lost / total)
        )
        if boundary.anchor == "trainable" and known_VD is not None:
            inside_DK = basis_DK.to(known_VD)
            self._table = known_VD - (known_VD @ inside_DK) @ inside_DK.T


def _batches(settings: Settings, data: Corpus, device: torch.device) -> list[Tensor]:
    """The token ids (B, T) of the first training batches, or of all where there are few."""
    feed = Feed(data, settings, device)
    count, per_step = settings.tokens_per_microbatch, settings.pipeline.microbatches
    most = max(1, feed.example_count // settings.microbatch_size)
    batches = min(most, -(-settings.boundary.calibrate // count))
    return [feed.training(n // per_step, n % per_step).inputs for n in range(batches)]
