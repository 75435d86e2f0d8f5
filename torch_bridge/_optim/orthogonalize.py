"""Orthogonalized updates of sharded matrices, for Muon.

Momentum of a matrix is sent to the rank that owns it, which runs Newton-Schulz; the result is sent back to the shards.
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
from qshard.torch_bridge._distributed.dtensor import local_box, wrapped_like
from qshard.torch_bridge._fsdp.weight import memory_of
from qshard.torch_bridge._ops.bind import dtype_name
from qshard.torch_bridge._optim.matrix_exchange import MatrixExchange, Sending
from qshard.torch_bridge._optim.newton_schulz import NEWTON_SCHULZ_SETTINGS, newton_schulz

_SETTINGS = ("momentum", "nesterov", *NEWTON_SCHULZ_SETTINGS, "adjust_lr_fn", "master_weights")
"""Settings of a group that change results, and so must be equal on all ranks."""


class Matrix(NamedTuple):
    """A matrix or a stack, its settings, and the states of the optimizer."""

    name: str
    parameter: Tensor
    group: dict[str, Any]
    states: Mapping[Tensor, dict[str, Any]]

    @property
    def facts(self) -> tuple[Any, ...]:
        """The description and settings that ranks must agree on."""
        given = "with" if self.parameter.grad is not None else "without"
        what = f"{self.name} {tuple(self.parameter.shape)} ({dtype_name(self.parameter.dtype)}) {given} a gradient"
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
        local = memory_of(grad).float()
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
        scale = core.update_scale("Muon", group["adjust_lr_fn"], *self.parameter.shape[-2:])
        lr = float(group["lr"])
        wide = values.float()
        wide.mul_(1 - lr * group["weight_decay"])
        wide.add_(update, alpha=-lr * scale)
        values.copy_(wide)
        if values is not memory:
            memory.copy_(values)


class MatrixUpdates(NamedTuple):
    """The matrices of one set of ranks, and the exchanges of their buckets."""

    matrices: list[Matrix]
    exchanges: list[MatrixExchange]

    def update(self, grad_scale: Tensor | float) -> None:
        """Update all matrices. Messages of a bucket are on their way while another bucket is orthogonalized.

        send 0 | send 1, orthogonalize 0 | send 2, orthogonalize 1, apply 0 | send 3, orthogonalize 2, apply 1 | ...
        """
        count = len(self.exchanges)
        there: dict[int, Sending] = {}
        back: dict[int, Sending] = {}
        for i in range(count + 2):
            if i < count:
                there[i] = self.exchanges[i].send([each.momentum(grad_scale) for each in self._of(i)])
            if 0 < i <= count:
                back[i - 1] = self._orthogonalize(self.exchanges[i - 1], there.pop(i - 1))
            if i > 1:
                matrices = self._of(i - 2)
                local = [memory_of(each.parameter) for each in matrices]
                shapes, devices = [each.shape for each in local], [each.device for each in local]
                for each, part in zip(
                    matrices, self.exchanges[i - 2].parts(back.pop(i - 2), shapes, devices), strict=True
                ):
                    each.apply(part)

    def _of(self, bucket: int) -> list[Matrix]:
        return [self.matrices[i] for i in self.exchanges[bucket].bucket.parameters]

    def _orthogonalize(self, exchange: MatrixExchange, sending: Sending) -> Sending:
        results = {}
        for unit, matrix in exchange.units(sending).items():
            group = self.matrices[exchange.bucket.units[unit][0]].group
            settings = (group[name] for name in NEWTON_SCHULZ_SETTINGS)
            results[unit] = newton_schulz(matrix, *settings)
        return exchange.send_back(results)


def plan_updates(
    op: str, group: dist.ProcessGroup | None, matrices: Sequence[Matrix], owned_elements: int
) -> list[MatrixUpdates]:
    """Plan the update of matrices of one set of ranks. Collective."""
    boxes = [local_box(each.parameter) for each in matrices]
    facts: list[tuple[Any, ...]] = [each.facts for each in matrices]
    facts.append(("matrices in buckets", owned_elements))
    everyone: list[Any] = [(facts, boxes)]
    if group is not None:
        everyone = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, (facts, boxes), group=group)
        _check_agreement(op, [of_rank for of_rank, _ in everyone])
    chosen = [i for i, each in enumerate(matrices) if each.parameter.grad is not None]
    if not chosen:
        return []
    device = _device_of(matrices[0].parameter)
    buckets = plan_buckets([[of_rank[i] for _, of_rank in everyone] for i in chosen], owned_elements=owned_elements)
    return [MatrixUpdates([matrices[i] for i in chosen], [MatrixExchange(bucket, group, device) for bucket in buckets])]


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
