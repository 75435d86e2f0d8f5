"""Every op of `ffi/ops.def` as a function of JAX arrays: `cast_tensor(x, scale, element="float8_e4m3fn")`.

One class makes them all. An op works eagerly, under `jit` on Auto and Explicit meshes, in `shard_map` with sound types,
under `vmap`, remat and export, because XLA itself can cut it:

- its FFI target is *batch partitionable*: XLA runs the handler on shards of the first `num_batch_dims` axes, which all
  its buffers have in common, and gathers what is cut along later axes;
- a Shardy rule, made from the op's axis pattern, carries shardings through it.

So a caller views its operands such that what may be cut is a leading axis of all of them (`runs.py`). A plain
`jax.ffi.ffi_call` would gather a sharded operand, silently.

A transposed result has no leading axis in common with its operand. The primitive gives it the operand's logical axes,
and a *layout* that transposes its memory. The `jnp.transpose` that follows is free.

Sources: Shardy, `sdy.op_sharding_rule`. The frontend attribute `num_batch_dims` is not documented: JAX's own LAPACK
calls are cut by it. Tests pin both.

>>> import jax.numpy as jnp
>>> from qshard.jax import ops
>>> ops.cast_tensor(jnp.array([0.3, 1000.0]), jnp.float32(2), element="float8_e4m3fn")
Array([0.625, 448], dtype=float8_e4m3fn)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from qshard import _ffi
from qshard.ops import Axes, Binding, Factor, OpSpec, table

__all__ = ["Op", "bind", "encoded", "may_be_cut", "names_of", "register_handlers", "target_of"]

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


register_handlers("cpu", _ffi.handlers("cpu"))
register_handlers("CUDA", _ffi.handlers("cuda"))


class Op:
    """An op of the table as a function of arrays.

    Options are all static: the op's attributes, of which `split` is found from the shapes; `dtype`, where the op gives
    any float; and numbers of axes that shapes leave open (`OpSpec.open_axes`).

    The primitive takes and gives arrays in the logical order of their factors (`qshard.ops.Binding`), in which those
    that XLA may cut lead, with layouts that keep the memory in the order of the op's patterns. So XLA for GPUs makes
    nothing of the reshapes and transposes around it. Two parameters are not options: `shapes`, of the operands by
    pattern, and `cuttable`. Where nothing can be cut, buffers go in as they are.
    """

    def __init__(self, spec: OpSpec, in_place: Mapping[int, int] | None = None):
        """Makes a primitive. `in_place`: by operand, the result that may take over its memory."""
        self.spec = spec
        self._in_place = dict(in_place or {})
        terms = [term for operand in spec.inputs for term in operand.terms]
        sizes = {name for term in terms for name in ((term[1:],) if isinstance(term, str) else term)} | {"lead"}
        self._idle = sizes - {*spec.attributes, *spec.open_axes}  # Options that shapes make redundant.
        first = spec.inputs[0].terms[0]
        self._leading_axes = first[1:] if isinstance(first, str) else None
        alike = {operand.terms for operand in spec.inputs} - {("...",)} | {operand.terms for operand in spec.outputs}
        self._elementwise = alike == {(f"*{self._leading_axes}",)}
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
        options = {name: value for name, value in options.items() if name not in self._idle}
        options["cuttable"] = may_be_cut(arrays[0])
        call = self._bound(arrays, options)
        if not self._elementwise or not 0 < arrays[0].ndim == call.binding.shared_lead:
            return self._patterned(arrays, options)
        # XLA does not cut the last axis of an op that it could cut along every axis, so there is one of size 1.
        star = self.spec.inputs[0].terms
        wider = [a[..., None] if o.terms == star else a for a, o in zip(arrays, self.spec.inputs, strict=True)]
        return jax.tree.map(lambda result: result[..., 0], self._patterned(wider, options))

    def _patterned(self, arrays: Sequence[jax.Array], options: dict[str, Any]) -> Any:
        """`__call__`, with the primitive's view of operands and results made around it."""
        shapes = tuple(a.shape for a in arrays)
        binding = self._bound(arrays, options).binding
        if "split" in self.spec.attributes and options.setdefault("split", binding.split) != binding.split:
            raise ValueError(f"{self.spec.name}: split ({options['split']}) is not the form of {shapes}; leave it out")
        logical = [self._factored(i, array, binding) for i, array in enumerate(arrays)]
        results = self._primitive.bind(*_alike(logical, self._bound(arrays, options)), shapes=shapes, **options)
        patterned = tuple(
            _joined(result, axes, *binding.in_operand_order(i))
            for i, (result, axes) in enumerate(zip(results, binding.outputs, strict=True))
        )
        return patterned if len(patterned) > 1 else patterned[0]

    def _factored(self, i: int, array: jax.Array, binding: Binding) -> jax.Array:
        """An operand with its factors as axes, in their logical order."""
        axes, (_, order) = binding.inputs[i], binding.input_order(i)
        if all(len(axis) == 1 for axis in axes):
            return array if order == tuple(range(array.ndim)) else jnp.transpose(array, _inverse(order))
        sharding = jax.typeof(array).sharding
        entries = []
        for size, axis, entry in zip(array.shape, axes, sharding.spec, strict=True):
            shards = math.prod(sharding.mesh.shape[name] for name in names_of(entry))
            if len(axis) > 1 and axis[0].size % shards:
                raise ValueError(
                    f"{self.spec.name}: {self.spec.inputs[i].name} {array.shape} has an axis of {size} cut into "
                    f"{shards} shards, which are not whole blocks of {size // axis[0].size}; cut it at blocks"
                )
            entries.extend([entry, *[None] * (len(axis) - 1)])
        sizes = [factor.size for axis in axes for factor in axis]
        return jnp.transpose(_reshape(array, sizes, entries), _inverse(order))

    def _bound(
        self,
        arrays: Sequence[Any],
        options: Mapping[str, Any],
        shapes: Sequence[tuple[int, ...]] | None = None,
    ) -> _Bound:
        """What follows from operands and options. `shapes`: by pattern, if `arrays` are the primitive's view."""
        shapes = [a.shape for a in arrays] if shapes is None else shapes
        return _bound(self.spec, tuple(shapes), tuple(str(a.dtype) for a in arrays), tuple(options.items()))

    def _type(self, *avals: Any, shapes: tuple[tuple[int, ...], ...], **options: Any) -> tuple[Any, ...]:
        call = self._bound(avals, options, shapes)
        binding = call.binding
        entries = _entries(avals[0], binding)
        # `update` keeps of the operand's type what a ShapeDtypeStruct lacks: the manual axes over which it varies.
        return tuple(
            avals[0].update(
                shape=tuple(factor.size for factor in factors),
                dtype=jnp.dtype(dtype),
                weak_type=False,
                sharding=_cut(avals[0], entries, factors),
            )
            for dtype, factors in zip(call.dtypes, call.result_factors, strict=True)
        )

    def _lower(self, ctx: Any, *operands: Any, shapes: tuple[tuple[int, ...], ...], **options: Any) -> Any:
        missing = sorted(set(ctx.module_context.platforms) - _registered)
        if missing:
            raise NotImplementedError(
                f"{self.spec.name}: this build of qshard has no kernels for {', '.join(missing)}; "
                "build it where a CUDA compiler is found, or run on the CPU"
            )
        call = self._bound(ctx.avals_in, options, shapes)
        binding = call.binding
        rule = jax.ffi.ffi_lowering(
            target_of(self.spec.name),
            # Layouts here run from minor to major.
            operand_layouts=[binding.input_order(i)[1][::-1] for i in range(len(ctx.avals_in))],
            result_layouts=[binding.in_operand_order(i)[1][::-1] for i in range(len(ctx.avals_out))],
            operand_output_aliases=self._in_place,
            extra_attributes={
                "mhlo.frontend_attributes": ir.DictAttr.get(
                    {
                        "num_batch_dims": ir.StringAttr.get(
                            str(min(binding.shared_lead, max(0, ctx.avals_in[0].ndim - 1)))
                        )
                    }
                ),
                "sdy.sharding_rule": ir.Attribute.parse(call.shardy_rule),
            },
        )
        return rule(
            ctx, *operands, **{name: encoded(value) for name, value in options.items() if name in self.spec.attributes}
        )

    def _batch(
        self,
        operands: Sequence[Any],
        axes: Sequence[int | None],
        *,
        shapes: tuple[tuple[int, ...], ...],
        **options: Any,
    ) -> Any:
        if self._leading_axes is None:
            raise NotImplementedError(f"{self.spec.name}: has no leading axes for vmap to add to; use jax.lax.map")
        size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
        moved = [
            jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
            for x, axis in zip(operands, axes, strict=True)
        ]
        options |= {name: options[name] + 1 for name in {self._leading_axes, "lead"} & options.keys()}
        shapes = tuple((size, *shape) for shape in shapes)
        results = self._primitive.bind(*_alike(moved, self._bound(moved, options, shapes)), shapes=shapes, **options)
        return results, (0,) * len(results)

    def _run(self, *operands: Any, **options: Any) -> Any:
        return _jitted(self._primitive, tuple(sorted(options.items())))(*operands)

    def _differentiate(self, *_: Any, **__: Any) -> Any:
        raise TypeError(
            f"{self.spec.name}: rounding to codes has no derivative; differentiate qshard.jax.linear, or hold the "
            "codes constant with jax.lax.stop_gradient(x)"
        )


