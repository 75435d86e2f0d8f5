"""Conversion of quantized arrays to plain arrays and metadata, for files that any program reads, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qshard._core import serialization
from qshard._core.quantize_steps import Plane
from qshard._core.serialization import Description
from qshard.formats import Usage
from qshard.jax._quantized.array import QuantizedArray, axes_of_shape


def to_plain(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Convert quantized arrays to arrays of uint8 and float32, with one line of JSON that describes them.

    Args:
      values: `QuantizedArray`s by name. Other values are returned unchanged.

    Returns:
      The arrays, by names such as `w.rowwise.data`, and metadata: a dict with one string.
      `qshard/_core/serialization.py` defines the names.

    Raises:
      TypeError: `values` is not a dict, or a value is a dict or list of quantized arrays.
      ValueError: two results have the same name; or an array has no plane, has axes that `vmap` or `scan` added, or is
        a shard.

    Sharded arrays stay sharded.

    >>> from qshard.formats import MXFP8_E4M3
    >>> from qshard.jax import quantize
    >>> arrays, metadata = to_plain({"w": quantize(jnp.ones((2, 64)), MXFP8_E4M3), "b": jnp.ones(2)})
    >>> {name: (str(array.dtype), array.shape) for name, array in arrays.items()}
    {'w.rowwise.data': ('uint8', (2, 64)), 'w.rowwise.scale_inv': ('uint8', (2, 2)), 'b': ('float32', (2,))}
    >>> print(from_plain(arrays, metadata)["w"])
    QuantizedArray(MXFP8_E4M3, float32, rowwise)

    With safetensors: `save_file(arrays, "w.safetensors", metadata)` of `safetensors.flax`.
    """
    return serialization.plain(values, _to_planes)


def from_plain(arrays: Mapping[str, Any], metadata: Mapping[str, str] | None) -> dict[str, Any]:
    """Restore the values that `to_plain` converted, here or in `qshard.torch_bridge`.

    Args:
      arrays: JAX or NumPy arrays by name, as read from a file.
      metadata: the metadata of the same file. Arrays that it does not describe are returned unchanged. None: it
        describes none.

    Returns:
      The quantized arrays and all other arrays, by name.

    Raises:
      TypeError: an argument is not a dict, or one of `arrays` is not an array.
      ValueError: `arrays` does not match the metadata, or the metadata is of a later version.

    Sharded arrays stay sharded.

    >>> from qshard.jax import quantize
    >>> arrays, metadata = to_plain({"w": quantize(jnp.full((2, 64), 3.0), "MXFP8_E4M3")})
    >>> float(from_plain(arrays, metadata)["w"].dequantize()[0, 0])
    3.0
    """
    return serialization.restore(arrays, metadata, _from_planes)


def _to_planes(name: str, value: Any) -> tuple[Description, dict[Usage, Plane]] | None:
    if not isinstance(value, QuantizedArray):
        return None
    if not value.planes:
        raise ValueError(f"to_plain: {name} ({value}) has no plane; quantize it with a usage")
    planes = {usage: Plane(*map(_bytes, parts)) for usage, parts in value.planes.items()}
    dtype = np.dtype(value.dtype).name
    description = Description(format=value.format, shape=value.shape, dtype=dtype, planes=tuple(planes))
    try:
        description.take(serialization.flat(planes))
    except ValueError as error:
        raise ValueError(
            f"to_plain: {name} ({value}, shape {value.shape}) is stacked or a shard, not one whole tensor; split it, "
            "or gather it, first"
        ) from error
    return description, planes


def _from_planes(name: str, description: Description, planes: dict[Usage, Plane]) -> QuantizedArray:
    fmt = description.format

    def own(parts: Plane) -> Plane:
        data, scale_inv = (jnp.asarray(part) for part in parts[:2])
        whole = None if parts.global_scale_inv is None else jnp.asarray(parts.global_scale_inv)
        return Plane(data.view(fmt.data_dtype), scale_inv.view(fmt.scale_dtype), whole)

    rowwise, columnwise = (own(planes[usage]) if usage in planes else None for usage in Usage.BOTH.planes)
    return QuantizedArray(
        format=fmt,
        dtype=jnp.dtype(description.dtype),
        axes=axes_of_shape(description.shape),
        rowwise=rowwise,
        columnwise=columnwise,
    )


def _bytes(part: jax.Array | None) -> jax.Array | None:
    return part.view(jnp.uint8) if part is not None and part.dtype.itemsize == 1 else part
