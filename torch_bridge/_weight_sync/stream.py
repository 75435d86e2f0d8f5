"""`stream_weights`: yields the weights of a sharded model as the tensors of a serving engine, bucket by bucket."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qshard._core.quantize_steps import Plane
from qshard._core.serialization import Description
from qshard._core.validation import FormatLike, as_format
from qshard._files.engine_stream import DEFAULT_BUCKET, EngineWeight, buckets, check_stream, check_weight, named_tensors
from qshard.formats import FLOATS, Format, Usage
from qshard.layout import plane
from qshard.torch_bridge._convert.export import entries_of, quantized_weight
from qshard.torch_bridge._distributed.dtensor import local_of
from qshard.torch_bridge._fsdp.weight import plain
from qshard.torch_bridge._moe.experts import Experts
from qshard.torch_bridge._nn.linear import WeightLayer
from qshard.torch_bridge._ops.bind import dtype_name
from qshard.torch_bridge._quantized.plane_programs import transpose
from qshard.torch_bridge._quantized.quantize import quantize
from qshard.torch_bridge._quantized.stack import QuantizedStack
from qshard.torch_bridge._quantized.tensor import QuantizedTensor
from qshard.torch_bridge._quantized.validation import check_dtype, check_model
from qshard.torch_bridge._weight_sync.code_gather import CodeShard, code_shard_of, gather_codes, gather_ranks
from qshard.torch_bridge._weight_sync.names import Names, engine_weights, expert_names
from qshard.torch_bridge._zero.schedule import ZeroUnit

OP = "stream_weights"


def stream_weights(
    model: nn.Module,
    format: str = "compressed-tensors",
    *,
    weight_format: FormatLike | None = None,
    dtype: torch.dtype | None = None,
    bucket_bytes: int = DEFAULT_BUCKET,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a model as named tensors of a serving engine, such as for vLLM's `load_weights`.

        engine_model.load_weights(stream_weights(model, "compressed-tensors"))    # after optimizer.step()

    Args:
      model: after `convert`, or with `weight_format` any model: sharded by FSDP2, `parallelize_module`, both, a
        `ZeroOptimizer`, or not at all.
      format: "compressed-tensors", "deepseek" or "modelopt", for engines; "qshard" for `from_plain`.
      weight_format: format of all `nn.Linear` weights; by default the weight format of the recipe of each
        converted layer; other layers are then not quantized.
      dtype: dtype of the other tensors; by default their own.
      bucket_bytes: most bytes of codes that are gathered at a time. A larger weight is gathered alone.

    Yields:
      Names as in Hugging Face checkpoints, and whole tensors on the device of the model: codes and scales of a weight
      one after the other, other parameters and buffers as values. Tensors stay valid after the next one. A weight that
      modules share is yielded once, under its first name.

    Raises:
      TypeError, ValueError: an argument is wrong, no weight is quantized, or `format` cannot hold a weight. All ranks
        raise before the first collective.

    Collective: every rank of the model iterates to the end, and every rank gets all tensors. A rank that does not feed
    an engine drops them. Weights are gathered as codes, 1 or 1/2 byte an element, after a max-reduction of amaxes for
    each bucket; the rest in `dtype`. Codes and scales are, bit for bit, the result of `quantize` of the whole weight,
    which the forward pass multiplies. Weights that are sharded in another way, and experts in 3-D parameters, are
    gathered one at a time in their own dtype first, with the same bits. Under a `ZeroOptimizer` with sharded weights,
    its units take the place of buckets.

    >>> from qshard.torch_bridge import convert
    >>> model = convert(nn.Sequential(nn.Linear(128, 128)), "BlockScaling")
    >>> for name, tensor in stream_weights(model, "deepseek"):
    ...     print(name, tensor.dtype, tuple(tensor.shape))
    0.weight torch.float8_e4m3fn (128, 128)
    0.weight_scale_inv torch.float32 (1, 1)
    0.bias torch.float32 (128,)
    """
    check_model(OP, model)
    check_stream(format, bucket_bytes, OP)
    if dtype is not None:
        check_dtype(OP, "dtype", dtype)
    fmt = None if weight_format is None else as_format(weight_format, OP, "weight_format")
    if fmt is not None and fmt.stochastic:
        raise ValueError(f"{OP}: weight_format ({fmt}) rounds stochastically; pass a format with rounding='nearest'")
    items = _items(model, fmt)
    if not any(item.fmt is not None for item in items):
        raise ValueError(
            f"{OP}: model ({type(model).__name__}) has no quantized weight; call convert first, or pass weight_format="
        )
    for item in items:
        item.check(format)
    return _Stream(items, format, dtype, bucket_bytes).tensors()


