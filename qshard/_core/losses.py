"""Cross entropy as both front ends know it: its options, what they refuse, and how many rows a head takes at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from qshard._core.validation import join_names, quote, seed_missing
from qshard.recipes import Recipe, RecipeLike, as_recipe

CHUNK_BYTES = 1 << 28
"""Logits that `linear_cross_entropy` has at a time."""
LABELS = ("int64", "int32")
WORD = (-(1 << 31), (1 << 31) - 1)
"""Of labels as the ops read them."""
_REDUCTIONS = ("mean", "sum", "none")
_ROWS = 128
"""Chunks have a multiple of so many rows, unless a caller says how many: what GEMMs like, and whole blocks."""
CHUNK_SEED_BIT = 48
"""Chunk `i` rounds with `seed ^ (i << CHUNK_SEED_BIT)`: bits in which neither layers nor ranks count."""


@dataclass(frozen=True)
class LossRule:
    """The options of a loss, as ops take them."""

    ignore_index: int
    smoothing: float
    z_loss: float

    @classmethod
    def of(cls, op: str, ignore_index: Any, label_smoothing: Any, z_loss: Any) -> LossRule:
        """Of what a caller of `op` gave.

        >>> LossRule.of("cross_entropy", -100, 1.5, 0.0)
        Traceback (most recent call last):
        ValueError: cross_entropy: label_smoothing (1.5) is not from 0 to 1; pass such a number
        """
        if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
            raise TypeError(f"{op}: ignore_index ({quote(ignore_index)}) is not an integer; pass one")
        if not WORD[0] <= ignore_index <= WORD[1]:
            raise ValueError(
                f"{op}: ignore_index ({ignore_index}) does not fit into 32 bits; pass a number such as -100"
            )
        for name, value in (("label_smoothing", label_smoothing), ("z_loss", z_loss)):
            if not isinstance(value, Real):
                raise TypeError(f"{op}: {name} ({quote(value)}) is not a number of the host; pass one, such as 0.0")
        if not 0 <= label_smoothing <= 1:
            raise ValueError(f"{op}: label_smoothing ({quote(label_smoothing)}) is not from 0 to 1; pass such a number")
        if not 0 <= z_loss < math.inf:
            raise ValueError(f"{op}: z_loss ({quote(z_loss)}) is not 0 or more; pass a small number, such as 1e-4")
        return cls(ignore_index, float(label_smoothing), float(z_loss))

    @property
    def options(self) -> dict[str, Any]:
        """Attributes of the ops that make losses and gradients."""
        return {"ignore_index": self.ignore_index, "smoothing": self.smoothing, "z_loss": self.z_loss}


def check_rows(
    op: str,
    name: str,
    shape: Sequence[int],
    labels: Sequence[int],
    dtype: str,
    reduction: Any,
    *,
    where: tuple[object, object] = ("", ""),
) -> None:
    """Raises unless there is a label for each row of what `op` calls `name`, and a reduction.

    Args:
      shape, labels: `[*rows, ...]` and `[*rows]`.
      dtype: of labels.
      where: on which devices the two are, where arrays have one: on the same one.
    """
    if reduction not in _REDUCTIONS:
        raise ValueError(f"{op}: reduction ({quote(reduction)}) is not {join_names(_REDUCTIONS)}; pass one of these")
    if dtype not in LABELS:
        raise TypeError(f"{op}: labels ({dtype}) are not {join_names(LABELS)}; cast them first")
    if not shape or tuple(labels) != tuple(shape[:-1]) or where[0] != where[1]:
        there, own = (f" on {device}" if device else "" for device in where)
        raise ValueError(
            f"{op}: labels ({tuple(labels)}{own}) are not one for each row of {name} ({tuple(shape)}{there}); classes "
            "are the last axis"
        )


def check_num_classes(op: str, num_classes: Any) -> None:
    """Raises unless `num_classes` is None or a number of classes.

    >>> check_num_classes("cross_entropy", 0)
    Traceback (most recent call last):
    ValueError: cross_entropy: num_classes (0) is not a number of classes; pass 1 or more, or None for all columns
    """
    if num_classes is None:
        return
    if isinstance(num_classes, bool) or not isinstance(num_classes, int) or num_classes < 1:
        raise ValueError(
            f"{op}: num_classes ({quote(num_classes)}) is not a number of classes; pass 1 or more, or None for all "
            "columns"
        )


def count_classes(op: str, name: str, columns: int, num_classes: int | None) -> int:
    """The number of classes of `name`, given its columns on all ranks or devices together.

    Raises:
      ValueError: there are none, more than 32 bits hold, or fewer columns than classes.
    """
    if num_classes is not None and num_classes > columns:
        raise ValueError(
            f"{op}: num_classes ({num_classes}) is more than the columns of {name} ({columns}); pass how many of them "
            "are classes, over all ranks or devices"
        )
    classes = columns if num_classes is None else num_classes
    if not classes:
        raise ValueError(f"{op}: {name} has no classes; give one or more")
    if classes > WORD[1]:
        raise ValueError(f"{op}: {name} has {classes} classes, which do not fit into 32 bits; give fewer")
    return classes


def wrong_label(op: str, label: int, classes: int, ignore_index: int) -> ValueError:
    """What is raised where labels are known on the host, and one is no class."""
    return ValueError(
        f"{op}: labels ({label} among them) are not all from 0 to {classes - 1}, nor ignore_index ({ignore_index}); "
        "mark rows to leave out with ignore_index"
    )


def check_head(op: str, x: Sequence[int], x_dtype: str, w: Sequence[int], w_dtype: str, chunk: Any) -> None:
    """Raises unless `x @ w.T` is a product of one dtype, of so many rows at a time."""
    if len(w) != 2 or len(x) < 1 or x[-1] != w[-1] or x_dtype != w_dtype:
        raise ValueError(
            f"{op}: w ({tuple(w)}, {w_dtype}) does not fit x ({tuple(x)}, {x_dtype}); give w as [classes, K] and x as "
            "[*rows, K], of one dtype"
        )
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
        raise ValueError(f"{op}: chunk ({quote(chunk)}) is not a number of rows; pass 1 or more, or None")


def rows_at_a_time(chunk: int | None, rows: int, classes: int, itemsize: int) -> int:
    """Of so many rows: `chunk`, or as many as have 256 MiB of logits, in chunks alike.

    >>> rows_at_a_time(None, 8192, 32000, 2), rows_at_a_time(None, 100, 32000, 2), rows_at_a_time(7, 8192, 32000, 2)
    (4096, 128, 7)
    """
    if chunk is not None:
        return chunk
    most = max(1, CHUNK_BYTES // (classes * itemsize))
    each = -(-rows // max(1, -(-rows // most)))
    return max(1, min(most, -(-each // _ROWS) * _ROWS))


def makes_gradients_early(reduction: str, dtype: str) -> bool:
    """True where `linear_cross_entropy` makes gradients with the loss: one number then multiplies them in backward.

    With "none" each row has its own number. In float16, values that have been rounded to 0 stay 0, however far a loss
    scale would lift them.
    """
    return reduction != "none" and dtype != "float16"


def head_recipe(op: str, given: RecipeLike, seed: Any) -> Recipe:
    """The recipe by which a head multiplies chunks of rows, of what a caller of `op` gave."""
    recipe = as_recipe(given, op)
    if recipe.stateful:
        raise ValueError(
            f"{op}: recipe ({type(recipe).__name__}) has scales of earlier steps, of whole tensors, and chunks have "
            "none; pass another, such as CurrentScaling()"
        )
    if recipe.stochastic and seed is None:
        raise ValueError(seed_missing(op, type(recipe).__name__))
    return recipe
