"""Statistics of a step: probes that `linear` takes, whose gradients bring what it has seen, and their reader.

As the amaxes of delayed scaling, statistics leave a differentiated function in a cotangent: that of a `Probe`, which is
zeros and changes nothing. So they pass `jit`, `shard_map`, `scan` and remat, and cost nothing where no gradient of a
probe is asked for. Cotangents are summed, by JAX where one probe serves two calls, and a sum of amaxes is no amax: each
carries a mark of 1, by which `numerics_of` tells.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from numpy.typing import NDArray

from qshard._core.operands import OperandSpec
from qshard._core.validation import quote
from qshard.formats import ElementFormat, Usage
from qshard.jax._delayed_scaling import LinearState, TensorState
from qshard.jax._ops.collectives import max_over
from qshard.jax._ops.mesh import mesh_of, names_of, spec_of, types_tell
from qshard.jax._quantized.array import QuantizedArray
from qshard.jax._quantized.quantize import WeightScales, quantize_shard
from qshard.jax._sharding.shard_spec import ShardSpec, matrix_of
from qshard.numerics._training_steps import COUNTS, StepStats, Totals, layer_stats, step_sums
from qshard.recipes import Recipe, RecipeLike, Role, as_recipe

NUMBERS = ("mark", "calls", "amax", "signal", "noise", "scale_low", "scale_high")
DIGITS = (1 << 8, 1 << 16, 1 << 16)
"""A count is three numbers, low first, each exact in float32 also as a sum over 256 devices."""
SIZE = len(NUMBERS) + len(DIGITS) * (len(COUNTS) + 1)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weight", "activation", "gradient"], meta_fields=[])
@dataclass(frozen=True, eq=False)
class Probe:
    """Zeros that a call of `linear` takes, and in a gradient with respect to them what it has seen, by role.

    Attributes:
      weight, activation, gradient: float32 `[..., n]`; what each number is, `numerics_of` knows.
    """

    weight: jax.Array
    activation: jax.Array
    gradient: jax.Array


def init_numerics(shape: Sequence[int] = ()) -> Probe:
    """The probe of a call of `linear`.

    Args:
      shape: leading axes: of layers that are scanned over; or one of devices, in `shard_map`, that each see their own.

    >>> init_numerics((12,)).weight.shape[0]
    12
    """
    if not isinstance(shape, tuple | list):
        raise TypeError(f"init_numerics: shape ({quote(shape)}) is not a tuple; pass one, such as (layers,)")
    return Probe(*(jnp.zeros((*shape, SIZE), jnp.float32) for _ in Role))


def numerics_of(seen: Any, recipe: RecipeLike) -> StepStats:
    """Statistics of a step, from the gradient with respect to the probes of its calls of `linear`.

        probes = {name: qshard.jax.init_numerics() for name in ("up", "down")}

        def loss_of(weights, probes, x):
            x = qshard.jax.linear(x, weights["up"], recipe, probe=probes["up"])
            return jnp.mean(qshard.jax.linear(x, weights["down"], recipe, probe=probes["down"]) ** 2)

        gradients, seen = jax.jit(jax.grad(loss_of, argnums=(0, 1)))(weights, probes, x)
        print(qshard.jax.numerics_of(seen, recipe).of("up", Role.GRADIENT).zeros_made)

    Each operand of the call is quantized once more, as `linear` does it, in the plane of the forward product (of a
    gradient, of `dy @ w`), and compared with what was given. No bit of the step changes.

    Args:
      seen: a pytree of `Probe`s: a gradient with respect to those that `init_numerics` gave. Its names are those of the
        layers; leading axes are put together.
      recipe: of the calls.

    Returns:
      A row for each layer and role that was seen: not of weights that came as codes, nor of what has no gradient.

    Raises:
      ValueError: a probe served more than one call, or its gradient was summed or scaled: give each call one of its
        own, such as a part of one with leading axes.

    Sharded arrays: counts and sums are those of whole arrays, under `jit` on any mesh, and in `shard_map` over all mesh
    axes over which an operand varies and the probe does not; a probe for each device, cut along a leading axis, is put
    together here. Counts are exact up to 256 devices in `shard_map`, and sums in float32. The cost: a gather of each
    weight's codes, a cast of each operand, and about 20 passes over float32, which XLA fuses in part;
    benchmarks/bench_watch.py measures it.

    >>> from qshard.jax import linear
    >>> x, w = jnp.full((4, 16), 2.0), jnp.full((8, 16), 7.0)
    >>> seen = jax.grad(lambda probe: linear(x, w, "CurrentScaling", probe=probe).sum())(init_numerics())
    >>> row = numerics_of({"up": seen}, "CurrentScaling").of("up", Role.ACTIVATION)
    >>> row.amax, row.sqnr_db, row.elements, round(448 * row.scale_low, 6)
    (2.0, inf, 64, 2.0)
    """
    recipe = as_recipe(recipe, "numerics_of")
    rows = []
    leaves = jax.tree_util.tree_leaves_with_path(seen, is_leaf=lambda node: isinstance(node, Probe))
    for path, probe in leaves:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if not isinstance(probe, Probe):
            raise TypeError(
                f"numerics_of: seen ({quote(probe)} at {name!r}) is not a Probe; pass the gradient with respect to the "
                "probes"
            )
        for role in Role:
            total = _total(np.asarray(getattr(probe, role.value), np.float32), name, role)
            if total.calls:
                rows.append(layer_stats(name, role, recipe.format(role), total))
    return StepStats(tuple(rows))


def _total(seen: NDArray[np.float32], name: str, role: Role) -> Totals:
    total = Totals()
    for values in seen.reshape(-1, seen.shape[-1]).astype(np.float64):
        mark, calls, amax, signal, noise, low, high = values[: len(NUMBERS)].tolist()
        if mark not in (0.0, 1.0):
            raise ValueError(
                f"numerics_of: the probe of {name!r} ({role.value}) was used by {mark:g} calls, so its amaxes are "
                "sums; use one probe for each call of linear and each microbatch"
            )
        digits = values[len(NUMBERS) :].reshape(-1, len(DIGITS))
        *counts, elements = (int(digits @ np.cumprod([1, *DIGITS[:-1]])) for digits in digits) if mark else [0] * 6
        named = dict(zip(COUNTS, counts, strict=True))
        if mark:
            square = amax * amax
            total += Totals(
                amax, signal * square, noise * square, low, high, **named, elements=elements, calls=round(calls)
            )
    return total


class How(NamedTuple):
    """What is static of the operands of a call."""

    recipe: Recipe
    axes: tuple[str, ...]
    rows: PartitionSpec | None


def check_probe(op: str, probe: Any, apart: bool) -> None:
    if not isinstance(probe, Probe):
        raise TypeError(f"{op}: probe ({quote(probe)}) is not a Probe; pass one from init_numerics, for this call only")
    if apart:
        raise ValueError(
            f"{op}: probe does not support local_axes, gather_rows, scatter_rows or vmap_as_rows; leave them out"
        )


def before(how: How, x: jax.Array, probe: Probe, seed: Any, state: LinearState | None) -> jax.Array:
    """x, whose statistics will come with its gradient."""
    given, state = lax.stop_gradient((x, state))
    seen = _of_operand(how, given, Role.ACTIVATION, probe.activation, seed, state)
    return _carry(x, probe.activation, seen)


def of_weight(
    x: jax.Array, w: jax.Array, whole: QuantizedArray, probe: Probe, spec: Any, gather_axes: tuple[str, ...]
) -> jax.Array:
    """x, with whose gradient come the statistics of `w`, of which `whole` has what is multiplied."""
    given = lax.stop_gradient(w).astype(jnp.float32)
    value, scale = (_part_of(values, given, spec, gather_axes) for values in _values(lax.stop_gradient(whole)))
    if jax.typeof(given).sharding.mesh.explicit_axes:
        value, scale = (jax.sharding.reshard(values, jax.typeof(given).sharding) for values in (value, scale))
    seen = _reduce(_pack(given, value, scale, whole.format.element), probe.weight, gather_axes)
    return _carry(x, probe.weight, seen)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def after(how: How, y: jax.Array, probe: jax.Array, seed: Any, state: LinearState | None) -> jax.Array:
    """y, the statistics of whose gradient will be the gradient of a probe."""
    return y


def _after_backward(how: How, kept: Any, dy: jax.Array) -> tuple[Any, ...]:
    probe, seed, state = kept
    return dy, _of_operand(how, dy, Role.GRADIENT, probe, seed, state), None, None


after.defvjp(lambda how, y, probe, seed, state: (y, (probe, seed, state)), _after_backward)


@jax.custom_vjp
def _carry(x: jax.Array, probe: jax.Array, seen: jax.Array) -> jax.Array:
    return x


_carry.defvjp(lambda x, probe, seen: (x, seen), lambda seen, dx: (dx, seen, None))


def _of_operand(
    how: How, x: jax.Array, role: Role, probe: jax.Array, seed: Any, state: LinearState | None
) -> jax.Array:
    """The numbers of x or dy, quantized as the call does it."""
    scales, rows = None, math.prod(x.shape[:-1])
    if state is not None:
        tensor: TensorState = getattr(state, role.value)
        scales = WeightScales(tensor.scale)
    operand = OperandSpec.of(how.recipe, role, Usage.ROWWISE, rows)
    made, _ = quantize_shard(x, operand, ShardSpec.of(x, how.axes, how.rows, own_blocks=True), scales, seed)
    given = matrix_of(x) if operand.added_rows else x
    value, scale = (values[:rows] if operand.added_rows else values for values in _values(made))
    return _reduce(_pack(given.astype(jnp.float32), value, scale, operand.format.element), probe, how.axes)


def _values(q: QuantizedArray) -> tuple[jax.Array, jax.Array]:
    """What is stored, and what each code is multiplied by: what is stored where all codes stand for 1."""
    (usage, plane), *_ = q.planes.items()
    bits = lax.bitcast_convert_type(plane.data, jnp.uint8)
    ones = lax.bitcast_convert_type((bits & np.uint8(0)) | np.uint8(q.format.element.ones_byte), plane.data.dtype)
    of_ones = q.with_planes({usage: plane._replace(data=ones)})
    return q.dequantize(jnp.float32, usage=usage), of_ones.dequantize(jnp.float32, usage=usage)


def _part_of(values: jax.Array, w: jax.Array, spec: Any, gather_axes: tuple[str, ...]) -> jax.Array:
    """What of a gathered weight `w` is, in `shard_map`."""
    manual = set(mesh_of(w, spec).manual_axes).intersection(gather_axes)
    for axis, entry in enumerate(spec_of(spec, gather_axes or None)):
        if names := tuple(name for name in names_of(entry) if name in manual):
            size = w.shape[axis]
            values = lax.dynamic_slice_in_dim(values, lax.axis_index(names) * size, size, axis)
    return values


def _pack(x: jax.Array, value: jax.Array, scale: jax.Array, element: ElementFormat) -> jax.Array:
    """All numbers of one tensor, as one array."""
    if not x.size:
        nothing = jnp.zeros(SIZE, jnp.float32).at[0].set(1).at[1].set(1).at[NUMBERS.index("scale_low")].set(jnp.inf)
        return nothing
    x = x if x.ndim else x[None]
    seen = step_sums(jnp, x, value.reshape(x.shape), scale.reshape(x.shape), element, _count)
    one = jnp.where(jnp.isnan(seen.amax), 1.0, 1.0)  # Under `vmap` on Explicit meshes cut as what it is joined to.
    numbers = jnp.stack([one, one, *(getattr(seen, name) for name in NUMBERS[2:])])
    rest, size = [], x.size
    for base in DIGITS:
        size, digit = divmod(size, base)
        rest.append(digit * one)
    return jnp.concatenate([numbers, *(getattr(seen, name) for name in COUNTS), jnp.stack(rest)])


def _count(mask: jax.Array) -> jax.Array:
    """How many are true, as digits: no sum of integers overflows, and each digit is exact in float32."""
    rows = jnp.sum(mask, axis=-1, dtype=jnp.int32)
    low, high = jnp.sum(rows % DIGITS[0]), jnp.sum(rows // DIGITS[0])
    high = high + low // DIGITS[0]
    return jnp.stack([low % DIGITS[0], high % DIGITS[1], high // DIGITS[1]]).astype(jnp.float32)


def _reduce(seen: jax.Array, probe: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Of all devices that share a probe. Types tell which those are; with `check_vma=False`, it is `axes`."""
    if types_tell():
        own, shared = (jax.typeof(a).manual_axis_type.varying for a in (seen, probe))
        if missing := tuple(sorted(shared - own)):
            seen = lax.pcast(seen, missing, to="varying")
        axes = tuple(sorted(own - shared))
    if not axes:
        return seen
    _, calls, amax, signal, noise, low, high = seen[: len(NUMBERS)]
    most = max_over(axes)(amax)
    part = jnp.where(most > 0, jnp.square(amax / jnp.where(most > 0, most, 1.0)), 0.0)
    sums = lax.psum(jnp.concatenate([jnp.stack([calls, signal * part, noise * part]), seen[len(NUMBERS) :]]), axes)
    ends = lax.pmax(jnp.stack([-low, high]), axes)
    numbers = [jnp.ones_like(most), sums[0], most, sums[1], sums[2], -ends[0], ends[1]]
    return jnp.concatenate([jnp.stack(numbers), sums[3:]])
