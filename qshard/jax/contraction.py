"""Products of tensors as products of matrices: which axes fold into K and N, and how what cuts them folds."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from qshard.jax.cuts import Spec, spec_of
from qshard.jax.ops import reshaped
from qshard.jax.passes import WeightLayout

Axes = tuple[int, ...]


class Folding(NamedTuple):
    """How a product over axes of `x` and `w` is one of matrices.

    Attributes:
      x: groups of the axes of x: one for each that is left, and all that are contracted.
      w: two groups of the axes of w, in an order that `layout` names: the contracted ones and those that are left.
    """

    x: tuple[Axes, ...]
    w: tuple[Axes, Axes]
    layout: WeightLayout

    @classmethod
    def of(cls, x_ndim: int, w_ndim: int, x_axes: Axes, w_axes: Axes) -> Folding:
        """Of a product that contracts these axes, in pairs."""
        pairs = sorted(zip(w_axes, x_axes, strict=True))  # In the order of w, which then lies as it is.
        k, n = tuple(axis for axis, _ in pairs), tuple(axis for axis in range(w_ndim) if axis not in w_axes)
        # Neither first nor last, the contracted axes are moved; what is in front stays, as FSDP may cut it.
        layout: WeightLayout = "KN" if n and 0 in k else "NK"
        lead = tuple((axis,) for axis in range(x_ndim) if axis not in x_axes)
        return cls((*lead, tuple(axis for _, axis in pairs)), (k, n) if layout == "KN" else (n, k), layout)

    def sizes(self, x: jax.Array, w: jax.Array) -> tuple[int, ...]:
        """Of the result: the axes of x that are left, then those of w."""
        left = self.w[self.layout.index("N")]
        return (*(x.shape[axis] for (axis,) in self.x[:-1]), *(w.shape[axis] for axis in left))

    def spec(self, op: str, name: str, spec: Any, groups: tuple[Axes, ...]) -> PartitionSpec:
        """How a tensor is cut once its axes are folded. Of those that become one, only the first may be cut."""
        entries = (*spec, *[None] * sum(map(len, groups)))
        for group in groups:
            for axis in group[1:]:
                if entries[axis] is not None:
                    raise ValueError(
                        f"{op}: {name} ({PartitionSpec(*spec)}) cuts axis {axis}, which is folded into axis {group[0]} "
                        f"for a product of matrices; cut axis {group[0]} in its place"
                    )
        return PartitionSpec(*(entries[group[0]] if group else None for group in groups))

    def folded(self, op: str, name: str, x: jax.Array, groups: tuple[Axes, ...]) -> jax.Array:
        """A tensor with each group of axes as one."""
        cut = self.spec(op, name, jax.typeof(x).sharding.spec, groups)
        sizes = [math.prod(x.shape[axis] for axis in group) for group in groups]
        order = tuple(axis for group in groups for axis in group)
        if order != tuple(range(x.ndim)):
            x = lax.transpose(x, order)
        return reshaped(x, sizes, tuple(cut))

    def unfolded(self, y: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
        """The result `[*lead, N]` with all axes of w that are left."""
        return reshaped(y, sizes, (*jax.typeof(y).sharding.spec, *[None] * len(sizes))[: len(sizes)])


def respec(spec: Spec, entries: Any) -> Spec:
    """Another spec on the mesh of this one."""
    made = PartitionSpec(*entries)
    return NamedSharding(spec.mesh, made) if isinstance(spec, NamedSharding) else made


def entries_of(spec: Spec, ndim: int) -> list[Any]:
    """An entry for every axis."""
    return [*spec_of(spec, None), *[None] * ndim][:ndim]


class Terms(NamedTuple):
    """The labels of `einsum`: of x, of w and of the result."""

    x: tuple[str, ...]
    w: tuple[str, ...]
    out: tuple[str, ...]

    @classmethod
    def of(cls, subscripts: str, x: jax.Array, w: jax.Array) -> Terms:
        """Of subscripts such as "btd,dhk->bthk"; an ellipsis may stand for axes of x."""
        parts = subscripts.replace(" ", "").split("->") if isinstance(subscripts, str) else ()
        operands = parts[0].split(",") if len(parts) == 2 else ()
        if len(operands) != 2:
            raise ValueError(
                f"einsum: subscripts ({subscripts!r}) are not two operands and a result; write them as 'btd,dhk->bthk'"
            )
        more = tuple(f".{i}" for i in range(max(0, x.ndim - len(operands[0].replace("...", "")))))

        def labels(term: str) -> tuple[str, ...]:
            before, dots, after = term.partition("...")
            return (*before, *(more if dots else ()), *after)

        terms = cls(labels(operands[0]), tuple(operands[1]), labels(parts[1]))
        for name, labels_of, ndim in (("x", terms.x, x.ndim), ("w", terms.w, w.ndim)):
            if len(labels_of) != ndim:
                raise ValueError(
                    f"einsum: subscripts ({subscripts!r}) do not have a label for each of the {ndim} axes of {name}; "
                    "name every axis"
                )
        alone = [label for a, b in (terms[:2], terms[1::-1]) for label in a if label not in (*b, *terms.out)]
        repeated = any(len(set(term)) < len(term) for term in terms)
        if repeated or alone or not set(terms.out) <= {*terms.x, *terms.w}:
            raise ValueError(
                f"einsum: subscripts ({subscripts!r}) repeat, add up or make up an axis; name each axis of x and w "
                "once in it, and once in the other or in the result"
            )
        return terms
