"""Refreshes of scales, and casts of shards with the refreshed scales. `scale_state.py` has the glossary.

FSDP2 calls the hook of one weight after the other, then copies and sends all codes. GEMMs occupy the whole GPU, so a
kernel on another stream starts only when a GEMM ends: seven casts with a launch each would take as long as the layers
that should hide them. So the first hook of a group also casts the other weights of the group, in the same launch.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from qshard._core.placement import chunk_range
from qshard._core.quantize_steps import Plane, Scales
from qshard.torch_bridge._delayed_scaling import delayed_scales, update_delayed
from qshard.torch_bridge._distributed.dtensor import local_of
from qshard.torch_bridge._distributed.tensor_shards import merge_plan
from qshard.torch_bridge._fsdp.scale_state import (
    Passes,
    PrefetchedCodes,
    Refresh,
    ScaleState,
    Status,
    WeightShard,
    state_of,
)
from qshard.torch_bridge._fsdp.shard_plan import ShardPlan, compute_device
from qshard.torch_bridge._modules import parameters_of
from qshard.torch_bridge._ops.bind import into
from qshard.torch_bridge._ops.collectives import max_over_ranks, unlike_ranks
from qshard.torch_bridge._ops.flat_plan import FlatPlan, flat_plan
from qshard.torch_bridge._quantized.validation import check_model
from qshard.torch_bridge._torch_internals import fsdp_groups

_ALIGNMENT = 256  # Bytes, of the codes of each weight in a shared buffer: the alignment of GPU allocations.


class WeightGather(NamedTuple):
    """A running gather. The pre-all-gather hook creates it, and FSDP2 passes it to the post-all-gather hook."""

    plan: ShardPlan
    refresh: Refresh
    restore_shape: Callable[[], None] | None

    def end(self, state: ScaleState, gathered: Tensor) -> Plane:
        """Commit the scales and return the plane of the weight. Its codes are a view of the gathered memory."""
        if self.restore_shape is not None:
            self.restore_shape()
        self.refresh.commit(state)
        state.status = Status.SHARDED
        assert state.stored is not None
        return Plane(self.plan.codes(gathered), state.stored.scale_inv, state.stored.global_scale_inv)


def begin_gather(state: ScaleState, shard: Tensor, shape: torch.Size, mesh: DeviceMesh) -> tuple[Tensor, WeightGather]:
    """Cast a shard for its all-gather, after a refresh if it is the first of a pass.

    FSDP2 shards a tensor of this shape over `mesh`. Returns the padded codes, uint8, and the gather for the
    post-all-gather hook.
    """
    state.passes.watch()  # Other hooks may now precede ours.
    if not state.agreed:
        _check_reshards(state.passes.root)
    if state.primary is not None:
        shard = state.primary.take_master(state.resident_shard(shard) if state.primary.master is None else shard)
    weight = WeightShard(state, shard, state.plan_of("fully_shard", shard, shape, mesh, 0, state.part))
    stage_scales(weight)
    if state.primary is None:
        padded = weight.plan.padded_view(_padded_codes(weight))
    else:
        if state.primary.codes is None:
            _cast_into(weight, state.primary.buffer(weight.plan))
            state.primary.end_cast(weight.plan)
        padded = state.primary.codes_on(weight.plan.device)
    restore_shape = _set_padded_shape(state, padded) if weight.plan.packs_shards else None
    assert state.refresh is not None
    return padded, WeightGather(weight.plan, state.refresh, restore_shape)


def padded_values(
    state: ScaleState, shard: Tensor, shape: torch.Size, mesh: DeviceMesh, dtype: torch.dtype, sent: torch.dtype | None
) -> Tensor:
    """Return the values of a shard, rounded to `dtype` and then to the dtype that is sent, with padding for the gather.

    Arguments as in `begin_gather`.
    """
    state.status = Status.GATHERING
    values = shard.to(compute_device(mesh, shard), dtype).to(dtype if sent is None else sent)
    _, longest = chunk_range(shape[0], mesh.size(), 0)
    # An axis after the first is sharded evenly.
    if values.shape[1:] != shape[1:] or len(values) == longest:
        return values.contiguous()
    padded = values.new_zeros(longest, *shape[1:])
    padded[: len(values)] = values
    return padded


def update_scales(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Compute the scales of the next step under `DelayedScaling`. Call it once after each optimizer step.

    For other recipes it does nothing, so one training loop serves all recipes. Their scales are computed by each
    forward and each backward before its first gather, with one max-reduction of amaxes for each process group, 4 bytes
    a scale.

    Args:
      model: the model, after `convert` and `fully_shard`.
      group: the ranks that train this model, or this stage of a pipeline. Needed if no parameter is a DTensor and they
        are not all ranks; see `update_delayed`.

    Raises:
      TypeError: `model` is not a module, or `group` is not a process group.
      ValueError: no single group trains the whole model; pass `group`.
      RuntimeError: the delayed scales of ranks differ.

    Collective under `DelayedScaling`: call it on all ranks. `update_delayed` has the formula.

    Weights of an unpickled model, and of a `Linear` that was constructed alone, do not know their model: each is
    refreshed by itself until the model was passed to this function once.

    >>> from qshard.recipes import CurrentScaling
    >>> from qshard.torch_bridge import convert
    >>> update_scales(convert(nn.Sequential(nn.Linear(4, 4)), CurrentScaling()))
    """
    check_model("update_scales", model)
    passes = Passes.of(model)
    for parameter in parameters_of(model):
        state = state_of(parameter)
        if state is None or state.passes is passes:
            continue
        root = state.passes.root
        if root is None or getattr(root, "is_one_layer", False):  # It was constructed alone.
            state.passes = passes
    update_delayed(model, group)


