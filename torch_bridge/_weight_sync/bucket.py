"""Buckets of a weight stream: items that are quantized and gathered together, planned once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from qshard._core.operands import OperandSpec
from qshard._core.quantize_steps import Plane
from qshard._files.engine_formats import EngineTensor
from qshard._files.engine_stream import EngineWeight
from qshard.formats import Usage
from qshard.torch_bridge._convert.export import quantized_weight
from qshard.torch_bridge._distributed.dtensor import local_of
from qshard.torch_bridge._fsdp.code_gather import CodeGather, PendingAmaxes, PendingCodes, device_of, gather_ranks
from qshard.torch_bridge._fsdp.weight import ShardedWeight, plain
from qshard.torch_bridge._ops.collectives import PendingGather
from qshard.torch_bridge._quantized.plane_programs import quantize_operand, transpose
from qshard.torch_bridge._quantized.stack import QuantizedStack
from qshard.torch_bridge._quantized.tensor import QuantizedTensor
from qshard.torch_bridge._weight_sync.items import OP, Item, plan_of, rows_group_of


class StreamBucket:
    """Items of a weight stream that are gathered together.

    Args:
      items: the items.
      values: the tensor of each. Only its sharding, dtype and device count here.
      format: one of `STREAM_FORMATS`.
      dtype: dtype of tensors that are not quantized; None: their own.
    """

    def __init__(self, items: Sequence[Item], values: Sequence[Tensor], format: str, dtype: torch.dtype | None):
        self.items, self.dtype = items, dtype
        plans = {i: plan for i, item in enumerate(items) if (plan := plan_of(item, values[i])) is not None}
        self.gathers: list[tuple[list[int], CodeGather]] = []
        for key in dict.fromkeys(plan.gather_key for plan in plans.values()):
            members = [i for i, plan in plans.items() if plan.gather_key == key]
            self.gathers.append((members, CodeGather([plans[i] for i in members])))
        # Items that are gathered as values, by the ranks that share their rows and the device.
        self.row_gathers: dict[tuple[dist.ProcessGroup, torch.device], list[int]] = {}
        for i, item in enumerate(items):
            if item.fmt is None and (group := rows_group_of(values[i])) is not None:
                self.row_gathers.setdefault((group, device_of(values[i])), []).append(i)
        self._tensors = [self._tensors_of(item, format) for item in items]

    def _tensors_of(self, item: Item, format: str) -> list[list[EngineTensor]]:
        """Return the tensors of each rank of expert parallelism, or of each expert of a stack."""
        if item.fmt is None:
            return []
        of_ranks: Sequence[Sequence[EngineWeight]] = item.names.of_ranks
        if item.layout is not None:
            of_ranks = [item.of_expert(expert) for expert in range(item.experts)]
        planned: dict[tuple[int, int] | None, tuple[EngineTensor, ...]] = {}
        found = []
        for weights in of_ranks:
            named = []
            for weight in weights:
                if weight.rows not in planned:
                    planned[weight.rows] = item.tensors(format, weight)
                named += [dataclasses.replace(each, name=f"{weight.name}{each.name}") for each in planned[weight.rows]]
            found.append(named)
        return found

    def begin(self, values: Sequence[Tensor], amaxes: Mapping[str, Tensor]) -> BucketPass:
        """Begin to gather the items: compute amaxes, and begin their reduction. Collective.

        `amaxes` has the result of `shared_amaxes` for items that share a global scale, by name.
        """
        return BucketPass(self, values, [amaxes.get(item.name) for item in self.items])

    def pairs_of(
        self, i: int, value: Tensor, amax: Tensor | None, plane: Plane | None, rows: Tensor | None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of an item from its gathered plane or values; None: gather them here. Collective."""
        item = self.items[i]
        if item.fmt is None:
            yield from _values(item, _whole(self.cast(value)) if rows is None else rows)
        elif item.layout is not None:
            for tensors, whole in zip(self._tensors[i], _planes_of_stack(item, value, amax), strict=True):
                yield from (_contents(each, whole) for each in tensors)
        else:
            own, group = plane or _whole_plane(item, value, amax), item.names.ep_group
            planes = [own] if group is None else gather_ranks(own, group)
            for tensors, whole in zip(self._tensors[i], planes, strict=True):
                yield from (_contents(each, whole) for each in tensors)

    def cast(self, value: Tensor) -> Tensor:
        """Return a value that is not quantized in the dtype of the stream."""
        value = value.detach()
        return value.to(self.dtype) if self.dtype is not None and value.is_floating_point() else value