@functools.cache
def bind(spec: OpSpec) -> Op:
    """The function of an op, and its primitive, made once."""
    return Op(spec)


def __getattr__(name: str) -> Op:
    if name.startswith("_") or name not in table():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return bind(table()[name])


@functools.cache
def _jitted(primitive: Primitive, options: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    return jax.jit(functools.partial(primitive.bind, **dict(options)))


def encoded(value: Any) -> Any:
    """An attribute as handlers decode it: in the width of NumPy, as a Python float has 64 bits under x64."""
    if isinstance(value, bool | str):
        return value
    return np.float32(value) if isinstance(value, float) else np.int64(value)


def may_be_cut(x: jax.Array) -> bool:
    """Whether XLA, or an Explicit mesh, may cut `x` over devices."""
    mesh = jax.typeof(x).sharding.mesh
    if mesh.empty:
        return jax.device_count() > 1
    return mesh.size > 1 and set(mesh.axis_types) != {AxisType.Manual}


@dataclass(frozen=True)
class _Bound:
    """A call, bound once: all that is asked of it follows from its shapes, dtypes and options."""

    binding: Binding
    dtypes: tuple[str, ...]

    @functools.cached_property
    def operand_factors(self) -> tuple[tuple[Factor, ...], ...]:
        """The axes of every operand as the primitive has it."""
        return tuple(self.binding.input_order(i)[0] for i in range(len(self.binding.inputs)))

    @functools.cached_property
    def result_factors(self) -> tuple[tuple[Factor, ...], ...]:
        """The axes of every result as the primitive has it: in the operand's order."""
        return tuple(self.binding.in_operand_order(i)[0] for i in range(len(self.binding.outputs)))

    @functools.cached_property
    def shardy_rule(self) -> str:
        """The rule in Shardy's notation: a letter for each factor, in the order in which they appear, and its size.

        What a result lacks is never cut: a front end that has it in shards reduces their amaxes itself.
        """
        inputs, outputs = self.operand_factors, self.result_factors
        factors = dict.fromkeys(factor for fs in inputs + outputs for factor in fs)
        letters = {factor: _letter(i) for i, factor in enumerate(factors)}
        sides = [
            ", ".join(f"[{', '.join(letters[factor] for factor in factors)}]" for factors in side)
            for side in (inputs, outputs)
        ]
        sizes = ", ".join(f"{letter}={factor.size}" for factor, letter in letters.items())
        whole = ", ".join(letters[factor] for factor in factors if factor in self.binding.reduced)
        whole = f" need_replication={{{whole}}}" if whole else ""
        return f"#sdy.op_sharding_rule<({sides[0]})->({sides[1]}) {{{sizes}}}{whole}, custom>"


@functools.lru_cache(maxsize=4096)
def _bound(
    spec: OpSpec, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...], options: tuple[tuple[str, Any], ...]
) -> _Bound:
    """Raises for what the op does not take."""
    given = {name: value for name, value in options if name not in ("cuttable", "dtype", "split")}
    results = spec.results(shapes, dtypes, given, dict(options).get("dtype"))
    binding = spec.bind(shapes, cuttable=dict(options)["cuttable"], **given)
    return _Bound(binding, tuple(dtype for _, dtype in results))


