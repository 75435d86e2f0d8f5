"""Process groups over which delayed scaling reduces amaxes: the ranks that train a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from qshard.torch_bridge._modules import modules_of, parameters_of


def groups_of(
    model: nn.Module, group: dist.ProcessGroup | None, layer_groups: Sequence[dist.ProcessGroup | None]
) -> Sequence[dist.ProcessGroup]:
    """Return the groups to reduce amaxes over, one after the other.

    `group`, the argument of `update_scales`, takes precedence over `layer_groups`: the group that a wrapper or an
    optimizer has set on each layer, or None.

    Raises:
      ValueError: no single group serves the whole model.
    """
    if group is not None or not dist.is_initialized():
        return [] if group is None else [group]
    everyone: Any = dist.group.WORLD
    meshes: dict[DeviceMesh, set[int]] = {}
    last: DeviceMesh | None = None
    for parameter in parameters_of(model):
        if isinstance(parameter, DTensor) and (mesh := parameter.device_mesh) is not last:
            last = mesh
            if mesh not in meshes:
                meshes[mesh] = set(mesh.mesh.flatten().tolist())
    if not meshes:
        return _groups_of_wrappers(model) or _group_of_layers(layer_groups) or [everyone]
    mesh = max(meshes, key=lambda mesh: len(meshes[mesh]))
    for other, ranks in meshes.items():
        if not ranks <= meshes[mesh]:
            raise ValueError(
                f"update_scales: parameters are on two meshes (ranks {_range_text(ranks)}, {other.ndim} axes, and "
                f"ranks {_range_text(meshes[mesh])}, {mesh.ndim} axes); pass group=, the ranks that train this model"
            )
    if mesh.size() == dist.get_world_size():
        return [everyone]
    return [mesh.get_group(axis) for axis in range(mesh.ndim)]


def _groups_of_wrappers(model: nn.Module) -> Sequence[dist.ProcessGroup]:
    """Return the groups of FSDP1 or DistributedDataParallel that train `model`; an empty list for all ranks."""
    found: dict[tuple[str, ...], list[dist.ProcessGroup]] = {}
    for module in modules_of(model):
        if isinstance(module, FullyShardedDataParallel | DistributedDataParallel):
            both: Any = (module.process_group, getattr(module, "_inter_node_pg", None))
            groups = [each for each in both if each is not None]
            found[tuple(each.group_name for each in groups)] = groups
    sizes = {names: math.prod(dist.get_world_size(each) for each in groups) for names, groups in found.items()}
    if not found or max(sizes.values()) == dist.get_world_size():
        return []
    if len(found) > 1:
        raise ValueError(
            f"update_scales: modules are wrapped with {len(found)} groups (of {min(sizes.values())} to "
            f"{max(sizes.values())} ranks); pass group=, the ranks that train this model"
        )
    return next(iter(found.values()))


def _group_of_layers(layer_groups: Sequence[dist.ProcessGroup | None]) -> Sequence[dist.ProcessGroup]:
    """Return the group that is set on all layers; an empty list without layers."""
    everyone: Any = dist.group.WORLD
    found = {group.group_name: group for group in (each or everyone for each in layer_groups)}
    if len(found) > 1:
        raise ValueError(
            f"update_scales: layers are trained by {len(found)} groups of ranks; pass group=, the ranks that train "
            "this model"
        )
    return [*found.values()]


def _range_text(ranks: set[int]) -> str:
    return f"{min(ranks)} to {max(ranks)}"
