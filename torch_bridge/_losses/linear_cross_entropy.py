"""Cross entropy of a linear layer in chunks of rows, so that all logits are never in memory at once.

`_EarlyLoss` computes gradients in the forward pass, `_LateLosses` in the backward pass. `_Values` multiplies values of
each chunk, and `_Codes` multiplies codes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from qshard._core.losses import CHUNK_SEED_BIT, LossRule, check_head, head_recipe, makes_gradients_early, rows_at_a_time
from qshard._core.operands import check_weight_format, check_weight_shape
from qshard._core.quantize_steps import Plane
from qshard.formats import Format, Usage
from qshard.recipes import Recipe, RecipeLike, Role
from qshard.torch_bridge._fsdp.weight import ShardedWeight
from qshard.torch_bridge._losses.cross_entropy import RowLoss, as_int32, count_labels, reduce_losses, row_loss
from qshard.torch_bridge._nn.operands import LayerQuantizer, check_gathered, matrix_of, planes_of_weight, values_of
from qshard.torch_bridge._ops.autograd_node import Node, apply_node
from qshard.torch_bridge._ops.bind import dtype_name
from qshard.torch_bridge._ops.eager import autocast_dtype, is_compiling
from qshard.torch_bridge._ops.uint64 import as_uint64, constant_uint64
from qshard.torch_bridge._quantized.gemm import Operand, matmul
from qshard.torch_bridge._quantized.plane_programs import transpose
from qshard.torch_bridge._quantized.tensor import QuantizedTensor
from qshard.torch_bridge._quantized.validation import check_tensor

Observer = Callable[[Role, Tensor, Tensor | None], None]
_OBSERVER: ContextVar[Observer | None] = ContextVar("observer", default=None)
"""Called with the role, values and seed of each operand that a chunk quantizes, also in the backward pass."""


def linear_cross_entropy(
    x: Tensor,
    w: Tensor,
    labels: Tensor,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    num_classes: int | None = None,
    group: dist.ProcessGroup | None = None,
    chunk: int | None = None,
    recipe: RecipeLike | None = None,
    seed: int | Tensor | None = None,
) -> Tensor:
    """Compute `cross_entropy(x @ w.T, labels)` in chunks of rows. The gradient of a chunk overwrites its logits.

    Args:
      x: float32, bfloat16 or float16, `[*rows, K]`.
      w: `[classes, K]` in the dtype of x; with `group`, a shard of the classes. With `recipe`, any of these dtypes or a
        `QuantizedTensor`. Or a DTensor sharded by classes over a mesh of one axis: its ranks replace `group`, x and
        labels may be DTensors of the same mesh, and the loss is a plain tensor.
      labels: int64 or int32, `[*rows]`.
      reduction: as for `cross_entropy`.
      ignore_index: as for `cross_entropy`.
      label_smoothing: as for `cross_entropy`.
      z_loss: as for `cross_entropy`.
      num_classes: as for `cross_entropy`; columns of the logits are rows of w.
      group: as for `cross_entropy`. x is the same on all ranks. Its gradient is summed over the ranks.
      chunk: rows of a chunk. The default is as many as have 256 MiB of logits, or the bytes of w if w is larger, in
        chunks of equal size; all rows if that takes no more memory.
      recipe: quantize the operands of all three GEMMs of each chunk, as `linear` does. w is quantized once; x and the
        gradient of the logits are quantized by chunk. A per-tensor scale is computed for each chunk, and for the
        classes of each rank, so results depend on `chunk`, as results of `linear` depend on the batch. `DelayedScaling`
        raises: chunks have no scale history. None: multiply values.
      seed: for stochastic rounding, as for `linear`.

    Returns:
      The loss, as `cross_entropy` returns it. Logits are rounded to the dtype of x. The gradient of w is summed over
      chunks in float32.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: as for `cross_entropy`; x and w do not fit each other or the formats; the recipe is `DelayedScaling`,
        or needs a seed; or a DTensor is sharded in another way.

    With "mean" and "sum", gradients are computed with the loss, and the backward pass multiplies them by the gradient
    of the loss, a scalar. In float16, scaling up the loss could not recover gradients that were rounded to 0. So in
    float16 and with "none", the backward pass recomputes the logits. Under autocast x and w are cast to its dtype.

    >>> x, w = torch.ones(2, 3, requires_grad=True), torch.zeros(4, 3)
    >>> loss = linear_cross_entropy(x, w, torch.tensor([0, 3]))
    >>> loss.backward()
    >>> loss.detach(), x.grad.abs().max()
    (tensor(1.3863), tensor(0.))

    Source: Wijmans et al., arXiv:2411.09009.
    """
    op, total = "linear_cross_entropy", None
    if isinstance(w, DTensor):
        total = w.shape[0]
        x, w, labels, group = _local_operands(op, x, w, labels, group)
    check_tensor(op, "x", x)
    if (dtype := autocast_dtype(x.device)) is not None:
        x, w = x.to(dtype), w.to(dtype) if recipe is None else w
    how = None if recipe is None else _How.of(op, w, recipe, seed, x.device)
    if how is None:
        check_tensor(op, "w", w)
    check_head(op, x.shape, dtype_name(x.dtype), w.shape, dtype_name((w if how is None else x).dtype), chunk)
    of = LossRule.of(op, ignore_index, label_smoothing, z_loss)
    rule = row_loss(op, "x", x, w.shape[0], labels, reduction, of, group, num_classes, total)
    if how is not None:
        for width in sorted(set(rule.shard.widths)):  # Check the widths of all ranks, so that all raise.
            check_weight_shape(op, "w", how.recipe, (width, w.shape[1]))
        w = w if w.is_contiguous() else w.contiguous()
    flat, flat_labels = x.reshape(-1, x.shape[-1]), as_int32(labels).reshape(-1)
    rows = rows_at_a_time(chunk, flat.shape, rule.shard.widest, x.dtype.itemsize)
    if not (torch.is_grad_enabled() and makes_gradients_early(reduction, dtype_name(x.dtype))):
        losses: Tensor = apply_node(_LateLosses, flat, w, flat_labels, rule, rows, how)
        return reduce_losses(losses.view(labels.shape), labels, reduction, ignore_index)
    one = torch.ones((), dtype=torch.float32, device=x.device)
    count = count_labels(labels, ignore_index) if reduction == "mean" else one
    loss: Tensor = apply_node(_EarlyLoss, flat, w, flat_labels, count, rule, rows, how)
    return loss


def _local_operands(
    op: str, x: Tensor, w: DTensor, labels: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor, dist.ProcessGroup | None]:
    """Return the local x, the local shard of w, the labels and the group of w, under tensor parallelism."""
    mesh, placements = w.device_mesh, tuple(w.placements)
    if placements not in ((Shard(0),), (Replicate(),)):
        raise ValueError(
            f"{op}: w {tuple(w.shape)} has placements {placements}; shard it by classes over a 1-D mesh, as "
            "ColwiseParallel does"
        )
    if group is not None:
        raise ValueError(f"{op}: group is for plain tensors, but w is a DTensor; leave group out")
    whole = [Replicate()]
    for name, tensor in (("x", x), ("labels", labels)):
        if isinstance(tensor, DTensor) and tensor.device_mesh != mesh:
            raise ValueError(f"{op}: {name} (over {tensor.device_mesh}) is not on the mesh of w, {mesh}; move it there")
    if isinstance(x, DTensor):
        x = x.redistribute(placements=whole).to_local(grad_placements=whole)
    if isinstance(labels, DTensor):
        labels = labels.redistribute(placements=whole).to_local()
    local = w.to_local(grad_placements=placements)
    return x, local, labels, mesh.get_group() if placements == (Shard(0),) else None


@contextlib.contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Call `observer` for the operands that losses in this context quantize."""
    token = _OBSERVER.set(observer)
    try:
        yield
    finally:
        _OBSERVER.reset(token)


