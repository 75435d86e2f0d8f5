"""`cast_master`: flat slices of master weights to quantized weights, with one max-reduction for all of them.

The algorithm is `_core.flat_shards`; this module binds it to torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from qshard._core import flat_shards
from qshard._core.flat_shards import FlatSlice, MasterPlan
from qshard._core.quantize_steps import Plane
from qshard._core.validation import quote
from qshard.formats import Usage
from qshard.layout import matrix_shape, plane, source
from qshard.torch_bridge._ops.bind import dtype_name, ops
from qshard.torch_bridge._ops.collectives import max_over_ranks
from qshard.torch_bridge._ops.flat_plan import SliceOps
from qshard.torch_bridge._ops.uint64 import as_uint64
from qshard.torch_bridge._optim.slices import QuantizedSlice
from qshard.torch_bridge._quantized.stack import QuantizedStack
from qshard.torch_bridge._quantized.tensor import QuantizedTensor
from qshard.torch_bridge._quantized.validation import check_contiguous, check_dtype, check_group, check_tensor

Parity = Literal["master", "model"]


def check_parity(op: str, parity: str) -> None:
    if parity not in ("master", "model"):
        raise ValueError(
            f"{op}: parity ({parity!r}) is not 'master' or 'model'; pass the values that the codes must match"
        )


class CastPlan:
    """Shapes, formats and device operands of a `cast_master` call. Construct it once to skip planning in every step.

    Args:
      weights: the weights to cast, all `QuantizedTensor` (whole) or all `QuantizedSlice`.
      parity: "master" quantizes masters as they are; "model" first rounds them to the dtype of the weight.
      dtype: dtype of all masters, also on a rank without slices.
      op: the name of the caller, for errors.

    Attributes:
      plan: the plan of `_core.flat_shards`.
      ops: its ops on the device.
      owners: for each plane of the plan, the index of its weight.
      pieces: True if the weights are `QuantizedSlice`s.

    Raises:
      ValueError: `parity` is unknown, weights are mixed, or a format cannot be cast in slices.
      TypeError: `weights` is not a list of quantized weights, or `dtype` is not a supported dtype.

    No communication.

    >>> from qshard.torch_bridge import quantize
    >>> plan = CastPlan([quantize(torch.zeros(2, 2), "FP8_E4M3")], parity="master")
    >>> plan.owners, plan.pieces
    ([0], False)
    """

    def __init__(
        self,
        weights: Sequence[QuantizedTensor | QuantizedSlice],
        *,
        parity: Parity,
        dtype: torch.dtype = torch.float32,
        op: str = "CastPlan",
    ):
        check_parity(op, parity)
        if not isinstance(weights, list | tuple):
            raise TypeError(f"{op}: weights ({quote(weights)}) is not a list; pass a list, even for one weight")
        for i, weight in enumerate(weights):
            if not isinstance(weight, QuantizedTensor | QuantizedSlice):
                raise TypeError(
                    f"{op}: weights[{i}] ({quote(weight)}) is not a QuantizedTensor or a QuantizedSlice; quantize it "
                    "first"
                )
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{op}: dtype ({quote(dtype)}) is not a torch.dtype; pass one, such as torch.float32")
        check_dtype(op, "dtype", dtype)
        self.pieces = any(isinstance(weight, QuantizedSlice) for weight in weights)
        if self.pieces and not all(isinstance(weight, QuantizedSlice) for weight in weights):
            raise ValueError(f"{op}: weights mix whole tensors and slices; cast them in two calls")
        # A weight with two different planes is cast twice.
        planes = [(i, *of_weight) for i, weight in enumerate(weights) for of_weight in _planes(weight)]
        self.owners = [i for i, _, _ in planes]
        slices = [
            FlatSlice(
                tuple(weights[i].shape),
                weights[i].format,
                dtype_name(dtype),
                usage=usage,
                rounded_to=None if parity == "master" else dtype_name(weights[i].dtype),
                is_stack=is_stack(weights[i]),
            )
            for i, usage, _ in planes
        ]
        self.plan: MasterPlan = flat_shards.plan_master(slices, op=op)
        self.dtype, self.weights = dtype, len(weights)
        self.device = planes[0][2].data.device if planes else torch.device("cpu")
        self.ops = SliceOps(self.plan, self.device)
        twice = len(planes) > len(weights)
        self._owners = torch.tensor(self.owners).to(self.device) if twice else None

    def as_uint64(self, name: str, numbers: Sequence[int] | Tensor) -> Tensor:
        """Convert 64-bit numbers, one for each weight, to int32 `[planes, 2]` on the device, the low half first.

        `numbers` are ints, or a tensor: int64 `[n]`, or int32 or uint32 `[n, 2]`. With a tensor on the device,
        `cast_master` can be captured in a CUDA graph. Errors call them `name`.
        """
        pairs = as_uint64("cast_master", name, numbers, self.device, self.weights)
        # Index as int32: CUDA cannot index uint32.
        return pairs if self._owners is None else pairs.view(torch.int32)[self._owners]


def cast_master(
    weights: Sequence[QuantizedTensor | QuantizedSlice],
    masters: Sequence[Tensor | None],
    starts: Sequence[int] | Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    parity: Parity,
    dtype: torch.dtype = torch.float32,
    seeds: Sequence[int] | Tensor | None = None,
    plan: CastPlan | None = None,
) -> None:
    """Cast slices of master weights to codes, and compute the scales of the whole weights, in place.

    Gathered slices have the bits of `quantize(master)` of the whole master, or of `quantize(master.to(weight.dtype))`
    with parity "model".

    Args:
      weights: the weights to write to. In a `QuantizedTensor`, which is whole, the codes of the slice change. A
        `QuantizedSlice` has only the codes of the slice.
      masters: this rank's slice of each master, flat, of `dtype`; None or empty if it has none.
      starts: the index of the first element of each slice in its weight. Elements past the end of a weight are padding.
      group: the ranks with the other slices. None if there are none, or if no block and no scale is shared
        (`_core.flat_shards.plan_shards`).
      parity: "master" or "model".
      dtype: dtype of all masters: float32, bfloat16 or float16.
      seeds: for stochastic rounding, a 64-bit seed for each weight; pass new ones in each step.
      plan: a plan for such weights with the same parity and dtype; by default it is computed here.

    Raises:
      ValueError: a format or shape cannot be cast in slices, seeds are missing, a start is negative, or tensors do not
        fit.
      TypeError: a master does not have the dtype of the plan.

    Collective: one all-reduce of int32 amaxes for all weights, also on ranks without slices. The number of launches
    depends on formats, not on weights: for each format one for amaxes, some for scales and one for codes; on a GPU one
    for every 448 weights. The columnwise plane of formats with 2-D blocks becomes stale: call `update_columnwise` after
    the gather.

    >>> from qshard.formats import FP8_E4M3
    >>> from qshard.torch_bridge import quantize
    >>> whole = torch.tensor([[1.0, 2.0], [4.0, 7.0]])
    >>> q = quantize(torch.zeros(2, 2), FP8_E4M3)
    >>> cast_master([q], [whole.view(-1)[1:]], [1], parity="master")
    >>> q.dequantize()
    tensor([[0., 2.],
            [4., 7.]])

    Sources: TransformerEngine `quantize_master_weights`.
    """
    check_group("cast_master", group)
    plan = plan or CastPlan(weights, parity=parity, dtype=dtype, op="cast_master")
    _check(plan, weights, masters)
    slices = [
        torch.empty(0, dtype=plan.dtype, device=plan.device) if m is None else m.detach().view(-1) for m in masters
    ]
    targets = [parts for weight in weights for _, parts in _planes(weight)]
    planes = flat_shards.cast_master(
        plan.ops,
        [target.data for target in targets],
        [slices[i] for i in plan.owners],
        plan.as_uint64("starts", starts),
        None if group is None else lambda amax: max_over_ranks(amax, group),
        plan=plan.plan,
        pieces=plan.pieces,
        seeds=None if seeds is None else plan.as_uint64("seeds", seeds),
    )
    _write_scales(weights, targets, planes)


def update_columnwise(weights: Sequence[QuantizedTensor]) -> None:
    """Recompute the columnwise planes of gathered weights by transposing their rowwise planes.

    Args:
      weights: `QuantizedTensor`s of formats with 2-D blocks or per-tensor scales.

    Raises:
      TypeError: a weight is not a `QuantizedTensor`.
      ValueError: the columnwise plane of a format is not a transpose of the rowwise plane.

    One launch for the codes and scales of all weights, no communication. `cast_master` marks the columnwise plane
    stale, so that nothing computes with it. This function restores it in the same memory.

    >>> from qshard.formats import Usage
    >>> from qshard.torch_bridge import quantize
    >>> q = quantize(torch.zeros(2, 2), "FP8_E4M3", usage=Usage.BOTH)
    >>> cast_master([q], [torch.tensor([1.0, 2.0, 4.0, 7.0])], [0], parity="master")
    >>> q.columnwise_is_stale
    True
    >>> update_columnwise([q])
    >>> q.columnwise_is_stale
    False
    """
    planes: list[Plane] = []
    matrices: list[Tensor] = []
    transposes: list[Tensor] = []
    for i, weight in enumerate(weights):
        if not isinstance(weight, QuantizedTensor):
            raise TypeError(f"update_columnwise: weights[{i}] ({quote(weight)}) is not a QuantizedTensor; quantize it")
        if isinstance(weight, QuantizedStack):
            raise TypeError(f"update_columnwise: weights[{i}] (QuantizedStack) is not transposed here; leave it out")
        fmt, rows = weight.format, weight.parts(Usage.ROWWISE)
        if not fmt.shares_codes or rows is None:  # With 1-D blocks the planes differ.
            raise ValueError(
                f"update_columnwise: weights[{i}] ({fmt}) has no columnwise plane that is the transpose of the rowwise "
                "one; use a format with 2-D blocks, quantized with usage=Usage.BOTH"
            )
        shape, columns = tuple(weight.shape), weight.parts(Usage.COLUMNWISE, stale=True)
        where = plane(fmt, shape, Usage.COLUMNWISE)
        data = rows.data.new_empty(where.data_shape) if columns is None else columns.data
        matrices.append(rows.data.view(plane(fmt, matrix_shape(shape), Usage.ROWWISE).data_shape))
        transposes.append(data)
        scale_inv = rows.scale_inv
        if scale_inv.ndim:
            scale_inv = scale_inv.new_empty(where.scale_shape) if columns is None else columns.scale_inv
            matrices.append(rows.scale_inv)
            transposes.append(scale_inv)
        planes.append(Plane(data, scale_inv, rows.global_scale_inv))
    if matrices:
        ops.transpose_each(matrices, transposes)
    for weight, parts in zip(weights, planes, strict=True):
        weight.set(Usage.COLUMNWISE, parts)


def is_stack(weight: QuantizedTensor | QuantizedSlice) -> bool:
    """Return True for a stack of matrices with their own scales."""
    return weight.is_stack if isinstance(weight, QuantizedSlice) else isinstance(weight, QuantizedStack)


def _planes(weight: QuantizedTensor | QuantizedSlice) -> list[tuple[Usage, Plane]]:
    """Return the planes to cast. A plane that is a transpose of another one is left out."""
    if isinstance(weight, QuantizedSlice):
        return [(weight.usage, weight.parts)]
    there = [(usage, parts) for usage in Usage if (parts := weight.parts(usage)) is not None]
    sources = {usage: source(weight.format, usage) for usage, _ in there}
    return [(usage, parts) for usage, parts in there if sources[usage] is usage or sources[usage] not in sources]


def _write_scales(weights: Sequence[Any], targets: Sequence[Plane], planes: Sequence[Plane]) -> None:
    """Copy new scales into the memory of the old ones, after the codes are written."""
    for part in (1, 2):  # scale_inv, global_scale_inv
        pairs = [(old[part], new[part]) for old, new in zip(targets, planes, strict=True)]
        if there := [(old, new) for old, new in pairs if old is not None and new is not None]:
            torch._foreach_copy_([old for old, _ in there], [new for _, new in there])
    for weight in weights:
        if isinstance(weight, QuantizedTensor) and Usage.COLUMNWISE not in dict(_planes(weight)):
            weight.columnwise_is_stale = True


def _check(plan: CastPlan, weights: Sequence[Any], masters: Sequence[Tensor | None]) -> None:
    if not len(weights) == len(masters) == plan.weights:
        raise ValueError(
            f"cast_master: got {len(masters)} masters and a plan of {plan.weights} for {len(weights)} weights; pass "
            "one per weight, None where this rank has no slice"
        )
    for i, m in enumerate(masters):
        if m is None:
            continue
        check_tensor("cast_master", f"masters[{i}]", m)
        if m.dtype != plan.dtype:
            raise TypeError(
                f"cast_master: masters[{i}] ({dtype_name(m.dtype)}) is not {dtype_name(plan.dtype)}, the dtype of the "
                "plan; cast it, or pass dtype= for all masters"
            )
        check_contiguous("cast_master", f"masters[{i}]", m)
