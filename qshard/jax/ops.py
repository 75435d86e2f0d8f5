"""Every op of `ffi/ops.def` as a function of JAX arrays: `cast_tensor(x, scale, element="float8_e4m3fn")`.

One class makes them all. An op works eagerly, under `jit` on Auto and Explicit meshes, in `shard_map` with sound types,
under `vmap`, remat and export, because XLA itself can cut it:

- its FFI target is *batch partitionable*: XLA runs the handler on shards of the first `num_batch_dims` axes, which all
  its buffers have in common, and gathers what is cut along later axes;
- a Shardy rule, made from the op's axis pattern, carries shardings through it.

So a caller views its operands such that what may be cut is a leading axis of all of them (`_runs.py`). A plain
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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from qshard import _ffi
from qshard.ops import Binding, Factor, OpSpec, table

__all__ = ["Op", "bind", "register_handlers"]

_registered: set[str] = set()


def register_handlers(platform: str, handlers: Mapping[str, Any]) -> None:
    """Registers handlers, `{op name: capsule}`, with XLA for platform "cpu" or "CUDA".

    Importing this module registers what the extension was built with. To compile for a GPU on a machine without one,
    the targets must exist, and are not run: register those of the CPU as "CUDA".
    """
    for name, handler in handlers.items():
        jax.ffi.register_ffi_target(_target(name), handler, platform=platform)
    if handlers:
        _registered.add(platform.lower())


def _target(name: str) -> str:
    return f"qshard_{name}"


register_handlers("cpu", _ffi.handlers("cpu"))
register_handlers("CUDA", _ffi.handlers("cuda"))


class Op:
    """An op of the table as a function of arrays.

    Options are all static: the op's attributes; `dtype`, where the op gives any float; and the number of axes that a
    `*name` of the pattern stands for, where shapes leave it open (`batch=1`).
    """

    def __init__(self, spec: OpSpec):
        self.spec = spec
        terms = [term for operand in spec.inputs for term in operand.terms]
        self._sizes = {name for term in terms for name in ((term[1:],) if isinstance(term, str) else term)}
        first = spec.inputs[0].terms[0]
        self._leading_axes = first[1:] if isinstance(first, str) else None
        jax.ffi.register_ffi_target_as_batch_partitionable(_target(spec.name))
        self._primitive = Primitive(_target(spec.name))
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
          ValueError: shapes do not fit the pattern of the op.
          TypeError: a dtype or an attribute is not what it takes.
          NotImplementedError: qshard was built without kernels for the device.
        """
        arrays = [jnp.asarray(operand) for operand in operands]
        binding = self._bind([a.shape for a in arrays], options)
        results = self._primitive.bind(*_alike(arrays, binding), **options)
        patterned = tuple(
            jnp.transpose(result, binding.in_operand_order(i)[1]).reshape(shape)
            for i, (result, shape) in enumerate(zip(results, binding.output_shapes, strict=True))
        )
        return patterned if len(patterned) > 1 else patterned[0]

    def _bind(self, shapes: Sequence[tuple[int, ...]], options: Mapping[str, Any]) -> Binding:
        return self.spec.bind(shapes, **{name: value for name, value in options.items() if name in self._sizes})

    def _attributes(self, options: Mapping[str, Any]) -> dict[str, Any]:
        not_attributes = {"dtype"} | self._sizes - set(self.spec.attributes)
        return {name: value for name, value in options.items() if name not in not_attributes}

    def _type(self, *avals: Any, **options: Any) -> tuple[Any, ...]:
        dtypes, element = [str(a.dtype) for a in avals], options.get("element")
        self.spec.check_attributes(self._attributes(options))
        self.spec.check_dtypes(dtypes, element=element)
        binding = self._bind([a.shape for a in avals], options)
        out_dtypes = self.spec.output_dtypes(dtypes, element=element, dtype=options.get("dtype"))
        entries = _entries(avals[0], binding)
        # `update` keeps of the operand's type what a ShapeDtypeStruct lacks: the manual axes over which it varies.
        return tuple(
            avals[0].update(
                shape=tuple(factor.size for factor in factors),
                dtype=jnp.dtype(dtype),
                weak_type=False,
                sharding=_cut(avals[0], entries, [(factor,) for factor in factors]),
            )
            for dtype, factors in zip(out_dtypes, _result_factors(binding), strict=True)
        )

    def _lower(self, ctx: Any, *operands: Any, **options: Any) -> Any:
        missing = sorted(set(ctx.module_context.platforms) - _registered)
        if missing:
            raise NotImplementedError(
                f"{self.spec.name}: this build of qshard has no kernels for {', '.join(missing)}; "
                "build it where a CUDA compiler is found, or run on the CPU"
            )
        binding = self._bind([a.shape for a in ctx.avals_in], options)
        rule = jax.ffi.ffi_lowering(
            _target(self.spec.name),
            # Layouts here run from minor to major.
            result_layouts=[binding.in_operand_order(i)[1][::-1] for i in range(len(ctx.avals_out))],
            extra_attributes={
                "mhlo.frontend_attributes": ir.DictAttr.get(
                    {"num_batch_dims": ir.StringAttr.get(str(binding.shared_lead))}
                ),
                "sdy.sharding_rule": ir.Attribute.parse(_shardy_rule(binding)),
            },
        )
        return rule(ctx, *operands, **{name: _encoded(value) for name, value in self._attributes(options).items()})

    def _batch(self, operands: Sequence[Any], axes: Sequence[int | None], **options: Any) -> Any:
        if self._leading_axes is None:
            raise NotImplementedError(f"{self.spec.name}: has no leading axes for vmap to add to; use jax.lax.map")
        size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
        moved = [
            jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
            for x, axis in zip(operands, axes, strict=True)
        ]
        if self._leading_axes in options:
            options[self._leading_axes] += 1
        results = self._primitive.bind(*_alike(moved, self._bind([x.shape for x in moved], options)), **options)
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


