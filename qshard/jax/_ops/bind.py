"""Every op of `ffi/ops.def` as a function of JAX arrays: `cast_tensor(x, scale, element="float8_e4m3fn")`.

One class makes them all. An op works eagerly, under `jit` on Auto and Explicit meshes, in `shard_map` with sound types,
under `vmap`, remat and export, because XLA itself can cut it:

- its FFI target is *batch partitionable*: XLA runs the handler on shards of the first `num_batch_dims` axes, which all
  its buffers have in common, and gathers what is cut along later axes;
- a Shardy rule, made from the op's axis pattern, carries shardings through it.

So a caller views its operands such that what may be cut is a leading axis of all of them (`partitionable_ops.py`). A
plain `jax.ffi.ffi_call` would gather a sharded operand, silently.

A transposed result has no leading axis in common with its operand. The primitive gives it the operand's logical axes,
and a *layout* that transposes its memory. The `jnp.transpose` that follows is free.

Sources: Shardy, `sdy.op_sharding_rule`; `_jax_internals.partitioning_attributes`. Tests pin both.

>>> import jax.numpy as jnp
>>> from qshard.jax import ops
>>> ops.cast_tensor(jnp.array([0.3, 1000.0]), jnp.float32(2), element="float8_e4m3fn")
Array([0.625, 448], dtype=float8_e4m3fn)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from qshard import _ffi
from qshard.jax._jax_internals import device_count, partitioning_attributes, platforms_of
from qshard.jax._ops import second_derivatives
from qshard.jax._ops.mesh import may_be_sharded, names_of, reshape
from qshard.jax._ops.validation import check_sizes
from qshard.op_table import Binding, Factor, Operand, OpSpec, View, multi_table, table

__all__ = [
    "Op",
    "bind",
    "disabled_checks",
    "encode_attribute",
    "register_handlers",
    "run_jitted",
    "target_of",
]

_registered: set[str] = set()


def register_handlers(platform: str, handlers: Mapping[str, Any]) -> None:
    """Registers handlers, `{op name: capsule}`, with XLA for platform "cpu" or "CUDA".

    Importing this module registers what the extension was built with. To compile for a GPU on a machine without one,
    the targets must exist, and are not run: register those of the CPU as "CUDA".
    """
    for name, handler in handlers.items():
        jax.ffi.register_ffi_target(target_of(name), handler, platform=platform)
    if handlers:
        _registered.add(platform.lower())


def target_of(name: str) -> str:
    """The name of an op among XLA's targets."""
    return f"qshard_{name}"


def disabled_checks() -> list[jax.export.DisabledSafetyCheck]:
    """What `jax.export.export(disabled_checks=)` takes, for programs with ops of qshard: all of their targets.

    Without it an export refuses custom calls that JAX does not know. Whoever loads the program needs `import
    qshard.jax`, which registers them, of a version with the same ops.

    >>> from qshard.jax import linear
    >>> step = jax.jit(lambda x, w: linear(x, w, "MXFP8"))
    >>> exported = jax.export.export(step, disabled_checks=disabled_checks())(jnp.ones((8, 32)), jnp.ones((32, 32)))
    >>> jax.export.deserialize(exported.serialize()).call(jnp.ones((8, 32)), jnp.ones((32, 32)))[0, 0]
    Array(32., dtype=float32)
    """
    names = dict.fromkeys((*table(), *multi_table()))
    return [jax.export.DisabledSafetyCheck.custom_call(target_of(name)) for name in names]


register_handlers("cpu", _ffi.handlers("cpu"))
register_handlers("CUDA", _ffi.handlers("cuda"))


