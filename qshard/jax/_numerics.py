"""Conversion of JAX arrays for `qshard.numerics`: each process reads its own shards."""

from __future__ import annotations

import pickle
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from numpy.typing import NDArray

from qshard._core.placement import Box
from qshard.numerics._arrays import ShardedArray, of_floats, of_shards
from qshard.numerics._reductions import as_float

T = TypeVar("T")

CHUNK = 1 << 20
"""Amaxes per all-gather. Each process receives this many from every process."""


class ProcessReductions:
    """Reductions of `qshard.numerics` over all processes of `jax.distributed`."""

    def maximum(self, bits: NDArray[np.int32]) -> NDArray[np.int32]:
        flat = bits.reshape(-1)
        parts = [flat[first : first + CHUNK] for first in range(0, flat.size, CHUNK)]
        merged = [_all_gather(part).max(axis=0) for part in parts]
        return np.concatenate([flat[:0], *merged])

    def gathered(self, own: T) -> list[T]:
        data = np.frombuffer(pickle.dumps(own), np.uint8)
        sizes = _all_gather(np.array([data.size], np.int32)).reshape(-1)
        rows = _all_gather(np.pad(data, (0, int(sizes.max()) - data.size)))
        return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes.tolist(), strict=True)]


def _all_gather(own: NDArray[Any]) -> NDArray[Any]:
    """All-gather equally shaped host arrays of all processes, along a new first axis."""
    found: NDArray[Any] = np.asarray(multihost_utils.process_allgather(own))
    return found.reshape(jax.process_count(), *own.shape)


def as_sharded(x: Any, op: str) -> ShardedArray:
    """Describe `x`, a JAX array of any sharding, for `qshard.numerics`: its shape, dtype and local shards.

    Every process must call this, and the measurement, for an array with shards on other processes.
    """
    if isinstance(x, jax.core.Tracer):
        raise TypeError(f"{op}: x ({x.aval}) is traced and has no values; call {op} outside jit")
    dtype = str(x.dtype)
    if not isinstance(x, jax.Array) or x.sharding.num_devices == 1:
        return of_floats(as_float(x, op), dtype)
    if x.is_fully_replicated:
        return of_floats(as_float(x.addressable_shards[0].data, op), dtype)
    shards = []
    for shard in x.addressable_shards:
        if shard.replica_id == 0:
            start = tuple(part.indices(size)[0] for part, size in zip(shard.index, x.shape, strict=True))
            shards.append((shard.data, Box(x.shape, start, shard.data.shape)))
    others = None if x.is_fully_addressable else ProcessReductions()
    return of_shards(x.shape, dtype, shards, others, op)


def placed_like(leaf: jax.Array, value: NDArray[Any]) -> jax.Array:
    """Put `value` on the devices of `leaf`, with its sharding."""
    placed: jax.Array = jax.device_put(value, leaf.sharding)
    return placed
