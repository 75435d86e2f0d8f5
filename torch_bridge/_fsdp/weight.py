"""`ShardedWeight`: a high-precision parameter that FSDP2 all-gathers as codes."""

from __future__ import annotations

import collections
import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.hooks import warn_if_has_hooks

from qshard._core.placement import Box
from qshard.formats import Usage
from qshard.torch_bridge._distributed.dtensor import local_of, wrapped_like
from qshard.torch_bridge._fsdp.gather_hook import GatherHook, hook_signature
from qshard.torch_bridge._fsdp.initial_values import RANDOM, box_of, exact_erfinv, fill
from qshard.torch_bridge._fsdp.op_kinds import MAKES_PLAIN, STAYS_SHARDED, is_mutable, is_view
from qshard.torch_bridge._fsdp.refresh import WeightGather, begin_gather, padded_values
from qshard.torch_bridge._fsdp.scale_state import ScaleState, Status
from qshard.torch_bridge._quantized.stack import QuantizedStack
from qshard.torch_bridge._quantized.tensor import QuantizedTensor
from qshard.torch_bridge._quantized.validation import check_tensor
from qshard.torch_bridge._torch_internals import make_wrapper, pytree, rebuild_parameter, rebuild_parameter_with_state

aten = torch.ops.aten


class Values:
    """Holder of the tensor inside a `ShardedWeight`.

    Sealing takes the tensor out of every `ShardedWeight` of a weight. It finds them through weak references to holders:
    weak references to parameters would make `torch.utils.swap_tensors`, and so `nn.Module.to`, fail.
    """

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


