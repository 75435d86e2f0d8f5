"""Cross entropy of a linear head, computed in chunks of rows, so that all logits are never stored."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from qshard._core.losses import (
    LossRule,
    check_head,
    check_num_classes,
    count_classes,
    makes_gradients_early,
    rows_at_a_time,
)
from qshard.jax._losses.cross_entropy import (
    RowLoss,
    cast_varying,
    check_shapes,
    count_class_shards,
    int32_labels,
    reduce_losses,
    rows_that_count,
    shard_as,
)
from qshard.jax._losses.quantized_head import QuantizedHead, check_recipe
from qshard.jax._ops.mesh import AxisName
from qshard.jax._ops.validation import Seed, as_axes, as_seed, check_array, check_dtype
from qshard.jax._sharding.row_partitioning import RowFunction, RowSharding, on_devices
from qshard.recipes import Recipe, RecipeLike


def linear_cross_entropy(
    x: jax.typing.ArrayLike,
    w: jax.typing.ArrayLike,
    labels: jax.typing.ArrayLike,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    num_classes: int | None = None,
    chunk: int | None = None,
    axis_name: AxisName = None,
    recipe: RecipeLike | None = None,
    seed: Seed = None,
) -> jax.Array:
    """Compute `cross_entropy(x @ w.T, labels)` in chunks of rows. The gradient of a chunk overwrites its logits.

    Args:
      x: float32, bfloat16 or float16, `[*rows, K]`.
      w: `[classes, K]` in the dtype of x, or with `recipe` in any of these dtypes. With `axis_name`, the local shard of
        the classes.
      labels: int32 or int64, `[*rows]`.
      reduction: "mean" over the rows that are not ignored, "sum", or "none".
      ignore_index: the label of rows to ignore, as for `cross_entropy`.
      label_smoothing: from 0 to 1.
      z_loss: weight of the penalty on lse, 0 or more.
      num_classes: the number of classes over all devices; further rows of w are padding. None: every row is a class.
      chunk: rows per chunk on each device. None: as many as have 256 MiB of logits, or the bytes of w if w is larger,
        in chunks of equal size; all rows if that takes no more memory.
      axis_name: in `shard_map`, the mesh axis, or axes, that shard classes. x is the same on all of their devices, and
        its gradient is summed over them.
      recipe: the recipe of the three products of each chunk, or its name: w is quantized once, x and the gradient of
        logits per chunk. Per-tensor formats have one scale per chunk, and one per shard of w, so results depend on
        `chunk`, as `linear` depends on the batch. For one device and `shard_map` only: on Auto meshes XLA gathers
        sharded rows, and on Explicit meshes they raise. DelayedScaling raises, since chunks have no scale history.
        None: products in the dtype of x.
      seed: the seed of stochastic rounding, as for `linear`.

    Returns:
      The loss, as for `cross_entropy`. Logits are rounded to the dtype of x. The gradient of w is summed in float32,
      over chunks and, outside of `shard_map`, over devices.

    Raises:
      TypeError, ValueError: as for `cross_entropy`; or x and w do not match, or the recipe cannot be used.

    With "mean" and "sum", the forward pass computes gradients with the loss, and backward multiplies them by the
    gradient of the loss, a number. In float16 a scaled loss could not recover gradients that were rounded to 0. So in
    float16, and with "none", backward recomputes the logits.

    On Auto and Explicit meshes rows stay in place, whatever axes of x are sharded. Classes stay in place too, unless
    the same mesh axis shards rows: then w is gathered once for all chunks, as it is if its K is sharded, and its
    gradient is reduce-scattered. Under `vmap` each example is a head of its own, and a chunk has rows of every example.

    >>> x, w = jnp.ones((2, 3)), jnp.zeros((4, 3))
    >>> loss, grad = jax.value_and_grad(linear_cross_entropy)(x, w, jnp.array([0, 3]))
    >>> print(f"{loss:.4f}", grad.tolist())
    1.3863 [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]

    Source: Wijmans et al., arXiv:2411.09009.
    """
    op = "linear_cross_entropy"
    for name, array in (("x", x), ("w", w)):
        check_array(op, name, array)
        check_dtype(op, name, array)
    names, x, w = as_axes(op, axis_name), jnp.asarray(x), jnp.asarray(w)
    check_head(op, x.shape, str(x.dtype), w.shape, str((w if recipe is None else x).dtype), chunk)
    rule = LossRule.of(op, ignore_index, label_smoothing, z_loss)
    coded = None if recipe is None else check_recipe(recipe, x, w, seed)
    drawn = as_seed(op, seed) if coded is not None and coded.stochastic else None
    check_num_classes(op, num_classes)
    check_shapes(op, "x", x.shape, labels, reduction)
    columns = w.shape[0] * count_class_shards(names)
    of = RowLoss(rule, count_classes(op, "x", columns, num_classes), names, columns)
    head = Head(of, reduction, chunk, str(w.dtype), coded)
    labels = int32_labels(op, labels, of)
    (x, w), labels = cast_varying((x, w), labels, names)
    if makes_gradients_early(reduction, str(x.dtype)):
        return _early(head, x, w, labels, drawn)
    return reduce_losses(_late(head, x, w, labels, drawn), labels, reduction, ignore_index)


@dataclass(frozen=True)
class Head:
    """Static options of a call, and its loops over chunks.

    Attributes:
      of: the loss of each row.
      reduction: "mean", "sum" or "none".
      chunk: rows per chunk; None: the default.
      w_dtype: dtype of the gradient of w.
      recipe: None: products are not quantized.
    """

    of: RowLoss
    reduction: str
    chunk: int | None
    w_dtype: str
    recipe: Recipe | None = None

    def count(self, labels: jax.Array) -> jax.Array:
        """The divisor of the sum of losses."""
        return rows_that_count(labels, self.of.rule.ignore_index) if self.reduction == "mean" else jnp.float32(1)

    def products(self, w: jax.Array, seed: jax.Array | None, *, backward: bool) -> _Values | _Codes:
        """The products of chunks with `w`, quantized if there is a recipe."""
        return _Values(w) if self.recipe is None else _Codes(w, QuantizedHead(self.recipe, seed), backward)

    def losses(
        self, sharding: RowSharding, x: jax.Array, w: jax.Array, labels: jax.Array, seed: jax.Array | None = None
    ) -> tuple[jax.Array, ...]:
        """Compute the loss and the lse of each row."""
        products = self.products(w, seed, backward=False)

        def step(made: Any, chunk: Any, part: Any, put: Any) -> Any:
            logits, _ = products.logits(part(x), chunk)
            loss, lse = self.of.losses(sharding, logits, part(labels))
            return put(made[0], loss), put(made[1], lse)

        flat, x, labels = labels.shape, *_flat(x, labels)
        begin = _zeros(labels.shape, labels), _zeros(labels.shape, labels)
        made = _over_chunks(len(x), self._rows_at_a_time(sharding, x, w), step, begin)
        return tuple(each.reshape(flat) for each in made)

    def gradients(
        self,
        sharding: RowSharding,
        x: jax.Array,
        w: jax.Array,
        labels: jax.Array,
        grad: jax.Array,
        seed: jax.Array | None = None,
        *,
        lse: jax.Array | None = None,
    ) -> tuple[jax.Array, ...]:
        """Compute losses and the gradients of x and w, the latter in float32 if it is a sum of chunks or over devices.

        `lse` is float32 `[*rows]`, from `losses`. If it is passed, losses are not computed, and are zeros; None
        computes both.
        """
        flat, shape = labels.shape, x.shape
        x, labels, grad = _flat(x, labels, grad)
        lses, products = None if lse is None else lse.reshape(-1), self.products(w, seed, backward=True)
        rows_of_chunk = self._rows_at_a_time(sharding, x, w)
        is_sum = len(x) > rows_of_chunk or sharding.may_sum_over_devices(x)

        def step(made: Any, chunk: Any, part: Any, put: Any) -> Any:
            losses, dx, dw = made
            rows, own = part(x), part(labels)
            logits, saved = products.logits(rows, chunk)
            if lses is None:
                loss, d = self.of.losses_and_gradient(sharding, logits, own, part(grad))
                losses = put(losses, loss)
            else:
                d = self.of.gradient(sharding, logits, own, part(lses), part(grad), in_place=True)
            of_rows, of_w = products.gradients(d, saved, chunk, x.dtype, dw.dtype)
            return losses, put(dx, of_rows), dw + of_w

        of_w = _zeros(w.shape, w, jnp.float32 if is_sum else self.w_dtype)
        begin = _zeros(labels.shape, labels), _zeros(x.shape, x, x.dtype), of_w
        losses, dx, dw = _over_chunks(len(x), rows_of_chunk, step, begin)
        return losses.reshape(flat), sharding.of_x(dx.reshape(shape)), sharding.of_w(dw)

    def _rows_at_a_time(self, sharding: RowSharding, x: jax.Array, w: jax.Array) -> int:
        always_sums = sharding.may_sum_over_devices(x)
        return rows_at_a_time(self.chunk, x.shape, w.shape[0], x.dtype.itemsize, always_sums=always_sums)


def _over_chunks(count: int, rows: int, step: Callable[..., Any], made: Any) -> Any:
    """Fold `step(made, chunk, part, put)` over chunks. `part` slices rows of an array, `put` writes them."""
    whole, rest = divmod(count, rows)

    def of(made: Any, chunk: Any, size: int) -> Any:
        start = chunk * rows
        part = functools.partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=size)
        put = functools.partial(lax.dynamic_update_slice_in_dim, start_index=start, axis=0)
        return step(made, chunk, part, put)

    if whole > 1:
        made, _ = lax.scan(lambda made, i: (of(made, i, rows), None), made, jnp.arange(whole))
    elif whole:
        made = of(made, 0, rows)
    return of(made, whole, rest) if rest else made


class _Values:
    """The three products of a chunk, not quantized."""

    def __init__(self, w: jax.Array):
        self.w = w

    def logits(self, x: jax.Array, chunk: Any) -> tuple[jax.Array, Any]:
        """Compute logits. Also return the operand that `gradients` takes for these rows."""
        return lax.dot_general(x, self.w, (((1,), (1,)), ((), ())), preferred_element_type=x.dtype), x

    def gradients(
        self, d: jax.Array, x: jax.Array, chunk: Any, dtype: Any, dw_dtype: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Compute the gradient of the rows of a chunk, and its addend to the gradient of w."""
        dx = lax.dot_general(d, self.w, (((1,), (0,)), ((), ())), preferred_element_type=dtype)
        return dx, lax.dot_general(d, x, (((0,), (0,)), ((), ())), preferred_element_type=dw_dtype)


