"""`ShardedWeight`: a high-precision parameter that FSDP2 gathers as codes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from qshard.formats import Format
from qshard.sharding import shard_rows
from qshard.torch_bridge import _pipeline
from qshard.torch_bridge._scales import ScaleState, ShardOf, refresh, stale_weights_of
from qshard.torch_bridge._tensor import QuantizedTensor

__all__ = ["ShardedWeight", "plain", "wrap"]

aten = torch.ops.aten


class ShardedWeight(Tensor):
    """A parameter in float32 or bfloat16, with hooks by which FSDP2 gathers it as codes of `scale_state.fmt`.

    To optimizers, gradient clipping and `load_state_dict` it is the high-precision tensor inside; so optimizer states
    and gradients are plain. The hooks cast the shard of this rank with the scales of the whole weight and gather the
    codes: what every rank then holds are, bit for bit, the codes of the whole weight cast at once.

    The wire carries one uint8 tensor in the shape of the padded shard, whatever the format: FSDP2 checks the shape of
    gather inputs on ranks with short shards alone, and hands on only the first one where there is one rank. Scales
    are made of reduced amaxes on every rank and never travel.

    Attributes:
      shard: the high-precision tensor: the whole weight, or under FSDP2 what this rank holds of it.
      scale_state: see `qshard.torch_bridge._scales`.
    """

    shard: Tensor
    scale_state: ScaleState

    @staticmethod
    def __new__(cls, shard: Tensor, scale_state: ScaleState) -> ShardedWeight:
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            shard.size(),
            strides=shard.stride(),
            storage_offset=shard.storage_offset(),
            dtype=shard.dtype,
            device=shard.device,
        )
        self.shard, self.scale_state = shard, scale_state
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedWeight({self.scale_state.fmt}, {self.shard})"

    def __tensor_flatten__(self) -> tuple[list[str], ScaleState]:
        return ["shard"], self.scale_state

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], state: ScaleState, shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> ShardedWeight:
        return ShardedWeight(inner["shard"], state)

    @classmethod
    def __metadata_guard__(cls, traced: ScaleState, now: ScaleState) -> bool:
        """Compiled code depends on the format alone."""
        return traced.fmt == now.fmt

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedWeight:
        if id(self) not in memo:
            copied: Tensor = ShardedWeight(self.shard.detach().clone(), copy.deepcopy(self.scale_state, memo))
            memo[id(self)] = nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied
        found: ShardedWeight = memo[id(self)]
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        states = [t.scale_state for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, ShardedWeight)]
        plain_args, plain_kwargs = pytree.tree_map_only(ShardedWeight, lambda t: t.shard, (args, kwargs))
        out = func(*plain_args, **plain_kwargs)
        if func._schema.is_mutable:
            _note_writes(func._schema.arguments, args, kwargs)
        if func in _STAYS_SHARDED or _is_view(func):
            return pytree.tree_map_only(Tensor, lambda t: ShardedWeight(t, states[0]), out)
        if func._schema.is_mutable and isinstance(out, Tensor):  # In place, alone: what was written comes back.
            return args[0] if plain_args and out is plain_args[0] else out
        return out

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Casts the shard. FSDP2 calls it on every rank alike, before each gather."""
        state = self.scale_state
        if not state.current:
            group = mesh.get_group()
            others = [w for w in stale_weights_of(state.root, group) if w.state is not state]
            refresh([ShardOf(state, self.shard, tuple(outer_size)), *others], group, mesh.device_type)
        assert state.scales is not None
        shape = tuple(self.shard.shape)
        if shape[1:] == tuple(outer_size[1:]):  # Cut along rows, where the last ranks may hold less or nothing.
            shape = (shard_rows(outer_size[0], mesh.size(), 0).padded, *shape[1:])
        codes = torch.empty(shape, dtype=torch.uint8, device=self.shard.device)
        rows = self.shard.shape[0]
        if state.written_since(self.shard):
            _warn_written(state.name)
            codes.fill_(state.fmt.element.nan_code)
        else:
            _pipeline.cast_into(state.fmt, self.shard, state.scales, codes[:rows])
            codes[rows:].zero_()
        return (codes,), (state.fmt, state.scales.scale_inv, outer_size)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: tuple[Format, Tensor, torch.Size],
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Wraps the gathered codes, without a copy. FSDP2 frees and refills their memory from then on."""
        (gathered,), (fmt, scale_inv, shape) = all_gather_outputs, metadata
        codes = gathered.view(-1)[: shape.numel()].view(shape)
        if out is None:
            return QuantizedTensor(fmt, tuple(shape), param_dtype, rowwise_data=codes, scale_inv=scale_inv), ()
        unsharded = out._local_tensor if isinstance(out, DTensor) else out
        assert isinstance(unsharded, QuantizedTensor)
        unsharded._rowwise_data, unsharded._scale_inv = codes, scale_inv
        return None


# Ops whose result is the weight again, besides views of it: what FSDP2 pads and moves, and what `to_empty` and `.to`
# make. Everything else gives plain tensors.
_STAYS_SHARDED = {
    aten.new_zeros.default,
    aten.new_empty.default,
    aten.empty_like.default,
    aten._to_copy.default,
    aten._pin_memory.default,
}


def _note_writes(arguments: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    written = [given.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    for tensor in pytree.tree_leaves(written):
        if isinstance(tensor, ShardedWeight):
            tensor.scale_state.note_write(tensor.shard)


def _is_view(func: Any) -> bool:
    """Whether a result is memory of an argument, so that who writes to it writes to the weight."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def plain(weight: Tensor) -> Tensor:
    """The high-precision tensor, or DTensor, inside a parameter; the same memory."""
    return _map_local(weight, lambda local: local.shard if isinstance(local, ShardedWeight) else local)


def wrap(weight: Tensor, state: ScaleState) -> Tensor:
    """The inverse of `plain`."""
    return _map_local(weight, lambda local: ShardedWeight(local, state))


def _map_local(weight: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    weight = weight.detach()
    if not isinstance(weight, DTensor):
        return change(weight)
    return DTensor.from_local(
        change(weight._local_tensor),
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )


def _warn_written(name: str) -> None:
    warnings.warn(
        f"ShardedWeight: {name} was written after its scales were made, by other means than an optimizer or "
        "load_state_dict; its codes are sent as NaN. Call update_scales(model) on all ranks after such a write",
        RuntimeWarning,
        stacklevel=3,
    )
