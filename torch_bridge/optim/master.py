"""`cast_master`: flat slices of master weights to quantized weights, with one max-reduction for all of them.

The steps are `qshard.master`; here is what they need of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from qshard import master
from qshard.formats import Usage
from qshard.layout import matrix_shape, plane
from qshard.master import Bucket, MasterPlan
from qshard.pipeline import Parts
from qshard.torch_bridge import _multi, _ops
from qshard.torch_bridge.optim.slices import QuantizedSlice
from qshard.torch_bridge.quantize import max_over_ranks
from qshard.torch_bridge.tensor import QuantizedTensor

__all__ = ["CastPlan", "cast_master", "update_columnwise"]

Parity = Literal["master", "model"]


class CastPlan:
    """What `cast_master` knows of its weights before it sees masters. Make it once, and no step pays for it again.

    Args:
      weights: those that will be cast: all `QuantizedTensor`, whole, or all `QuantizedSlice`.
      dtype: of the masters, of all of them: a rank without a slice must know it too.
      parity: "master": quantize masters as they are; "model": round them to the dtype of the weight first.

    Raises:
      ValueError: as `qshard.master.plan_master`.
    """

    def __init__(
        self,
        weights: Sequence[QuantizedTensor | QuantizedSlice],
        *,
        parity: Parity,
        dtype: torch.dtype = torch.float32,
    ):
        if parity not in ("master", "model"):
            raise ValueError(f"cast_master: parity ({parity!r}) is not 'master' or 'model'; choose what codes equal")
        self.pieces = any(isinstance(weight, QuantizedSlice) for weight in weights)
        if self.pieces and not all(isinstance(weight, QuantizedSlice) for weight in weights):
            raise ValueError("cast_master: weights (mixed) are not all whole or all slices; cast them in two calls")
        # A weight with two planes of different numbers is cast twice; `owners` says of which weight a plane is.
        self.owners: list[int] = []
        usages: list[Usage] = []
        for i, weight in enumerate(weights):
            for usage in _usages(weight):
                self.owners.append(i)
                usages.append(usage)
        of_planes = [weights[i] for i in self.owners]
        self.plan: MasterPlan = master.plan_master(
            [tuple(weight.shape) for weight in of_planes],
            [weight.format for weight in of_planes],
            usages=usages,
            dtype=_ops.dtype_name(dtype),
            rounded_to=[None if parity == "master" else _ops.dtype_name(weight.dtype) for weight in of_planes],
        )
        self.dtype, self.weights = dtype, len(weights)
        self.device = _parts(weights[0], usages[0]).data.device if weights else torch.device("cpu")
        self._ops = _Steps(self.plan, self.device)

    def words(self, name: str, numbers: Sequence[int] | Tensor) -> Tensor:
        """Numbers of 64 bits, one for each weight, as int32 `[planes, 2]`, the low words first.

        A tensor may be int64 `[n]`, or int32 or uint32 `[n, 2]`: on the device, it makes a call that a CUDA graph can
        capture.
        """
        if not isinstance(numbers, Tensor):
            signed = [((number + 2**63) % 2**64) - 2**63 for number in numbers]
            numbers = torch.tensor(signed, dtype=torch.int64).to(self.device)
        if numbers.dtype == torch.int64:
            numbers = numbers.contiguous().view(torch.int32).view(-1, 2)
        elif numbers.dtype == torch.uint32:
            numbers = numbers.view(torch.int32)  # which can be indexed
        n = self.weights
        if tuple(numbers.shape) != (n, 2) or numbers.dtype != torch.int32:
            raise ValueError(
                f"cast_master: {name} ({numbers.dtype} {tuple(numbers.shape)}) is not one number for each of {n} "
                "weights; give ints, int64 (n,), or int32 (n, 2), low word first"
            )
        return numbers if len(self.owners) == n else self._ops.of_owners(numbers, self.owners)


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
    """Writes the codes of slices of master weights, and the scales of the whole weights, in place.

    The codes are those of `quantize(master)`, or with parity "model" of `quantize(master.to(weight.dtype))`, of the
    whole master: gathered, slices are its bits.

    Args:
      weights: what is written to. A `QuantizedTensor` is a whole weight, of whose codes those of the slice change. A
        `QuantizedSlice` holds codes of the slice alone.
      masters: for each weight this rank's slice, flat, of `dtype`; None or empty if it has none.
      starts: index of the first element of each slice in its weight. Elements past the end of a weight are padding.
      group: the ranks that hold the other slices. None: there are none, or no block or scale is shared
        (`qshard.master.plan_shards`).
      parity: "master" or "model".
      dtype: of all masters: float32, bfloat16 or float16.
      seeds: of stochastic rounding, one for each weight, 64 bits; another one each step.
      plan: made of such weights, with parity and dtype; None: it is made here.

    Raises:
      ValueError: a format or a shape cannot be cast in slices; seeds are missing; tensors do not fit.
      TypeError: a master is not of the dtype of the plan.

    Collective: one all-reduce of int32 amaxes for all weights, whatever a rank holds. Launches do not grow with the
    number of weights: for each format, one for amaxes, some for scales and one for codes; on a GPU, one for each 448
    weights. The columnwise plane of square blocks goes: `update_columnwise` makes it of the gathered codes.

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
    plan = plan or CastPlan(weights, parity=parity, dtype=dtype)
    _check(plan, weights, masters)
    slices = [
        torch.empty(0, dtype=plan.dtype, device=plan.device) if m is None else m.detach().view(-1) for m in masters
    ]
    targets = [_parts(weights[i], usage) for i, usage in zip(plan.owners, plan.plan.usages, strict=True)]
    made = master.cast_master(
        plan._ops,
        [target.data for target in targets],
        [slices[i] for i in plan.owners],
        plan.words("starts", starts),
        None if group is None else lambda amax: max_over_ranks(amax, group),
        plan=plan.plan,
        pieces=plan.pieces,
        seeds=None if seeds is None else plan.words("seeds", seeds),
    )
    for part in (1, 2):  # scale_inv, global_scale_inv
        pairs = [(old[part], new[part]) for old, new in zip(targets, made, strict=True)]
        if there := [(old, new) for old, new in pairs if old is not None and new is not None]:
            torch._foreach_copy_([old for old, _ in there], [new for _, new in there])
    for weight in weights:
        if isinstance(weight, QuantizedTensor) and weight.format.square and weight.parts(Usage.COLUMNWISE):
            weight._spare_columnwise = weight.parts(Usage.COLUMNWISE)  # type: ignore[attr-defined]
            weight.set(Usage.COLUMNWISE, None)


