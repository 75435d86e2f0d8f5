"""Cross entropy of a linear layer, whose logits are never whole: a chunk of rows at a time, on each device its own."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from qshard.jax import ops
from qshard.jax.arguments import as_axes, check_array, check_dtype
from qshard.jax.cross_entropy import Rows, as_words, cut_as, reduced, rows_that_count, shards_of, vary
from qshard.jax.cuts import AxisName
from qshard.jax.rows import Held, on_devices
from qshard.losses import LossRule, check_head, rows_at_a_time
from qshard.ops import table


def linear_cross_entropy(
    x: jax.typing.ArrayLike,
    w: jax.typing.ArrayLike,
    labels: jax.typing.ArrayLike,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk: int | None = None,
    axis_name: AxisName = None,
) -> jax.Array:
    """`cross_entropy(x @ w.T, labels)`, a chunk of rows at a time, whose gradient then takes the place of its logits.

    Args:
      x: float32, bfloat16 or float16, `[*rows, K]`.
      w: of the dtype of x, `[classes, K]`; with `axis_name` a part of the classes.
      labels, reduction, ignore_index, label_smoothing, z_loss, axis_name: as for `cross_entropy`. With `axis_name` x is
        the same on all devices that have parts of the classes, and its gradient is the sum of theirs.
      chunk: rows at a time, on each device. By default as many as have 256 MiB of logits, in chunks alike.

    Returns:
      As `cross_entropy`. Logits are rounded to the dtype of x. The gradient of w is summed in float32, over chunks and,
      outside of `shard_map`, over devices.

    Raises:
      TypeError, ValueError: as `cross_entropy` does, or x and w do not fit.

    With "mean" and "sum" gradients are made as the loss is, and multiplied by that of the loss, a number, in backward.
    In float16 a loss that was scaled up could not bring back what has been rounded to 0; so there, and with "none",
    logits are made again in backward.

    On Auto and Explicit meshes rows stay where they are, whatever axes of x are cut, and so do classes, unless what
    cuts them cuts rows too: then w is gathered once for all chunks, as where its K is cut, and its gradient
    reduce-scattered. Under `vmap` each example is a head of its own, of which all have a chunk at a time.

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
    classes, x, w = as_axes(op, axis_name), jnp.asarray(x), jnp.asarray(w)
    check_head(op, x.shape, str(x.dtype), w.shape, str(w.dtype), chunk)
    rule = LossRule.of(op, ignore_index, label_smoothing, z_loss)
    head = Head(Rows(rule, w.shape[0] * shards_of(classes), classes), reduction, chunk)
    words = as_words(op, "x", x.shape, labels, head.of, reduction)
    (x, w), words = vary((x, w), words, classes)
    if reduction == "none" or x.dtype == jnp.float16:
        return reduced(_late(head, x, w, words), words, reduction, ignore_index)
    return _early(head, x, w, words)


@dataclass(frozen=True)
class Head:
    """What is static in losses of a linear layer."""

    of: Rows
    reduction: str
    chunk: int | None

    def count(self, labels: jax.Array) -> jax.Array:
        """What the sum of losses is divided by."""
        return rows_that_count(labels, self.of.rule.ignore_index) if self.reduction == "mean" else jnp.float32(1)

    def losses(self, held: Held, x: jax.Array, w: jax.Array, labels: jax.Array) -> tuple[jax.Array, ...]:
        """The loss of each row, and its lse."""

        def step(made: Any, part: Any, put: Any) -> Any:
            loss, lse = self.of.losses(held, _product(part(x), w), part(labels))
            return put(made[0], loss), put(made[1], lse)

        flat, x, labels = labels.shape, *_flat(x, labels)
        made = self._over_chunks(x, w, step, (_zeros(labels.shape, labels), _zeros(labels.shape, labels)))
        return tuple(each.reshape(flat) for each in made)

    def gradients(
        self,
        held: Held,
        x: jax.Array,
        w: jax.Array,
        labels: jax.Array,
        grad: jax.Array,
        lse: jax.Array | None = None,
    ) -> tuple[jax.Array, ...]:
        """Losses, and the gradients of x and w, that of w in float32, of that of each loss."""
        in_place = functools.partial(_grad_in_place(), **({"cuttable": False} if held.own else {}))
        flat, shape = labels.shape, x.shape
        x, labels, grad = _flat(x, labels, grad)
        lses = None if lse is None else lse.reshape(-1)

        def step(made: Any, part: Any, put: Any) -> Any:
            losses, dx, dw = made
            rows, own = part(x), part(labels)
            logits = _product(rows, w)
            if lses is None:
                loss, lse = self.of.losses(held, logits, own)
                losses = put(losses, loss)
            else:
                lse = part(lses)
            d = self.of.gradient(held, logits, own, lse, part(grad), in_place)
            dx = put(dx, lax.dot_general(d, w, (((1,), (0,)), ((), ())), preferred_element_type=x.dtype))
            dw += lax.dot_general(d, rows, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
            return losses, dx, dw

        begin = _zeros(labels.shape, labels), _zeros(x.shape, x, x.dtype), _zeros(w.shape, w)
        losses, dx, dw = self._over_chunks(x, w, step, begin)
        return losses.reshape(flat), held.of_x(dx.reshape(shape)), held.of_w(dw)

    def _over_chunks(self, x: jax.Array, w: jax.Array, step: Callable[..., Any], made: Any) -> Any:
        """`made` after `step(made, part, put)` of each chunk: `part` of an array of all rows, and `put` there."""
        rows = rows_at_a_time(self.chunk, len(x), w.shape[0], x.dtype.itemsize)
        whole, rest = divmod(len(x), rows)

        def of(made: Any, start: Any, size: int) -> Any:
            part = functools.partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=size)
            return step(made, part, functools.partial(lax.dynamic_update_slice_in_dim, start_index=start, axis=0))

        if whole > 1:
            made, _ = lax.scan(lambda made, i: (of(made, i * rows, rows), None), made, jnp.arange(whole))
        elif whole:
            made = of(made, 0, rows)
        return of(made, whole * rows, rest) if rest else made


