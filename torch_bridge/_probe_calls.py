"""Calls of layers that `numerics_of` measures: it quantizes their operands once more and compares the values."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from qshard._core import quantize_steps
from qshard._core.quantize_steps import Plane
from qshard.formats import Format, Usage
from qshard.numerics._training_steps import step_sums
from qshard.recipes import Role
from qshard.torch_bridge._delayed_scaling import DelayedScale
from qshard.torch_bridge._distributed.dtensor import local_of
from qshard.torch_bridge._distributed.tensor_shards import ShardSpec
from qshard.torch_bridge._experts.grouped_linear import checked_sizes
from qshard.torch_bridge._experts.tiles import GroupedRows
from qshard.torch_bridge._losses.heads import QuantizedHead
from qshard.torch_bridge._nn.linear import WeightLayer
from qshard.torch_bridge._nn.operands import ROLES, LayerQuantizer, matrix_of
from qshard.torch_bridge._nn.weight_module import next_seed, rank_of
from qshard.torch_bridge._ops.bind import ops
from qshard.torch_bridge._ops.eager import autocast_dtype
from qshard.torch_bridge._torch_internals import backward_id

PART = 1 << 22
"""Elements to measure at a time, each with about 30 bytes of temporary memory."""
ROWS = 128
"""Row alignment of a part, so that it has whole blocks of every format."""

Measured = list[tuple[Tensor, int]]
"""For each part of an operand: sums as one float64 tensor on the device, and the number of elements."""
Add = Callable[[str, Role, Measured], None]
"""Function that counts what was measured for a role of a layer, by the name of the layer."""


class LayerCall:
    """One call of a layer. Recomputation in a backward pass is not counted."""

    def __init__(self, add: Add, name: str, layer: WeightLayer, input: Any = None, labels: Tensor | None = None):
        self.add, self.name, self.layer = add, name, layer
        self.seed = _seed_of_next_call(layer)
        self.pending: list[Measured] | None = []
        if isinstance(layer, QuantizedHead):
            layer.observer = self._observe if labels is not None else None
            self.gives_loss = labels is not None
        else:
            self.gives_loss = False
        if not self.gives_loss and isinstance(input, Tensor) and not _is_in_backward():
            add(name, Role.ACTIVATION, measure_operand(Role.ACTIVATION, layer, input, _dtype_of(input), self.seed))

    @torch.no_grad()
    def measure_gradient(self, grad: Tensor) -> None:
        """Measure the gradient of y. For a loss, count the gradients of logits that waited for this hook."""
        if not self.gives_loss:
            self.add(self.name, Role.GRADIENT, measure_operand(Role.GRADIENT, self.layer, grad, grad.dtype, self.seed))
            return
        for measured in self.pending or ():
            self.add(self.name, Role.GRADIENT, measured)
        self.pending = None

    @torch.no_grad()
    def _observe(self, role: Role, x: Tensor, seed: Tensor | None) -> None:
        """Measure an operand of a chunk of a head. Gradients computed with the loss wait until it is differentiated."""
        if role is Role.ACTIVATION and _is_in_backward():
            return
        measured = measure_operand(role, self.layer, x, x.dtype, seed)
        if role is Role.ACTIVATION or self.pending is None:
            self.add(self.name, role, measured)
        else:
            self.pending.append(measured)


class ExpertsCall:
    """One call of a `GroupedLinear`: a call of each expert, with the rows of its group.

    `MoE` passes padded rows in place of group sizes.
    """

    def __init__(self, add: Add, experts: Sequence[tuple[str, WeightLayer]], input: Tensor, group_sizes: Any):
        padded = isinstance(group_sizes, GroupedRows)
        if padded and group_sizes.transfer is not None:
            raise NotImplementedError(
                f"numerics_of: {experts[0][0]} gets rows from other ranks (ep_group of MoE), which is not measured; "
                "measure a model without ep_group"
            )
        if not padded:
            checked_sizes(input, len(experts), group_sizes)
        self.add, self.experts, self.groups = add, experts, group_sizes
        self.seeds = [_seed_of_next_call(layer) for _, layer in experts]
        if not _is_in_backward():
            self._measure(Role.ACTIVATION, input, _dtype_of(input))

    @torch.no_grad()
    def measure_gradient(self, grad: Tensor) -> None:
        self._measure(Role.GRADIENT, grad, grad.dtype)

    def _measure(self, role: Role, x: Tensor, dtype: torch.dtype) -> None:
        for (name, layer), seed, part in zip(self.experts, self.seeds, self._by_expert(role, x), strict=True):
            self.add(name, role, measure_operand(role, layer, part, dtype, seed))

    def _by_expert(self, role: Role, x: Tensor) -> Sequence[Tensor]:
        """Split the rows of x, or of the gradient, into the rows of each expert."""
        if not isinstance(self.groups, GroupedRows):
            sizes: list[int] = self.groups.tolist()
            groups: Sequence[Tensor] = x[: sum(sizes)].split(sizes)
            return groups
        tiles = self.groups.x if role is Role.ACTIVATION else self.groups.y
        stops = tiles.stops.tolist()
        rows = (tiles.rows[start:stop] for start, stop in itertools.pairwise((0, *stops)))
        return [x.index_select(0, own[own < x.shape[0]]) for own in rows]


def _seed_of_next_call(layer: WeightLayer) -> Tensor | None:
    return None if layer.seed is None else next_seed(layer.seed.clone(), rank_of(layer.weight))


def _is_in_backward() -> bool:
    return backward_id() is not None


def _dtype_of(x: Tensor) -> torch.dtype:
    return autocast_dtype(x.device) or x.dtype


def measure_operand(role: Role, layer: WeightLayer, x: Tensor, dtype: torch.dtype, seed: Tensor | None) -> Measured:
    """Quantize an operand of a layer rowwise, as the layer does it, and measure the plane."""
    local = local_of(x).detach()
    parts = {role: ShardSpec(tuple(x.shape), x.device_mesh, tuple(x.placements))} if isinstance(x, DTensor) else {}
    matrix = matrix_of(local, dtype)
    planes, _ = LayerQuantizer(layer.recipe, seed, parts, scales_of(layer)).quantize(matrix, role, Usage.ROWWISE)
    operand = planes[Usage.ROWWISE]
    return measure_plane(matrix, operand.parts, operand.format)


def scales_of(layer: WeightLayer) -> list[Tensor]:
    """Return the scales of delayed scaling by role, or an empty list."""
    if "delayed" not in layer._modules:
        return []
    return [cast(DelayedScale, layer.delayed[role.value]).scale for role in ROLES]


def measure_plane(x: Tensor, parts: Plane, fmt: Format) -> Measured:
    """Compute `step_sums` of a matrix and its rowwise plane, in parts of some rows.

    Each part gives one float64 tensor on the device, which holds counts exactly, and its number of elements.
    """
    found = []
    rows, columns = x.shape
    step = max(PART // max(columns, 1) // ROWS, 1) * ROWS
    for first in range(0, rows if columns else 0, step):
        last = min(first + step, rows)
        some = quantize_steps.plane_rows(parts, fmt, Usage.ROWWISE, first, last)
        value = _values(some, fmt)
        ones = some.data.view(torch.uint8).clone().fill_(fmt.element.ones_byte).view(some.data.dtype)
        scale = _values(some._replace(data=ones), fmt)
        seen = step_sums(torch, x[first:last].float(), value, scale, fmt.element, _count)
        found.append((torch.stack([number.double() for number in seen]), value.numel()))
    return found


def _values(parts: Plane, fmt: Format) -> Tensor:
    values: Tensor = quantize_steps.dequantize(ops, parts, fmt, Usage.ROWWISE, torch.float32)
    return values


def _count(mask: Tensor) -> Tensor:
    return mask.sum()
