"""Cross entropy, bit-equal to the PyTorch front end and the reference: one pass over the logits in each direction.

Each row reduces to four numbers (`ffi/ops.def`). If classes are sharded, devices gather these numbers, not the logits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qshard._core.losses import INT32_RANGE, LossRule, check_num_classes, check_rows, count_classes, wrong_label
from qshard.jax._ops import bind as ops
from qshard.jax._ops.mesh import AxisName, MeshAxes, types_tell
from qshard.jax._ops.validation import as_axes, check_array, check_dtype
from qshard.jax._sharding.row_partitioning import RowFunction, RowSharding, on_devices
from qshard.op_table import table

_IGNORED, _NO_CLASS = -1, -2
"""Labels of ignored rows and of invalid labels, once `RowLoss._local_labels` has renumbered classes."""


def cross_entropy(
    logits: jax.typing.ArrayLike,
    labels: jax.typing.ArrayLike,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    num_classes: int | None = None,
    axis_name: AxisName = None,
) -> jax.Array:
    """Compute `lse - logits[label] + z_loss * lse^2` for each row, with `lse = log(sum(exp(logits)))`.

    With smoothing s, `(1 - s) * logits[label] + s * mean(logits)` replaces `logits[label]`.

    Args:
      logits: float32, bfloat16 or float16, `[*rows, classes]`.
      labels: int32 or int64, `[*rows]`.
      reduction: "mean" over the rows that are not ignored, "sum", or "none".
      ignore_index: a row with this label has loss 0 and gradients 0.
      label_smoothing: from 0 to 1.
      z_loss: weight of the penalty that keeps lse near 0, 0 or more.
      num_classes: the number of classes over all devices. Further columns are padding, as in a vocabulary padded to a
        multiple of the devices: they add nothing to the loss, and their gradient is 0. None: every column is a class.
      axis_name: in `shard_map`, the mesh axis that shards classes, or several, major to minor. Devices have equally
        many classes and the same labels. They gather 16 bytes a row, and all get the loss.

    Returns:
      float32, `[]`, or `[*rows]` with "none". The gradient of logits has their dtype; it is computed in float32 and
      rounded once.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: shapes do not match, an option is out of range, or a label that the host knows (a NumPy array, or an
        array on a CPU outside of `jit`) is not a class. Otherwise such a row has NaN as its loss and gradients.

    The error of each loss is at most 1e-6 and 4 units in the last place of lse, compared with fp64. A GPU
    uses an instruction for exponentials, so its bits differ from a CPU's. Second derivatives raise.
    Options are static.

    On Auto and Explicit meshes rows stay in place, whatever axes are sharded, with the same bits, and the mean is over
    all rows. Sharded classes stay in place too: devices gather 16 bytes a row, and the order of sums changes. In
    `shard_map` the loss is over the local rows: to average means over devices, weight them by the number of labels that
    are not ignored. With `check_vma=False`, gradients there are of the sum of all devices' losses, as after `lax.psum`.

    >>> logits = jnp.array([[0.0, 0.0], [0.0, 1.0986123]])
    >>> loss, grad = jax.value_and_grad(cross_entropy)(logits, jnp.array([0, 1]))
    >>> print(f"{loss:.4f}", grad.round(3).tolist())
    0.4904 [[-0.25, 0.25], [0.125, -0.125]]

    Sources: Szegedy et al., arXiv:1512.00567 (smoothing); Chowdhery et al., arXiv:2204.02311 (z-loss).
    """
    check_array("cross_entropy", "logits", logits)
    check_dtype("cross_entropy", "logits", logits)
    names, logits = as_axes("cross_entropy", axis_name), jnp.asarray(logits)
    rule = LossRule.of("cross_entropy", ignore_index, label_smoothing, z_loss)
    check_num_classes("cross_entropy", num_classes)
    columns = (logits.shape[-1] if logits.ndim else 0) * count_class_shards(names)
    check_shapes("cross_entropy", "logits", logits.shape, labels, reduction)
    of = RowLoss(rule, count_classes("cross_entropy", "logits", columns, num_classes), names, columns)
    labels = int32_labels("cross_entropy", labels, of)
    (logits,), labels = cast_varying((logits,), labels, names)
    return reduce_losses(_losses(of, logits, labels), labels, reduction, ignore_index)


@dataclass(frozen=True)
class RowLoss:
    """Static options of the losses of rows.

    Attributes:
      classes: classes on all devices, without padding.
      names: in `shard_map`, the mesh axes over which classes are sharded.
      columns: columns of logits on all devices, with padding.
    """

    rule: LossRule
    classes: int
    names: MeshAxes
    columns: int

    def losses(self, sharding: RowSharding, logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Compute the loss and the lse of each row."""
        of_own, _ = self._local_labels(sharding, logits, labels)
        valid, smooth = self._class_mask(sharding, logits), self.rule.smoothing > 0
        if valid is None:
            stats = sharding.ops.cross_entropy_stats(logits, of_own, first=0, total=smooth)
        else:
            picked = jnp.where(of_own < jnp.sum(valid), of_own, _NO_CLASS)
            stats = sharding.ops.cross_entropy_stats(_mask(logits, valid), picked, first=0, total=False)
            if smooth:
                total = jnp.sum(jnp.where(valid, logits, 0), -1, dtype=jnp.float32, keepdims=True)
                stats = jnp.concatenate([stats[..., :3], total], -1)
        made = sharding.ops.cross_entropy(sharding.gathered(stats), labels, classes=self.classes, **self.rule.options)
        return made[0], made[1]

    def gradient(
        self,
        sharding: RowSharding,
        logits: jax.Array,
        labels: jax.Array,
        lse: jax.Array,
        grad: jax.Array,
        *,
        in_place: bool = False,
    ) -> jax.Array:
        """Compute the gradient of the local logits, `[*rows, classes]`.

        `lse` is a result of `losses`, and `grad` the gradient of each loss, both float32 `[*rows]`. `in_place` reuses
        the memory of the logits.
        """
        of_own, options = self._local_labels(sharding, logits, labels)
        options |= {"classes": self.classes, "first": 0}
        valid = self._class_mask(sharding, logits)
        logits = logits if valid is None else _mask(logits, valid)
        op = _in_place(sharding, "cross_entropy_grad", 0) if in_place else sharding.ops.cross_entropy_grad
        d: jax.Array = op(logits, of_own, lse, grad, **options)
        return d if valid is None else jnp.where(valid, d, 0)

    def losses_and_gradient(
        self, sharding: RowSharding, logits: jax.Array, labels: jax.Array, grad: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Compute the loss of each row and, in the memory of the logits, their gradient as `gradient` does."""
        if sharding.classes or self.classes != self.columns:
            losses, lse = self.losses(sharding, logits, labels)
            return losses, self.gradient(sharding, logits, labels, lse, grad, in_place=True)
        op = _in_place(sharding, "cross_entropy_with_grad", 1)
        losses, d = op(logits, labels, grad, classes=self.classes, **self.rule.options)
        return losses, d

    def _class_mask(self, sharding: RowSharding, logits: jax.Array) -> jax.Array | None:
        """A mask of the local columns that are classes; None without padding."""
        if self.classes == self.columns:
            return None
        own = logits.shape[-1]
        valid: jax.Array = sharding.first(own) + jnp.arange(own, dtype=jnp.int32) < self.classes
        return valid

    def _local_labels(
        self, sharding: RowSharding, logits: jax.Array, labels: jax.Array
    ) -> tuple[jax.Array, dict[str, Any]]:
        """Renumber labels so that the first local class is 0. Labels of other devices' classes become the last class.

        An op takes the first class as an attribute, but one program serves all devices. Also returns the options of the
        op.
        """
        if not sharding.classes:
            return labels, self.rule.options
        own = logits.shape[-1]
        local = labels - sharding.first(own)
        # Local column `classes - 1` does not exist on this device, or is padding.
        local = jnp.where((local >= 0) & (local < own), local, self.classes - 1)
        local = jnp.where((labels >= 0) & (labels < self.classes), local, _NO_CLASS)
        local = jnp.where(labels == self.rule.ignore_index, _IGNORED, local)
        return local.astype(jnp.int32), self.rule.options | {"ignore_index": _IGNORED}


@functools.cache
def _op_in_place(name: str, result: int) -> ops.Op:
    return ops.Op(table()[name], {0: result})


def _in_place(sharding: RowSharding, name: str, result: int) -> Callable[..., Any]:
    """Return the op `name` with a result in the buffer of its first operand."""
    return functools.partial(_op_in_place(name, result), **({"may_shard": False} if sharding.own else {}))


def _losses_of(of: RowLoss, *operands: jax.Array) -> tuple[jax.Array, ...]:
    return _on_devices(of, RowLoss.losses, ("rows classes", "rows"), ("rows", "rows"), operands)


def _gradient_of(of: RowLoss, *operands: jax.Array) -> jax.Array:
    (d,) = _on_devices(of, _gradients, ("rows classes", "rows", "rows", "rows"), ("rows classes",), operands)
    return d


def _gradients(of: RowLoss, sharding: RowSharding, *operands: jax.Array) -> tuple[jax.Array, ...]:
    return (of.gradient(sharding, *operands),)


def _on_devices(
    of: RowLoss, body: Any, takes: tuple[str, ...], gives: tuple[str, ...], operands: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
    return on_devices(RowFunction("cross_entropy", body, of, takes, gives, xla_shards_rows=True), of.names, *operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses(of: RowLoss, logits: jax.Array, labels: jax.Array) -> jax.Array:
    return _losses_of(of, logits, labels)[0]


def _losses_forward(of: RowLoss, logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    losses, lse = _losses_of(of, logits, labels)
    return losses, (logits, labels, lse)


def _losses_backward(of: RowLoss, saved: tuple[jax.Array, ...], grad: jax.Array) -> tuple[jax.Array, None]:
    d = _gradient_of(of, *saved, RowSharding(of.names).of_losses(grad))
    return shard_as(d, saved[0]), None


_losses.defvjp(_losses_forward, _losses_backward)


def shard_as(made: jax.Array, like: jax.Array) -> jax.Array:
    """Reshard a gradient as `like`, on Explicit meshes."""
    own = jax.typeof(like).sharding
    return jax.sharding.reshard(made, own) if jax.typeof(made).sharding.spec != own.spec else made


def reduce_losses(losses: jax.Array, labels: jax.Array, reduction: str, ignore_index: int) -> jax.Array:
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / rows_that_count(labels, ignore_index)


def rows_that_count(labels: jax.Array, ignore_index: int) -> jax.Array:
    """The number of labels that are not ignored, as float32."""
    return jnp.sum(labels != ignore_index).astype(jnp.float32)


def count_class_shards(classes: MeshAxes) -> int:
    """The number of devices that shard classes, in `shard_map`."""
    return int(lax.axis_size(classes)) if classes else 1


def cast_varying(
    arrays: Sequence[jax.Array], labels: jax.Array, classes: MeshAxes
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Cast arrays and labels to vary over the same manual axes, except labels over `classes`: they are equal there."""
    own = [frozenset(jax.typeof(a).manual_axis_type.varying) for a in (*arrays, labels)]
    parts = frozenset(classes) if types_tell(classes) else frozenset()
    every = parts.union(*own)
    wide = tuple(_cast(a, every - axes) for a, axes in zip(arrays, own[:-1], strict=True))
    return wide, _cast(labels, every - parts - own[-1])


def _cast(x: jax.Array, missing: frozenset[str]) -> jax.Array:
    return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def check_shapes(op: str, name: str, shape: Sequence[int], labels: Any, reduction: Any) -> None:
    """Raise TypeError or ValueError unless each row of `name` has a label, and `reduction` exists."""
    check_array(op, "labels", labels)
    labels = labels if hasattr(labels, "dtype") else jnp.asarray(labels)
    check_rows(op, name, shape, labels.shape, str(labels.dtype), reduction)


def int32_labels(op: str, labels: Any, of: RowLoss) -> jax.Array:
    """Convert labels to int32, clipped to its range. Raise ValueError if the host knows one that is not a class."""
    labels = labels if hasattr(labels, "dtype") else jnp.asarray(labels)
    if _is_known(labels):
        there, ignored = np.asarray(labels), of.rule.ignore_index
        wrong = there[(there != ignored) & ((there < 0) | (there >= of.classes))]
        if wrong.size:
            raise wrong_label(op, int(wrong[0]), of.classes, ignored)
    if str(labels.dtype) != "int32":  # `jnp.asarray` would truncate int64 of NumPy to the low 32 bits.
        labels = (np if isinstance(labels, np.ndarray | np.generic) else jnp).clip(labels, *INT32_RANGE).astype("int32")
    return jnp.asarray(labels)


def _mask(logits: jax.Array, valid: jax.Array) -> jax.Array:
    """Set logits of padding to -inf, so that they add 0 to the sum of exponentials."""
    return jnp.where(valid, logits, jnp.array(-jnp.inf, logits.dtype))


def _is_known(labels: Any) -> bool:
    """True if the host has all labels, the same on all processes."""
    if isinstance(labels, jax.core.Tracer):
        return False
    if isinstance(labels, jax.Array):
        return labels.is_fully_addressable and all(device.platform == "cpu" for device in labels.devices())
    return isinstance(labels, np.ndarray | np.generic)
