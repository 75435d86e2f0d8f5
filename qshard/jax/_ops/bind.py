"""The ops of `ffi/ops.def` as functions of JAX arrays, such as `cast_tensor(x, scale, element="float8_e4m3fn")`.

The class `Op` implements all of them. An op works eagerly, under `jit` on Auto and Explicit meshes, in `shard_map` with
`check_vma`, under `vmap`, remat and export, because XLA itself can partition it:

- its FFI target is *batch partitionable*: XLA runs the handler on shards of the first `num_batch_dims` axes, which all
  its buffers share, and gathers an operand that is sharded along a later axis;
- a Shardy rule, derived from the op's axis pattern, propagates shardings through it.

So a caller views its operands such that the axes that may be sharded are leading axes of all of them
(`partitionable_ops.py`). A plain `jax.ffi.ffi_call` would silently gather a sharded operand.

A transposed result shares no leading axis with its operand. The primitive gives the result the logical axes of the
operand, and a *layout* that transposes its memory. The `jnp.transpose` that follows is free.

Sources: Shardy, `sdy.op_sharding_rule`; `_jax_internals.partitioning_attributes`. Tests check both.

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
from qshard.jax._ops.mesh import count_shards, may_be_sharded, names_of, reshape
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
    """Register FFI handlers with XLA.

    Importing this module registers the handlers of the extension. To compile for a GPU on a machine without one, the
    targets must exist, but they do not run: register the CPU handlers as "CUDA".

    Args:
      platform: "cpu" or "CUDA".
      handlers: a capsule for each op name.
    """
    for name, handler in handlers.items():
        jax.ffi.register_ffi_target(target_of(name), handler, platform=platform)
    if handlers:
        _registered.add(platform.lower())


def target_of(name: str) -> str:
    return f"qshard_{name}"


def disabled_checks() -> list[jax.export.DisabledSafetyCheck]:
    """Return the argument `disabled_checks` of `jax.export.export` for programs with ops of qshard.

    Without it, an export refuses custom calls that JAX does not know. The process that loads the program must import
    qshard.jax, which registers the targets, in a version with the same ops.

    Returns:
      One entry for each FFI target of qshard.

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
    """An op of the table as a JAX primitive and a function of arrays.

    All options are static: the attributes of the op; `dtype`, if the result may have any float dtype; `split`, which is
    derived from the shapes; and `may_shard`, whether XLA may shard operands, which is derived from the mesh.

    The primitive takes and returns arrays in the logical order of their factors (`qshard.op_table.Binding`): axes that
    XLA may shard come first. Layouts keep the memory in the order of the op's pattern, so on GPUs the reshapes and
    transposes around the primitive cost nothing. Where nothing can be sharded, buffers are passed unchanged. The
    primitive has one more parameter, `shapes`: the shapes of the operands in the order of the pattern. The handler gets
    the attributes only.
    """

    def __init__(self, spec: OpSpec, in_place: Mapping[int, int] | None = None):
        """Create the primitive of `spec`. `in_place` gives, for an operand, the result that may reuse its memory."""
        self.spec = spec
        self._in_place = dict(in_place or {})
        first = spec.inputs[0].terms
        self._has_leading_axes = spec.inputs[0].has_leading_axes
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
        """Run the op.

        Args:
          operands: arrays or numbers, in the order of the op's row.
          options: the attributes of the op, and the other options of this class.

        Returns:
          An array, or a tuple of arrays if the op has several results.

        Raises:
          ValueError: shapes do not fit the pattern of the op, or an Explicit mesh splits a block.
          TypeError: a dtype or an attribute is not one that the op takes.
          NotImplementedError: qshard was built without kernels for the device.
        """
        arrays = [jnp.asarray(operand) for operand in operands]
        for operand, array in zip(self.spec.inputs, arrays, strict=False):
            check_sizes(self.spec.name, operand.name, array.shape)
        options.setdefault("may_shard", may_be_sharded(arrays[0]))
        if not self._elementwise or not 0 < arrays[0].ndim == self._bind(arrays, options).lead:
            return self._call_views(arrays, options)
        # XLA does not shard the last axis of an op, even if all axes are leading ones. So append an axis of size 1.
        star = self.spec.inputs[0].terms
        wider = [a[..., None] if o.terms == star else a for a, o in zip(arrays, self.spec.inputs, strict=True)]
        return jax.tree.map(lambda result: result[..., 0], self._call_views(wider, options))

    def _call_views(self, arrays: Sequence[jax.Array], options: dict[str, Any]) -> Any:
        """Run the op on the primitive's view of the operands, and return results in the shapes of the pattern."""
        shapes = tuple(a.shape for a in arrays)
        binding = self._bind(arrays, options)
        if self.spec.splits and options.setdefault("split", binding.split) != binding.split:
            raise ValueError(f"{self.spec.name}: split ({options['split']}) does not match {shapes}; leave it out")
        logical = list(map(self._split_factors, self.spec.inputs, arrays, binding.inputs))
        results = self._primitive.bind(*_alike(logical, binding), shapes=shapes, **options)
        patterned = tuple(map(_join_factors, results, binding.outputs))
        return patterned if len(patterned) > 1 else patterned[0]

    def _split_factors(self, operand: Operand, array: jax.Array, view: View) -> jax.Array:
        """View an operand with one axis for each factor, in logical order."""
        if all(len(axis) == 1 for axis in view.axes):
            return array if view.order == tuple(range(array.ndim)) else jnp.transpose(array, _inverse(view.order))
        sharding = jax.typeof(array).sharding
        entries = []
        for size, axis, entry in zip(array.shape, view.axes, sharding.spec, strict=True):
            shards = count_shards(sharding.mesh.shape, names_of(entry))
            if len(axis) > 1 and axis[0].size % shards:
                raise ValueError(
                    f"{self.spec.name}: {operand.name} {array.shape} has an axis of {size} in {shards} shards, not a "
                    f"whole number of blocks of {size // axis[0].size}; shard it on block boundaries"
                )
            entries.extend([entry, *[None] * (len(axis) - 1)])
        sizes = [factor.size for axis in view.axes for factor in axis]
        return jnp.transpose(reshape(array, sizes, entries), _inverse(view.order))

    def _bind(
        self, arrays: Sequence[Any], options: Mapping[str, Any], shapes: Sequence[tuple[int, ...]] | None = None
    ) -> Binding:
        """Bind operands and options to the row of the op.

        `shapes` gives the shapes in the order of the pattern, if `arrays` are the primitive's view.
        """
        shapes = [a.shape for a in arrays] if shapes is None else shapes
        given = {name: value for name, value in options.items() if name not in ("may_shard", "dtype", "split")}
        dtypes = [str(a.dtype) for a in arrays]
        return self.spec.bind(shapes, dtypes, given, options.get("dtype"), may_shard=options["may_shard"])

    def _type(self, *avals: Any, shapes: tuple[tuple[int, ...], ...], **options: Any) -> tuple[Any, ...]:
        binding = self._bind(avals, options, shapes)
        entries = _entries(avals[0], binding)
        # `update` keeps the manual axes over which the operand varies, which a ShapeDtypeStruct lacks.
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
        if devices > 1 and not options["may_shard"] and all(mesh.empty for mesh in meshes):
            raise ValueError(
                f"{self.spec.name}: operands are compiled for {devices} without a mesh, and XLA would gather all of "
                "them; trace within jax.set_mesh(mesh)"
            )
        binding = self._bind(ctx.avals_in, options, shapes)
        batch_dims = min(binding.lead, max(0, ctx.avals_in[0].ndim - 1))
        rule = jax.ffi.ffi_lowering(
            target_of(self.spec.name),
            # A layout lists axes from minor to major.
            operand_layouts=[view.order[::-1] for view in binding.inputs],
            result_layouts=[view.order[::-1] for view in binding.outputs],
            operand_output_aliases=self._in_place,
            extra_attributes=partitioning_attributes(batch_dims, shardy_rule(binding)),
        )
        attributes = {name: encode_attribute(v) for name, v in options.items() if name not in ("may_shard", "dtype")}
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
            return _loop(functools.partial(self._primitive.bind, shapes=shapes, **options), operands, axes)
        size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
        grow = [operand.has_leading_axes for operand in self.spec.inputs]  # Other operands serve all examples.
        if any(axis is not None and not grows for axis, grows in zip(axes, grow, strict=True)):
            fixed = next(o.name for o, grows in zip(self.spec.inputs, grow, strict=True) if not grows)
            raise NotImplementedError(f"{self.spec.name}: {fixed} cannot be batched by vmap; use jax.lax.map")
        moved = [
            x if not grows else jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
            for x, axis, grows in zip(operands, axes, grow, strict=True)
        ]
        options |= {name: options.get(name, 0) + 1 for name in ("batch", "lead") if name in self.spec.attributes}
        # These attributes describe the operands of one example.
        options = {name: value for name, value in options.items() if name not in ("shared", "transposed")}
        shapes = tuple((size, *shape) if grows else shape for shape, grows in zip(shapes, grow, strict=True))
        results = self._primitive.bind(*_alike(moved, self._bind(moved, options, shapes)), shapes=shapes, **options)
        return results, (0,) * len(results)

    def _run(self, *operands: Any, **options: Any) -> Any:
        return run_jitted(_jit(self._primitive, tuple(sorted(options.items()))), *operands)

    def _differentiate(self, *_: Any, **__: Any) -> Any:
        raise second_derivatives.op_derivative_error(self.spec.name)