class _Codes:
    """The three products of a chunk, quantized. The codes of w are computed once."""

    def __init__(self, w: jax.Array, codes: QuantizedHead, backward: bool):
        self.codes, self.backward, self.w = codes, backward, codes.weight(w, backward=backward)

    def logits(self, x: jax.Array, chunk: Any) -> tuple[jax.Array, Any]:
        xq = self.codes.rows(x, chunk, backward=self.backward)
        return self.codes.logits(xq, self.w, len(x), x.dtype), xq

    def gradients(self, d: jax.Array, xq: Any, chunk: Any, dtype: Any, dw_dtype: Any) -> tuple[jax.Array, jax.Array]:
        return self.codes.gradients(d, xq, self.w, chunk, dtype, dw_dtype)


def _flat(x: jax.Array, *others: jax.Array) -> tuple[jax.Array, ...]:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), *(each.reshape(-1) for each in others)


def _zeros(shape: tuple[int, ...], like: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """Zeros that vary over the manual axes over which `like` varies."""
    varying = tuple(sorted(jax.typeof(like).manual_axis_type.varying))
    zeros = jnp.zeros(shape, dtype)
    return lax.pcast(zeros, varying, to="varying") if varying else zeros


Seeds = jax.Array | None


def _losses_of(head: Head, x: jax.Array, w: jax.Array, labels: jax.Array, seed: Seeds) -> tuple[jax.Array, ...]:
    return _on_devices(head, Head.losses, ("rows K", "classes K", "rows"), ("rows", "rows"), (x, w, labels), seed)


def _gradients_of(
    head: Head, x: jax.Array, w: jax.Array, labels: jax.Array, grad: jax.Array, lse: jax.Array | None, seed: Seeds
) -> tuple[jax.Array, ...]:
    """Compute losses and gradients of x and w; without losses if `lse` is passed."""
    takes, operands = ("rows K", "classes K", "rows", "rows"), (x, w, labels, grad)
    if lse is None:
        return _on_devices(head, Head.gradients, takes, ("rows", "rows K", "classes K"), operands, seed)
    return _on_devices(head, _gradients_again, (*takes, "rows"), ("rows K", "classes K"), (*operands, lse), seed)


def _gradients_again(head: Head, sharding: RowSharding, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """Compute gradients without losses, from operands that include lse."""
    x, w, labels, grad, lse, *seed = operands
    return head.gradients(sharding, x, w, labels, grad, seed[0] if seed else None, lse=lse)[1:]


def _on_devices(
    head: Head, body: Any, takes: tuple[str, ...], gives: tuple[str, ...], operands: Sequence[jax.Array], seed: Seeds
) -> tuple[jax.Array, ...]:
    function = RowFunction("linear_cross_entropy", body, head, takes, gives)
    drawn = () if seed is None else (seed,)
    return on_devices(function, head.of.names, *operands, *drawn, spreads=head.recipe is None)


# --- gradients computed with the loss ---


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _early(head: Head, x: jax.Array, w: jax.Array, labels: jax.Array, seed: Seeds) -> jax.Array:
    losses, _ = _losses_of(head, x, w, labels, seed)
    return losses.sum() / head.count(labels)


def _early_forward(head: Head, x: jax.Array, w: jax.Array, labels: jax.Array, seed: Seeds) -> tuple[jax.Array, Any]:
    count = head.count(labels)
    share = jnp.broadcast_to(1 / count, labels.shape)
    losses, dx, dw = _gradients_of(head, x, w, labels, share, None, seed)
    return losses.sum() / count, (shard_as(dx, x), shard_as(dw, w))


def _early_backward(head: Head, saved: Any, grad: jax.Array) -> tuple[jax.Array | None, ...]:
    dx, dw = saved
    grad = RowSharding(head.of.names).of_losses(grad)
    return (dx * grad).astype(dx.dtype), (dw * grad).astype(head.w_dtype), None, None


_early.defvjp(_early_forward, _early_backward)


# --- gradients computed in backward ---


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _late(head: Head, x: jax.Array, w: jax.Array, labels: jax.Array, seed: Seeds) -> jax.Array:
    return _losses_of(head, x, w, labels, seed)[0]


def _late_forward(head: Head, x: jax.Array, w: jax.Array, labels: jax.Array, seed: Seeds) -> tuple[jax.Array, Any]:
    losses, lse = _losses_of(head, x, w, labels, seed)
    return losses, (x, w, labels, lse, seed)


def _late_backward(head: Head, saved: Any, grad: jax.Array) -> tuple[jax.Array | None, ...]:
    x, w, labels, lse, seed = saved
    grad = RowSharding(head.of.names).of_losses(grad)
    dx, dw = _gradients_of(head, x, w, labels, grad, lse, seed)
    return shard_as(dx, x), shard_as(dw.astype(w.dtype), w), None, None


_late.defvjp(_late_forward, _late_backward)