class Op:
    """An op of the table as a function of arrays.

    Options are all static: the op's attributes; `dtype`, where the op gives any float; `split`, which is found from
    the shapes; and `cuttable`, whether XLA may cut operands, which is found from the mesh.

    The primitive takes and gives arrays in the logical order of their factors (`qshard.op_table.Binding`), in which
    those that XLA may cut lead, with layouts that keep the memory in the order of the op's patterns. So XLA for GPUs
    makes nothing of the reshapes and transposes around it. Two parameters are not options: `shapes`, of the operands by
    pattern, and `cuttable`. Where nothing can be cut, buffers go in as they are.
    """

    def __init__(self, spec: OpSpec, in_place: Mapping[int, int] | None = None):
        """Makes a primitive. `in_place`: by operand, the result that may take over its memory."""
        self.spec = spec
        self._in_place = dict(in_place or {})
        first = spec.inputs[0].terms
        self._has_leading_axes = isinstance(first[0], str)
        alike = {operand.terms for operand in spec.inputs} - {("...",)} | {operand.terms for operand in spec.outputs}
        self._elementwise = alike == {first[:1]} and self._has_leading_axes
        jax.ffi.register_ffi_target_as_batch_partitionable(target_of(spec.name))
        self._primitive = Primitive(target_of(spec.name))
        self._primitive.multiple_results = True
        self._primitive.def_impl(self._run)
        self._primitive.def_abstract_eval(self._type)
        mlir.register_lowering(self._primitive, self._lower)
        batching.primitive_batchers[self._primitive] = self._batch
        ad.primitive_jvps[self._primitive] = self._differentiate

    def __repr__(self) -> str:
        return f"<op {self.spec.name}>"

    def __call__(self, *operands: jax.typing.ArrayLike, **options: Any) -> Any:
        """Runs the op: gives an array, or a tuple of them.

        Raises:
          ValueError: shapes do not fit the pattern of the op, or an Explicit mesh cuts an axis inside a block.
          TypeError: a dtype or an attribute is not what it takes.
          NotImplementedError: qshard was built without kernels for the device.
        """
        arrays = [jnp.asarray(operand) for operand in operands]
        for operand, array in zip(self.spec.inputs, arrays, strict=False):
            check_sizes(self.spec.name, operand.name, array.shape)
        options.setdefault("cuttable", may_be_sharded(arrays[0]))
        if not self._elementwise or not 0 < arrays[0].ndim == self._bound(arrays, options).lead:
            return self._patterned(arrays, options)
        # XLA does not cut the last axis of an op that it could cut along every axis, so there is one of size 1.
        star = self.spec.inputs[0].terms
        wider = [a[..., None] if o.terms == star else a for a, o in zip(arrays, self.spec.inputs, strict=True)]
        return jax.tree.map(lambda result: result[..., 0], self._patterned(wider, options))

    def _patterned(self, arrays: Sequence[jax.Array], options: dict[str, Any]) -> Any:
        """`__call__`, with the primitive's view of operands and results made around it."""
        shapes = tuple(a.shape for a in arrays)
        binding = self._bound(arrays, options)
        if self.spec.splits and options.setdefault("split", binding.split) != binding.split:
            raise ValueError(f"{self.spec.name}: split ({options['split']}) does not match {shapes}; leave it out")
        logical = list(map(self._factored, self.spec.inputs, arrays, binding.inputs))
        results = self._primitive.bind(*_alike(logical, binding), shapes=shapes, **options)
        patterned = tuple(map(_join_factors, results, binding.outputs))
        return patterned if len(patterned) > 1 else patterned[0]

    def _factored(self, operand: Operand, array: jax.Array, view: View) -> jax.Array:
        """An operand with its factors as axes, in their logical order."""
        if all(len(axis) == 1 for axis in view.axes):
            return array if view.order == tuple(range(array.ndim)) else jnp.transpose(array, _inverse(view.order))
        sharding = jax.typeof(array).sharding
        entries = []
        for size, axis, entry in zip(array.shape, view.axes, sharding.spec, strict=True):
            shards = math.prod(sharding.mesh.shape[name] for name in names_of(entry))
            if len(axis) > 1 and axis[0].size % shards:
                raise ValueError(
                    f"{self.spec.name}: {operand.name} {array.shape} has an axis of {size} in {shards} shards, not a "
                    f"whole number of blocks of {size // axis[0].size}; shard it on block boundaries"
                )
            entries.extend([entry, *[None] * (len(axis) - 1)])
        sizes = [factor.size for axis in view.axes for factor in axis]
        return jnp.transpose(reshape(array, sizes, entries), _inverse(view.order))

    def _bound(
        self, arrays: Sequence[Any], options: Mapping[str, Any], shapes: Sequence[tuple[int, ...]] | None = None
    ) -> Binding:
        """What follows from operands and options. `shapes`: by pattern, if `arrays` are the primitive's view."""
        shapes = [a.shape for a in arrays] if shapes is None else shapes
        given = {name: value for name, value in options.items() if name not in ("cuttable", "dtype", "split")}
        dtypes = [str(a.dtype) for a in arrays]
        return self.spec.bind(shapes, dtypes, given, options.get("dtype"), cuttable=options["cuttable"])

    def _type(self, *avals: Any, shapes: tuple[tuple[int, ...], ...], **options: Any) -> tuple[Any, ...]:
        binding = self._bound(avals, options, shapes)
        entries = _entries(avals[0], binding)
        # `update` keeps of the operand's type what a ShapeDtypeStruct lacks: the manual axes over which it varies.
        return tuple(
            avals[0].update(
                shape=tuple(factor.size for factor in view.factors),
                dtype=jnp.dtype(dtype),
                weak_type=False,
                sharding=_sharding_of(avals[0], entries, view),
            )
            for (_, dtype), view in zip(binding.results, binding.outputs, strict=True)
        )

    def _lower(self, ctx: Any, *operands: Any, shapes: tuple[tuple[int, ...], ...], **options: Any) -> Any:
        missing = sorted(set(platforms_of(ctx)) - _registered)
        if missing:
            raise NotImplementedError(
                f"{self.spec.name}: this build of qshard has no kernels for {', '.join(missing)}; install a build with "
                "CUDA, or run on the CPU"
            )
        devices = device_count(ctx)
        meshes = (ctx.avals_in[0].sharding.mesh, jax.sharding.get_abstract_mesh())
        if devices > 1 and not options["cuttable"] and all(mesh.empty for mesh in meshes):
            raise ValueError(
                f"{self.spec.name}: operands are compiled for {devices} without a mesh, and XLA would gather all of "
                "them; trace within jax.set_mesh(mesh)"
            )
        binding = self._bound(ctx.avals_in, options, shapes)
        batch_dims = min(binding.lead, max(0, ctx.avals_in[0].ndim - 1))
        rule = jax.ffi.ffi_lowering(
            target_of(self.spec.name),
            # Layouts here run from minor to major.
            operand_layouts=[view.order[::-1] for view in binding.inputs],
            result_layouts=[view.order[::-1] for view in binding.outputs],
            operand_output_aliases=self._in_place,
            extra_attributes=partitioning_attributes(batch_dims, shardy_rule(binding)),
        )
        attributes = {name: encode_attribute(v) for name, v in options.items() if name not in ("cuttable", "dtype")}
        return rule(ctx, *operands, **attributes)

    def _batch(
        self,
        operands: Sequence[Any],
        axes: Sequence[int | None],
        *,
        shapes: tuple[tuple[int, ...], ...],
        **options: Any,
    ) -> Any:
        if not self._has_leading_axes:
            raise NotImplementedError(f"{self.spec.name}: cannot be batched by vmap; use jax.lax.map")
        size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
        grow = [isinstance(operand.terms[0], str) for operand in self.spec.inputs]  # Others are one for all.
        if any(axis is not None and not grows for axis, grows in zip(axes, grow, strict=True)):
            fixed = next(o.name for o, grows in zip(self.spec.inputs, grow, strict=True) if not grows)
            raise NotImplementedError(f"{self.spec.name}: {fixed} cannot be batched by vmap; use jax.lax.map")
        moved = [
            x if not grows else jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
            for x, axis, grows in zip(operands, axes, grow, strict=True)
        ]
        options |= {name: options.get(name, 0) + 1 for name in ("batch", "lead") if name in self.spec.attributes}
        # What one call says of its operands does not hold for many.
        options = {name: value for name, value in options.items() if name not in ("shared", "turned")}
        shapes = tuple((size, *shape) if grows else shape for shape, grows in zip(shapes, grow, strict=True))
        results = self._primitive.bind(*_alike(moved, self._bound(moved, options, shapes)), shapes=shapes, **options)
        return results, (0,) * len(results)

    def _run(self, *operands: Any, **options: Any) -> Any:
        return run_jitted(_jit(self._primitive, tuple(sorted(options.items()))), *operands)

    def _differentiate(self, *_: Any, **__: Any) -> Any:
        raise second_derivatives.of_op(self.spec.name)


