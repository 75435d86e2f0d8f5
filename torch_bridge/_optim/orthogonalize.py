"""Orthogonalized updates of sharded matrices, for Muon.

Momentum of a matrix is sent to the rank that owns it, which runs Newton-Schulz; the result is sent back to the shards.
A shard is the local tensor of a DTensor, or a flat slice of ZeRO.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from qshard._core.optimizers import muon as core
from qshard._core.optimizers.muon_plan import plan_buckets
from qshard._core.placement import Box
from qshard.layout import Shape
from qshard.torch_bridge._distributed.dtensor import local_box, wrapped_like
from qshard.torch_bridge._fsdp.weight import gradient_of, memory_of
from qshard.torch_bridge._ops.bind import dtype_name
from qshard.torch_bridge._optim.matrix_exchange import MatrixExchange, Sending
from qshard.torch_bridge._optim.newton_schulz import NEWTON_SCHULZ_SETTINGS, newton_schulz

_SETTINGS = ("momentum", "nesterov", *NEWTON_SCHULZ_SETTINGS, "adjust_lr_fn", "master_weights")
"""Settings of a group that change results, and so must be equal on all ranks."""


class Matrix(NamedTuple):
    """A matrix or a stack, its settings, and the states of the optimizer.

    Attributes:
      parameter: the tensor to update, with its gradient and the key of its state; for a flat slice, the slice.
      shape: the whole shape.
      box: the local shard, as a box of the whole shape or of the flattened parameter.
    """

    name: str
    parameter: Tensor
    group: dict[str, Any]
    states: Mapping[Tensor, dict[str, Any]]
    shape: Shape
    box: Box

    @classmethod
    def of(cls, name: str | None, parameter: Tensor, group: dict[str, Any], states: Mapping[Tensor, Any]) -> Matrix:
        """Return the local shard of a DTensor, or a plain tensor."""
        shape = tuple(parameter.shape)
        return cls(name or f"parameter {shape}", parameter, group, states, shape, local_box(parameter))

    @property
    def facts(self) -> tuple[Any, ...]:
        """The description and settings that ranks must agree on."""
        given = "with" if self.parameter.grad is not None else "without"
        what = f"{self.name} {self.shape} ({dtype_name(self.parameter.dtype)}) {given} a gradient"
        return what, *(self.group[name] for name in _SETTINGS)

    def values(self) -> Tensor:
        """Return the local values to update: the shard, or its float32 master. Create missing states."""
        memory, state = memory_of(self.parameter), self.states[self.parameter]
        if memory.dtype != torch.float32 and self.group["master_weights"] is not None and "master" not in state:
            state["master"] = wrapped_like(self.parameter, memory.float())
        values = memory_of(state["master"]) if "master" in state else memory
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = wrapped_like(self.parameter, torch.zeros_like(values))
        return values

    def momentum(self, grad_scale: Tensor | float) -> Tensor:
        """Update the momentum of the local shard, and return what Newton-Schulz takes."""
        grad, group = self.parameter.grad, self.group
        assert grad is not None
        if grad.is_sparse:
            raise NotImplementedError(f"Muon: grad (sparse) of {self.name} is not dense; call .to_dense() on it")
        local = gradient_of(self.parameter).float()
        if isinstance(grad_scale, Tensor) or grad_scale != 1:
            local = local * grad_scale
        self.values()  # Creates the state.
        buffer = memory_of(self.states[self.parameter]["momentum_buffer"])
        wide = buffer.float()  # Itself in float32. In 16 bits, loops of torch round as elements are aligned.
        wide.lerp_(local, 1 - group["momentum"])
        buffer.copy_(wide)
        return local.lerp(wide, group["momentum"]) if group["nesterov"] else wide

    def apply(self, update: Tensor) -> None:
        """Update the local shard by its part of the orthogonalized matrix."""
        group, memory, values = self.group, memory_of(self.parameter), self.values()
        scale = core.update_scale("Muon", group["adjust_lr_fn"], *self.shape[-2:])
        lr = float(group["lr"])
        wide = values.float()
        wide.mul_(1 - lr * group["weight_decay"])
        wide.add_(update, alpha=-lr * scale)
        values.copy_(wide)
        if values is not memory:
            memory.copy_(values)


class MatrixUpdates:
    """A step of the matrices of one set of ranks. Messages of a bucket are sent while another is orthogonalized.

        send 0 | send 1, orthogonalize 0 | send 2, orthogonalize 1, apply 0 | send 3, orthogonalize 2, apply 1 | ...

    Args:
      matrices: the matrices of all buckets, in their order.
      exchanges: the exchange of each bucket.
    """

    def __init__(self, matrices: Sequence[Matrix], exchanges: Sequence[MatrixExchange]):
        self._matrices, self._exchanges = matrices, exchanges
        self._inputs: list[Tensor] = []  # of Newton-Schulz, for the next bucket
        self._there: dict[int, Sending] = {}
        self._back: dict[int, Sending] = {}
        self._bucket = 0  # the next to send

    def add(self, matrix: Tensor) -> None:
        """Take the local part of what Newton-Schulz takes of the next matrix. Send the bucket if it is complete."""
        self._inputs.append(matrix)
        exchange = self._exchanges[self._bucket]
        if len(self._inputs) == len(exchange.bucket.parameters):
            self._there[self._bucket] = exchange.send(self._inputs)
            self._inputs = []
            self._advance()

    def finish(self) -> None:
        """Update the matrices of the last two buckets."""
        self._advance()
        self._advance()

    def _advance(self) -> None:
        """Orthogonalize the bucket that was sent before the last one, and update the matrices of the one before it."""
        i, self._bucket = self._bucket, self._bucket + 1
        if i - 1 in self._there:
            self._back[i - 1] = self._orthogonalize(self._exchanges[i - 1], self._there.pop(i - 1))
        if i - 2 in self._back:
            exchange = self._exchanges[i - 2]
            matrices = [self._matrices[index] for index in exchange.bucket.parameters]
            local = [memory_of(each.parameter) for each in matrices]
            shapes, devices = [each.shape for each in local], [each.device for each in local]
            for matrix, part in zip(matrices, exchange.parts(self._back.pop(i - 2), shapes, devices), strict=True):
                matrix.apply(part)

    def _orthogonalize(self, exchange: MatrixExchange, sending: Sending) -> Sending:
        results = {}
        for unit, matrix in exchange.units(sending).items():
            group = self._matrices[exchange.bucket.units[unit][0]].group
            results[unit] = newton_schulz(matrix, *(group[name] for name in NEWTON_SCHULZ_SETTINGS))
        return exchange.send_back(results)


class MatrixPlan(NamedTuple):
    """The matrices of one set of ranks, and the exchanges of their buckets."""

    matrices: list[Matrix]
    exchanges: list[MatrixExchange]

    def update(self, grad_scale: Tensor | float) -> None:
        """Update all matrices with their gradients. Collective."""
        updates = MatrixUpdates(self.matrices, self.exchanges)
        for matrix in self.matrices:
            updates.add(matrix.momentum(grad_scale))
        updates.finish()


def plan_updates(
    op: str, group: dist.ProcessGroup | None, matrices: Sequence[Matrix], owned_elements: int
) -> MatrixPlan:
    """Plan the update of the matrices of one set of ranks that have a gradient. Collective."""
    boxes = [each.box for each in matrices]
    facts: list[tuple[Any, ...]] = [each.facts for each in matrices]
    facts.append(("matrices in buckets", owned_elements))
    everyone: list[Any] = [(facts, boxes)]
    if group is not None:
        everyone = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, (facts, boxes), group=group)
        _check_agreement(op, [of_rank for of_rank, _ in everyone])
    chosen = [i for i, each in enumerate(matrices) if each.parameter.grad is not None]
    shapes, of_ranks = [matrices[i].shape for i in chosen], [[of_rank[i] for _, of_rank in everyone] for i in chosen]
    exchanges = plan_exchanges(shapes, of_ranks, group, _device_of(matrices[0].parameter), owned_elements)
    return MatrixPlan([matrices[i] for i in chosen], exchanges)


def plan_exchanges(
    shapes: Sequence[Shape],
    boxes: Sequence[Sequence[Box]],
    group: dist.ProcessGroup | None,
    device: torch.device,
    owned_elements: int,
) -> list[MatrixExchange]:
    """Return the exchanges of the buckets of matrices, from their shapes and the shards of all ranks."""
    buckets = plan_buckets(shapes, boxes, owned_elements=owned_elements)
    return [MatrixExchange(bucket, group, device) for bucket in buckets]


def _check_agreement(op: str, everyone: Sequence[Sequence[tuple[Any, ...]]]) -> None:
    """Raise the same error on every rank if ranks differ."""
    for rank, facts in enumerate(everyone):
        if facts == everyone[0]:
            continue
        there = [[*each, ("nothing more",)] for each in (everyone[0], facts)]
        first, other = next((a, b) for a, b in zip(*there, strict=False) if a != b)
        differing = f"{first[0]}, and rank {rank} {other[0]}"
        if first[0] == other[0]:
            differing = f"{first[0]} with settings {first[1:]}, and rank {rank} with {other[1:]}"
        raise ValueError(
            f"{op}: rank 0 of {len(everyone)} would update {differing}; use the same parameters, settings and "
            "gradients on every rank"
        )


def ranks_of(parameter: Tensor, group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Return the global ranks that have a part or a copy of a parameter, as far as they are known."""
    if isinstance(parameter, DTensor):
        return tuple(sorted(parameter.device_mesh.mesh.flatten().tolist()))
    return () if group is None else tuple(dist.get_process_group_ranks(group))


def _device_of(parameter: Tensor) -> torch.device:
    """Return where matrices are whole: the device of the mesh, for a parameter that is offloaded too."""
    memory = memory_of(parameter)
    kind = parameter.device_mesh.device_type if isinstance(parameter, DTensor) else memory.device.type
    if memory.device.type == kind:
        return memory.device
    return torch.device(kind, torch.get_device_module(kind).current_device())