class ShardedWeight(Tensor):
    """A high-precision parameter with hooks that let FSDP2 all-gather it as codes of `scale_state.fmt`.

    Optimizers, gradient clipping and `load_state_dict` see the high-precision tensor inside, so optimizer states and
    gradients are plain tensors. The hooks cast the local shard with the scales of the whole weight and gather the
    codes. Every rank then has, bit for bit, the codes of `quantize` of the whole weight. `scale_state.py` has a
    glossary.

    Each gather sends one uint8 tensor, whatever the format: on a single rank FSDP2 passes on only the first tensor.

    `convert` creates these parameters; users do not.

    Attributes:
      shard: the high-precision tensor: the whole weight, or under FSDP2 the local shard.
      scale_state: the state of the weight, shared by all tensors that stand for it.

    >>> from qshard.torch_bridge import convert
    >>> layer = convert(nn.Linear(32, 16), "CurrentScaling")
    >>> isinstance(layer.weight, ShardedWeight), layer.weight.dtype
    (True, torch.float32)
    """

    scale_state: ScaleState
    _inner: Values

    @staticmethod
    def __new__(cls, shard: Tensor, scale_state: ScaleState, device: torch.device | None = None) -> ShardedWeight:
        """Wrap `shard`. A sealed weight has no memory and passes its `device`."""
        self: ShardedWeight = make_wrapper(
            cls,
            shard.size(),
            strides=shard.stride(),
            storage_offset=shard.storage_offset(),
            dtype=shard.dtype,
            device=shard.device if device is None else device,
        )
        self._inner, self.scale_state = Values(shard), scale_state
        if scale_state.primary is not None:
            scale_state.primary.add_values(self._inner)
        return self

    @property
    def shard(self) -> Tensor:
        return self._inner.tensor

    @shard.setter
    def shard(self, value: Tensor) -> None:
        self._inner.tensor = value

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if self.scale_state.is_sealed:
            return f"ShardedWeight({self.scale_state.fmt}, primary, shape={tuple(self.shape)}, device={self.device})"
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
        return traced.fmt == now.fmt

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedWeight:
        if id(self) not in memo:
            # The copy of a sealed weight has the values of the master, and is not sealed.
            copied: Tensor = ShardedWeight(memory_of(self).clone(), copy.deepcopy(self.scale_state, memo))
            memo[id(self)] = nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied
        found: ShardedWeight = memo[id(self)]
        return found

    @property
    def data(self) -> Tensor:
        return super().data

    @data.setter
    def data(self, value: Tensor) -> None:
        """Make the weight share the memory of `value`, as for plain tensors."""
        check_tensor("ShardedWeight", "data", value)
        if self.scale_state.is_sealed:
            raise ValueError(
                f"ShardedWeight: data of {self.scale_state.name} (primary) is the master that its optimizer updates; "
                "load new values with load_state_dict"
            )
        memory = memory_of(value).detach()
        for what, got, want in (
            ("shape", tuple(memory.shape), tuple(self.shard.shape)),
            ("dtype", memory.dtype, self.shard.dtype),
            ("device", memory.device, self.shard.device),
            ("strides", memory.stride(), self.shard.stride()),
        ):
            if got != want:
                raise ValueError(
                    f"ShardedWeight: data ({what} {got}) does not have the {what} of {self.scale_state.name}, {want}; "
                    "pass such data, or convert the layer after changing it"
                )
        if memory.storage_offset() != self.storage_offset():  # Dynamo compares both, and fails if they differ.
            Tensor.data.__set__(self, ShardedWeight(memory, self.scale_state))  # type: ignore[attr-defined]
        self.shard = memory

    def __copy__(self) -> ShardedWeight:
        copied: Tensor = ShardedWeight(self.shard, self.scale_state)
        copied = nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied
        copied.__dict__.update(attributes_of(self))
        return cast(ShardedWeight, copied)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle as a plain parameter, which loads without this package.

        Unpickling a `Linear` wraps its weight again.
        """
        if not isinstance(self, nn.Parameter):
            return cast(tuple[Any, ...], self.shard.__reduce_ex__(protocol))
        warn_if_has_hooks(self)
        given: tuple[Any, ...] = (self.shard, self.requires_grad, collections.OrderedDict())
        if others := attributes_of(self):
            return rebuild_parameter_with_state, (*given, others)
        return rebuild_parameter, given

    def data_ptr(self) -> int:
        """Return the address of the values: accelerate, among other tools, tells parameters apart by it."""
        return memory_of(self).data_ptr()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array in the same memory, for histograms and logs."""
        if self.requires_grad and not force:
            raise RuntimeError(f"ShardedWeight: {self.scale_state.name} requires grad; call weight.detach().numpy()")
        return memory_of(self).numpy(force=force)

    def tolist(self) -> Any:
        return memory_of(self).tolist()

    def __dlpack__(self, **options: Any) -> Any:
        """Export the values: the tensor itself has no memory, and importers would read address 0."""
        if self.requires_grad:
            raise BufferError(f"ShardedWeight: {self.scale_state.name} requires grad; export weight.detach()")
        return memory_of(self).__dlpack__(**options)

    def share_memory_(self) -> ShardedWeight:
        self.shard.share_memory_()
        return self

    def is_shared(self) -> bool:
        return bool(self.shard.is_shared())

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        states: list[ScaleState] = []
        plain_args = [_unwrap(value, states) for value in args]
        plain_kwargs = {name: _unwrap(value, states) for name, value in kwargs.items()}
        if any(state.is_sealed for state in states):
            return _run_on_sealed(func, args, kwargs)
        if func is aten.erfinv_.default and states[0].gathers:
            args[0].shard.copy_(exact_erfinv(args[0].shard))  # From `trunc_normal_`, before torch 2.13.
            return args[0]
        if func in RANDOM and args[0].ndim in (2, 3) and (box := box_of(states[0], tuple(args[0].shape))) is not None:
            return args[0]._fill(box, func, *args[1:], **kwargs)
        out = func(*plain_args, **plain_kwargs)
        if is_mutable(func):
            _count_writes(func, args, kwargs)
        if func in STAYS_SHARDED or is_view(func):
            if is_view(func) and _is_whole(out, plain_args[0]):
                out = plain_args[0]  # A view made here would have a version counter of its own, and miss writes.
            with torch.inference_mode(False):  # In inference mode the wrapper could not be a view.
                wrapped = _wrap(out, states[0])
            if func is aten.split.Tensor and len(args[0].shape) in (2, 3):
                _note_split(*args, wrapped)
            return wrapped
        if func is aten.copy_.default and len(states) == 2:
            states[0].note_start(getattr(args[1], "first", 0))
        if isinstance(out, Tensor) and is_mutable(func):  # In-place ops return their argument.
            return args[0] if plain_args and out is plain_args[0] else out
        return out

    def _fill(self, box: Box, func: Any, a: float = 0.0, b: float = 1.0, *, generator: Any = None) -> ShardedWeight:
        """Fill a shard with the random values of its position in the weight, for any number of ranks.

        The values depend on the name of the weight, the seed of `torch.manual_seed` and the number of earlier fills.
        They do not depend on how many numbers were drawn before, which differs between ranks.
        """
        state = self.scale_state
        seeded = torch.initial_seed() if generator is None else generator.initial_seed()
        fill(func, self.shard, box, a, b, f"{seeded} {state.name} {state.fill_count}")
        state.fill_count += 1
        return self

    @property
    def _fsdp_flattened(self) -> bool:
        """Raise on every rank: FSDP1 reads this attribute first, and would flatten values and lose the hooks."""
        state = self.scale_state
        do = "call prepare_modules_for_fsdp1(model) before wrapping it"
        if state.primary is not None:
            do = f"convert with primary=False and {do}, or use fully_shard"
        kind = f"{'primary, ' if state.primary is not None else ''}{state.fmt}"
        raise ValueError(
            f"FullyShardedDataParallel: {state.name} ({kind}) is not a plain parameter, which FSDP1 needs; {do}"
        )

    @property
    def fsdp_pre_all_gather(self) -> Callable[..., tuple[tuple[Tensor, ...], Any]]:
        """The pre-all-gather hook. Every rank looks it up when it shards, so unsupported weights raise here."""
        state = self.scale_state
        if 0 in state.shape:
            raise NotImplementedError(
                f"fully_shard: {state.name} {state.shape} has no elements, which the backward pass of FSDP2 does not "
                "support, even for plain parameters; remove the layer"
            )
        state.check_format()  # Cheap: FSDP2 looks the hook up three times a gather.
        if state.status is Status.PLAIN:
            state.status = Status.SHARDED
            state.passes.watch()
        if state.fmt is None:
            return GatherHook(self._pad_values, _PAD_VALUES)
        if state.fmt.element.packed and self.shape[-1] == state.whole[-1]:
            return GatherHook(self._cast_packed_rows, _CAST_PACKED_ROWS)
        return GatherHook(self._cast_shard, _CAST_SHARD)

    def _cast_packed_rows(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], WeightGather]:
        """Cast a shard of rows to 4-bit codes, with the older signature of the hook.

        With the newer signature FSDP2 requires one element of codes for each element of an uneven shard, so 4-bit codes
        would need a byte each.
        """
        return self._cast_shard(mesh, torch.Size(self.scale_state.whole))

    def _cast_shard(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...] = (),
        module: nn.Module | None = None,
        mp_policy: MixedPrecisionPolicy | None = None,
    ) -> tuple[tuple[Tensor, ...], WeightGather]:
        """Cast the shard to padded codes. FSDP2 calls it before each gather, on all ranks."""
        padded, gather = begin_gather(self.scale_state, self.shard, outer_size, mesh)
        return (padded,), gather

    def _pad_values(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[Tensor, ...], None]:
        """Return the padded values of the shard, in the dtype that FSDP2 gathers plain parameters in."""
        state, values = self.scale_state, self.shard
        if state.primary is not None:
            values = state.primary.take_master(values if state.is_sealed else state.resident_shard(values))
        return (padded_values(state, values, outer_size, mesh, self.dtype, mp_policy.param_dtype),), None

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: WeightGather | None,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Wrap the gathered codes, or return the values, without a copy. FSDP2 then frees and refills their memory."""
        if metadata is None:
            self.scale_state.status = Status.SHARDED
            return (all_gather_outputs[0], ()) if out is None else None
        plan, parts = metadata.plan, metadata.end(self.scale_state, *all_gather_outputs)
        if out is None:
            kind = QuantizedStack if plan.is_stack else QuantizedTensor
            return kind(plan.fmt, plan.shape, param_dtype, rowwise=parts), ()
        unsharded = local_of(out)
        assert isinstance(unsharded, QuantizedTensor)
        unsharded.set(Usage.ROWWISE, parts)
        return None


_CAST_SHARD = hook_signature(ShardedWeight._cast_shard)
_CAST_PACKED_ROWS = hook_signature(ShardedWeight._cast_packed_rows)
_PAD_VALUES = hook_signature(ShardedWeight._pad_values)


def _note_split(whole: ShardedWeight, size: int, *others: Any) -> None:
    """Record where each part of a split weight starts."""
    *axis, parts = others
    each = size * math.prod(whole.shape[axis[0] % whole.ndim + 1 if axis else 1 :])
    whole.scale_state.note_split(whole.shape)
    for i, part in enumerate(parts):
        part.first = i * each


def _run_on_sealed(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an op on a sealed primary weight. FSDP2 pads, splits and views it, which needs no values."""
    given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, ShardedWeight)]
    weight = given[0]
    state, name = weight.scale_state, weight.scale_state.name
    if func is aten.copy_.default:
        target, source = args[:2]
        if isinstance(target, ShardedWeight):
            if isinstance(source, ShardedWeight) and source.scale_state is state:
                return target  # FSDP2 pads a shard without values.
            values = memory_of(source)
            if state.is_sealed:
                assert state.primary is not None
                state.primary.load(values)
            else:
                target.shard.copy_(values)
            return target
    elif func in MAKES_PLAIN:
        plain = torch.empty((), dtype=weight.dtype, device=weight.device).expand(weight.shape)
        return func(plain, *args[1:], **kwargs)
    elif func in STAYS_SHARDED or is_view(func):
        device = kwargs.get("device") or weight.device
        kwargs = {key: "meta" if key == "device" else value for key, value in kwargs.items()}
        sizes, options = pytree.tree_map_only(ShardedWeight, lambda t: t.shard, (args, kwargs))
        out = func(*sizes, **options)
        return pytree.tree_map_only(Tensor, lambda t: ShardedWeight(t, state, torch.device(device)), out)
    raise NotImplementedError(
        f"ShardedWeight: {name} (primary) has only codes, which {func} cannot use; use qshard.torch_bridge.Adam or "
        "WithMasters, which keep the master, and read values in state_dict()"
    )


