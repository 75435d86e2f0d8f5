"""Errors for wrappers that treat different experts of several ranks as copies or shards of one parameter.

Expert e of one rank and expert e of another have the same name and shape in a module, so no wrapper notices. Its
averages, broadcasts and gathers would mix their values.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from qshard.torch_bridge._distributed.fsdp1 import flat_of
from qshard.torch_bridge._torch_internals import active_ddp, fsdp_groups, fsdp_modules


def check_wrappers(weights: Iterable[Tensor], group: dist.ProcessGroup, experts: int) -> None:
    """Raise ValueError if a wrapper averages or shards `weights` over ranks of `group`, which have different experts.

    The ranks of `group` share this number of `experts`. A DTensor of all of them is sharded over `group` by its last
    mesh axis. Called by each forward pass. All ranks with such a wrapper raise.
    """
    weights = [*weights]
    for name, averaged in _ranks_of_ddp(weights).items():
        _check(
            averaged,
            group,
            f"DistributedDataParallel averages {name}",
            "and use FSDP2, or exclude experts with "
            "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)",
        )
    new = [weight for weight in weights if getattr(weight, _CHECKED, None) != group.group_name]
    if any(flat_of(weight) is not None for weight in new):
        raise ValueError(
            "grouped_mlp: FullyShardedDataParallel (FSDP1) is not supported with ep_group; build the model again, and "
            "use fully_shard, or pass the experts as ignored_states"
        )
    for ranks in _meshes_of(new, experts):
        _check(
            ranks,
            group,
            f"fully_shard has weights of experts on a mesh of {len(ranks)} ranks, and joins them",
            "and shard its experts first, over ranks that have the same ones, such as fully_shard(moe.w13, "
            "mesh=mesh['dp'])",
        )
    for weight in new:
        setattr(weight, _CHECKED, group.group_name)


_CHECKED = "_qshard_experts_of"
"""Attribute of a weight that was checked: the name of the group."""


def _check(ranks: Iterable[int], group: dist.ProcessGroup, problem: str, advice: str) -> None:
    both = {*ranks} & {*dist.get_process_group_ranks(group)}
    if len(both) > 1:
        raise ValueError(
            f"grouped_mlp: {problem} over {len(both)} ranks that have different experts; build the model again, "
            f"{advice}"
        )


def _ranks_of_ddp(weights: Iterable[Tensor]) -> dict[str, list[int]]:
    """Return the name of the first weight that the DistributedDataParallel in its forward pass averages, and its ranks.

    It has already overwritten the experts of other ranks by the experts of its first rank.
    """
    ddp = active_ddp()
    if ddp is None:
        return {}
    averaged = _AVERAGED.get(ddp)
    if averaged is None:
        ignored = ddp.parameters_to_ignore
        averaged = {id(own): name for name, own in ddp.module.named_parameters() if name not in ignored}
        _AVERAGED[ddp] = averaged
    names = [averaged[id(weight)] for weight in weights if id(weight) in averaged]
    return {name: dist.get_process_group_ranks(ddp.process_group) for name in names[:1]}


_AVERAGED: weakref.WeakKeyDictionary[Any, dict[int, str]] = weakref.WeakKeyDictionary()
"""The names of the parameters that a DistributedDataParallel averages, by id."""


def _meshes_of(weights: Iterable[Tensor], experts: int) -> set[tuple[int, ...]]:
    """Return the ranks over which FSDP2 has sharded weights, or has gathered them for this forward pass."""
    sharded: set[tuple[int, ...]] = set()
    gathered: set[int] = set()
    for weight in weights:
        mesh = weight.device_mesh if isinstance(weight, DTensor) else None
        ranks = None if mesh is None else mesh.mesh
        if mesh is not None and ranks is not None and weight.shape[0] == experts:  # Without the axis of the experts.
            ranks = None if mesh.ndim == 1 else ranks[..., mesh.get_local_rank(mesh.ndim - 1)]
        if ranks is None:
            gathered.add(id(weight))
        else:
            sharded.add((*ranks.flatten().tolist(),))
    if not gathered:
        return sharded
    groups = [group for module in fsdp_modules() for group in fsdp_groups(module)]
    return sharded | {
        (*group.mesh_info.mesh.mesh.flatten().tolist(),)
        for group in groups
        for param in group.fsdp_params
        if id(getattr(param, "_unsharded_param", None)) in gathered
    }
