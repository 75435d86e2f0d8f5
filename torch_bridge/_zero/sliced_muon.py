"""Muon on the slices of ZeRO: ranks send slices of momentum to the owners of matrices, and update their masters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qshard._core.optimizers.muon import MUON
from qshard._core.placement import Box
from qshard.torch_bridge._ops.collectives import unlike_ranks
from qshard.torch_bridge._optim.matrix_exchange import MatrixExchange
from qshard.torch_bridge._optim.orthogonalize import Matrix, MatrixUpdates, plan_exchanges
from qshard.torch_bridge._zero.buffers import UpdateBatch
from qshard.torch_bridge._zero.settings import Settings
from qshard.torch_bridge._zero.weight import Ranks, ZeroParameter

Groups = Sequence[dict[str, Any]]
States = Mapping[Tensor, dict[str, Any]]


def is_muon(group: Mapping[str, Any]) -> bool:
    return group.get("algorithm") == MUON


class MuonStep(NamedTuple):
    """One step of the matrices of all batches. Buckets of matrices do not depend on batches."""

    of_batches: list[list[Matrix]]
    updates: MatrixUpdates

    def add(self, batch: UpdateBatch, grad_scale: Tensor | float) -> None:
        """Update the momentum of a batch from the gradients of its masters. Collective: complete buckets are sent."""
        for matrix in self.of_batches[batch.number]:
            self.updates.add(matrix.momentum(grad_scale))

    def finish(self) -> None:
        """Update the masters of the last buckets. Collective."""
        self.updates.finish()


class SlicedMuon:
    """The matrices of a `ZeroOptimizer`, and the plan of their owners.

    Args:
      batches: the units that this rank updates together. Ranks have other batches of the same order of units.
      settings: parameter groups; some or none have Muon as their algorithm.
      ranks: the ranks that own matrices.
      device: their device.
    """

    def __init__(self, batches: Sequence[UpdateBatch], settings: Settings, ranks: Ranks, device: torch.device):
        self._ranks, self._device = ranks, device
        self._group_of = {w: i for i, of in enumerate(settings.groups) if is_muon(of.settings) for w in of.weights}
        self._of_batches = [
            [weight for flat in batch.flats for weight in flat.weights if weight in self._group_of] for batch in batches
        ]
        self._exchanges: list[MatrixExchange] | None = None

    def initialize_states(self, groups: Groups, states: States) -> None:
        """Create the momentum that a matrix lacks."""
        for of_batch in self._matrices(groups, states):
            for matrix in of_batch:
                matrix.values()

    def begin(self, groups: Groups, states: States, owned_elements: int) -> MuonStep:
        """Begin a step with the settings and states of the optimizer's parameter groups, which loads replace.

        The first step plans buckets with `owned_elements` elements for each rank, and is collective.

        Raises:
          ValueError: ranks have other `owned_elements`.
        """
        if self._exchanges is None:
            self._exchanges = self._plan(owned_elements)
        of_batches = self._matrices(groups, states)
        return MuonStep(of_batches, MatrixUpdates([each for of in of_batches for each in of], self._exchanges))

    def _plan(self, owned_elements: int) -> list[MatrixExchange]:
        ordered = [weight for of_batch in self._of_batches for weight in of_batch]
        if not ordered:
            return []
        group = self._ranks.group
        if others := unlike_ranks(repr(owned_elements).encode(), group, self._device):
            raise ValueError(
                f"ZeroOptimizer: owned_elements ({owned_elements}) differs from rank {others[0]}; set it alike on all "
                "ranks before the first step"
            )
        shapes, boxes = [weight.shape for weight in ordered], [_boxes(weight) for weight in ordered]
        return plan_exchanges(shapes, boxes, group, self._device, owned_elements)

    def _matrices(self, groups: Groups, states: States) -> list[list[Matrix]]:
        """Return the slices of this rank as shards of flattened matrices. A visible weight is the key of a state."""
        return [[self._matrix(weight, groups, states) for weight in of_batch] for of_batch in self._of_batches]

    def _matrix(self, w: ZeroParameter, groups: Groups, states: States) -> Matrix:
        own: States = {w.master: states[w.visible]}
        return Matrix(w.name, w.master, groups[self._group_of[w]], own, w.shape, _boxes(w)[self._ranks.rank])


def _boxes(weight: ZeroParameter) -> list[Box]:
    return [Box((weight.size,), (start,), (stop - start,)) for start, stop in weight.slices]
