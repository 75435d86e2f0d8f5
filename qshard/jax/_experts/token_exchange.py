"""Exchange of tokens between devices that have different experts (expert parallelism), inside `shard_map`.

    source rows     rows of the tokens of this device, sorted by the index of their expert among all E experts
    received rows   rows of all R devices for the E / R experts of this device: device 0's first, each sorted by expert

Shapes are static, so received rows are the first rows of a buffer of `capacity` rows. `all_to_all` sends equal numbers
of rows to all devices: first the mean, then smaller parts until the longest chunk has arrived. So the exchange takes as
long as its longest chunk, and any imbalance fits. `jax.lax.ragged_all_to_all` would send only rows in use. XLA lacks it
for CPUs. On the GPUs of one host XLA copies with a kernel of its own, at some 2 % of NVLink's bandwidth
(openxla/xla#33386), and jaxlib 0.11 refuses to use NCCL instead.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from qshard._core.validation import quote
from qshard.jax._ops.amaxes import max_over
from qshard.jax._ops.mesh import count_shards, vary_alike
from qshard.jax._ops.padded_rows import count_stops

PARTS = 4
"""After the mean number of rows, this part of it is sent at once. More parts send less padding, in more calls."""
least_bytes = jax.make_user_context(2**20)
"""Sent to each device at once, if there is as much: below it, calls take as long as transfers. `with least_bytes(n)`
changes it for the programs that are traced there."""


class Chunks(NamedTuple):
    """The rows that a device sends to each of R devices and receives from each, int32 `[R]`.

    Padding is sent too, so `received` says how many of the rows that arrive are in use.

    Attributes:
      sent_at: the first row to send to each device.
      received_at: the position of the rows from each device.
      received: the number of these rows.
      longest: int32 `[]`, the most rows that any device sends to another; the same on all devices.
    """

    sent_at: jax.Array
    received_at: jax.Array
    received: jax.Array
    longest: jax.Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["group_sizes", "ends", "order", "position", "fits", "to_experts", "to_sources"],
    meta_fields=["axes", "rows", "capacity", "overflows"],
)
@dataclass(frozen=True)
class TokenExchange:
    """The positions of rows in one exchange. `of` computes them, with one all-gather of E sizes.

    Attributes:
      axes: the mesh axes of the R devices. Device r has experts `r * E / R` to `(r + 1) * E / R`.
      rows: M, the number of source rows.
      capacity: T, the number of rows in the buffer of received rows.
      overflows: static: some choice of a router needs more than T rows on a device.
      group_sizes: int32 `[E / R]`: received rows of each local expert; -1 if a device has too few rows.
      ends: int32 `[E]`: for each expert, the end of its source rows.
      order: int32 `[T]`: received rows in the order of experts. Rows of an expert keep the order of devices and tokens.
      position: int32 `[T]`, the inverse.
      fits: whether all devices have enough rows.
      to_experts, to_sources: chunks of both directions.
    """

    axes: tuple[str, ...]
    rows: int
    capacity: int
    overflows: bool
    group_sizes: jax.Array
    ends: jax.Array
    order: jax.Array
    position: jax.Array
    fits: jax.Array
    to_experts: Chunks
    to_sources: Chunks

    @classmethod
    def of(
        cls, group_sizes: jax.Array, rows: int, axes: tuple[str, ...], capacity_factor: float | None
    ) -> TokenExchange:
        """Return the exchange of M source rows. `group_sizes` are int32 `[E]`, the source rows of each expert."""
        ranks, worst = device_count(axes), rows * device_count(axes)
        capacity = worst if capacity_factor is None else min(worst, math.ceil(capacity_factor * rows))
        sizes = jnp.asarray(group_sizes, jnp.int32)
        rank, own = lax.axis_index(axes), sizes.shape[0] // ranks
        table = lax.all_gather(sizes, axes).reshape(ranks, ranks, own)  # Source, destination, expert.
        ends = jnp.cumsum(sizes, dtype=jnp.int32)
        fits = table.sum((0, 2)).max() <= capacity
        table = jnp.where(fits, table, 0)  # Nothing is sent, so nothing is written past the end of a buffer.
        counts, sent = table[:, rank], table.sum(2)
        at_source, at_experts = _starts(sent, 1), _starts(sent, 0)
        longest = sent.max()
        to_experts = Chunks(at_source[rank], at_experts[:, rank], sent[:, rank], longest)
        to_sources = Chunks(at_experts[:, rank], at_source[rank], sent[rank], longest)
        position, order = _by_expert(counts, capacity)
        return cls(
            axes=axes,
            rows=rows,
            capacity=capacity,
            overflows=capacity < worst,
            group_sizes=jnp.where(fits, counts.sum(0), -1).astype(jnp.int32),
            ends=ends,
            order=order,
            position=position,
            fits=fits,
            to_experts=to_experts,
            to_sources=to_sources,
        )

    @property
    def first_expert(self) -> jax.Array:
        """The index of the first local expert among all experts."""
        return lax.axis_index(self.axes) * self.group_sizes.shape[0]

    def dispatch(self, rows: jax.Array) -> jax.Array:
        """Send source rows `[M, C]` to the devices of their experts: `[T, C]`. Rows that are not in use are zeros."""
        return _all_to_all(rows, self.to_experts, self.capacity, self.axes)

    def combine(self, rows: jax.Array) -> jax.Array:
        """Return received rows `[T, C]` to their sources: `[M, C]`. Rows of no expert are zeros.

        If a device has too few rows, all is NaN on all devices.
        """
        source = _all_to_all(rows, self.to_sources, self.rows, self.axes)
        return jnp.where(self.fits, source, jnp.nan) if self.overflows else source

    def max_over_devices(self, axes: tuple[str, ...]) -> Any:
        """Return the max-reduction of amaxes of all experts over the devices, and over the mesh axes `axes`."""
        return max_over((*self.axes, *axes))

    def own(self, of_experts: jax.Array) -> jax.Array:
        """Return the part `[E / R]` of an array of all experts `[E]` that belongs to the local experts."""
        size = self.group_sizes.shape[0]
        return lax.dynamic_slice_in_dim(of_experts, self.first_expert, size)

    def of_all(self, of_experts: jax.Array) -> jax.Array:
        """Gather `[E / R]` of the local experts to `[E]`."""
        gathered: jax.Array = lax.all_gather(of_experts, self.axes, tiled=True)
        return gathered

    def guard(self, w: jax.Array) -> jax.Array:
        """Return `w` `[E / R, ...]`. If a device has too few rows, a row of each expert's gradient is NaN."""
        return _guard(*vary_alike(w, self.fits)) if self.overflows else w


