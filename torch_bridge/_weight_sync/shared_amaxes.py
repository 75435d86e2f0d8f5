"""Amaxes of weights that engines merge, such as q, k and v: in formats with a global scale they get one for all.

The engine then has, bit for bit, the rows of `quantize` of the merged weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from qshard._files.engine_stream import shared_weights
from qshard.torch_bridge._distributed.dtensor import local_box, local_of
from qshard.torch_bridge._fsdp.code_gather import device_of
from qshard.torch_bridge._fsdp.weight import memory_of
from qshard.torch_bridge._ops.bind import ops
from qshard.torch_bridge._ops.collectives import max_over_ranks
from qshard.torch_bridge._quantized.tensor import QuantizedTensor
from qshard.torch_bridge._weight_sync.items import OP, Item
from qshard.torch_bridge._zero.weight import ZeroParameter


def items_that_share(
    items: Sequence[Item], values: Mapping[str, Tensor], format: str, stacklevel: int
) -> list[list[Item]]:
    """Return the items of a stream that get one global scale. Warns of merged weights that cannot: codes keep theirs.

    So do experts in 3-D parameters of a `ZeroOptimizer`.
    """
    # Rows of one weight have one scale.
    whole = {each.name: item for item in items if item.fmt for each in item.first_weights if not each.rows}
    formats = {name: item.fmt for name, item in whole.items() if item.fmt is not None}

    def may_share(names: list[str]) -> bool:
        members = [whole[name] for name in names]
        for item in members:
            weight = _zero_parameter(item, values[item.name])
            if weight is None and isinstance(local_of(values[item.name]), QuantizedTensor):
                return False
            if weight is not None and weight.is_stack:
                return False
        return len({item.experts for item in members}) == 1

    groups = shared_weights(format, formats, may_share, OP, stacklevel + 1)
    return [[whole[name] for name in names] for names in groups]


@torch.no_grad()
def shared_amaxes(groups: Sequence[Sequence[Item]], values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Compute the amax of all weights of each group, by the name of each of its items: `[]`, or of a stack `[experts]`.

    Collective: one max-reduction of 4 bytes a weight for each set of ranks that shards weights.
    """
    items = {item.name: item for group in groups for item in group}
    own = {name: _amax_of_shard(item, values[name]) for name, item in items.items()}
    of_ranks: dict[tuple[torch.device, tuple[dist.ProcessGroup, ...]], list[str]] = {}
    for name, item in items.items():
        of_ranks.setdefault((own[name].device, _groups_of(item, values[name])), []).append(name)
    for (_, ranks), names in of_ranks.items():
        found = [own[name] for name in names]
        reduced = max_over_ranks(torch.cat([each.view(-1) for each in found]), ranks)
        parts = reduced.split([each.numel() for each in found])
        own |= {name: part.view(each.shape) for name, part, each in zip(names, parts, found, strict=True)}
    shared: dict[str, Tensor] = {}
    for group in groups:
        # As integers: NaN is the largest.
        bits = torch.stack([own[item.name].view(torch.int32) for item in group])
        shared |= dict.fromkeys([item.name for item in group], bits.amax(0).view(torch.float32))
    return shared


def _amax_of_shard(item: Item, value: Tensor) -> Tensor:
    """Return the amax of the local shard; of a stack the amax of each expert, 0 for experts that are not here."""
    weight = _zero_parameter(item, value)
    if item.unit is not None and weight is not None:
        local = weight.master.detach().to(item.unit.cast_dtype(weight))
    else:
        local = memory_of(value).to(device_of(value)).contiguous()
    if item.layout is None:
        amax: Tensor = ops.amax_tensor(local, lead=0)
        return amax
    box, grid = local_box(value), torch.zeros(item.experts, dtype=torch.float32, device=local.device)
    grid[box.start[0] : box.stop[0]] = ops.amax_tensor(local, lead=1)
    return grid


def _groups_of(item: Item, value: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups of ranks with other shards of a tensor."""
    if item.unit is not None:
        group = item.unit.flat.ranks.group
        return () if group is None else (group,)
    if not isinstance(value, DTensor):
        return ()
    mesh = value.device_mesh
    axes = [i for i, each in enumerate(value.placements) if not isinstance(each, Replicate) and mesh.size(i) > 1]
    return tuple(mesh.get_group(i) for i in axes)


def _zero_parameter(item: Item, value: Tensor) -> ZeroParameter | None:
    """Return the weight of a `ZeroOptimizer` that `value` is the placeholder of; None: it is none."""
    weights = [] if item.unit is None else item.unit.flat.weights
    return next((weight for weight in weights if weight.visible is value), None)