class BucketPass:
    """One pass over a bucket, in steps that other work may come between. Each step is collective."""

    @torch.no_grad()
    def __init__(self, bucket: StreamBucket, values: Sequence[Tensor], shared: Sequence[Tensor | None]):
        self._bucket, self._values, self._shared = bucket, values, shared
        self._amaxes: list[PendingAmaxes] = [
            gather.reduce([values[i] for i in members]) for members, gather in bucket.gathers
        ]
        self._codes: list[PendingCodes] = []
        self._rows: list[PendingGather] = []

    @torch.no_grad()
    def send(self) -> None:
        """Cast the shards, and begin all all-gathers."""
        bucket = self._bucket
        self._codes = [
            gather.send(step, [self._shared[i] for i in members])
            for (members, gather), step in zip(bucket.gathers, self._amaxes, strict=True)
        ]
        self._amaxes = []
        for (group, device), members in bucket.row_gathers.items():
            arrays = [bucket.cast(local_of(self._values[i]).to(device)) for i in members]
            self._rows.append(PendingGather.begin(arrays, group))

    @torch.no_grad()
    def pairs(self) -> list[tuple[str, Tensor]]:
        """Return the tensors, once they are gathered."""
        bucket = self._bucket
        planes: dict[int, Plane] = {}
        rows: dict[int, Tensor] = {}
        for (members, gather), step in zip(bucket.gathers, self._codes, strict=True):
            planes |= zip(members, gather.planes(step), strict=True)
        for members, gathering in zip(bucket.row_gathers.values(), self._rows, strict=True):
            rows |= zip(members, gathering.wait(), strict=True)
        self._codes, self._rows = [], []
        found: list[tuple[str, Tensor]] = []
        for i, value in enumerate(self._values):
            found += bucket.pairs_of(i, value, self._shared[i], planes.get(i), rows.get(i))
        return found

    def abandon(self) -> None:
        """Wait for collectives that have begun, so that their memory can be freed."""
        for step in self._amaxes:
            for work in step.reductions:
                work.wait()
        for gathering in (*(each.gathering for each in self._codes), *self._rows):
            gathering.wait()


def _contents(tensor: EngineTensor, whole: Plane) -> tuple[str, Tensor]:
    contents: Tensor = tensor.contents(whole, torch)
    return tensor.name, contents.view(torch.float8_e4m3fn) if tensor.dtype == "F8_E4M3" else contents


def _values(item: Item, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor that is not quantized, or its parts under the names of the engine."""
    group = item.names.ep_group
    parts: Sequence[Tensor] = [whole] if len(item.names.of_ranks) == 1 else whole.unbind()  # Of a stack of biases.
    if group is not None:
        parts = [each.data for each in gather_ranks(Plane(whole, None, None), group)]
    for weights, own in zip(item.names.of_ranks, parts, strict=True):
        for weight in weights:
            yield weight.name, own if weight.rows is None else own[slice(*weight.rows)]


def _whole_plane(item: Item, value: Tensor, amax: Tensor | None) -> Plane:
    """Return the rowwise plane of a weight that is not gathered as codes. Collective.

    `amax` is the amax of all weights that share its global scale; None: it has a scale of its own.
    """
    local = local_of(value)
    is_own = isinstance(local, ShardedWeight) and local.scale_state.fmt == item.fmt and amax is None
    if isinstance(local, QuantizedTensor) or is_own:
        codes = quantized_weight(OP, value)
        assert isinstance(codes, QuantizedTensor)
        return _rowwise(codes, item)
    return _cast(item, _whole(plain(value)), amax)


def _cast(item: Item, values: Tensor, amax: Tensor | None) -> Plane:
    assert item.fmt is not None
    spec = OperandSpec(item.fmt, Usage.ROWWISE)
    return quantize_operand(values.contiguous(), spec, global_amaxes=() if amax is None else (amax,))[0][Usage.ROWWISE]


def _planes_of_stack(item: Item, value: Tensor, amaxes: Tensor | None) -> Iterator[Plane]:
    """Yield the rowwise plane of each expert of a 3-D parameter, from its codes or its values. Collective."""
    stack, is_kn = local_of(value), item.layout == "KN"
    if isinstance(stack, QuantizedStack):
        for codes in stack.unbind():
            assert isinstance(codes, QuantizedTensor)
            whole = _rowwise(codes, item)
            yield transpose(whole, codes.format) if is_kn else whole
        return
    values = _whole(plain(value))
    for i, expert in enumerate((values.transpose(-2, -1) if is_kn else values).unbind()):
        yield _cast(item, expert, None if amaxes is None else amaxes[i])


def _rowwise(codes: QuantizedTensor, item: Item) -> Plane:
    own = codes.parts(Usage.ROWWISE)
    if own is None:
        raise ValueError(f"{OP}: {item.name} has no rowwise plane, which engines read; quantize it with Usage.ROWWISE")
    return own


def _whole(value: Tensor) -> Tensor:
    """Return a whole tensor. Collective for a DTensor."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()
