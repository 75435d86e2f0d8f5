"""`gather`: the whole of a weight that FSDP has cut, by moving its codes; and weights as `linear` takes them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast, get_args

import jax
from jax import lax
from jax.sharding import NamedSharding

from qshard._core.quantize_steps import Plane
from qshard._core.validation import join_names, quote
from qshard.formats import Format, Usage
from qshard.jax._ops.collectives import sum_over
from qshard.jax._ops.mesh import Names, Spec, is_auto
from qshard.jax._ops.validation import as_names, check_spec
from qshard.jax._quantized.array import QuantizedArray
from qshard.jax._sharding.shard_spec import ShardSpec, reshard
from qshard.layout import Shape, is_transposed, matrix_shape, stored_block


def gather(q: QuantizedArray, axis_name: str | Sequence[str], *, spec: Spec = None) -> QuantizedArray:
    """Gives every device the whole of a tensor that is cut along mesh axes. Codes travel, never values.

    What is gathered is pinned: the codes are seen as uint8 and held to their place on both sides of the gather. XLA is
    free to move a gather past a cast or a product, to where it costs 2 or 4 bytes an element in place of 1.

    Args:
      q: cut along `axis_name`.
      axis_name: the mesh axis to gather over, or several.
      spec: how the tensor is cut: by rows along `axis_name` if not given. Types of Explicit meshes say it. A
        NamedSharding also names the mesh, where neither `jax.set_mesh` nor an array does.

    Returns:
      The tensor, no longer cut along `axis_name`; cuts along other mesh axes stay.

    Raises:
      TypeError: `axis_name` is not the name of a mesh axis, or several.
      ValueError: no mesh is known, `axis_name` is not in `spec`, shards have scales of their own, or what would be
        gathered does not lie side by side.

    >>> import jax.numpy as jnp
    >>> from qshard.formats import FP8_E4M3
    >>> from qshard.jax import quantize
    >>> mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> w = jax.device_put(jnp.ones((64, 32)), NamedSharding(mesh, jax.P("fsdp")))
    >>> gather(quantize(w, FP8_E4M3), "fsdp").rowwise.data.sharding.is_fully_replicated
    True
    """
    if not isinstance(q, QuantizedArray):
        raise TypeError(f"gather: q ({quote(q)}) is not a QuantizedArray; quantize it first")
    check_spec("gather", "spec", spec)
    if not q.planes:
        raise ValueError(f"gather: {q} has no plane to gather; quantize with a usage")
    axes = as_names("gather", "axis_name", axis_name)
    return WeightSharding(spec_of_codes(q, axes, spec, op="gather", name="axis_name"), axes).gather(q)


class Shards(Protocol):
    """How a weight lies over devices; hashable, as it is static."""

    def gather(self, codes: Any) -> QuantizedArray:
        """The whole weight, of what one device has of it."""

    def scatter(self, gradient: jax.Array) -> jax.Array:
        """What one device keeps of the gradient of the whole weight."""


WeightLayout = Literal["NK", "KN"]
"""How a weight lies in memory. "NK": `[N, K]`, as in PyTorch and equinox; "KN": `[K, N]`, as in flax."""


def as_layout(op: str, layout: Any) -> WeightLayout:
    """The layout that a caller named."""
    if layout not in get_args(WeightLayout):
        raise ValueError(
            f"{op}: weight_layout ({quote(layout)}) is not a layout; pass 'NK' for w [N, K] or 'KN' for w [K, N]"
        )
    return cast(WeightLayout, layout)


@dataclass(frozen=True)
class WeightSharding:
    """`Shards` of a weight that FSDP has sharded along mesh axes, or that is whole: along none.

    Attributes:
      spec: the sharding of the weight, as it lies; empty if nothing tells it.
      gather_axes: the mesh axes along which codes are gathered.
      layout: of the weight, its gradient and its codes.
    """

    spec: ShardSpec = ShardSpec()
    gather_axes: Names = ()
    layout: WeightLayout = "NK"

    @property
    def contracted(self) -> Usage:
        """The plane of w, as it lies, that forward contracts K of."""
        return Usage.ROWWISE if self.layout == "NK" else Usage.COLUMNWISE

    @property
    def contracted_back(self) -> Usage:
        """The plane of w, as it lies, that backward contracts N of."""
        return Usage.COLUMNWISE if self.layout == "NK" else Usage.ROWWISE

    @property
    def columns(self) -> int:
        """The number of shards of the last axis of the gathered w."""
        return self.count("K" if self.layout == "NK" else "N")

    def count(self, axis: Literal["N", "K"]) -> int:
        """The number of shards of an axis of the gathered w, and so of x or y: as far as a spec tells."""
        spec, at = self.spec, self.layout.index(axis)
        if spec.local or len(spec.entries) <= at:
            return 1
        return spec.count(tuple(name for name in spec.entries[at] if name not in self.gather_axes))

    @property
    def contracts_whole_k(self) -> bool:
        """Whether the gradient of w is known to be whole along K, on an Auto mesh: x is gathered if K is sharded."""
        spec, at = self.spec, self.layout.index("K")
        return not spec.local and len(spec.entries) > at and not spec.entries[at] and is_auto(spec.mesh)

    @property
    def by_rows(self) -> bool:
        """Whether w is gathered along every axis of the mesh, as in FSDP alone, which shards x by rows."""
        names = self.gather_axes
        return bool(names) and all(name in names for name, size in self.spec.mesh.shape.items() if size > 1)

    def whole_shape(self, shape: tuple[Any, ...]) -> tuple[Any, ...]:
        """The shape of the gathered weight, given that of the local array. A size of None stays."""
        if not (self.spec.local and self.gather_axes):
            return shape
        counts = (self.spec.count(tuple(n for n in names if n in self.gather_axes)) for names in self.spec.entries)
        return tuple(None if size is None else size * n for size, n in zip(shape, counts, strict=True))

    def gather(self, codes: QuantizedArray) -> QuantizedArray:
        spec, names = self.spec, self.gather_axes
        if not names:
            return codes
        _check_adjacent(spec, names)
        planes = {}
        for usage, plane in codes.planes.items():
            if not set(names).isdisjoint(spec.mesh.explicit_axes):
                own = ShardSpec.of(plane.data)
            else:
                own = _transpose_spec(spec, names) if is_transposed(codes.format, usage) else spec
            planes[usage] = _gather_plane(plane, codes.format, usage, names, own)
        gathered = codes.with_planes(planes)
        if len(codes.axes) > 2:
            gathered = dataclasses.replace(gathered, axes=self.whole_shape(codes.axes))
        return gathered

    def scatter(self, gradient: jax.Array) -> jax.Array:
        """Summed over devices and cut as the weight is. On Explicit meshes its type says that."""
        spec = self.spec
        if spec.local and not spec.mesh.explicit_axes:
            shared = (tuple(name for name in names if name in self.gather_axes) for names in spec.entries)
            return sum_over(gradient, ((axis, names) for axis, names in enumerate(shared) if names))
        if spec.entries and not spec.mesh.explicit_axes:
            gradient = lax.with_sharding_constraint(gradient, NamedSharding(spec.mesh, spec.spec))
        return gradient


@functools.partial(jax.tree_util.register_dataclass, data_fields=["codes", "sink"], meta_fields=["shards"])
@dataclass(frozen=True, eq=False)
class CodedWeight:
    """A weight `[N, K]` for `linear` that is codes already, and where its gradient goes.

    Attributes:
      codes: a `QuantizedArray` of the whole weight; or a pytree that `shards.gather` makes one of, which `linear` then
        calls in the forward and again in the backward pass.
      sink: an array. The gradient with respect to it is `shards.scatter` of that of the whole weight; the values of it
        are not used. None: the weight has no gradient.
      shards: static. None: the weight is a `QuantizedArray`, cut as the call of `linear` says.
    """

    codes: Any
    sink: jax.Array | None
    shards: Any


def spec_of_codes(
    q: QuantizedArray, axes: tuple[str, ...], spec: Spec, *, op: str, name: str, spec_name: str = "spec"
) -> ShardSpec:
    usage = Usage.COLUMNWISE if q.rowwise is None else Usage.ROWWISE
    turned = is_transposed(q.format, usage)
    data = q.plane(usage).data
    turned_axes = len(q.axes) if turned else None
    return ShardSpec.along(data, axes, spec, op=op, name=name, spec_name=spec_name, transposed_of=turned_axes)


def _gather_plane(plane: Plane, fmt: Format, usage: Usage, axes: tuple[str, ...], cut: ShardSpec) -> Plane:
    (data, grid, global_scale_inv), block = plane, stored_block(fmt, usage)
    after = cut.without(axes)
    gathered = reshard(data, cut, after)
    if fmt.per_tensor:  # The one scale does not travel: shards have it in common.
        _check_shared(grid, axes)
    else:
        assert block is not None
        of_grid, shape = _of_grid(data, fmt, grid.ndim, block, cut, axes)
        _check_shared(grid, axes, of_grid.axes, grid.shape == shape)
        grid = reshard(grid, of_grid, _of_grid(gathered, fmt, grid.ndim, block, after, axes)[0])
    if global_scale_inv is not None and fmt.row_scaled:
        by_row = dataclasses.replace(cut, entries=cut.entries[:-1])
        _check_shared(global_scale_inv, axes, by_row.axes)
        global_scale_inv = reshard(global_scale_inv, by_row, by_row.without(axes))
    elif global_scale_inv is not None:
        _check_shared(global_scale_inv, axes)
    return Plane(gathered, grid, global_scale_inv)


def _of_grid(
    data: jax.Array, fmt: Format, ndim: int, block: tuple[int, int], cut: ShardSpec, axes: tuple[str, ...]
) -> tuple[ShardSpec, Shape]:
    """How the scales of codes are cut, `ndim` axes of them, and their shape in hand."""
    shape = (*data.shape[:-1], data.shape[-1] * fmt.element.codes_per_byte)
    if ndim != data.ndim:
        if cut.local:
            _check_rows_follow(cut, axes, "scales of rows")
        shape, cut = matrix_shape(shape), cut.matrix
    units = (*(1,) * (ndim - 2), *block[-ndim:])
    of_grid = cut.of_blocks(shape, units)
    whole = cut.without(of_grid.axes).whole(shape)
    return of_grid, tuple(-(-size // unit) for size, unit in zip(whole, units, strict=True))


def _check_shared(scale: jax.Array, axes: tuple[str, ...], cut: tuple[str, ...] = (), fits: bool = True) -> None:
    """Raises unless a scale that only `cut` cuts fits and is else the same on all devices, as far as its type tells."""
    own = jax.typeof(scale)
    varying = own.manual_axis_type.varying
    differs = [name for name in axes if name in varying and name not in cut and own.sharding.mesh.shape[name] > 1]
    if differs or not fits:
        what = f"of shape {scale.shape}" if not fits else f"varying over {', '.join(map(repr, differs))}"
        raise ValueError(
            f"gather: scale_inv ({what}) is not one scale for the whole tensor; quantize with "
            f"axis_name={(axes[0] if len(axes) == 1 else axes)!r}, or pass scales="
        )


def _check_adjacent(cut: ShardSpec, axes: tuple[str, ...]) -> None:
    """Raises where what `shard_map` would gather are pieces that do not lie side by side in the tensor."""
    for axis, names in enumerate(cut.entries if cut.local else ()):
        sizeable = [name for name in names if cut.count((name,)) > 1]
        kept = [name for name in sizeable if name not in axes]
        if sizeable[: len(kept)] != kept:
            raise ValueError(
                f"gather: axis {axis} is sharded over {names}, so shards gathered over {axes} alone are not adjacent; "
                f"gather over {kept[-1]!r} too, or first"
            )


def _transpose_spec(cut: ShardSpec, axes: tuple[str, ...]) -> ShardSpec:
    """How the transposed plane of a tensor is cut: its first axis is the tensor's last, its last all the others."""
    _check_rows_follow(cut, axes, "a transposed plane")
    return cut.transposed


def _check_rows_follow(cut: ShardSpec, axes: tuple[str, ...], what: str) -> None:
    """Raises where rows that are gathered do not follow one another in an array that has them in one axis."""
    if inner := [name for name in axes if name in cut.inner_axes]:
        raise ValueError(
            f"gather: spec ({cut.spec}) does not shard the first or last axis over {join_names(map(repr, inner))}, so "
            f"shards of {what} are not adjacent; gather the rowwise plane, in a format with 1-D blocks"
        )