def _letter(index: int) -> str:
    return "ijklmnopqrstuvwxyz"[index] if index < 18 else f"z_{index - 17}"


def _entries(aval: Any, binding: Binding) -> dict[Factor, Any]:
    """Mesh axes by factor, as the first operand is cut."""
    return dict(zip(binding.input_order(0)[0], aval.sharding.spec, strict=True))


def _cut(aval: Any, entries: Mapping[Factor, Any], factors: Sequence[Factor]) -> NamedSharding:
    """The sharding of an operand or result with these axes, on the mesh of `aval`."""
    return NamedSharding(aval.sharding.mesh, PartitionSpec(*(entries.get(factor) for factor in factors)))


def _alike(arrays: Sequence[jax.Array], call: _Bound) -> list[jax.Array]:
    """The operands, all varying over the same manual axes, and on Explicit meshes cut as the first one is."""
    first = jax.typeof(arrays[0])
    entries = _entries(first, call.binding)
    varying = frozenset().union(*(jax.typeof(a).manual_axis_type.varying for a in arrays))
    alike = []
    for array, factors in zip(arrays, call.operand_factors, strict=True):
        own = jax.typeof(array)
        if missing := tuple(sorted(varying - own.manual_axis_type.varying)):
            array = lax.pcast(array, missing, to="varying")
        cut = _cut(first, entries, factors)
        alike.append(array if own.sharding.spec == cut.spec else jax.sharding.reshard(array, cut))
    return alike


def _joined(result: jax.Array, axes: Axes, factors: tuple[Factor, ...], order: tuple[int, ...]) -> jax.Array:
    """A result by its pattern: the memory as it is, each axis the product of its factors."""
    entries = dict(zip(factors, jax.typeof(result).sharding.spec, strict=True))
    result = jnp.transpose(result, order)
    sizes = [math.prod(factor.size for factor in axis) for axis in axes]
    return _reshape(result, sizes, [entries.get(axis[0]) if axis else None for axis in axes])


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(i) for i in range(len(order))]


def _reshape(x: jax.Array, sizes: Sequence[int], entries: Sequence[Any]) -> jax.Array:
    """`x` in another shape, and on Explicit meshes cut so."""
    if x.shape == tuple(sizes):
        return x
    mesh = jax.typeof(x).sharding.mesh
    return lax.reshape(
        x, sizes, out_sharding=NamedSharding(mesh, PartitionSpec(*entries)) if mesh.explicit_axes else None
    )


def names_of(entry: Any) -> tuple[str, ...]:
    """The mesh axes of an entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
