"""`load_quantized`: quantized weights of a file as sharded arrays. Each device reads its part."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from qshard._core.quantize_steps import Plane
from qshard._core.validation import FormatLike, as_format, quote
from qshard._files.reader import CheckpointReader, values_of
from qshard._files.regrid import regrid
from qshard.jax._ops.mesh import count_shards, names_of
from qshard.jax._quantized.array import QuantizedArray, axes_of_shape
from qshard.layout import Shape

OP = "load_quantized"
Shardings = Mapping[str, Sharding] | Callable[[str, Shape], Sharding | None]


def load_quantized(
    path: str | PathLike[str],
    fmt: FormatLike | None = None,
    *,
    shardings: Shardings | None = None,
    values: bool = False,
    dtype: Any = None,
) -> dict[str, Any]:
    """Load a checkpoint with quantized weights.

    Args:
      path: a safetensors file, an index of shards, or a folder with either: of `qshard convert`, or in a format that
        `qshard convert` recognizes, such as DeepSeek, compressed-tensors or ModelOpt.
      fmt: the format of the result, such as the weight format of a recipe: "MXFP8_32x32" for MXFP8. The codes stay, so
        it may differ from the format of the file only in blocks, and each block must have one scale. None: the format
        of the file.
      shardings: the sharding of a tensor, by name, or as a function of name and shape. None, or a name that is missing:
        the default device.
      values: return values, `fl(code * scale)`, instead of `QuantizedArray`s: for models that train, or have another
        axis order.
      dtype: dtype of these values. None: float32.

    Returns:
      By name: a `QuantizedArray` with the rowwise plane for each quantized weight, `[N, K]` as in PyTorch, and arrays
      for all other tensors. As an argument of a jitted function it is a frozen weight of `linear`.

    Raises:
      FileNotFoundError: the checkpoint or one of its files does not exist.
      TypeError: `shardings` is not a dict or a function, or gives something other than a Sharding.
      ValueError: the checkpoint has quantized weights that are unknown, codes are not codes of `fmt`, or an integer
        does not fit 32 bits, and JAX has no wider ones (`jax_enable_x64`).

    A sharded tensor is read by the process of each device: its slice of the codes, and all scales.

    >>> import tempfile
    >>> from safetensors.flax import save_file
    >>> from qshard.jax import quantize, to_plain
    >>> arrays, metadata = to_plain({"w": quantize(jnp.ones((32, 64)), "MXFP8_32x32"), "b": jnp.ones(2)})
    >>> path = tempfile.mkdtemp() + "/codes.safetensors"
    >>> save_file(arrays, path, metadata)
    >>> {name: str(each) for name, each in load_quantized(path).items()}
    {'w': 'QuantizedArray(MXFP8_32x32, float32, rowwise)', 'b': '[1. 1.]'}
    """
    target = None if fmt is None else as_format(fmt, OP)
    reader = CheckpointReader(path, OP)
    if shardings is not None and not isinstance(shardings, Mapping) and not callable(shardings):
        raise TypeError(f"{OP}: shardings ({quote(shardings)}) is not a dict or a function; pass one of them")
    planes: dict[str, QuantizedArray | Any] = {}
    for name, what in reader.weights.items():
        sharding, plane = _sharding_of(shardings, name, what.shape), reader.read_plane(name)
        if values:
            planes[name] = _array(
                what.shape,
                jnp.float32 if dtype is None else dtype,
                sharding,
                functools.partial(values_of, plane, what),
            )
            continue
        own = what.format
        if target is not None:
            found = regrid(plane, what, target)
            if found is None:
                raise ValueError(
                    f"{OP}: {name} ({own}) does not have one scale for each block of {target}; leave fmt out, or pass "
                    "values=True and quantize them"
                )
            plane, own = found
        planes[name] = QuantizedArray(
            format=own,
            dtype=jnp.dtype(what.dtype),
            axes=axes_of_shape(what.shape),
            rowwise=_plane(plane, own.data_dtype, own.scale_dtype, sharding),
        )
    for name, spec in reader.arrays.items():
        there = reader.read(name, (slice(0, 0),) * len(spec.shape)).dtype
        sharding = _sharding_of(shardings, name, spec.shape)
        planes[name] = _array(spec.shape, there, sharding, functools.partial(_read_numbers, reader, name))
    return planes


def _read_numbers(reader: CheckpointReader, name: str, part: Any) -> Any:
    """Read a part of an array that is not quantized. Raise ValueError if JAX would change its integers."""
    array = reader.read(name, part)
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    if dtype != array.dtype and array.dtype.kind == "i" and np.any(array.astype(dtype) != array):
        raise ValueError(f"{OP}: {name} ({array.dtype}) has numbers that {dtype} cannot hold; set jax_enable_x64")
    return array


def _sharding_of(shardings: Shardings | None, name: str, shape: Shape) -> Sharding | None:
    if shardings is None:
        return None
    found = shardings.get(name) if isinstance(shardings, Mapping) else shardings(name, shape)
    if found is not None and not isinstance(found, Sharding):
        raise TypeError(f"{OP}: shardings of {name} ({quote(found)}) is not a Sharding; pass NamedSharding(mesh, spec)")
    return found


def _plane(plane: Plane, data_dtype: str, scale_dtype: str, sharding: Sharding | None) -> Plane:
    """Make arrays of a plane. Scales are sharded like the codes where their axes divide evenly."""

    def make(part: Any, dtype: str, own: Sharding | None) -> jax.Array:
        typed = np.asarray(part).view(jnp.dtype(dtype)) if np.asarray(part).dtype == np.uint8 else np.asarray(part)
        return _array(typed.shape, typed.dtype, own, lambda index: typed[index])

    whole = None
    if plane.global_scale_inv is not None:
        whole = make(plane.global_scale_inv, "float32", _whole_sharding(sharding))
    scales = _fitting(sharding, np.shape(plane.scale_inv), np.shape(plane.data))
    return Plane(make(plane.data, data_dtype, sharding), make(plane.scale_inv, scale_dtype, scales), whole)


def _whole_sharding(sharding: Sharding | None) -> Sharding | None:
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding


def _fitting(sharding: Sharding | None, shape: Shape, data: Shape) -> Sharding | None:
    """Return the sharding of the codes for scales, without the axes along which a shard would split a block."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    entries = [*sharding.spec, *(None,) * (len(data) - len(sharding.spec))]
    if len(shape) != len(data):
        return _whole_sharding(sharding)
    kept = []
    for size, codes, entry in zip(shape, data, entries, strict=True):
        shards = count_shards(sharding.mesh.shape, names_of(entry))
        block = -(-codes // size) if size else 1
        kept.append(entry if size % shards == 0 and (codes // shards) % block == 0 else None)
    return NamedSharding(sharding.mesh, PartitionSpec(*kept))


def _array(shape: Shape, dtype: Any, sharding: Sharding | None, read: Callable[[Any], Any]) -> jax.Array:
    def local(index: Any) -> Any:
        return np.asarray(read(tuple(index))).astype(dtype, copy=False)

    if sharding is None:
        return jnp.asarray(local((slice(None),) * len(shape)))
    return jax.make_array_from_callback(shape, sharding, local)