def _unwrap(value: Any, states: list[ScaleState]) -> Any:
    """Replace sharded weights in an argument by their tensors, and append their states to `states`."""
    if isinstance(value, ShardedWeight):
        states.append(value.scale_state)
        return value.shard
    if isinstance(value, list | tuple):
        # An optimizer passes all gradients and states of a model: plain tensors need no call.
        return [each if type(each) is Tensor else _unwrap(each, states) for each in value]
    return value


def _wrap(out: Any, state: ScaleState) -> Any:
    if isinstance(out, Tensor):
        return ShardedWeight(out, state)
    return type(out)(_wrap(each, state) for each in out) if isinstance(out, list | tuple) else out


def _count_writes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise the version of the shards that `func` wrote: compiled layers save these, and not the parameters."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            values = given if isinstance(given, list) else [given]
            shards = [x.shard for x in values if isinstance(x, ShardedWeight)]
            torch.autograd.graph.increment_version([x for x in shards if type(x) is Tensor and not x.is_inference()])


def _is_whole(view: Any, tensor: Any) -> bool:
    """Return True if a view of a plain tensor in memory is all of it."""
    if type(view) is not Tensor or type(tensor) is not Tensor or view.dtype != tensor.dtype:
        return False
    return view.shape == tensor.shape and view.stride() == tensor.stride() and view.data_ptr() == tensor.data_ptr()