def recast(parameters: Iterable[Tensor]) -> None:
    """Cast primary weights from masters that an optimizer has changed. Collective.

    One max-reduction for each process group. Under `DelayedScaling` the next gather casts instead, with the scales of
    that time.
    """
    groups: dict[str, list[WeightShard]] = {}
    for parameter in parameters:
        state = state_of(parameter)
        if state is None or state.primary is None or state.primary.master is None:
            continue
        if state.delayed is not None or state.fmt is None or not state.gathers:
            state.primary.load(state.primary.master)
        elif (found := state.shard_of(parameter)) is not None:
            groups.setdefault(found.plan.group.group_name, []).append(found)
    for weights in groups.values():
        refresh_scales(weights, None)
        with torch.no_grad():
            cast_shards(weights, [weight.primary.buffer(weight.plan) for weight in weights])
        for weight in weights:
            weight.primary.end_cast(weight.plan)


def stage_scales(weight: WeightShard) -> None:
    """Stage the scales for a gather that starts, with a refresh if it is the first gather of its pass."""
    state = weight.state
    if state.primary is not None and state.primary.codes is not None:
        state.primary.check()
    else:
        now = state.passes.now()
        if now is None or state.refresh is None or state.refresh.pass_id != now:
            weights = [weight]
            if now is not None:
                others = [weight if other.state is state else other for other in sharded_weights(state.passes.root)]
                weights = [each for each in others if each.plan.group.group_name == weight.plan.group.group_name]
            refresh_scales(weights if any(each is weight for each in weights) else [weight], now)
    assert state.staged is not None
    state.status = Status.GATHERING


def sharded_weights(model: nn.Module | None) -> Iterator[WeightShard]:
    """Yield the sharded weights that need scales, in the order of the model, which is the same on all ranks."""
    for parameter in () if model is None else parameters_of(model):
        state = state_of(parameter)
        if state is None or state.fmt is None or not state.gathers or state.status is Status.GATHERING:
            continue
        if state.primary is not None and state.primary.codes is not None:
            continue
        if (found := state.shard_of(parameter)) is not None:
            yield found


@torch.no_grad()
def refresh_scales(weights: Sequence[WeightShard], pass_id: object) -> None:
    """Compute the scales of weights that are sharded over one group. All ranks pass the same weights."""
    if not all(weight.state.agreed for weight in weights):
        check_ranks_agree(weights)
    for delayed in (False, True):
        if chosen := [weight for weight in weights if (weight.state.delayed is not None) is delayed]:
            scales = stored_scales(chosen) if delayed else current_scales(chosen)
            Refresh([weight.state for weight in chosen], scales, pass_id)


def stored_scales(weights: Sequence[WeightShard]) -> list[Scales]:
    """Return delayed scales, with one max-reduction for all weights that have none yet."""

    def whole_amaxes(indices: list[int]) -> list[Tensor]:
        flat, amaxes = _reduced_amaxes([weights[i] for i in indices])
        return [grid for grid, _ in flat.plan.split_amaxes(amaxes)]

    return delayed_scales([state.delayed for state, _, _ in weights if state.delayed is not None], whole_amaxes)


def current_scales(weights: Sequence[WeightShard]) -> list[Scales]:
    """Compute the scales of the current values, with one max-reduction."""
    flat, amaxes = _reduced_amaxes(weights)
    return flat.split_scales(flat.scales(amaxes))