def _encoded(value: Any) -> Any:
    """NumPy scalars have the width that handlers decode; a Python float is 64 bits wide under x64."""
    if isinstance(value, bool | str):
        return value
    return np.float32(value) if isinstance(value, float) else np.int64(value)


def _result_factors(binding: Binding) -> list[tuple[Factor, ...]]:
    """The axes of every result as the primitive has it: in the operand's order."""
    return [binding.in_operand_order(i)[0] for i in range(len(binding.outputs))]


def _shardy_rule(binding: Binding) -> str:
    """The rule in Shardy's notation: a letter for each factor, in the order in which they appear, and its size."""
    inputs = [list(axes) for axes in binding.inputs]
    outputs = [[(factor,) for factor in factors] for factors in _result_factors(binding)]
    every = [factor for axes in inputs + outputs for axis in axes for factor in axis]
    letters = {factor: _letter(i) for i, factor in enumerate(dict.fromkeys(every))}
    sides = [
        ", ".join(f"[{', '.join(''.join(letters[factor] for factor in axis) for axis in axes)}]" for axes in side)
        for side in (inputs, outputs)
    ]
    sizes = ", ".join(f"{letter}={factor.size}" for factor, letter in letters.items())
    return f"#sdy.op_sharding_rule<({sides[0]})->({sides[1]}) {{{sizes}}}, custom>"


def _letter(index: int) -> str:
    return "ijklmnopqrstuvwxyz"[index] if index < 18 else f"z_{index - 17}"


def _entries(aval: Any, binding: Binding) -> dict[Factor, Any]:
    """Mesh axes by factor, as the first operand is cut. An axis of several factors is cut along its first."""
    return {axis[0]: entry for axis, entry in zip(binding.inputs[0], aval.sharding.spec, strict=True) if axis}


def _cut(aval: Any, entries: Mapping[Factor, Any], axes: Sequence[Sequence[Factor]]) -> NamedSharding:
    """The sharding of an operand or result with these axes, on the mesh of `aval`."""
    spec = PartitionSpec(*(entries.get(axis[0]) if axis else None for axis in axes))
    return NamedSharding(aval.sharding.mesh, spec)


def _alike(arrays: Sequence[jax.Array], binding: Binding) -> list[jax.Array]:
    """The operands, all varying over the same manual axes, and on Explicit meshes cut as the first one is."""
    first = jax.typeof(arrays[0])
    entries = _entries(first, binding)
    varying = frozenset().union(*(jax.typeof(a).manual_axis_type.varying for a in arrays))
    alike = []
    for array, axes in zip(arrays, binding.inputs, strict=True):
        own = jax.typeof(array)
        if missing := tuple(sorted(varying - own.manual_axis_type.varying)):
            array = lax.pcast(array, missing, to="varying")
        cut = _cut(first, entries, axes)
        alike.append(array if own.sharding.spec == cut.spec else jax.sharding.reshard(array, cut))
    return alike
