"""What a caller may pass where a function takes an array: one check and one text for each mistake.

What is no array is refused before `jit` sees it. Dtypes and shapes are checked while it traces, so once for each shape.
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
from qshard.jax._ops.uint64 import words_of

Seed = jax.Array | int | None

_ARRAYS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


def is_staged(tree: Any) -> bool:
    """Whether what is done with the arrays of `tree` becomes a program, as under `jit`; eager gradients do not.

    >>> is_staged(jnp.ones(2)), jax.jit(lambda x: jnp.full((), is_staged(x)))(1.0)
    (False, Array(True, dtype=bool))
    """
    for leaf in jax.tree.leaves(tree):
        value = leaf
        # Of a transform, around what it transforms. One that does not show it counts as of a program, as does `jit`'s.
        while isinstance(value, jax.core.Tracer):
            value = wrapped_value(value)
        if not isinstance(value, _ARRAYS):
            return True
    return False


def check_array(op: str, name: str, x: Any) -> None:
    """Raises TypeError unless `x` is an array, or a number.

    >>> check_array("quantize", "x", [1.0])
    Traceback (most recent call last):
    TypeError: quantize: x ([1.0]) is not a JAX or NumPy array; pass jnp.asarray(x)
    """
    if isinstance(x, _ARRAYS) or hasattr(x, "__jax_array__"):
        return
    if isinstance(getattr(x, "format", None), Format):
        raise TypeError(already_quantized(op, name, x))
    make = "from_dlpack" if hasattr(x, "__dlpack__") else "asarray"
    raise TypeError(f"{op}: {name} ({quote(x)}) is not a JAX or NumPy array; pass jnp.{make}({name})")


def check_sizes(op: str, name: str, shape: Sequence[Any]) -> None:
    """Raises ValueError where `jax.export` gives a size as a symbol: tracing fits shapes to blocks and to the mesh."""
    if not all(isinstance(size, int | np.integer) for size in shape):
        sizes = ", ".join(map(str, shape))
        raise ValueError(
            f"{op}: {name} [{sizes}] has a symbolic size, but blocks need known sizes; export one program per shape"
        )


def check_dtype(op: str, name: str, x: Any) -> None:
    """Raises TypeError unless `x` is of numbers in high precision, and ValueError unless its sizes are numbers."""
    check_float(op, name, str(jnp.result_type(x)))
    check_sizes(op, name, jnp.shape(x))


def as_float_name(op: str, dtype: Any, argument: str = "dtype") -> str:
    """The dtype that `op` is asked for, by its name."""
    try:
        name = str(jnp.dtype(dtype).name)
    except TypeError:
        name = ""
    if name not in FLOATS:
        raise TypeError(f"{op}: {argument} ({quote(dtype)}) is not {join_names(FLOATS)}; pass one of these")
    return name


def as_axes(op: str, axis_name: Any, name: str = "axis_name") -> tuple[str, ...]:
    """The mesh axes of `shard_map` that a caller named as `axis_name`, or as `name`: one, several or none."""
    if axis_name is None:
        return ()
    axes = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(axes, Iterable) or not all(isinstance(axis, str) for axis in axes):
        raise TypeError(f"{op}: {name} ({quote(axis_name)}) is not a mesh axis name or a tuple of them; pass one")
    axes = tuple(axes)
    manual = jax.sharding.get_abstract_mesh().manual_axes
    for axis in axes:
        if axis not in manual:
            raise ValueError(
                f"{op}: {name} ({axis!r}) is not an axis of an enclosing jax.shard_map ({manual or 'none'}); call it "
                f"inside shard_map over that axis, or leave {name} out"
            )
    return axes


def as_names(op: str, name: str, axes: Any) -> tuple[str, ...]:
    """Mesh axes that a caller names: one, several or none."""
    made = () if axes is None else (axes,) if isinstance(axes, str) else axes
    if not isinstance(made, Iterable) or not all(isinstance(axis, str) for axis in made):
        raise TypeError(f"{op}: {name} ({quote(axes)}) is not a mesh axis name or a tuple of them; pass one")
    return tuple(made)


def check_spec(op: str, name: str, spec: Any) -> None:
    """Raises TypeError unless `spec` can say how an array is cut."""
    if spec is not None and not isinstance(spec, PartitionSpec | NamedSharding):
        entries = ", ".join(map(repr, spec)) if isinstance(spec, tuple | list) else repr(spec)
        raise TypeError(f"{op}: {name} ({quote(spec)}) is not a PartitionSpec or NamedSharding; pass P({entries})")


def check_spec_fits(op: str, name: str, spec: Any, mesh: Any, ndim: int) -> None:
    """Raises ValueError unless a spec is of an array of `ndim` axes on this mesh."""
    if spec is None:
        return
    entries = spec.spec if isinstance(spec, NamedSharding) else spec
    if len(entries) > ndim:
        raise ValueError(f"{op}: {name} ({entries}) has more entries than the {ndim} axes of the array; remove some")
    for axis in (axis for entry in entries for axis in names_of(entry)):
        if axis not in mesh.axis_names:
            raise ValueError(
                f"{op}: {name} ({entries}) names {axis!r}, which is not an axis of the mesh {mesh.axis_names}; "
                f"enter the mesh with jax.set_mesh, or pass {name} as a NamedSharding"
            )


def seed_words(op: str, seed: Any) -> Any:
    """A seed as two words, and None as it is."""
    if seed is None:
        return None
    array = isinstance(seed, jax.Array | np.ndarray | np.generic)
    dtype, shape = (seed.dtype, seed.shape) if array else (None, ())
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and shape == ():
        return jax.random.bits(seed, (2,), jnp.uint32)
    if shape == (2,) and dtype in (jnp.uint32, jnp.int32):
        return jnp.asarray(seed)
    if isinstance(seed, int) or (dtype is not None and jnp.issubdtype(dtype, jnp.integer) and shape == ()):
        return jnp.asarray(words_of(seed, f"{op}: seed"))
    raise TypeError(
        f"{op}: seed ({quote(seed)}) is not an integer, a jax.random key, or int32 or uint32 of shape (2,); pass one "
        "of these"
    )