class _Item(NamedTuple):
    """A parameter or buffer of the model.

    Attributes:
      module: the module that has it, under the name `attribute`.
      names: the weights of the engine that it contains; none for a stack.
      fmt: format that it is quantized to; None: it is not.
      unit: the unit of a `ZeroOptimizer` that gathers it before it has memory.
      is_stack: a 3-D parameter with a weight for each expert.
    """

    name: str
    module: Any
    attribute: str
    value: Tensor
    names: Names
    fmt: Format | None
    unit: ZeroUnit | None
    is_stack: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a weight, `[N, K]` for each expert of a stack."""
        shape = tuple(self.value.shape)
        if self.is_stack:
            return shape[:0:-1] if self.module.weight_layout == "KN" else shape[1:]
        return shape

    @property
    def what(self) -> Description:
        word = dtype_name(self.value.dtype)
        assert self.fmt is not None
        dtype = word if word in FLOATS else "bfloat16"
        return Description(format=self.fmt, shape=self.shape, dtype=dtype, planes=(Usage.ROWWISE,))

    @property
    def nbytes(self) -> int:
        if self.fmt is None or self.is_stack:
            return self.value.numel() * self.value.itemsize
        return plane(self.fmt, self.shape, Usage.ROWWISE).nbytes

    def check(self, format: str) -> None:
        """Raise ValueError if the engine's format cannot hold the weights."""
        if self.fmt is not None:
            weights = expert_names(self.name, 0, self.shape[0]) if self.is_stack else self.names.of_ranks[0]
            for weight in weights:
                check_weight(format, weight, self.what, OP)


def _items(model: nn.Module, fmt: Format | None) -> list[_Item]:
    """Return the parameters and buffers of a model, each once, in the order of its state dict."""
    names, modules = engine_weights(model), dict(model.named_modules(remove_duplicate=False))
    units: dict[int, ZeroUnit] = {}
    for module in model.modules():
        if isinstance(unit := getattr(module, "zero_unit", None), ZeroUnit):
            units |= {id(weight.visible): unit for weight in unit.flat.weights}
    found: dict[int, _Item] = {}
    for name, value in entries_of(model):
        prefix, _, attribute = name.rpartition(".")
        module, is_stack = modules[prefix], False
        own = _format_of(module, attribute, value, fmt)
        if isinstance(module, Experts) and value.ndim == 3:
            own, is_stack = own or fmt or module.recipe.weight, True
        of = names.get(name, Names.of(EngineWeight(name)))
        found.setdefault(id(value), _Item(name, module, attribute, value, of, own, units.get(id(value)), is_stack))
    return [*found.values()]


def _format_of(module: nn.Module, attribute: str, value: Tensor, fmt: Format | None) -> Format | None:
    """Return the format of the codes of a parameter; of a linear layer also `fmt`, or the format of its recipe."""
    local = local_of(value)
    if isinstance(local, QuantizedTensor):
        return local.format
    if not isinstance(module, nn.Linear | WeightLayer) or attribute != "weight":
        return None
    if getattr(module, "weight_layout", "NK") != "NK":
        return None
    return fmt or (module.recipe.weight if isinstance(module, WeightLayer) else None)


