"""`stream_weights`: yields sharded weights as the tensors of a serving engine, bucket by bucket."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from qshard._core.name_patterns import NamePatterns
from qshard._core.quantize_steps import Plane
from qshard._core.serialization import Description
from qshard._core.validation import FormatLike, WeightLayout, as_format, as_layout, quote
from qshard._files.engine_formats import EngineTensor
from qshard._files.engine_stream import (
    DEFAULT_BUCKET,
    EngineWeight,
    buckets,
    check_stream,
    shared_weights,
    stream_tensors,
)
from qshard.formats import FLOATS, Format, Usage
from qshard.jax._ops.amaxes import max_along
from qshard.jax._quantized.array import QuantizedArray
from qshard.jax._quantized.gather import gather
from qshard.jax._quantized.primary import PrimaryWeight
from qshard.jax._quantized.quantize import quantize
from qshard.jax._quantized.weight_scales import WeightScales
from qshard.jax._sharding import partitionable_ops
from qshard.jax._sharding.shard_spec import ShardSpec
from qshard.layout import plane

OP = "stream_weights"
Formats = FormatLike | Mapping[str, FormatLike | None]


def stream_weights(
    params: Any,
    format: str = "compressed-tensors",
    *,
    weight_format: Formats | None = None,
    weight_layout: WeightLayout = "NK",
    dtype: Any = None,
    bucket_bytes: int = DEFAULT_BUCKET,
) -> Iterator[tuple[str, jax.Array]]:
    """Yield weights as named tensors of a serving engine, as `qshard.torch_bridge.stream_weights` does.

    Args:
      params: a dict of arrays by the names that the engine reads, or another pytree: keys of its paths are joined by
        dots. Leaves are arrays, sharded with a NamedSharding or not, `QuantizedArray`s or `PrimaryWeight`s.
      format: "compressed-tensors", "deepseek" or "modelopt", for engines; "qshard" for `from_plain`.
      weight_format: format of all float arrays with two axes; or formats by pattern of names, as recipes in `convert`;
        None keeps values: `{"*embed*": None, "*": "FP8_128x128"}`. None: nothing is cast.
      weight_layout: "NK", or "KN" as in flax: arrays with two axes that are quantized are transposed first.
      dtype: dtype of float arrays that are not quantized; by default their own.
      bucket_bytes: most bytes of codes that are gathered at a time. A larger weight is gathered alone.

    Yields:
      Names, and whole arrays that are replicated over the mesh: codes and scales of a weight one after the other.

    Raises:
      TypeError, ValueError: an argument is wrong, a pattern has no effect, no weight is quantized, or `format` cannot
        hold a weight.

    Each bucket is one program, compiled once for its shapes and shardings: shards are quantized where they are, and
    codes are gathered, never values. Codes and scales are, bit for bit, the result of `quantize` of the whole weight.
    Engines multiply q, k and v, and gate and up, as one weight: in NVFP4 such weights are rows of `quantize` of that
    weight, with its global scale. Codes keep theirs, with a warning. With several processes, every process iterates to
    the end.

    >>> w = {"up_proj.weight": jnp.ones((128, 256)), "norm.weight": jnp.ones(256)}
    >>> for name, x in stream_weights(w, "deepseek", weight_format="FP8_128x128"):
    ...     print(name, x.dtype, x.shape)
    norm.weight float32 (256,)
    up_proj.weight float8_e4m3fn (128, 256)
    up_proj.weight_scale_inv float32 (1, 2)
    """
    check_stream(format, bucket_bytes, OP)
    layout = as_layout(OP, weight_layout)
    items = _items(params, weight_format, layout)
    if not any(item.fmt is not None for item in items):
        raise ValueError(f"{OP}: params have no weight to quantize; pass weight_format=, such as 'FP8_128x128'")
    for item in items:
        if item.fmt is not None:
            _plan_tensors(format, item.name, item.what)
    return _tensors(items, _items_that_share(items, format), format, dtype, bucket_bytes)


class _Item(NamedTuple):
    """A leaf. `fmt` is the format of its codes, now or after the cast; None: it stays a value."""

    name: str
    value: Any
    fmt: Format | None
    layout: WeightLayout

    @property
    def shape(self) -> tuple[int, ...]:
        shape = tuple(self.value.shape)
        return shape[::-1] if self.layout == "KN" and not _is_quantized(self.value) else shape

    @property
    def what(self) -> Description:
        assert self.fmt is not None
        dtype = np.dtype(self.value.dtype).name
        return Description(format=self.fmt, shape=self.shape, dtype=dtype, planes=(Usage.ROWWISE,))

    @property
    def nbytes(self) -> int:
        if self.fmt is None:
            return int(self.value.size * self.value.dtype.itemsize)
        return plane(self.fmt, self.shape, Usage.ROWWISE).nbytes


def _is_quantized(value: Any) -> bool:
    return isinstance(value, QuantizedArray | PrimaryWeight)


def _items(params: Any, formats: Formats | None, layout: WeightLayout) -> list[_Item]:
    rules: Mapping[str, FormatLike | None] = formats if isinstance(formats, Mapping) else {"*": formats}
    parsed = {key: None if each is None else as_format(each, OP, "weight_format") for key, each in rules.items()}
    for fmt in parsed.values():
        if fmt is not None and fmt.stochastic:
            raise ValueError(f"{OP}: weight_format ({fmt}) rounds stochastically; pass one with rounding='nearest'")
    leaves: dict[str, Any] = {}
    for path, value in jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_quantized):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name in leaves:
            raise ValueError(f"{OP}: params have two arrays with the name {name!r}; rename one of them")
        leaves[name] = value
    patterns = NamePatterns(parsed, leaves)
    patterns.check_used(OP, [(name,) for name in leaves], "array")
    found = []
    for name, value in leaves.items():
        if _is_quantized(value):
            found.append(_Item(name, value, value.format, layout))
            continue
        if not isinstance(value, jax.Array | np.ndarray):
            raise TypeError(f"{OP}: {name} ({quote(value)}) is not an array; pass a dict of arrays")
        is_weight = value.ndim == 2 and np.dtype(value.dtype).name in FLOATS
        pattern = patterns.first(name)
        fmt = parsed[pattern] if is_weight and pattern is not None else None
        found.append(_Item(name, jnp.asarray(value), fmt, layout))
    return found


def _items_that_share(items: Sequence[_Item], format: str) -> list[list[_Item]]:
    """Return the items that get one global scale. Warns of merged weights that cannot, because they are codes."""
    named = {item.name: item for item in items if item.fmt is not None}
    formats = {name: item.fmt for name, item in named.items() if item.fmt is not None}

    def may_share(names: list[str]) -> bool:
        return not any(_is_quantized(named[name].value) for name in names)

    groups = shared_weights(format, formats, may_share, OP, stacklevel=4)
    return [[named[name] for name in names] for names in groups]


@functools.lru_cache(maxsize=4096)
def _plan_tensors(format: str, name: str, what: Description) -> tuple[EngineTensor, ...]:
    """Return the tensors of a weight; the name is for errors."""
    return stream_tensors(format, EngineWeight(name), what, OP)


class _LeafPlan(NamedTuple):
    """Cast, gather and encoding of a leaf: the static part of its bucket's program.

    `tensors` describes the tensors of the engine; None: the leaf stays a value.
    """

    fmt: Format | None
    layout: WeightLayout
    sharding: NamedSharding | None
    tensors: tuple[EngineTensor, ...] | None


def _tensors(
    items: Sequence[_Item], shared: Sequence[Sequence[_Item]], format: str, dtype: Any, bucket_bytes: int
) -> Iterator[tuple[str, jax.Array]]:
    """Yield the tensors. Each bucket is dispatched before the caller gets the tensors of the one before.

    Each group of `shared` gets one global scale.
    """
    dtype = None if dtype is None else np.dtype(dtype)
    amaxes: dict[str, jax.Array] = {}
    for group in shared:
        amax = _amax_program(tuple(_sharding_of(item.value) for item in group))([item.value for item in group])
        amaxes |= dict.fromkeys([item.name for item in group], amax)
    pending: list[tuple[str, jax.Array]] = []
    for bucket in buckets([item.nbytes for item in items], bucket_bytes):
        members = [items[i] for i in bucket]
        planned = [None if item.fmt is None else _plan_tensors(format, item.name, item.what) for item in members]
        pairs = zip(members, planned, strict=True)
        plans = tuple(_LeafPlan(item.fmt, item.layout, _sharding_of(item.value), tensors) for item, tensors in pairs)
        of_members = [amaxes.get(item.name) for item in members]
        whole = _program(plans, dtype)([item.value for item in members], of_members)
        yield from pending
        pending = []
        for item, tensors, arrays in zip(members, planned, whole, strict=True):
            suffixes = [""] if tensors is None else [each.name for each in tensors]
            pending += [(f"{item.name}{suffix}", array) for suffix, array in zip(suffixes, arrays, strict=True)]
        del whole
    yield from pending


def _sharding_of(value: Any) -> NamedSharding | None:
    """Return the sharding of a leaf over a mesh of several devices, by the codes of quantized weights."""
    array = value.plane(Usage.ROWWISE).data if isinstance(value, QuantizedArray) else value
    sharding = (array.data if isinstance(value, PrimaryWeight) else array).sharding
    return sharding if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1 else None


@functools.lru_cache(maxsize=256)
def _amax_program(shardings: tuple[NamedSharding | None, ...]) -> Callable[[list[Any]], jax.Array]:
    """Return the jitted amax of all weights that share a global scale."""

    def run(values: list[Any]) -> jax.Array:
        shard_specs = [ShardSpec.of(value, (), sharding) for value, sharding in zip(values, shardings, strict=True)]
        pairs = zip(values, shard_specs, strict=True)
        return max_along(
            jnp.stack([partitionable_ops.ops_for(shard_spec).amax_tensor(value, lead=0) for value, shard_spec in pairs])
        )

    return jax.jit(run)


@functools.lru_cache(maxsize=256)
def _program(how: tuple[_LeafPlan, ...], dtype: Any) -> Callable[[list[Any], list[Any]], list[list[Any]]]:
    """Return the jitted cast, gather and encoding of a bucket: the tensors of each leaf.

    Its second argument has the amaxes of leaves that share a global scale, and None for others.
    """

    def run(values: list[Any], amaxes: list[Any]) -> list[list[Any]]:
        return [_whole(value, each, dtype, amax) for value, each, amax in zip(values, how, amaxes, strict=True)]

    return jax.jit(run)


def _whole(value: Any, how: _LeafPlan, dtype: Any, amax: Any) -> list[Any]:
    """Return the tensors of a whole leaf on every device."""
    sharding = how.sharding
    if how.fmt is None or how.tensors is None:
        if dtype is not None and jnp.issubdtype(value.dtype, jnp.floating):
            value = value.astype(dtype)
        return [value if sharding is None else lax.with_sharding_constraint(value, _everywhere(sharding))]
    if isinstance(value, PrimaryWeight):
        value = value.codes
    if not isinstance(value, QuantizedArray):
        if how.layout == "KN":
            value, sharding = value.T, None if sharding is None else _transpose_sharding(sharding)
        value = quantize(value, how.fmt, spec=sharding, scales=None if amax is None else WeightScales(amax=amax))
    if sharding is not None:
        axes = [name for entry in sharding.spec for name in ((entry,) if isinstance(entry, str) else entry or ())]
        value = gather(value, axes, spec=sharding) if axes else value
    parts = value.plane(Usage.ROWWISE)
    whole = Plane(*(part.view(jnp.uint8) if part is not None and part.dtype.itemsize == 1 else part for part in parts))
    arrays = [(each.dtype, each.contents(whole, jnp)) for each in how.tensors]
    return [lax.bitcast_convert_type(x, jnp.float8_e4m3fn) if kind == "F8_E4M3" else x for kind, x in arrays]


def _everywhere(sharding: NamedSharding) -> NamedSharding:
    return NamedSharding(sharding.mesh, PartitionSpec())


def _transpose_sharding(sharding: NamedSharding) -> NamedSharding:
    entries = (*sharding.spec, None, None)[:2]
    return NamedSharding(sharding.mesh, PartitionSpec(*entries[::-1]))
