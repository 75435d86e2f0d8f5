"""Reduction of tensor products to matrix products: which axes fold into K and N, and how their shardings fold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from qshard._core.validation import WeightLayout
from qshard.jax._ops.mesh import Spec, mesh_of, names_of, reshape, spec_of
from qshard.recipes import Recipe, Role

Dims = tuple[int, ...]


class MatrixAxes(NamedTuple):
    """The axes of `x` and `w` in groups. Each group folds into one axis of a matrix product.

    Attributes:
      x: one group for each free axis, then one for all contracted axes.
      w: two groups, contracted and free, in the order of `layout`.
    """

    x: tuple[Dims, ...]
    w: tuple[Dims, Dims]
    layout: WeightLayout

    @classmethod
    def of(cls, x_ndim: int, w_ndim: int, x_axes: Dims, w_axes: Dims) -> MatrixAxes:
        """Group the axes of a product that contracts `x_axes` with `w_axes`, pairwise."""
        pairs = sorted(zip(w_axes, x_axes, strict=True))  # In the order of w, to avoid a transpose of w.
        k, n = tuple(axis for axis, _ in pairs), tuple(axis for axis in range(w_ndim) if axis not in w_axes)
        # Contracted axes in the middle of w move to the end. The first axis stays first, as FSDP may shard it.
        layout: WeightLayout = "KN" if n and 0 in k else "NK"
        lead = tuple((axis,) for axis in range(x_ndim) if axis not in x_axes)
        return cls((*lead, tuple(axis for _, axis in pairs)), (k, n) if layout == "KN" else (n, k), layout)

    def group(self, of: Literal["N", "K"]) -> Dims:
        """The free ("N") or contracted ("K") axes of w."""
        return self.w[self.layout.index(of)]

    def spec(self, spec: Any, groups: tuple[Dims, ...]) -> PartitionSpec:
        """The sharding after folding: each folded axis is sharded along all mesh axes of its group, in order."""
        entries = (*spec, *[None] * sum(map(len, groups)))
        return PartitionSpec(*(_merge(entries[axis] for axis in group) for group in groups))

    def parts(
        self, op: str, x: jax.Array, w: jax.Array, spec: Spec, gathers: tuple[str, ...], recipe: Recipe
    ) -> AxisSplits:
        """Compute how axes must be split before folding, from the types of x and w and the sharding `spec` of w.

        `gathers` are the mesh axes along which w is gathered. Raises ValueError if the shards of a group of axes would
        break the blocks of the folded matrix.
        """
        mesh, told = mesh_of(w, spec), entries_of(spec, w.ndim)
        manual = set(mesh.manual_axes)
        if spec is None and not manual.isdisjoint(gathers):
            told[self.w[0][0]] = gathers
        typed = jax.typeof(w).sharding.spec
        names = [tuple(dict.fromkeys((*names_of(a), *names_of(b)))) for a, b in zip(typed, told, strict=True)]

        def count(axes: Iterable[str]) -> int:
            return math.prod(int(mesh.shape.get(name, 1)) for name in axes)

        outside = [count(set(axes) - manual) for axes in names]
        gathered = [count(manual.intersection(axes, gathers)) for axes in names]
        total = [count(axes) for axes in names]
        k, of_x = self.group("K"), [1] * x.ndim
        shards_of_x = [count(names_of(jax.typeof(x).sharding.spec[axis])) for axis in self.x[-1]]
        if any(n > 1 for n in (*shards_of_x[1:], *(total[axis] for axis in k[1:]))):
            for axis, own, n in zip(self.x[-1], k, shards_of_x, strict=True):
                if total[own] == 1:  # Split w as x is sharded.
                    outside[own] = total[own] = n
                elif total[own] % n:
                    raise ValueError(
                        f"{op}: axis {axis} of x {x.shape} has {n} shards, but axis {own} of w {w.shape}, contracted "
                        f"with it, has {total[own]}; shard both alike, or replicate x"
                    )
        for group, role in ((self.group("N"), Role.GRADIENT), (k, Role.ACTIVATION)):
            sharded = [axis for axis in group[1:] if total[axis] > 1]
            if not sharded:  # If only the first axis is sharded, the folded axis has the same shards.
                for axis in group:
                    outside[axis] = 1
                continue
            used = [own.format(each) for own in recipe.distinct for each in (Role.WEIGHT, role)]
            last, unit = sharded[-1], max((max(fmt.block_shape()) for fmt in used), default=1)
            size = w.shape[last] * count(manual.intersection(names[last]))
            run = size // total[last] * math.prod(w.shape[axis] for axis in group[group.index(last) + 1 :])
            if any(w.shape[axis] % outside[axis] for axis in group) or run % unit:
                raise ValueError(
                    f"{op}: axis {last} of w {w.shape} is folded after axis {group[0]}, and its {total[last]} shards "
                    f"split blocks of {unit}; shard it on block boundaries, or put it before axis {group[0]} in w"
                )
        merged = [a * b for a, b in zip(outside, gathered, strict=True)]
        if any(merged[axis] > 1 for axis in k[1:]):
            for axis, own in zip(self.x[-1], k, strict=True):
                of_x[axis] = merged[own]
        return AxisSplits(tuple(outside), tuple(of_x), tuple(gathered), tuple(merged), tuple(names))

    def sizes(self, x: jax.Array, w: jax.Array, parts: AxisSplits) -> tuple[int, ...]:
        """The shape of the result: the free axes of x, then the free axes of the gathered w."""
        left = (w.shape[axis] * parts.gathered[axis] for axis in self.group("N"))
        return (*(x.shape[axis] for (axis,) in self.x[:-1]), *left)

    def fold(self, x: jax.Array, groups: tuple[Dims, ...], parts: Sequence[int]) -> jax.Array:
        """Fold each group of axes into one axis, after splitting axis i into `parts[i]` parts.

        Part numbers come first in the folded axis, which is then sharded along the mesh axes of the group: no element
        moves between devices.
        """
        entries = jax.typeof(x).sharding.spec
        spec = self.spec(entries, groups)
        sizes = [math.prod(x.shape[axis] for axis in group) for group in groups]
        order = [axis for group in groups for axis in group]
        if any(count > 1 for count in parts):
            pairs = [(count, size // count) for size, count in zip(x.shape, parts, strict=True)]
            ends = [(e, None) if count > 1 else (None, e) for e, count in zip(entries, parts, strict=True)]
            x = reshape(x, [size for pair in pairs for size in pair], [e for pair in ends for e in pair])
            order = [2 * axis + minor for group in groups for minor in (0, 1) for axis in group]
        if order != list(range(x.ndim)):
            x = lax.transpose(x, order)
        return reshape(x, sizes, tuple(spec))

    def unfold(self, y: jax.Array, sizes: tuple[int, ...], parts: AxisSplits) -> jax.Array:
        """Unfold the result `[*lead, N]` to the free axes of w."""
        group, lead = self.group("N"), len(self.x) - 1
        entries = (*jax.typeof(y).sharding.spec, *[None] * len(sizes))
        counts = [parts.merged[axis] for axis in group]
        last = names_of(entries[lead])
        own = [_merge([name for name in parts.names[axis] if name in last]) for axis in group]
        if all(count == 1 for count in counts[1:]):
            # Mesh axes of size 1 go back to their own axis, although they do not split it.
            known = set(last) == set(_merge(own) or ())
            return reshape(y, sizes, (*entries[:lead], *own) if known else entries[: len(sizes)])
        within = [size // count for size, count in zip(sizes[lead:], counts, strict=True)]
        y = reshape(y, (*sizes[:lead], *counts, *within), (*entries[:lead], *own, *[None] * len(group)))
        pairs = [lead + i + minor * len(group) for i in range(len(group)) for minor in (0, 1)]
        return reshape(lax.transpose(y, (*range(lead), *pairs)), sizes, (*entries[:lead], *own))


class AxisSplits(NamedTuple):
    """The parts that axes of a product are split into before folding, so that each shard is one run of the folded axis.

    Attributes:
      w: the number of parts of each axis of the local w. In `shard_map` it is 1.
      x: the number of parts of each axis of the local x.
      gathered: for each axis of w, the number of shards that `shard_map` gathers.
      merged: for each axis of the gathered w, its number of parts in the folded axis.
      names: the mesh axes that shard each axis of w.
    """

    w: tuple[int, ...]
    x: tuple[int, ...]
    gathered: tuple[int, ...]
    merged: tuple[int, ...]
    names: tuple[tuple[str, ...], ...]


def _merge(entries: Iterable[Any]) -> tuple[str, ...] | None:
    return tuple(name for entry in entries for name in names_of(entry)) or None


def replace_entries(spec: Spec, entries: Any) -> Spec:
    """Replace the entries of `spec`; a NamedSharding keeps its mesh."""
    made = PartitionSpec(*entries)
    return NamedSharding(spec.mesh, made) if isinstance(spec, NamedSharding) else made


def entries_of(spec: Spec, ndim: int) -> list[Any]:
    """The entries of `spec`, padded with None to `ndim`."""
    return [*spec_of(spec, None), *[None] * ndim][:ndim]


class Terms(NamedTuple):
    """The labels of an einsum: those on the axes of x, of w and of the result."""

    x: tuple[str, ...]
    w: tuple[str, ...]
    out: tuple[str, ...]

    @classmethod
    def of(cls, subscripts: str, x: jax.Array, w: jax.Array) -> Terms:
        """Parse subscripts such as "btd,dhk->bthk". An ellipsis may stand for axes of x."""
        parts = subscripts.replace(" ", "").split("->") if isinstance(subscripts, str) else ()
        operands = parts[0].split(",") if len(parts) == 2 else ()
        if len(operands) != 2:
            raise ValueError(
                f"einsum: subscripts ({subscripts!r}) are not two operands and a result; write them like "
                "'btd,dhk->bthk'"
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
                f"einsum: subscripts ({subscripts!r}) repeat, sum or add an axis; name each axis of x and w once "
                "there, and once in the other operand or the result"
            )
        return terms
