"""Partitioning of row functions, such as losses: rows and classes stay on their devices.

The operands and results of a `RowFunction` have one of four forms: "rows classes", "rows K", "classes K" or "rows".
"rows" stands for all leading axes. A `RowSharding` says which mesh axes shard rows and classes, and reduces partial
sums over devices:

- on one device, there are none;
- in `shard_map`, the caller names the mesh axes that shard classes, and JAX adds up gradients;
- on Explicit meshes types give the shardings, and on Auto meshes XLA does (`custom_partitioning.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import NamedSharding, PartitionSpec

from qshard.jax._ops import bind as ops
from qshard.jax._ops.custom_partitioning import call_partitionable, local, partitionable, specs_of
from qshard.jax._ops.mesh import (
    MeshAxes,
    MeshKind,
    assign_mesh_axes,
    assign_scatter,
    count_shards,
    mesh_of,
    names_of,
    sum_over,
    types_tell,
)
from qshard.jax._ops.second_derivatives import second_derivative_error


@dataclass(frozen=True)
class RowSharding:
    """The mesh axes that shard rows and classes.

    Attributes:
      classes: the mesh axes that shard classes.
      rows: the mesh axes that shard each axis of rows, if `own`.
      scattered: pairs (array axis, mesh axis). A "classes K" result, which sums over rows, is reduce-scattered along
        them, in addition to its sharding by `classes`.
      own: whether this module partitioned the arrays, so that XLA shards none of them and JAX reduces no gradients.
    """

    classes: MeshAxes = ()
    rows: tuple[MeshAxes, ...] = ()
    scattered: tuple[tuple[int, str], ...] = ()
    own: bool = False

    @property
    def ops(self) -> Any:
        """The ops for local arrays, or the ops that XLA partitions."""
        return local if self.own else ops

    def may_sum_over_devices(self, x: jax.Array) -> bool:
        """Return whether a sum over the rows of `x` may be one over devices, computed here or by XLA."""
        return any(self.rows) or not (self.own or MeshKind.of(x) is MeshKind.LOCAL)

    def first(self, columns: int) -> Any:
        """Return the index of the first class on this device, if each device has `columns` classes."""
        return lax.axis_index(self.classes) * columns if self.classes else 0

    def gathered(self, stats: jax.Array) -> jax.Array:
        """All-gather `stats` `[*rows, 4]` over the devices with other classes.

        The result is `[*rows, parts, 4]`, with the parts in order of the classes, and is equal on all these devices.
        """
        if not self.classes:
            return jnp.expand_dims(stats, -2)
        told = set(self.classes) <= jax.typeof(stats).manual_axis_type.varying
        to = "invarying" if told else "varying"
        parts: jax.Array = lax.all_gather(stats, self.classes, axis=stats.ndim - 1, to=to)
        return parts

    def of_losses(self, grad: jax.Array) -> jax.Array:
        """Return the gradient of losses that are replicated over the devices with other classes.

        Where types do not show that they are, JAX has divided the gradient among these devices, and `lax.psum` restores
        it.
        """
        return grad if self.own or types_tell(self.classes) else lax.psum(grad, self.classes)

    def of_x(self, made: jax.Array) -> jax.Array:
        """Sum a gradient of form "rows K" over the devices with other classes."""
        return lax.psum(made, self.classes) if self.own and self.classes else made

    def of_w(self, made: jax.Array) -> jax.Array:
        """Sum a gradient of form "classes K" over the devices with other rows."""
        scattered = {name for _, name in self.scattered}
        left = tuple(name for names in self.rows for name in names if name not in scattered)
        return sum_over(made, self.scattered, left)

    def spec(self, form: str, *, is_sum: bool = False) -> PartitionSpec:
        """Return the PartitionSpec of an array of this form. `is_sum`: the array is a result."""
        entries: list[MeshAxes] = []
        for word in form.split():
            entries += self.rows if word == "rows" else [self.classes if word == "classes" else ()]
        if is_sum and form == "classes K":
            entries = [(*own, *(name for at, name in self.scattered if at == i)) for i, own in enumerate(entries)]
        return PartitionSpec(*(names or None for names in entries))


@dataclass(frozen=True)
class RowFunction:
    """A function of rows, `body(options, sharding, *operands)`. Functions with equal options are equal.

    Attributes:
      op: the public function, for errors.
      body: returns the local results for a `RowSharding` and the local operands.
      options: the static options of a call, hashable.
      takes: the forms of the operands. The first operand has rows.
      gives: the forms of the results.
      xla_shards_rows: whether XLA can shard rows without a custom partitioning rule, as for ops.
    """

    op: str
    body: Callable[..., tuple[jax.Array, ...]]
    options: Any
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    xla_shards_rows: bool = False

    def __call__(self, sharding: RowSharding, *operands: jax.Array) -> tuple[jax.Array, ...]:
        return self.body(self.options, sharding, *operands)

    def __repr__(self) -> str:
        """Name `body` without its address: the text is in the keys of JAX's persistent cache (`partitionable`)."""
        body = f"{self.body.__module__}.{self.body.__qualname__}"
        return f"{self.op}{(body, self.options, self.takes, self.gives, self.xla_shards_rows)}"


