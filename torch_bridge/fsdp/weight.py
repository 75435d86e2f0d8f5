"""`ShardedWeight`: a high-precision parameter that FSDP2 gathers as codes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from qshard import pipeline
from qshard.formats import Format, Usage
from qshard.pipeline import Parts, Scales
from qshard.sharding import shard_rows
from qshard.torch_bridge._ops import into
from qshard.torch_bridge.fsdp.scales import ScaleState, ShardOf, cut_of, refresh, stale_weights_of
from qshard.torch_bridge.fsdp.shards import cast_into, codes_width, refusal
from qshard.torch_bridge.tensor import QuantizedTensor

__all__ = ["ShardedWeight", "plain", "wrap"]

aten = torch.ops.aten


class ShardedWeight(Tensor):
    """A parameter in float32 or bfloat16, with hooks by which FSDP2 gathers it as codes of `scale_state.fmt`.

    To optimizers, gradient clipping and `load_state_dict` it is the high-precision tensor inside; so optimizer states
    and gradients are plain. The hooks cast the shard of this rank with the scales of the whole weight and gather the
    codes: what every rank then holds are, bit for bit, the codes of the whole weight cast at once.

    The wire carries one uint8 tensor for a weight, whatever the format, since FSDP2 hands on only the first one where
    there is one rank. Scales are made of reduced amaxes on every rank and never travel. Codes of 4 bits travel two a
    byte if all ranks hold the same number of rows. Else they travel one a byte, on all ranks alike, since FSDP2 wants
    the shape of the padded shard from ranks with short ones; so do shards of columns.

    Attributes:
      shard: the high-precision tensor: the whole weight, or under FSDP2 what this rank holds of it.
      scale_state: see `qshard.torch_bridge.fsdp.scales`.
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

    @property
    def fsdp_pre_all_gather(self) -> Callable[..., tuple[tuple[Tensor, ...], Any]]:
        """FSDP2 asks whether there is such a hook when it shards: there and then, on every rank, is the time to refuse.

        Raises:
          NotImplementedError: weights of this format cannot be cut.
        """
        why = refusal(self.scale_state.fmt)
        if why is not None:
            raise NotImplementedError(
                f"fully_shard: {self.scale_state.name} ({self.scale_state.fmt}) is not a format that FSDP2 can gather: "
                f"{why}; give the recipe a weight format of square blocks, such as MXFP8_32x32, or one scale a tensor"
            )
        return self._cast_shard

    def _cast_shard(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Casts the shard. FSDP2 calls it on every rank alike, before each gather."""
        state, rows = self.scale_state, self.shard.shape[0]
        cut = cut_of(self.shard.shape, outer_size, mesh)
        if state.delayed is None and not state.current:
            group = mesh.get_group()
            others = [w for w in stale_weights_of(state.root, group) if w.state is not state]
            refresh([ShardOf(state, self.shard, tuple(outer_size), cut), *others], group, mesh.device_type)
        per_byte = state.fmt.element.codes_per_byte
        wide = cut.axis == 1 or outer_size[0] % mesh.size() != 0
        padded = shard_rows(outer_size[0], mesh.size(), 0).padded if cut.axis == 0 else rows
        if per_byte > 1 and self.shard.shape[1] % per_byte:
            raise NotImplementedError(
                f"fully_shard: {state.name} {tuple(outer_size)} is not cut into columns of whole bytes; cut its rows"
            )
        codes = torch.empty(
            (padded, codes_width(state.fmt, self.shard.shape[1])), dtype=torch.uint8, device=self.device
        )
        if state.delayed is not None:
            scales = Scales(state.delayed.scale, state.delayed.scale_inv)
            amax = torch.empty((), dtype=torch.float32, device=self.device)
            pipeline.quantize_delayed(into(codes[:rows], amax), self.shard, state.fmt, Usage.ROWWISE, *scales[:2])
            state.delayed.observe(amax)
        else:
            assert state.scales is not None
            scales = state.scales
            cast_into(state.fmt, self.shard, cut, scales.scale, codes[:rows])
        codes[rows:].zero_()
        if state.written_since(self.shard):
            _warn_written(state.name)
            codes.fill_(state.fmt.element.nan_code * (0x11 if per_byte > 1 else 1))
        if per_byte > 1 and wide:
            codes = _unpack(codes)
        return (codes,), (state.fmt, scales, outer_size)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: tuple[Format, Scales, torch.Size],
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Wraps the gathered codes, without a copy. FSDP2 frees and refills their memory from then on."""
        (gathered,), (fmt, scales, shape) = all_gather_outputs, metadata
        rows, columns = shape
        width = codes_width(fmt, columns)
        wide = gathered.numel() >= rows * columns > rows * width
        codes = gathered.view(-1)[: rows * (columns if wide else width)].view(rows, columns if wide else width)
        unsharded = out._local_tensor if isinstance(out, DTensor) else out
        own: tuple[Tensor, ...] = ()
        if wide:  # The packed codes are memory of our own, which FSDP2 frees and allocates along with its own.
            packed = torch.empty((rows, width), dtype=torch.uint8, device=codes.device)
            if unsharded is not None:
                assert isinstance(unsharded, QuantizedTensor)
                before = unsharded.parts(Usage.ROWWISE)
                assert before is not None
                packed = before.data
            with _unsafe_preserve_version_counter(packed):
                torch.bitwise_or(codes[:, 0::2], codes[:, 1::2] << 4, out=packed)
            codes, own = packed, (packed,)
        parts = Parts(codes, scales.scale_inv, scales.global_scale_inv)
        if unsharded is None:
            return QuantizedTensor(fmt, tuple(shape), param_dtype, rowwise=parts), own
        assert isinstance(unsharded, QuantizedTensor)
        unsharded.set(Usage.ROWWISE, parts)
        return None


def _unpack(codes: Tensor) -> Tensor:
    """One 4-bit code a byte."""
    return torch.stack([codes & 0xF, codes >> 4], dim=-1).view(codes.shape[0], -1)


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
        "load_state_dict; NaN is sent in place of its codes, or their largest if there is no NaN. "
        "Call update_scales(model) on all ranks after such a write",
        RuntimeWarning,
        stacklevel=3,
    )
