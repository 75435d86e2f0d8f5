"""Amaxes of weights under tensor parallelism: one max-reduction for each forward pass of a model.

A scale for a whole weight needs the amax of all its shards. The first layer that needs one in a pass (`Passes`)
computes the amaxes of all weights of the model that are sharded over the same ranks, and reduces them together. The
layers after it find theirs. An amax is used again only in the same pass, on the same stream, and for the same version
of the same tensor, so a weight that was written to since is reduced by itself. Ranks must agree on when they reduce:
all run the same layers in the same order, and write to the shards of a weight at the same time.

Outside of a pass, and while a CUDA graph is captured, each layer reduces its own weight. Autograd saves the amax for
the backward pass, which reduces nothing for weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from qshard._core.flat_shards import FlatSlice
from qshard.formats import FP8_E4M3, Format
from qshard.torch_bridge._distributed.dtensor import local_of
from qshard.torch_bridge._distributed.tensor_shards import ShardSpec
from qshard.torch_bridge._fsdp.scale_state import ScaleState
from qshard.torch_bridge._fsdp.weight import ShardedWeight
from qshard.torch_bridge._modules import parameters_of
from qshard.torch_bridge._ops.bind import dtype_name, ops
from qshard.torch_bridge._ops.eager import is_capturing, is_compiling
from qshard.torch_bridge._ops.flat_plan import flat_plan
from qshard.torch_bridge._torch_internals import stream_of


class WholeAmax(NamedTuple):
    """The amax of a whole weight, computed in the pass `when` on a stream from one version of the local shard."""

    when: object
    stream: int | None
    shard: weakref.ref[Tensor]
    version: int
    amax: Tensor


def whole_amax(weight: Tensor, values: Tensor, part: ShardSpec | None, fmt: Format) -> Tensor | None:
    """Return the amax `[]` of a whole weight, from the local shard `weight` with these values. Collective.

    None if codes do not depend on it alone, or no other rank has a shard, or a compiler traces, which saves codes.
    """
    if part is None or not fmt.has_one_amax or is_compiling() or not part.axes():
        return None
    state = weight.scale_state if isinstance(weight, ShardedWeight) else None
    untracked = values.is_inference() or is_capturing(values.device)
    now = None if state is None or untracked else state.passes.now()
    if state is None or now is None:
        amax: Tensor = ops.amax_tensor(values, lead=0)
        return part.merge_amax(amax)
    stream = stream_of(values)
    found: WholeAmax | None = state.whole_amax
    is_refreshed = found is not None and found.when == now and found.stream == stream
    if found is None or not is_refreshed or found.shard() is not values or found.version != values._version:
        others = [] if is_refreshed else _weights_beside(state, part, values)
        found = _refresh([(state, values), *others], part, now, stream)
    return found.amax


def _weights_beside(state: ScaleState, part: ShardSpec, values: Tensor) -> list[tuple[ScaleState, Tensor]]:
    """Return the other weights of the model that are sharded over the same ranks, in the order of the model."""
    root, found = state.passes.root, {id(state): (state, values)}
    for parameter in () if root is None else parameters_of(root):
        local = local_of(parameter)
        if not isinstance(parameter, DTensor) or not isinstance(local, ShardedWeight) or local.is_meta:
            continue
        other = local.scale_state
        if other.part is None or other.gathers or other.fmt is None or not other.fmt.has_one_amax:
            continue
        if local.device != values.device or local.shard.is_inference():
            continue
        if other.part.mesh == part.mesh and other.part.axes() == part.axes():
            found.setdefault(id(other), (other, local.shard))
    return [*found.values()][1:]


@torch.no_grad()
def _refresh(
    weights: Sequence[tuple[ScaleState, Tensor]], part: ShardSpec, now: object, stream: int | None
) -> WholeAmax:
    """Compute and reduce the amaxes of these weights, and return the first."""
    shards = [shard for _, shard in weights]
    slices = tuple(FlatSlice(tuple(shard.shape), FP8_E4M3, dtype_name(shard.dtype)) for shard in shards)
    amaxes = part.merge_amax(flat_plan(slices, shards[0].device).amaxes(shards))
    for (state, shard), amax in zip(weights, amaxes.unbind(), strict=True):
        state.whole_amax = WholeAmax(now, stream, weakref.ref(shard), shard._version, amax)
    first: WholeAmax | None = weights[0][0].whole_amax
    assert first is not None
    return first