def update_columnwise(weights: Sequence[QuantizedTensor]) -> None:
    """Makes the columnwise planes of weights whose rowwise planes have been gathered: their transposes.

    Args:
      weights: of formats with square blocks, or one scale.

    Raises:
      ValueError: the columnwise plane of a format is no transpose of the rowwise one.

    One launch for the codes and the scales of all weights. `cast_master` takes the plane away, so that nothing
    computes with a stale one; this gives it back, in the same memory.
    """
    made: list[Parts] = []
    matrices: list[Tensor] = []
    transposes: list[Tensor] = []
    for weight in weights:
        fmt, rows = weight.format, weight.parts(Usage.ROWWISE)
        if not fmt.square or rows is None:
            raise ValueError(f"update_columnwise: {fmt} is not one with a transpose for a plane; gather both planes")
        where = plane(fmt, tuple(weight.shape), Usage.COLUMNWISE)
        spare: Parts | None = weight.parts(Usage.COLUMNWISE) or getattr(weight, "_spare_columnwise", None)
        if spare is None:
            spare = Parts(
                rows.data.new_empty(where.data_shape),
                rows.scale_inv if fmt.block is None else rows.scale_inv.new_empty(where.scale_shape),
            )
        spare = Parts(spare.data, rows.scale_inv if fmt.block is None else spare.scale_inv, rows.global_scale_inv)
        m, k = matrix_shape(tuple(weight.shape))
        matrices.append(rows.data.view(m, k // fmt.element.codes_per_byte))
        transposes.append(spare.data)
        if fmt.block is not None:
            matrices.append(rows.scale_inv)
            transposes.append(spare.scale_inv)
        made.append(spare)
    if matrices:
        torch.ops.qshard.transpose_each(matrices, transposes)
    for weight, parts in zip(weights, made, strict=True):
        weight.set(Usage.COLUMNWISE, parts)


class _Steps:
    """The ops of `qshard.master`, with what a plan needs on its device."""

    def __init__(self, plan: MasterPlan, device: torch.device):
        self.__dict__.update(vars(_ops.ops))
        self._device = device
        # By the first weight, which is of one bucket.
        self._rows = {b.indices[0]: self._tensor(b.indices) for b in plan.buckets if len(plan.buckets) > 1}
        self._repeats = {
            b.indices[0]: self._tensor([each for count, each in b.repeats for _ in range(count)])
            for b in plan.buckets
            if b.fmt.global_scale == "row"
        }
        self._owners: Tensor | None = None

    def _tensor(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64).to(self._device)

    def zeros(self, count: int) -> Tensor:
        return torch.zeros(count, device=self._device)

    def joined(self, arrays: Sequence[Tensor]) -> Tensor:
        return torch.cat([*arrays])

    # Indexed as int32: CUDA does not index uint32.

    def of_bucket(self, pairs: Tensor, bucket: Bucket) -> Tensor:
        rows = self._rows.get(bucket.indices[0])
        return pairs if rows is None else pairs.view(torch.int32)[rows].view(pairs.dtype)

    def of_owners(self, pairs: Tensor, owners: Sequence[int]) -> Tensor:
        self._owners = self._tensor(owners) if self._owners is None else self._owners
        return pairs.view(torch.int32)[self._owners].view(pairs.dtype)

    def repeated(self, values: Tensor, bucket: Bucket) -> Tensor:
        if (repeats := self._repeats.get(bucket.indices[0])) is not None:
            return torch.repeat_interleave(values, repeats, output_size=bucket.blocks)
        # repeat_interleave has one warp for each value, which is slow where values are few and blocks many.
        each = zip(values.split(1), bucket.grids, strict=True)
        return torch.cat([value.expand(blocks) for value, blocks in each])

    def amax_slices(self, starts: Tensor, amax: Tensor, x: Sequence[Tensor], **attributes: Any) -> Tensor:
        _multi.ops["amax_slices"](starts, amax, x, **attributes)
        return amax

    def cast_slices(
        self, starts: Tensor, scale: Tensor, x: Sequence[Tensor], data: Sequence[Tensor], **attributes: Any
    ) -> Sequence[Tensor]:
        _multi.ops["cast_slices"](starts, scale, x, data, **attributes)
        return data

    def cast_slices_stochastic(
        self,
        starts: Tensor,
        seeds: Tensor,
        scale: Tensor,
        x: Sequence[Tensor],
        data: Sequence[Tensor],
        **attributes: Any,
    ) -> Sequence[Tensor]:
        _multi.ops["cast_slices_stochastic"](starts, seeds, scale, x, data, **attributes)
        return data


def _usages(weight: QuantizedTensor | QuantizedSlice) -> list[Usage]:
    """The planes to cast: of square blocks the rowwise one, of which the other is a transpose."""
    if isinstance(weight, QuantizedSlice):
        return [weight.usage]
    there = [usage for usage in Usage if weight.parts(usage) is not None]
    return [Usage.ROWWISE] if weight.format.square and Usage.ROWWISE in there else there


def _parts(weight: QuantizedTensor | QuantizedSlice, usage: Usage) -> Parts:
    parts = weight.parts if isinstance(weight, QuantizedSlice) else weight.parts(usage)
    assert parts is not None
    return parts


def _check(plan: CastPlan, weights: Sequence[Any], masters: Sequence[Tensor | None]) -> None:
    if not len(weights) == len(masters) == plan.weights:
        raise ValueError(
            f"cast_master: {len(masters)} masters and a plan of {plan.weights} are not one for each of "
            f"{len(weights)} weights; give None where this rank has no slice"
        )
    for i, m in enumerate(masters):
        if m is not None and m.dtype != plan.dtype:
            raise TypeError(f"cast_master: masters[{i}] ({m.dtype}) is not {plan.dtype}; pass dtype= that of them all")
        if m is not None and not m.is_contiguous():
            raise ValueError(
                f"cast_master: masters[{i}] (strides {m.stride()}) is not contiguous; flatten a copy of it"
            )
