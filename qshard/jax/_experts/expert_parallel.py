"""Operands of ragged products under expert parallelism: rows come from other devices.

Rows are quantized on the source device, and codes are sent, in two cases:

- Formats with one scale. Devices reduce the amax of each expert first. Both planes have the same numbers, so the
  columnwise plane is the transpose of the received one.
- Formats with 1-D blocks and no other scale, if no product reads the columnwise plane: without gradients, and if the
  weights are codes without a gradient.

Otherwise values are sent, and quantized where they arrive, because blocks along columns join rows of several devices.
Codes of both planes would be as many bytes as values in bfloat16. Codes and scales are always the same as on one device
that has all experts, and the tokens of device 0 first.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from qshard._core import quantize_steps
from qshard._core.operands import OperandSpec, quantize_rows
from qshard.formats import Usage
from qshard.jax._experts.tiles import Tiles, quantize_tiles, tiles_of
from qshard.jax._experts.token_exchange import TokenExchange
from qshard.jax._quantized.array import QuantizedArray
from qshard.jax._sharding import partitionable_ops
from qshard.layout import rows_are_independent
from qshard.recipes import Recipe, Role


@functools.partial(jax.tree_util.register_dataclass, data_fields=["x", "y", "exchange"], meta_fields=["dispatched"])
@dataclass(frozen=True)
class GroupedRows:
    """The padded rows of one ragged product: as rows of x, and as rows of the result.

    With expert parallelism, `exchange` dispatches the operand in the role `dispatched`: the activation, and combines
    its gradient; or the gradient of the result, and combines the result.
    """

    x: Tiles
    y: Tiles
    exchange: TokenExchange | None = None
    dispatched: Role | None = None

    @property
    def experts(self) -> int:
        return int(self.x.stops.shape[0])

    @property
    def first_expert(self) -> jax.Array | int:
        """The index of the first expert among the experts of all devices."""
        return 0 if self.exchange is None else self.exchange.first_expert

    def exchange_of(self, role: Role) -> TokenExchange | None:
        """Return the exchange that dispatches the operand in `role`, or None."""
        return self.exchange if role is self.dispatched else None

    def combine(self, rows: jax.Array, role: Role) -> jax.Array:
        """Return the rows of a result to their sources, if the operand in `role` is dispatched."""
        exchange = self.exchange_of(role)
        return rows if exchange is None else exchange.combine(rows)


def exchanged_rows(exchange: TokenExchange, recipe: Recipe) -> tuple[GroupedRows, GroupedRows]:
    """Return the padded rows of a product that dispatches activations, and of a product that combines results.

    Between the two products are padded rows.
    """
    tiles = tiles_of(recipe, exchange.capacity, exchange.group_sizes)
    padded = tiles.rows.shape[0]
    fits = tiles.fits if exchange.overflows else jnp.ones((), bool)  # A constant, so that XLA has no select to do.
    # Received rows are sorted by device first, so they have no `ends`.
    rows = exchange.order.at[tiles.rows].get(mode="fill", fill_value=exchange.capacity)
    assert tiles.place is not None
    received = dataclasses.replace(tiles, ends=None, rows=rows, place=tiles.place[exchange.position], fits=fits)
    row = jnp.arange(padded, dtype=jnp.int32)
    own = jnp.where(tiles.rows < exchange.capacity, row, padded)
    inside = dataclasses.replace(tiles, ends=None, rows=own, place=None, fits=fits)
    first = GroupedRows(received, inside, exchange, Role.ACTIVATION)
    return first, GroupedRows(inside, received, exchange, Role.GRADIENT)


def quantize_dispatched(
    x: jax.Array,
    operand: OperandSpec,
    tiles: Tiles,
    exchange: TokenExchange,
    *,
    axes: tuple[str, ...],
    seeds: jax.Array | None,
    scales: jax.Array | None,
) -> tuple[QuantizedArray, jax.Array | None]:
    """Quantize and dispatch source rows `[M, K]`. Arguments and results as of `quantize_tiles`, for local experts."""
    fmt, usage = operand.format, operand.usage
    q = QuantizedArray(format=fmt, dtype=x.dtype, axes=(None, None))
    if usage is Usage.ROWWISE and rows_are_independent(fmt):
        plane = quantize_steps.quantize(partitionable_ops, x, fmt, usage)[usage]
        received = jax.tree.map(lambda part: _dispatch_part(part, tiles, exchange), plane)
        return q.with_planes({usage: received}), None
    if not fmt.per_tensor:
        return quantize_tiles(exchange.dispatch(x), operand, tiles, axes=axes, seeds=seeds, scales=scales)
    source = jnp.arange(x.shape[0], dtype=jnp.int32)
    planes, amax = quantize_rows(
        partitionable_ops,
        x,
        operand._replace(usage=Usage.ROWWISE),
        source,
        exchange.ends,
        scale=None if scales is None else exchange.of_all(scales),
        reduce_max=exchange.max_over_devices(axes),
    )
    sent = planes[Usage.ROWWISE]
    data, scale_inv = _dispatch_part(sent.data, tiles, exchange), exchange.own(sent.scale_inv)
    found: dict[Usage, Any] = {Usage.ROWWISE: sent._replace(data=data, scale_inv=scale_inv)}
    if Usage.COLUMNWISE in usage:
        found[Usage.COLUMNWISE] = quantize_steps.transpose_plane(partitionable_ops, found[Usage.ROWWISE], fmt)
    return q.with_planes({each: found[each] for each in usage.planes}), None if amax is None else exchange.own(amax)


def _dispatch_part(part: jax.Array, tiles: Tiles, exchange: TokenExchange) -> jax.Array:
    """Dispatch rows of codes or scales, and copy them to padded rows."""
    is_byte = part.dtype.itemsize == 1
    received = exchange.dispatch(lax.bitcast_convert_type(part, jnp.uint8) if is_byte else part)
    received = received.at[tiles.rows].get(mode="fill", fill_value=0)
    return lax.bitcast_convert_type(received, part.dtype) if is_byte else received