class _Stream:
    """The iteration over the items of a model."""

    def __init__(self, items: Sequence[_Item], format: str, dtype: torch.dtype | None, bucket_bytes: int):
        self._items, self._format, self._dtype, self._most = items, format, dtype, bucket_bytes

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors. Memory of a bucket is freed when its last tensor is dropped."""
        taken: set[int] = set()
        for unit, run in itertools.groupby(self._items, key=lambda item: item.unit):
            if unit is None:
                items = [*run]
                for bucket in buckets([item.nbytes for item in items], self._most):
                    yield from self._pairs([items[i] for i in bucket])
            elif id(unit) not in taken:
                taken.add(id(unit))
                yield from self._of_unit(unit)

    @torch.no_grad()
    def _of_unit(self, unit: ZeroUnit) -> list[tuple[str, Tensor]]:
        """Return the tensors of a unit of ZeRO, in memory of their own: the unit frees its weights."""
        members = [item for item in self._items if item.unit is unit]
        with unit.gathered():
            members = [each._replace(value=getattr(each.module, each.attribute)) for each in members]
            return [(name, tensor.clone()) for name, tensor in self._pairs(members)]

    @torch.no_grad()
    def _pairs(self, items: Sequence[_Item]) -> list[tuple[str, Tensor]]:
        """Return the tensors of a bucket. Collective."""
        shards = {i: shard for i, item in enumerate(items) if (shard := _shard(item)) is not None}
        planes: dict[int, Plane] = {}
        for key in dict.fromkeys(shard.key for shard in shards.values()):
            members = [i for i, shard in shards.items() if shard.key == key]
            device = _device_of(items[members[0]].value)
            planes |= zip(members, gather_codes([shards[i] for i in members], device), strict=True)
        pairs: list[tuple[str, Tensor]] = []
        for i, item in enumerate(items):
            if item.fmt is None:
                pairs += self._values(item)
            elif item.is_stack:
                pairs += self._stack(item)
            else:
                pairs += self._codes(item, planes[i] if i in planes else _whole_plane(item))
        return pairs

    def _codes(self, item: _Item, whole: Plane) -> Iterator[tuple[str, Tensor]]:
        group = item.names.ep_group
        planes = [whole] if group is None else gather_ranks(whole, group)
        for weights, own in zip(item.names.of_ranks, planes, strict=True):
            for weight in weights:
                yield from self._named(weight, item.what, own)

    def _stack(self, item: _Item) -> Iterator[tuple[str, Tensor]]:
        stack = local_of(item.value)
        is_turned, has_codes = item.module.weight_layout == "KN", isinstance(stack, QuantizedStack)
        if not has_codes:
            stack = _whole(plain(item.value))
            stack = stack.transpose(-2, -1) if is_turned else stack
        for expert, values in enumerate(stack.unbind()):
            codes = values if has_codes else quantize(values.contiguous(), item.what.format)
            assert isinstance(codes, QuantizedTensor)
            own = codes.parts(Usage.ROWWISE)
            assert own is not None
            own = transpose(own, codes.format) if has_codes and is_turned else own
            for weight in expert_names(item.name, expert, item.shape[0]):
                yield from self._named(weight, item.what, own)

    def _named(self, weight: EngineWeight, what: Description, own: Plane) -> Iterator[tuple[str, Tensor]]:
        for name, dtype, tensor in named_tensors(self._format, weight, what, own, torch, OP):
            yield name, tensor.view(torch.float8_e4m3fn) if dtype == "F8_E4M3" else tensor

    def _values(self, item: _Item) -> Iterator[tuple[str, Tensor]]:
        value = item.value.detach()
        if self._dtype is not None and value.is_floating_point():
            value = value.to(self._dtype)
        whole, group = _whole(value), item.names.ep_group
        parts = [whole] if group is None else [each.data for each in gather_ranks(Plane(whole, None, None), group)]
        for weights, own in zip(item.names.of_ranks, parts, strict=True):
            for weight in weights:
                yield weight.name, own if weight.rows is None else own[slice(*weight.rows)]


def _shard(item: _Item) -> CodeShard | None:
    """Return the local shard of a weight that is gathered as codes in a bucket; None for others."""
    local = local_of(item.value)
    if item.fmt is None or item.is_stack or isinstance(local, QuantizedTensor) or _has_delayed_scale(item):
        return None
    return code_shard_of(item.value, item.fmt) if item.fmt.slice_refusal is None else None


def _has_delayed_scale(item: _Item) -> bool:
    """Return whether the scale of a weight comes from earlier steps."""
    state = getattr(local_of(item.value), "scale_state", None)
    return state is not None and state.delayed is not None and state.fmt == item.fmt


def _whole_plane(item: _Item) -> Plane:
    """Return the rowwise plane of a weight that is not gathered in a bucket. Collective."""
    assert item.fmt is not None
    if isinstance(local_of(item.value), QuantizedTensor) or _has_delayed_scale(item):
        codes = quantized_weight(item.value)
    else:
        codes = quantize(_whole(plain(item.value)), item.fmt)
    assert isinstance(codes, QuantizedTensor)
    own = codes.parts(Usage.ROWWISE)
    if own is None:
        raise ValueError(f"{OP}: {item.name} has no rowwise plane, which engines read; quantize it with Usage.ROWWISE")
    return own


def _whole(value: Tensor) -> Tensor:
    """Return a whole tensor. Collective for a DTensor."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


def _device_of(value: Tensor) -> torch.device:
    """Return the device where ranks gather a weight, which an offloaded shard is not on."""
    if isinstance(value, DTensor) and value.device_mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return local_of(value).device