@functools.cache
def bind(spec: OpSpec) -> Op:
    """The function of an op, and its primitive, made once."""
    return Op(spec)


def __getattr__(name: str) -> Op:
    if name.startswith("_") or name not in table():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return bind(table()[name])


@functools.cache
def _jit(primitive: Primitive, options: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    return jax.jit(functools.partial(primitive.bind, **dict(options)))


def run_jitted(function: Callable[..., Any], *operands: Any) -> Any:
    """Calls a jitted function that binds a primitive, as an eager call of the primitive: under `jax.disable_jit()` too.

    There `jit` would call the primitive eagerly again, and again.
    """
    if not jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        return function(*operands)
    with jax.disable_jit(False):
        return function(*operands)


def encode_attribute(value: Any) -> Any:
    """An attribute as handlers decode it: in the width of NumPy, as a Python float has 64 bits under x64."""
    if isinstance(value, bool | str):
        return value
    return np.float32(value) if isinstance(value, float) else np.int64(value)


def shardy_rule(binding: Binding) -> str:
    """The rule in Shardy's notation: a letter for each factor, in the order in which they appear, and its size.

    What a result lacks is never cut: a front end that has it in shards reduces their amaxes itself.
    """
    views = (*binding.inputs, *binding.outputs)
    letters = {factor: _letter(i) for i, factor in enumerate(dict.fromkeys(f for view in views for f in view.factors))}
    sides = [
        ", ".join(f"[{', '.join(letters[factor] for factor in view.factors)}]" for view in side)
        for side in (binding.inputs, binding.outputs)
    ]
    sizes = ", ".join(f"{letter}={factor.size}" for factor, letter in letters.items())
    whole = ", ".join(letter for factor, letter in letters.items() if factor in binding.reduced)
    whole = f" need_replication={{{whole}}}" if whole else ""
    return f"#sdy.op_sharding_rule<({sides[0]})->({sides[1]}) {{{sizes}}}{whole}, custom>"


def _letter(index: int) -> str:
    return "ijklmnopqrstuvwxyz"[index] if index < 18 else f"z_{index - 17}"


def _entries(aval: Any, binding: Binding) -> dict[Factor, Any]:
    """Mesh axes by factor, as the first operand is cut."""
    return dict(zip(binding.inputs[0].factors, aval.sharding.spec, strict=True))


def _sharding_of(aval: Any, entries: Mapping[Factor, Any], view: View) -> NamedSharding:
    """The sharding of an operand or result, on the mesh of `aval`."""
    return NamedSharding(aval.sharding.mesh, PartitionSpec(*(entries.get(factor) for factor in view.factors)))


def _alike(arrays: Sequence[jax.Array], binding: Binding) -> list[jax.Array]:
    """The operands, all varying over the same manual axes, and on Explicit meshes cut as the first one is."""
    first = jax.typeof(arrays[0])
    entries = _entries(first, binding)
    varying = frozenset().union(*(jax.typeof(a).manual_axis_type.varying for a in arrays))
    alike = []
    for array, view in zip(arrays, binding.inputs, strict=True):
        own = jax.typeof(array)
        if missing := tuple(sorted(varying - own.manual_axis_type.varying)):
            array = lax.pcast(array, missing, to="varying")
        cut = _sharding_of(first, entries, view)
        alike.append(array if own.sharding.spec == cut.spec else jax.sharding.reshard(array, cut))
    return alike


def _join_factors(result: jax.Array, view: View) -> jax.Array:
    """A result by its pattern: the memory as it is, each axis the product of its factors."""
    entries = dict(zip(view.factors, jax.typeof(result).sharding.spec, strict=True))
    sizes = [math.prod(factor.size for factor in axis) for axis in view.axes]
    return reshape(jnp.transpose(result, view.order), sizes, [entries[axis[0]] for axis in view.axes])


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(i) for i in range(len(order))]