@functools.cache
def bind(spec: OpSpec) -> Op:
    """Return the function of an op, and create its primitive once."""
    return Op(spec)


def __getattr__(name: str) -> Op:
    if name.startswith("_") or name not in table():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return bind(table()[name])


def _loop(bind: Callable[..., Any], operands: Sequence[Any], axes: Sequence[int | None]) -> Any:
    """Run an op without leading axes once for each example, as the rule of `vmap`."""
    mapped = [jnp.moveaxis(x, axis, 0) for x, axis in zip(operands, axes, strict=True) if axis is not None]

    def one(examples: list[jax.Array]) -> Any:
        each = iter(examples)
        return bind(*(x if axis is None else next(each) for x, axis in zip(operands, axes, strict=True)))

    results = lax.map(one, mapped)
    return results, (0,) * len(results)


@functools.cache
def _jit(primitive: Primitive, options: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    return jax.jit(functools.partial(primitive.bind, **dict(options)))


def run_jitted(function: Callable[..., Any], *operands: Any) -> Any:
    """Call a jitted function that binds a primitive, as the eager implementation of the primitive.

    `jit` stays enabled under `jax.disable_jit()`. Otherwise it would call the primitive eagerly again, without end.
    """
    if not jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        return function(*operands)
    with jax.disable_jit(False):
        return function(*operands)


def encode_attribute(value: Any) -> Any:
    """Return an attribute in the type that handlers decode: float32 or int64.

    Under x64, JAX would encode a Python float as float64.
    """
    if isinstance(value, bool | str):
        return value
    return np.float32(value) if isinstance(value, float) else np.int64(value)


def shardy_rule(binding: Binding) -> str:
    """Return the op's rule in Shardy's notation: each factor has a letter, in order of first use, and a size.

    A factor that no result has must be replicated. A front end that shards it reduces the amaxes itself.
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
    """Return the mesh axes of each factor, from the sharding of the first operand."""
    return dict(zip(binding.inputs[0].factors, aval.sharding.spec, strict=True))


def _sharding_of(aval: Any, entries: Mapping[Factor, Any], view: View) -> NamedSharding:
    return NamedSharding(aval.sharding.mesh, PartitionSpec(*(entries.get(factor) for factor in view.factors)))


def _alike(arrays: Sequence[jax.Array], binding: Binding) -> list[jax.Array]:
    """Return the operands, varying over the same manual axes, and on Explicit meshes sharded like the first one."""
    first = jax.typeof(arrays[0])
    entries = _entries(first, binding)
    varying = frozenset().union(*(jax.typeof(a).manual_axis_type.varying for a in arrays))
    alike = []
    for array, view in zip(arrays, binding.inputs, strict=True):
        own = jax.typeof(array)
        if missing := tuple(sorted(varying - own.manual_axis_type.varying)):
            array = lax.pcast(array, missing, to="varying")
        sharding = _sharding_of(first, entries, view)
        alike.append(array if own.sharding.spec == sharding.spec else jax.sharding.reshard(array, sharding))
    return alike


def _join_factors(result: jax.Array, view: View) -> jax.Array:
    """Reshape a result to its pattern: each axis is the product of its factors. The memory stays as it is."""
    entries = dict(zip(view.factors, jax.typeof(result).sharding.spec, strict=True))
    sizes = [math.prod(factor.size for factor in axis) for axis in view.axes]
    return reshape(jnp.transpose(result, view.order), sizes, [entries[axis[0]] for axis in view.axes])


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(i) for i in range(len(order))]