def _reduced_amaxes(weights: Sequence[WeightShard]) -> tuple[FlatPlan, Tensor]:
    """Return the amaxes of whole weights, fp32 `[plan.amaxes]`, and the plan of their order.

    Empty shards contribute amaxes of 0. The amaxes of an offloaded shard are computed where it is, and moved to where
    ranks compute. That is the CPU, unless FSDP2 has already copied the shard for this gather.
    """
    group, device = weights[0].plan.group, weights[0].plan.device
    plans = tuple(weight.plan for weight in weights)
    devices = dict.fromkeys(weight.shard.device for weight in weights)
    bits = [_amaxes_on(there, weights, plans).to(device).view(torch.int32) for there in devices]
    amaxes = functools.reduce(torch.maximum, bits).view(torch.float32)
    flat = flat_plan(tuple(plan.slice for plan in plans), device)
    amaxes = max_over_ranks(amaxes, group)
    merge_plan([plan.part for plan in plans], flat.plan, amaxes)
    return flat, amaxes


def _amaxes_on(device: torch.device, weights: Sequence[WeightShard], plans: tuple[ShardPlan, ...]) -> Tensor:
    """Return the amaxes of all weights, from the shards on one device. Other shards contribute 0."""
    flat = flat_plan(tuple(plan.slice for plan in plans), device)
    amaxes = flat.amaxes(
        [  # Empty slices for boxes and for shards on other devices.
            shard if shard.device == device and plan.box is None else shard.new_empty(0, device=device)
            for _, shard, plan in weights
        ]
    )
    if any(plan.box for plan in plans):
        for (_, shard, plan), of_weight in zip(weights, flat.plan.split_amaxes(amaxes), strict=True):
            if shard.device == device:
                plan.write_box_amaxes(shard, *of_weight)
    return amaxes


def check_ranks_agree(weights: Sequence[WeightShard]) -> None:
    """Raise ValueError on every rank if ranks have different weights.

    They would compute different scales, or wait for amaxes that are never sent. Each rank sends a digest of fixed size.
    The host waits for the device, once for each set of weights.
    """
    group, device = weights[0].plan.group, weights[0].plan.device
    facts = [(state.name, *plan.facts) for state, _, plan in weights]
    if others := unlike_ranks(repr(facts).encode(), group, device):
        raise ValueError(
            f"fully_shard: rank {others[0]} has other weights than this rank ({len(weights)}, the first "
            f"{weights[0].state.name} {weights[0].plan.shape} in {weights[0].state.fmt}); convert and shard the model "
            "alike on every rank"
        )
    for weight in weights:
        weight.state.agreed = True


def zero_padding(weight: WeightShard, buffer: Tensor) -> None:
    """Zero the padding of the codes of a shard that is shorter than the longest one."""
    rows = weight.shard.shape[0]
    if rows < weight.plan.padded_shape[0]:
        weight.plan.padded_view(buffer)[rows:].zero_()


def cast_shards(weights: Sequence[WeightShard], buffers: Sequence[Tensor]) -> None:
    """Cast shards with their staged scales, in one launch for all slices of one format on one device."""
    for device in dict.fromkeys(weight.shard.device for weight in weights):
        of_device = [(w, buffer) for w, buffer in zip(weights, buffers, strict=True) if w.shard.device == device]
        if slices := [(weight, buffer) for weight, buffer in of_device if weight.plan.box is None]:
            flat = flat_plan(tuple(weight.plan.slice for weight, _ in slices), device)
            of_batches = [each.to(device) for each in flat.join_scales([w.staged.scale for w, _ in slices])]
            flat.cast([buffer for _, buffer in slices], [w.shard for w, _ in slices], of_batches, pieces=True)
        for weight, buffer in of_device:
            if weight.plan.box is not None:
                weight.plan.cast_box(weight.shard, weight.staged.scale.to(device), buffer)