def device_count(axes: tuple[str, ...]) -> int:
    """Return the number of devices along mesh axes of the enclosing `shard_map`."""
    return count_shards(jax.sharding.get_abstract_mesh().shape, axes)


def check_capacity(op: str, capacity_factor: Any, axes: tuple[str, ...]) -> None:
    """Raise ValueError unless `capacity_factor` is None or a positive number, for a call with mesh axes of experts."""
    if capacity_factor is None:
        return
    is_number = isinstance(capacity_factor, int | float) and not isinstance(capacity_factor, bool)
    if not is_number or not 0 < capacity_factor < math.inf:
        raise ValueError(
            f"{op}: capacity_factor ({quote(capacity_factor)}) is not a positive number; pass the rows of the buffer "
            "per row that a device sends, such as 1.5, or None for the worst case"
        )
    if not axes:
        raise ValueError(
            f"{op}: capacity_factor ({capacity_factor}) is for expert parallelism; pass ep_axis too, or leave it out"
        )


def _starts(sizes: jax.Array, axis: int) -> jax.Array:
    return jnp.cumsum(sizes, axis, dtype=jnp.int32) - sizes


def _by_expert(counts: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Return the position of each received row among rows sorted by expert, and the inverse; `counts` is `[R, E / R]`.

    Rows that are not in use keep their positions.
    """
    by_rank, row = counts.reshape(-1), jnp.arange(capacity, dtype=jnp.int32)
    starts = _starts(counts.T.reshape(-1), 0).reshape(counts.shape[::-1]).T.reshape(-1)
    ends = jnp.cumsum(by_rank, dtype=jnp.int32)
    moves = jnp.append(starts - (ends - by_rank), 0)
    position = row + moves[count_stops(ends, row)]
    zeros, position, row = vary_alike(jnp.zeros_like(row), position, row)
    return position, zeros.at[position].set(row, unique_indices=True, mode="promise_in_bounds")


def _all_to_all(rows: jax.Array, chunks: Chunks, size: int, axes: tuple[str, ...]) -> jax.Array:
    """Send chunks of rows `[M, C]` to all devices: `[size, C]`, with zeros in rows that are not received."""
    rows, *varying = vary_alike(rows, *chunks)
    (received, _) = vary_alike(jnp.zeros((size, rows.shape[1]), rows.dtype), rows)
    chunks = Chunks(*varying)
    most, ranks = min(rows.shape[0], size), chunks.sent_at.shape[0]
    mean = -(-most // ranks)
    part = max(-(-mean // PARTS), -(-least_bytes.value // max(rows.shape[1] * rows.dtype.itemsize, 1)))
    first = min(max(mean, part), most)

    def send(at: jax.Array, count: int, received: jax.Array) -> jax.Array:
        row = at + jnp.arange(count, dtype=jnp.int32)
        each = lax.all_to_all(rows.at[chunks.sent_at[:, None] + row].get(mode="clip"), axes, 0, 0)
        lands_at = jnp.where(row < chunks.received[:, None], chunks.received_at[:, None] + row, size)
        return received.at[lands_at].set(each, mode="drop")

    received = send(jnp.int32(0), first, received)
    if first == most:
        return received
    _, received = lax.while_loop(
        lambda state: state[0] < chunks.longest,
        lambda state: (state[0] + part, send(state[0], part, state[1])),
        (jnp.int32(first), received),
    )
    return received


@jax.custom_vjp
def _guard(w: jax.Array, fits: jax.Array) -> jax.Array:
    return w


def _guard_backward(fits: jax.Array, grad: jax.Array) -> tuple[jax.Array, None]:
    # Writes one row of each expert, or none. A `where` over the gradient would read and write all of it.
    row = jnp.where(fits, grad.shape[1], 0)
    return grad.at[:, row].set(jnp.nan, mode="drop"), None


_guard.defvjp(lambda w, fits: (w, fits), _guard_backward)
