"""Cross entropy in both front ends: options, argument checks, and chunks of rows for `linear_cross_entropy`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from qshard._core.validation import join_names, quote, seed_missing
from qshard.recipes import Recipe, RecipeLike, as_recipe

CHUNK_BYTES = 1 << 28  # bytes of logits that `linear_cross_entropy` may compute at a time, however small w is
LABELS = ("int64", "int32")
INT32_RANGE = (-(1 << 31), (1 << 31) - 1)  # range of labels in ops: int32
_REDUCTIONS = ("mean", "sum", "none")
_SUM_BYTES = 4  # of an element of the sum of gradients of w: float32
_ROWS = 128  # default row alignment of chunks: whole blocks, and efficient sizes for GEMMs
CHUNK_SEED_BIT = 48  # chunk `i` rounds with `seed ^ (i << CHUNK_SEED_BIT)`, in bits that layers and ranks do not use


@dataclass(frozen=True)
class LossRule:
    """Options of a cross entropy loss, as the ops take them.

    Attributes:
      ignore_index: label of rows that are left out.
      smoothing: label smoothing, from 0 to 1.
      z_loss: weight of the squared log of the partition function.
    """

    ignore_index: int
    smoothing: float
    z_loss: float

    @classmethod
    def of(cls, op: str, ignore_index: Any, label_smoothing: Any, z_loss: Any) -> LossRule:
        """Validate the arguments of `op`, and build the rule."""
        if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
            raise TypeError(f"{op}: ignore_index ({quote(ignore_index)}) is not an integer; pass one, such as -100")
        if not INT32_RANGE[0] <= ignore_index <= INT32_RANGE[1]:
            raise ValueError(
                f"{op}: ignore_index ({ignore_index}) does not fit in 32 bits; pass a smaller one, such as -100"
            )
        for name, value in (("label_smoothing", label_smoothing), ("z_loss", z_loss)):
            if not isinstance(value, Real):
                raise TypeError(f"{op}: {name} ({quote(value)}) is not a Python number; pass one, such as 0.0")
        if not 0 <= label_smoothing <= 1:
            raise ValueError(f"{op}: label_smoothing ({quote(label_smoothing)}) must be from 0 to 1")
        if not 0 <= z_loss < math.inf:
            raise ValueError(f"{op}: z_loss ({quote(z_loss)}) must be a finite number of at least 0, such as 1e-4")
        return cls(ignore_index, float(label_smoothing), float(z_loss))

    @property
    def options(self) -> dict[str, Any]:
        """Attributes of the ops that compute losses and gradients."""
        return {"ignore_index": self.ignore_index, "smoothing": self.smoothing, "z_loss": self.z_loss}


def check_rows(
    op: str,
    name: str,
    shape: Sequence[int],
    labels_shape: Sequence[int],
    labels_dtype: str,
    reduction: Any,
    *,
    devices: tuple[object, object] = ("", ""),
) -> None:
    """Raise unless `name`, `[*rows, ...]`, has one label per row, on one device, and `reduction` is known."""
    if reduction not in _REDUCTIONS:
        raise ValueError(
            f"{op}: reduction ({quote(reduction)}) is not {join_names(map(repr, _REDUCTIONS))}; pass one of these"
        )
    if labels_dtype not in LABELS:
        raise TypeError(f"{op}: labels ({labels_dtype}) are not {join_names(LABELS)}; cast them first")
    if not shape or tuple(labels_shape) != tuple(shape[:-1]) or devices[0] != devices[1]:
        there, own = (f" on {device}" if device else "" for device in devices)
        raise ValueError(
            f"{op}: labels {tuple(labels_shape)}{own} do not match the rows of {name} {tuple(shape)}{there}; pass one "
            f"label per row, with classes on the last axis of {name}"
        )


def check_num_classes(op: str, num_classes: Any) -> None:
    """Raise unless `num_classes` is None or a positive integer."""
    if num_classes is None:
        return
    if isinstance(num_classes, bool) or not isinstance(num_classes, int) or num_classes < 1:
        raise ValueError(
            f"{op}: num_classes ({quote(num_classes)}) is not a positive integer; pass the number of classes, or None "
            "for all columns"
        )


def count_classes(op: str, name: str, columns: int, num_classes: int | None) -> int:
    """Return the number of classes; `columns` counts the columns of `name` on all ranks or devices.

    Raises ValueError if the number is 0, exceeds int32, or exceeds `columns`.
    """
    if num_classes is not None and num_classes > columns:
        raise ValueError(
            f"{op}: num_classes ({num_classes}) is more than the {columns} columns of {name}; pass the number of "
            "classes over all ranks or devices"
        )
    classes = columns if num_classes is None else num_classes
    if not classes:
        raise ValueError(f"{op}: {name} has no classes; pass at least one column")
    if classes > INT32_RANGE[1]:
        raise ValueError(f"{op}: {name} has {classes} classes, which do not fit in 32 bits; use fewer")
    return classes


def wrong_label(op: str, label: int, classes: int, ignore_index: int) -> ValueError:
    """Return the error for a label that is not a class, for labels that are known on the host."""
    return ValueError(
        f"{op}: labels contain {label}, which is neither a class (0 to {classes - 1}) nor ignore_index "
        f"({ignore_index}); pass ignore_index as the label of rows to skip"
    )


def check_head(op: str, x: Sequence[int], x_dtype: str, w: Sequence[int], w_dtype: str, chunk: Any) -> None:
    """Raise unless `x @ w.T` is a valid product of equal dtypes and `chunk` is None or a positive number of rows."""
    if len(w) != 2 or len(x) < 1 or x[-1] != w[-1] or x_dtype != w_dtype:
        raise ValueError(
            f"{op}: w ({w_dtype} {tuple(w)}) does not fit x ({x_dtype} {tuple(x)}); pass w as [classes, K] and x as "
            "[*rows, K], of the same dtype"
        )
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
        raise ValueError(f"{op}: chunk ({quote(chunk)}) is not a positive integer; pass a number of rows, or None")


def rows_at_a_time(
    chunk: int | None, x: Sequence[int], classes: int, itemsize: int, *, always_sums: bool = False
) -> int:
    """Return the number of rows per chunk of x `[rows, K]`: `chunk`, or a number by the memory of a call.

    The gradient of w, `[classes, K]`, is summed over chunks in float32, and then cast to new memory. So the logits of a
    chunk may be as large as w, or 256 MiB. A single chunk needs no sum, so its logits may be as large as the sum would
    be. `always_sums`: the gradient is summed over devices too, also of a single chunk.

    >>> rows_at_a_time(None, (8192, 4096), 32000, 2), rows_at_a_time(None, (8192, 512), 32000, 2)
    (8192, 4096)
    >>> rows_at_a_time(None, (100, 64), 32000, 2), rows_at_a_time(7, (8192, 4096), 32000, 2)
    (128, 7)
    """
    if chunk is not None:
        return chunk
    rows, k = x
    most = max(1, CHUNK_BYTES // (classes * itemsize), k)
    if not always_sums and rows * itemsize <= k * _SUM_BYTES:
        most = max(most, rows)
    each = -(-rows // max(1, -(-rows // most)))
    return max(1, min(most, -(-each // _ROWS) * _ROWS))


def makes_gradients_early(reduction: str, dtype: str) -> bool:
    """Return whether `linear_cross_entropy` computes gradients in forward, and only scales them in backward.

    Not with reduction "none", where each row has its own factor. Not in float16, where gradients that underflow before
    a loss scale is applied are lost.
    """
    return reduction != "none" and dtype != "float16"


def head_recipe(op: str, given: RecipeLike, seed: Any) -> Recipe:
    """Return the recipe for the products of a head in chunks of rows.

    Raises ValueError if the recipe uses scales of earlier steps, or needs a seed that is not passed.
    """
    recipe = as_recipe(given, op, by_product=False)
    if recipe.stateful:
        raise ValueError(
            f"{op}: recipe ({type(recipe).__name__}) is not supported: chunks have no scale history; pass another "
            "recipe, such as CurrentScaling()"
        )
    if recipe.stochastic and seed is None:
        raise ValueError(seed_missing(op, type(recipe).__name__))
    return recipe
