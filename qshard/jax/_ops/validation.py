"""Checks of arguments: arrays, dtypes, mesh axes, specs and seeds, with one error text for each mistake.

Arguments that are not arrays are refused before `jit` sees them. Dtypes and shapes are checked while `jit` traces, so
once for each shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from qshard._core.validation import already_quantized, check_float, join_names, quote
from qshard.formats import FLOATS, Format
from qshard.jax._jax_internals import wrapped_value
from qshard.jax._ops.mesh import names_of
from qshard.jax._ops.uint64 import as_uint64

Seed = jax.Array | int | None

_ARRAYS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


def is_staged(tree: Any) -> bool:
    """True if operations on the arrays of `tree` become part of a program, as under `jit`. Eager gradients do not.

    >>> is_staged(jnp.ones(2)), jax.jit(lambda x: jnp.full((), is_staged(x)))(1.0)
    (False, Array(True, dtype=bool))
    """
    for leaf in jax.tree.leaves(tree):
        value = leaf
        # Unwrap the tracers of transforms. A tracer that shows no value counts as staged, like the tracers of `jit`.
        while isinstance(value, jax.core.Tracer):
            value = wrapped_value(value)
        if not isinstance(value, _ARRAYS):
            return True
    return False


def check_array(op: str, name: str, x: Any) -> None:
    """Raise TypeError unless `x` is an array or a number, in the byte order of the machine.

    A compiled program that has run with float32 reads the bytes of `>f4` as float32: JAX compares only kinds and sizes.

    >>> check_array("quantize", "x", [1.0])
    Traceback (most recent call last):
    TypeError: quantize: x ([1.0]) is not a JAX or NumPy array; pass jnp.asarray(x)
    """
    if isinstance(x, _ARRAYS) or hasattr(x, "__jax_array__"):
        if isinstance(x, np.ndarray) and not x.dtype.isnative:
            raise TypeError(
                f"{op}: {name} ({x.dtype.str}) is not in the byte order of this machine; pass "
                f"{name}.astype({x.dtype.name!r})"
            )
        return
    if isinstance(getattr(x, "format", None), Format):
        raise TypeError(already_quantized(op, name, x))
    make = "from_dlpack" if hasattr(x, "__dlpack__") else "asarray"
    raise TypeError(f"{op}: {name} ({quote(x)}) is not a JAX or NumPy array; pass jnp.{make}({name})")


def check_sizes(op: str, name: str, shape: Sequence[Any]) -> None:
    """Raise ValueError if `jax.export` gives a size as a symbol: tracing fits shapes to blocks and to the mesh."""
    if not all(isinstance(size, int | np.integer) for size in shape):
        sizes = ", ".join(map(str, shape))
        raise ValueError(
            f"{op}: {name} [{sizes}] has a symbolic size, but blocks need known sizes; export one program per shape"
        )


def check_dtype(op: str, name: str, x: Any) -> None:
    """Raise TypeError unless `x` is float32, bfloat16 or float16, and ValueError if a size is a symbol."""
    check_float(op, name, str(jnp.result_type(x)))
    check_sizes(op, name, jnp.shape(x))


def as_float_name(op: str, dtype: Any, argument: str = "dtype") -> str:
    """Return the name of a dtype that a caller requested: float32, bfloat16 or float16."""
    try:
        name = str(jnp.dtype(dtype).name)
    except TypeError:
        name = ""
    if name not in FLOATS:
        raise TypeError(f"{op}: {argument} ({quote(dtype)}) is not {join_names(FLOATS)}; pass one of these")
    return name


def as_axes(op: str, axis_name: Any, name: str = "axis_name") -> tuple[str, ...]:
    """Return the mesh axes of the enclosing `shard_map` that a caller named: one, several or none."""
    axes = as_names(op, name, axis_name)
    manual = jax.sharding.get_abstract_mesh().manual_axes
    for axis in axes:
        if axis not in manual:
            raise ValueError(
                f"{op}: {name} ({axis!r}) is not an axis of an enclosing jax.shard_map ({manual or 'none'}); call it "
                f"inside shard_map over that axis, or leave {name} out"
            )
    return axes


def as_names(op: str, name: str, axes: Any) -> tuple[str, ...]:
    """Return the mesh axes that a caller named: one, several or none."""
    made = () if axes is None else (axes,) if isinstance(axes, str) else axes
    if not isinstance(made, Iterable) or not all(isinstance(axis, str) for axis in made):
        raise TypeError(f"{op}: {name} ({quote(axes)}) is not a mesh axis name or a tuple of them; pass one")
    return tuple(made)


def check_spec(op: str, name: str, spec: Any) -> None:
    """Raise TypeError unless `spec` is None, a PartitionSpec or a NamedSharding."""
    if spec is not None and not isinstance(spec, PartitionSpec | NamedSharding):
        entries = ", ".join(map(repr, spec)) if isinstance(spec, tuple | list) else repr(spec)
        raise TypeError(f"{op}: {name} ({quote(spec)}) is not a PartitionSpec or NamedSharding; pass P({entries})")


def check_spec_fits(op: str, name: str, spec: Any, mesh: Any, ndim: int) -> None:
    """Raise ValueError unless a spec fits an array of `ndim` axes on this mesh."""
    if spec is None:
        return
    entries = spec.spec if isinstance(spec, NamedSharding) else spec
    if len(entries) > ndim:
        raise ValueError(f"{op}: {name} ({entries}) has more entries than the {ndim} axes of the array; remove some")
    for axis in (axis for entry in entries for axis in names_of(entry)):
        check_mesh_axis(op, f"{name} ({entries}) names {axis!r}, which", axis, mesh, name)


def check_mesh_axis(op: str, subject: str, axis: str, mesh: Any, spec_name: str) -> None:
    """Raise ValueError unless `axis` is an axis of the mesh. `subject` begins the sentence of the error."""
    if axis not in mesh.axis_names:
        raise ValueError(
            f"{op}: {subject} is not an axis of the mesh {mesh.axis_names}; enter the mesh with jax.set_mesh, or pass "
            f"{spec_name} as a NamedSharding"
        )


def as_seed(op: str, seed: Any) -> Any:
    """Return a seed as uint32 `[2]`, low half first, or None."""
    if seed is None:
        return None
    array = isinstance(seed, jax.Array | np.ndarray | np.generic)
    dtype, shape = (seed.dtype, seed.shape) if array else (None, ())
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and shape == ():
        return jax.random.bits(seed, (2,), jnp.uint32)
    if shape == (2,) and dtype in (jnp.uint32, jnp.int32):
        return jnp.asarray(seed)
    if isinstance(seed, int) or (dtype is not None and jnp.issubdtype(dtype, jnp.integer) and shape == ()):
        return jnp.asarray(as_uint64(seed, f"{op}: seed"))
    raise TypeError(
        f"{op}: seed ({quote(seed)}) is not an integer, a jax.random key, or int32 or uint32 of shape (2,); pass one "
        "of these"
    )