class _How(NamedTuple):
    """Recipe, seed and observer that quantize the operands of each chunk."""

    recipe: Recipe
    seed: Tensor | None
    observer: Observer | None

    @classmethod
    def of(cls, op: str, w: Tensor, recipe: RecipeLike, seed: Any, device: torch.device) -> _How:
        recipe = head_recipe(op, recipe, seed)
        if isinstance(w, QuantizedTensor):
            check_weight_format(op, "w", w.format, recipe)
        else:
            check_tensor(op, "w", w)
            check_gathered(w)
        observer = None if is_compiling() else _OBSERVER.get()
        return cls(
            recipe, as_uint64(op, "seed", seed, device).view(torch.int32) if recipe.stochastic else None, observer
        )

    def of_chunk(self, number: int, device: torch.device) -> Tensor | None:
        if self.seed is None or not number:
            return self.seed
        return self.seed ^ constant_uint64(number << CHUNK_SEED_BIT, device)


class _Values:
    """The three GEMMs of each chunk, on values. `dx` is filled by chunk, `dw` summed over chunks; None: not needed.

    The logits and their gradient are the largest tensors. So the caller drops them after `take`, and `dw` is allocated
    after that.
    """

    def __init__(self, x: Tensor, w: Tensor, needed: tuple[bool, bool], rows: int):
        self.x, self._w, self.rows = x, w, rows
        self.dx = torch.empty_like(x) if needed[0] else None
        self.dw: Tensor | None = None
        self._d: Tensor | None = None
        # With a single chunk the product is the gradient, so no fp32 sum is needed.
        self._dw_dtype = None if not needed[1] else torch.float32 if len(x) > rows else w.dtype

    def logits(self, chunk: slice) -> Tensor:
        return torch.mm(self.x[chunk], self._w.t())

    def take(self, d: Tensor) -> None:
        """Take the gradient of the logits computed last."""
        self._d = d

    def add(self, chunk: slice) -> None:
        """Add the gradients of the chunk of the logits computed last."""
        if self.dx is not None:
            self._put_dx(self.dx[chunk])
        if self._dw_dtype is not None:
            self.dw = self._plus_dw(self.dw, self.x[chunk], self._dw_dtype)
        self._d = None

    def _put_dx(self, dx: Tensor) -> None:
        assert self._d is not None
        torch.mm(self._d, self._w, out=dx)

    def _plus_dw(self, dw: Tensor | None, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the gradient of w with this chunk, in the memory of `dw` if it is there."""
        assert self._d is not None
        d = self._d.t()
        if dtype == d.dtype:
            return torch.mm(d, x) if dw is None else dw.addmm_(d, x)
        if d.is_cuda:
            if dw is None:
                return torch.mm(d, x, out_dtype=dtype)
            return torch.addmm(dw, d, x, out_dtype=dtype, out=dw)
        return torch.mm(d, x).to(dtype) if dw is None else dw.add_(torch.mm(d, x))

    def reduce(self, group: dist.ProcessGroup | None) -> tuple[Tensor | None, Tensor | None]:
        if self.dw is None and self._dw_dtype is not None:  # There are no rows.
            self.dw = torch.zeros(self._w.shape, dtype=self._dw_dtype, device=self.x.device)
        if group is not None and self.dx is not None:
            dist.all_reduce(self.dx, group=group)
        return self.dx, self.dw


class _Codes(_Values):
    """The three GEMMs of each chunk, on codes. w is quantized once."""

    def __init__(self, x: Tensor, w: _Weight, needed: tuple[bool, bool], rows: int, how: _How):
        super().__init__(x, w.like(x), needed, rows)
        self._how, self._planes = how, w.planes(how, needed[0])
        self._ds: dict[Usage, Operand] = {}
        self._xs: dict[Usage, Operand] = {}

    def logits(self, chunk: slice) -> Tensor:
        usage = Usage.ROWWISE if self._dw_dtype is None else Usage.BOTH
        self._seed = self._how.of_chunk(chunk.start // self.rows, self.x.device)
        self._xs = self._quantize(self.x[chunk], usage, Role.ACTIVATION)
        return matmul(self._xs.pop(Usage.ROWWISE), self._planes[Usage.ROWWISE], self.x.dtype, fast=True)

    def take(self, d: Tensor) -> None:
        needed = (Usage.ROWWISE, self.dx), (Usage.COLUMNWISE, self._dw_dtype)
        usages = [usage for usage, there in needed if there is not None]
        self._ds = self._quantize(d, Usage.BOTH if len(usages) > 1 else usages[0], Role.GRADIENT)

    def _put_dx(self, dx: Tensor) -> None:
        dx.copy_(matmul(self._ds.pop(Usage.ROWWISE), self._planes[Usage.COLUMNWISE], dx.dtype))

    def _plus_dw(self, dw: Tensor | None, x: Tensor, dtype: torch.dtype) -> Tensor:
        part = matmul(self._ds.pop(Usage.COLUMNWISE), self._xs.pop(Usage.COLUMNWISE), dtype)
        return part if dw is None else dw.add_(part)

    def _quantize(self, x: Tensor, usage: Usage, role: Role) -> dict[Usage, Operand]:
        if self._how.observer is not None:
            self._how.observer(role, x, self._seed)
        return LayerQuantizer(self._how.recipe, self._seed).quantize(matrix_of(x, x.dtype), role, usage)[0]


class _Weight(NamedTuple):
    """A weight as autograd saves it: a parameter by reference, or the planes of gathered codes (`format`)."""

    tensors: tuple[Tensor | None, ...]
    dtype: torch.dtype
    shape: torch.Size
    format: Format | None
    usages: tuple[Usage, ...] = ()

    @classmethod
    def of(cls, w: Tensor, columnwise: bool) -> _Weight:
        if not isinstance(w, QuantizedTensor):
            return cls((w.shard if isinstance(w, ShardedWeight) else w,), w.dtype, w.shape, None)
        there = planes_of_weight(w, columnwise)
        parts = tuple(part for operand in there.values() for part in operand.parts)
        return cls(parts, w.dtype, w.shape, w.format, tuple(there))

    def like(self, x: Tensor) -> Tensor:
        """Return a tensor without memory that has the shape and dtype of the weight."""
        return x.new_empty((), dtype=self.dtype).expand(self.shape)

    def planes(self, how: _How, columnwise: bool) -> dict[Usage, Operand]:
        if self.format is None:
            (w,) = self.tensors
            assert w is not None
            usage = Usage.BOTH if columnwise else Usage.ROWWISE
            return LayerQuantizer(how.recipe, how.seed).quantize(values_of(w), Role.WEIGHT, usage)[0]
        size = len(Plane._fields)
        there = {
            usage: Operand(self.format, Plane(*self.tensors[i * size : (i + 1) * size]), usage)
            for i, usage in enumerate(self.usages)
        }
        if columnwise and Usage.COLUMNWISE not in there:
            parts = transpose(there[Usage.ROWWISE].parts, self.format)
            there[Usage.COLUMNWISE] = Operand(self.format, parts, Usage.COLUMNWISE)
        return there


def _products(x: Tensor, w: _Weight, needed: tuple[bool, bool], rows: int, how: _How | None) -> _Values:
    if how is not None:
        return _Codes(x, w, needed, rows, how)
    (values,) = w.tensors
    assert values is not None
    return _Values(x, values.contiguous(), needed, rows)


_INSTEAD = "use torch.nn.functional.cross_entropy(x @ w.T, labels)"


class _EarlyLoss(Node):
    """Sum of losses divided by `count`, with gradients computed in the forward pass."""

    op, instead = "linear_cross_entropy", _INSTEAD

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, labels: Tensor, count: Tensor, rule: RowLoss, rows: int, how: _How | None
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        x, needed = x.contiguous(), ctx.needs_input_grad[:2]
        products = _products(x, _Weight.of(w, needed[0]), needed, rows, how)
        share = count.reciprocal().expand(min(rows, len(x))).contiguous()
        losses = torch.empty(len(x), dtype=torch.float32, device=x.device)
        for chunk in _chunks(len(x), rows):
            logits = products.logits(chunk)
            if any(needed):
                losses[chunk], d = rule.losses_and_gradient(logits, labels[chunk], share[: len(logits)])
                products.take(d)
                del logits, d
                products.add(chunk)
            else:
                losses[chunk], _ = rule.losses(logits, labels[chunk])
                del logits  # The next chunk takes its memory.
        ctx.dtype = w.dtype
        return losses.sum() / count, products.reduce(rule.group)

    @staticmethod
    def gradients(ctx: Any, saved: list[Tensor | None], grad: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = saved
        of_w = None
        if dw is not None:  # Multiplied and rounded in one op: an fp32 product would be the largest tensor of all.
            of_w = torch.mul(dw, grad, out=torch.empty_like(dw, dtype=ctx.dtype))
        return None if dx is None else dx * grad, of_w, None, None, None, None, None


class _LateLosses(Node):
    """Loss of each row. The backward pass recomputes the logits."""

    op, instead = "linear_cross_entropy", _INSTEAD

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, labels: Tensor, rule: RowLoss, rows: int, how: _How | None
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        x, weight = x.contiguous(), _Weight.of(w, ctx.needs_input_grad[0])
        products = _products(x, weight, (False, False), rows, how)
        losses, lses = (torch.empty(len(x), dtype=torch.float32, device=x.device) for _ in range(2))
        for chunk in _chunks(len(x), rows):
            losses[chunk], lses[chunk] = rule.losses(products.logits(chunk), labels[chunk])
        ctx.rest = rule, rows, how, weight._replace(tensors=())
        return losses, (x, labels, lses, *weight.tensors)

    @staticmethod
    def gradients(ctx: Any, saved: list[Any], grad: Tensor) -> tuple[Tensor | None, ...]:
        x, labels, lses, *tensors = saved
        rule, rows, how, weight = ctx.rest
        products = _products(x, weight._replace(tensors=tuple(tensors)), ctx.needs_input_grad[:2], rows, how)
        grad = grad.contiguous()
        for chunk in _chunks(len(x), rows):
            logits = products.logits(chunk)
            products.take(rule.gradient(logits, labels[chunk], lses[chunk], grad[chunk], in_place=True))
            del logits
            products.add(chunk)
        dx, dw = products.reduce(rule.group)
        return dx, None if dw is None else dw.to(weight.dtype), None, None, None, None


def _chunks(count: int, rows: int) -> Iterator[slice]:
    return (slice(at, min(at + rows, count)) for at in range(0, count, rows))