def cast_group(weight: WeightShard) -> Tensor:
    """Return the codes of a slice, and cast the next weights of its FSDP2 group in the same launch."""
    weights = [weight, *_next_in_group(weight)]
    sizes = [-(-one.plan.buffer_size // _ALIGNMENT) * _ALIGNMENT for one in weights]
    whole = torch.empty(sum(sizes), dtype=torch.uint8, device=weight.shard.device)
    buffers = [one.plan.buffer_in(part) for one, part in zip(weights, whole.split(sizes), strict=True)]
    for one, buffer in zip(weights, buffers, strict=True):
        zero_padding(one, buffer)
    cast_shards(weights, buffers)
    for (state, shard, _), buffer in zip(weights[1:], buffers[1:], strict=True):
        assert state.refresh is not None
        state.prefetched = PrefetchedCodes(buffer, state.refresh, shard.data_ptr())
    return buffers[0]


def _next_in_group(weight: WeightShard) -> Iterator[WeightShard]:
    """Yield later weights of the FSDP2 group that have scales of the same refresh and are cast in gathers."""
    group = _group_of(weight.state)
    is_later = False
    for parameter in () if group is None else group.fsdp_params:
        state = getattr(local_of(parameter.sharded_param), "scale_state", None)
        if state is weight.state:
            is_later = True
        elif not is_later or state is None or state.status is Status.GATHERING:
            continue
        elif state.refresh is weight.state.refresh:
            found = state.shard_of(parameter.sharded_param)
            if found is not None and found.is_cast_in_gathers and found.shard.device == weight.shard.device:
                yield found


def _group_of(state: ScaleState) -> Any:
    """Return the `FSDPParamGroup` of a weight. One search finds the groups of all weights of a model."""
    if state.group is None:
        for group, _, known in sharded_params(state.passes.root):
            known.group = weakref.ref(group)
        if state.group is None:  # For example in an unpickled model before `update_scales(model)`.
            state.group = lambda: None
    return state.group()


def _padded_codes(weight: WeightShard) -> Tensor:
    prefetched, weight.state.prefetched = weight.state.prefetched, None
    if prefetched is not None and prefetched[1:] == (weight.state.refresh, weight.shard.data_ptr()):
        return prefetched.buffer
    if weight.is_cast_in_gathers:
        return cast_group(weight)
    buffer = torch.empty(weight.plan.buffer_size, dtype=torch.uint8, device=weight.shard.device)
    zero_padding(weight, buffer)
    _cast_into(weight, buffer)
    return buffer


def _cast_into(weight: WeightShard, buffer: Tensor) -> None:
    state, shard, plan = weight
    if state.delayed is None:
        cast_shards([weight], [buffer])
        return
    scale = weight.staged.scale.to(shard.device)
    amax, scale_inv = torch.zeros_like(scale), torch.empty_like(scale)
    own = plan.local_matrices
    outputs = into(plan.padded_view(buffer)[: shard.shape[0]], amax[own], scale_inv[own])
    if shard.numel():
        options = {"element": plan.fmt.element.name, "nonfinite": plan.fmt.nonfinite, "margin": state.delayed.margin}
        outputs.cast_delayed(shard, scale[own], lead=int(plan.is_stack), **options)
    state.delayed.observe(amax)


def _set_padded_shape(state: ScaleState, padded: Tensor) -> Callable[[], None]:
    """Make FSDP2 believe that shards have the shape of `padded`. The returned function restores their shape.

    On axes after the first, FSDP2 concatenates the shards of ranks by their stored shape, and 4-bit codes have half as
    many columns.
    Only a private attribute tells it so; the attribute has the same name in torch 2.11 to 2.15.
    """
    param = _fsdp_param(state)
    shape, param.padded_sharded_param_size = param.padded_sharded_param_size, padded.shape
    return lambda: setattr(param, "padded_sharded_param_size", shape)


def _fsdp_param(state: ScaleState) -> Any:
    for _, param, known in sharded_params(state.passes.root):
        if known is state:
            return param
    raise NotImplementedError(
        f"fully_shard: {state.name} ({state.fmt}) is not sharded by its first axis, and its model is "
        "unknown; call update_scales(model) once after fully_shard, or shard its first axis"
    )


def _check_reshards(model: nn.Module | None) -> None:
    """Raise on every rank if a module with quantized weights reshards to fewer ranks after forward.

    FSDP2 then turns its part of the gathered memory into a parameter with a gradient, which codes cannot be, and
    gathers it without the hooks of the weight.
    """
    for group, _, known in sharded_params(model):
        if group.post_forward_mesh_info not in (None, group.mesh_info):
            raise NotImplementedError(
                f"fully_shard: {known.name} (reshard_after_forward="
                f"{group.post_forward_mesh_info.shard_mesh_size}) is gathered as codes, which FSDP2 cannot "
                "reshard to fewer ranks; pass reshard_after_forward=True or False"
            )


def sharded_params(model: nn.Module | None) -> Iterator[tuple[Any, Any, ScaleState]]:
    """Yield the `FSDPParamGroup`, the `FSDPParam` and the state of each quantized weight of a model."""
    for module in () if model is None else model.modules():
        if isinstance(module, FSDPModule):
            for group in fsdp_groups(module):
                for param in group.fsdp_params:
                    state = getattr(local_of(param.sharded_param), "scale_state", None)
                    if state is not None:
                        yield group, param, state