def on_devices(
    function: RowFunction, classes: MeshAxes, *operands: jax.Array, spreads: bool = True
) -> tuple[jax.Array, ...]:
    """Run a row function on the rows and classes that each device has.

    The rules of gradients call it. Differentiating it raises. `classes` are the mesh axes of `shard_map` that shard
    classes. `spreads=False` leaves partitioning, and any gathers, to XLA.
    """

    @jax.custom_jvp
    def call(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return _spread(function, classes, operands) if spreads else function(RowSharding(classes), *operands)

    @call.defjvp
    def _(*_: Any) -> Any:
        raise second_derivative_error(function.op)

    made: tuple[jax.Array, ...] = call(*operands)
    return made


def _spread(function: RowFunction, classes: MeshAxes, operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    kind = MeshKind.of(operands[0])
    if kind is MeshKind.MIXED and not classes:
        _check_mixed(function, operands)
    if classes or kind in (MeshKind.LOCAL, MeshKind.MIXED):
        return function(RowSharding(classes), *operands)
    is_explicit = kind is MeshKind.EXPLICIT

    @custom_vmap
    def call(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return _explicit(function, (), *operands) if is_explicit else _auto(function, *operands)

    @call.def_vmap
    def _(size: int, batched: Sequence[bool], *operands: jax.Array) -> Any:
        """Add an axis of rows, unless results are sums over rows: each example has sums of its own."""
        flags = (True,) * len(function.gives)
        if not all(form.startswith("rows") for form in (*function.takes, *function.gives)):
            if is_explicit:
                return _map_examples(function, (tuple(batched),), *operands), flags
            axes = [0 if flag else None for flag in batched]
            return jax.vmap(functools.partial(function, RowSharding()), axes)(*operands), flags
        grown = [
            x if flag else jnp.broadcast_to(x, (size, *x.shape)) for x, flag in zip(operands, batched, strict=True)
        ]
        return _spread(function, (), grown), flags

    made: tuple[jax.Array, ...] = call(*operands)
    return made


def _check_mixed(function: RowFunction, operands: Sequence[jax.Array]) -> None:
    """Raise ValueError if a mesh with axes of several kinds shards an array in a way that XLA would gather."""
    for form, x in zip(function.takes, operands, strict=True):
        sharding = jax.typeof(x).sharding
        words = ["rows"] * (x.ndim - len(form.split()) + 1) + form.split()[1:] if "rows" in form else form.split()
        for word, entry in zip(words, sharding.spec, strict=True):
            if not (function.xla_shards_rows and word == "rows") and any(
                sharding.mesh.shape[name] > 1 for name in names_of(entry)
            ):
                raise ValueError(
                    f"{function.op}: {word} of {x.shape} are sharded over {entry!r} of a mesh with mixed axis types, "
                    f"{sharding.mesh.axis_types}; enter shard_map over all of its axes, and pass axis_name for classes"
                )


Levels = tuple[tuple[bool, ...], ...]
"""For each enclosing `vmap`, outermost first: which operands have its axis, among their leading axes."""


def _map_examples(function: RowFunction, levels: Levels, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """Run `function` on each example, on Explicit meshes. All results have the axes of all `levels`."""

    @custom_vmap
    def call(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return _explicit(function, levels, *operands)

    @call.def_vmap
    def _(size: int, batched: Sequence[bool], *operands: jax.Array) -> Any:
        return _map_examples(function, (tuple(batched), *levels), *operands), (True,) * len(function.gives)

    made: tuple[jax.Array, ...] = call(*operands)
    return made


def _explicit(function: RowFunction, levels: Levels, *operands: jax.Array) -> tuple[jax.Array, ...]:
    types = [jax.typeof(x) for x in operands]
    mesh, specs = mesh_of(operands[0]), [tuple(own.sharding.spec) for own in types]
    leads = [sum(level[i] for level in levels) for i in range(len(operands))]
    examples = _names_of_examples(levels, specs)
    specs = [spec[lead:] for spec, lead in zip(specs, leads, strict=True)]
    wanted = specs[function.takes.index("classes K")] if "classes K" in function.gives else ()
    shapes = [own.shape[lead:] for own, lead in zip(types, leads, strict=True)]
    sharding = _row_sharding(
        function, mesh.shape, shapes, specs, wanted, used={name for names in examples for name in names}
    )
    takes = []
    for i, form in enumerate(function.takes):
        own = [names or None for names, level in zip(examples, levels, strict=True) if level[i]]
        takes.append(PartitionSpec(*own, *sharding.spec(form)))
    every = [names or None for names in examples]
    gives = tuple(PartitionSpec(*every, *sharding.spec(form, is_sum=True)) for form in function.gives)
    local: Callable[..., Any] = functools.partial(function, sharding)
    for level in reversed(levels):
        local = jax.vmap(local, [0 if flag else None for flag in level])
    # Nothing is differentiated, so varying types are not needed.
    run = jax.shard_map(local, mesh=mesh, in_specs=tuple(takes), out_specs=gives, check_vma=False)
    resharded = [jax.sharding.reshard(x, NamedSharding(mesh, spec)) for x, spec in zip(operands, takes, strict=True)]
    made: tuple[jax.Array, ...] = run(*resharded)
    return made


def _names_of_examples(levels: Levels, specs: Sequence[Sequence[Any]]) -> list[MeshAxes]:
    """Return the mesh axes that shard the examples of each `vmap`."""
    found: list[MeshAxes] = []
    for depth, level in enumerate(levels):
        names: MeshAxes = ()
        for i, flag in enumerate(level):
            if flag and not names:
                names = names_of(specs[i][sum(outer[i] for outer in levels[:depth])])
        found.append(names)
    return found


def _auto(function: RowFunction, *operands: jax.Array) -> tuple[jax.Array, ...]:
    plain = functools.partial(function, RowSharding())
    return tuple(call_partitionable(_partitionable(function, operands[0].ndim), plain, function, *operands))


@functools.lru_cache(maxsize=1024)
def _partitionable(function: RowFunction, ndim: int) -> Callable[..., Any]:
    """Return `function` with a custom partitioning rule, for a first operand with `ndim` axes."""
    rows = ndim - len(function.takes[0].split()) + 1

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        specs = specs_of(function.op, (*operands, *results))
        wanted = specs[len(operands) + function.gives.index("classes K")] if "classes K" in function.gives else ()
        sharding = _row_sharding(
            function, dict(mesh.shape), [x.shape for x in operands], specs[: len(operands)], wanted
        )
        takes = tuple(NamedSharding(mesh, sharding.spec(form)) for form in function.takes)
        gives = tuple(NamedSharding(mesh, sharding.spec(form, is_sum=True)) for form in function.gives)
        return mesh, functools.partial(function, sharding), gives, takes

    lead = " ".join(f"r{i}" for i in range(rows))
    # K has a different letter in each form, so that Shardy does not propagate the sharding of one K to the other.
    factors = {"rows": lead, "rows classes": f"{lead} c", "rows K": f"{lead} k", "classes K": "c h"}
    sides = [[factors[form] for form in forms] for forms in (function.takes, function.gives)]
    whole = functools.partial(function, RowSharding(own=True))
    return partitionable(whole, partition, " -> ".join(", ".join(side) for side in sides))


def _row_sharding(
    function: RowFunction,
    mesh: Mapping[str, int],
    shapes: Sequence[Any],
    specs: Sequence[Any],
    wanted: Any,
    used: Collection[str] = (),
) -> RowSharding:
    """Choose the mesh axes that shard rows and classes.

    Mesh axes that shard rows of the operands stay. Mesh axes that shard classes stay, unless they shard rows too, or
    are in `used` because they shard something else already. `wanted` is the requested sharding of a "classes K" result.
    """
    entries = [(*spec, *[None] * (len(s) - len(spec))) for spec, s in zip(specs, shapes, strict=True)]
    count = len(shapes[0]) - len(function.takes[0].split()) + 1
    having = next(i for i, form in enumerate(function.takes) if "classes" in form)
    places = [
        *((0, axis) for axis in range(count)),
        (having, count if function.takes[having].startswith("rows") else 0),
    ]
    requests = [(names_of(entries[i][axis]), shapes[i][axis], 1) for i, axis in places]
    *rows, classes = assign_mesh_axes(mesh, requests, used)
    left = [shapes[having][0] // count_shards(mesh, classes), *shapes[having][1:]]
    scattered = assign_scatter(mesh, wanted, left, [name for names in rows for name in names])
    return RowSharding(classes, tuple(rows), scattered, own=True)