@functools.cache
def _grad_in_place() -> ops.Op:
    """`cross_entropy_grad`, whose result takes over the memory of logits."""
    return ops.Op(table()["cross_entropy_grad"], {0: 0})


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=x.dtype)


def _flat(x: jax.Array, *others: jax.Array) -> tuple[jax.Array, ...]:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), *(each.reshape(-1) for each in others)


def _zeros(shape: tuple[int, ...], like: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """Typed as varying over the manual axes over which `like` does."""
    varying = tuple(sorted(jax.typeof(like).manual_axis_type.varying))
    zeros = jnp.zeros(shape, dtype)
    return lax.pcast(zeros, varying, to="varying") if varying else zeros


@dataclass(frozen=True)
class _Losses:
    op: ClassVar[str] = "linear_cross_entropy"
    is_cut: ClassVar[bool] = False
    takes: ClassVar[tuple[str, ...]] = ("rows K", "classes K", "rows")
    gives: ClassVar[tuple[str, ...]] = ("rows", "rows")
    head: Head

    def __call__(self, held: Held, *operands: jax.Array) -> tuple[jax.Array, ...]:
        return self.head.losses(held, *operands)


@dataclass(frozen=True)
class _LossesAndGradients:
    op: ClassVar[str] = "linear_cross_entropy"
    is_cut: ClassVar[bool] = False
    takes: ClassVar[tuple[str, ...]] = ("rows K", "classes K", "rows", "rows")
    gives: ClassVar[tuple[str, ...]] = ("rows", "rows K", "classes K")
    head: Head

    def __call__(self, held: Held, *operands: jax.Array) -> tuple[jax.Array, ...]:
        return self.head.gradients(held, *operands)


@dataclass(frozen=True)
class _Gradients:
    op: ClassVar[str] = "linear_cross_entropy"
    is_cut: ClassVar[bool] = False
    takes: ClassVar[tuple[str, ...]] = ("rows K", "classes K", "rows", "rows", "rows")
    gives: ClassVar[tuple[str, ...]] = ("rows K", "classes K")
    head: Head

    def __call__(self, held: Held, *operands: jax.Array) -> tuple[jax.Array, ...]:
        return self.head.gradients(held, *operands)[1:]


# --- gradients with the loss ---


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _early(head: Head, x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
    losses, _ = on_devices(_Losses(head), head.of.names, x, w, labels)
    return losses.sum() / head.count(labels)


def _early_forward(head: Head, x: jax.Array, w: jax.Array, labels: jax.Array) -> tuple[jax.Array, Any]:
    count = head.count(labels)
    share = jnp.broadcast_to(1 / count, labels.shape)
    losses, dx, dw = on_devices(_LossesAndGradients(head), head.of.names, x, w, labels, share)
    return losses.sum() / count, (cut_as(dx, x), cut_as(dw, w))


def _early_backward(head: Head, kept: Any, grad: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    dx, dw = kept
    grad = Held(head.of.names).of_losses(grad)
    return (dx * grad).astype(dx.dtype), (dw * grad).astype(dx.dtype), None


_early.defvjp(_early_forward, _early_backward)


# --- gradients in backward ---


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _late(head: Head, x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
    return on_devices(_Losses(head), head.of.names, x, w, labels)[0]


def _late_forward(head: Head, x: jax.Array, w: jax.Array, labels: jax.Array) -> tuple[jax.Array, Any]:
    losses, lse = on_devices(_Losses(head), head.of.names, x, w, labels)
    return losses, (x, w, labels, lse)


def _late_backward(head: Head, kept: Any, grad: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, w, labels, lse = kept
    grad = Held(head.of.names).of_losses(grad)
    dx, dw = on_devices(_Gradients(head), head.of.names, x, w, labels, grad, lse)
    return cut_as(dx, x), cut_as(dw.astype(w.dtype), w), None


_late.defvjp(_late_forward, _late_backward)