def attributes_of(weight: Tensor) -> dict[str, Any]:
    own = ("_inner", "scale_state", "first", "_is_param")
    return {name: value for name, value in weight.__dict__.items() if name not in own}


def memory_of(tensor: Tensor) -> Tensor:
    """Return the local high-precision tensor: the shard, or the master of a sealed primary weight."""
    local = tensor if type(tensor) is Tensor else local_of(tensor)
    if type(local) is not Tensor and isinstance(local, ShardedWeight):
        primary = local.scale_state.primary
        local = local.shard if primary is None or primary.master is None else primary.master
    return local.detach() if local.requires_grad else local


def gradient_of(parameter: Tensor) -> Tensor:
    """Return the local gradient of a parameter that has one. Collective if it is sharded unlike the parameter.

    Under sequence parallelism the gradients of replicated parameters, as of norms and biases, are partial sums.
    """
    grad: Any = parameter.grad
    if isinstance(parameter, DTensor) and isinstance(grad, DTensor) and grad.placements != parameter.placements:
        grad = grad.redistribute(placements=parameter.placements)
    return memory_of(grad)


def plain(weight: Tensor) -> Tensor:
    """Return the high-precision tensor, or DTensor, inside a parameter, sharing its memory."""
    return wrapped_like(weight, memory_of(weight))


def wrap(weight: Tensor, state: ScaleState) -> Tensor:
    """Wrap the local shard of a tensor or DTensor as a sharded weight: the inverse of `plain`."""
    return wrapped_like(weight, ShardedWeight(local_of(weight.detach()), state))
