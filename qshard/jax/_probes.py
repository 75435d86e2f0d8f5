"""Statistics of a training step: the probes that `linear` takes, and `numerics_of`, which reads their gradients.

Statistics leave a differentiated function as the cotangent of a `Probe`, like the amaxes of delayed scaling. A probe is
zeros and changes no result. So statistics pass through `jit`, `shard_map`, `scan` and remat, and cost nothing if no
gradient of a probe is taken. JAX sums the cotangents of two calls that share a probe, and a sum of amaxes is not an
amax. So each cotangent has a mark of 1, and `numerics_of` raises on any mark other than 0 and 1.
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
from qshard.jax._ops.amaxes import max_over
from qshard.jax._ops.mesh import mesh_of, names_of, spec_of, types_tell
from qshard.jax._quantized.array import QuantizedArray
from qshard.jax._quantized.quantize import quantize_shard
from qshard.jax._quantized.weight_scales import WeightScales
from qshard.jax._sharding.shard_spec import ShardSpec, matrix_of
from qshard.numerics._training_steps import COUNTS, StepStats, Totals, layer_stats, step_sums
from qshard.recipes import Recipe, RecipeLike, Role, as_recipe

NUMBERS = ("mark", "calls", "amax", "signal", "noise", "scale_low", "scale_high")
DIGITS = (1 << 8, 1 << 16, 1 << 16)
"""Bases of the three digits of a count, low first. Each digit is exact in float32, even summed over 256 devices."""
SIZE = len(NUMBERS) + len(DIGITS) * (len(COUNTS) + 1)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weight", "activation", "gradient"], meta_fields=[])
@dataclass(frozen=True, eq=False)
class Probe:
    """A zero input to one call of `linear`. Its cotangent carries the statistics of the call, by role.

    Attributes:
      weight, activation, gradient: float32 `[..., n]`, packed numbers that `numerics_of` reads.
    """

    weight: jax.Array
    activation: jax.Array
    gradient: jax.Array


def init_numerics(shape: Sequence[int] = ()) -> Probe:
    """Create the probe of one call of `linear`.

    Args:
      shape: leading axes: `(layers,)` for `lax.scan` over layers; `(devices,)` for a probe per device in `shard_map`.

    Returns:
      A `Probe` of float32 zeros, each array `[*shape, n]`.

    Raises:
      TypeError: `shape` is not a tuple.

    >>> init_numerics((12,)).weight.shape[0]
    12
    """
    if not isinstance(shape, tuple | list):
        raise TypeError(f"init_numerics: shape ({quote(shape)}) is not a tuple; pass one, such as (layers,)")
    return Probe(*(jnp.zeros((*shape, SIZE), jnp.float32) for _ in Role))


def numerics_of(seen: Any, recipe: RecipeLike) -> StepStats:
    """Compute the statistics of a training step from the gradient with respect to its probes.

        probes = {name: qshard.jax.init_numerics() for name in ("up", "down")}

        def loss_of(weights, probes, x):
            x = qshard.jax.linear(x, weights["up"], recipe, probe=probes["up"])
            return jnp.mean(qshard.jax.linear(x, weights["down"], recipe, probe=probes["down"]) ** 2)

        gradients, seen = jax.jit(jax.grad(loss_of, argnums=(0, 1)))(weights, probes, x)
        print(qshard.jax.numerics_of(seen, recipe).of("up", Role.GRADIENT).zeros_made)

    Each operand of a call with a probe is quantized once more, as `linear` does it, and compared with its exact values:
    the plane that the forward product reads, for a gradient the plane that `dy @ w` reads. No bit of the step changes.

    Args:
      seen: a pytree of `Probe`s: the gradient with respect to the probes of `init_numerics`. Its keys name the layers.
        Leading axes are merged into one row.
      recipe: the recipe of the calls, or its name.

    Returns:
      A row for each layer and role. Weights passed as codes and tensors without a gradient have no row.

    Raises:
      TypeError: a leaf of `seen` is not a `Probe`, or `recipe` is not a recipe.
      ValueError: a probe served several calls, or its gradient was summed or scaled. Give each call its own probe, such
        as one index of a probe with leading axes.

    Counts and sums are of whole arrays: under `jit` on any mesh, and in `shard_map` over all mesh axes over which an
    operand varies and the probe does not. Probes per device, sharded along a leading axis, are merged here. Counts are
    exact up to 256 devices in `shard_map`; sums are in float32. A probe costs a gather of the weight's codes, a cast of
    each operand, and about 20 passes over float32 that XLA fuses in part (benchmarks/bench_watch.py).

    >>> from qshard.jax import linear
    >>> x, w = jnp.full((4, 16), 2.0), jnp.full((8, 16), 7.0)
    >>> seen = jax.grad(lambda probe: linear(x, w, "CurrentScaling", probe=probe).sum())(init_numerics())
    >>> row = numerics_of({"up": seen}, "CurrentScaling").of("up", Role.ACTIVATION)
    >>> row.amax, row.sqnr_db, row.elements, round(448 * row.scale_low, 6)
    (2.0, inf, 64, 2.0)
    """
    recipe = as_recipe(recipe, "numerics_of", by_product=False)
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


class ProbeOptions(NamedTuple):
    """Static options of the operands of a call: the recipe and the sharding of x."""

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


def observe_activation(
    how: ProbeOptions, x: jax.Array, probe: Probe, seed: Any, state: LinearState | None
) -> jax.Array:
    """Return x, with the statistics of x as the gradient of `probe.activation`."""
    given, state = lax.stop_gradient((x, state))
    seen = _operand_stats(how, given, Role.ACTIVATION, probe.activation, seed, state)
    return _attach(x, probe.activation, seen)


def observe_weight(
    x: jax.Array, w: jax.Array, whole: QuantizedArray, probe: Probe, spec: Any, gather_axes: tuple[str, ...]
) -> jax.Array:
    """Return x, with the statistics of `w` as the gradient of `probe.weight`. The gradient of x passes through.

    `w` is the weight as passed to `linear`, and `whole` the codes, gathered over `gather_axes`, that the product reads.
    """
    given = lax.stop_gradient(w).astype(jnp.float32)
    value, scale = (_slice_shard(values, given, spec, gather_axes) for values in _values(lax.stop_gradient(whole)))
    if jax.typeof(given).sharding.mesh.explicit_axes:
        value, scale = (jax.sharding.reshard(values, jax.typeof(given).sharding) for values in (value, scale))
    seen = _reduce(_pack(given, value, scale, whole.format.element), probe.weight, gather_axes)
    return _attach(x, probe.weight, seen)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def observe_gradient(
    how: ProbeOptions, y: jax.Array, probe: jax.Array, seed: Any, state: LinearState | None
) -> jax.Array:
    """Return y, with the statistics of its gradient as the gradient of `probe`."""
    return y


def _observe_gradient_backward(how: ProbeOptions, saved: Any, dy: jax.Array) -> tuple[Any, ...]:
    probe, seed, state = saved
    return dy, _operand_stats(how, dy, Role.GRADIENT, probe, seed, state), None, None


observe_gradient.defvjp(lambda how, y, probe, seed, state: (y, (probe, seed, state)), _observe_gradient_backward)


@jax.custom_vjp
def _attach(x: jax.Array, probe: jax.Array, seen: jax.Array) -> jax.Array:
    return x


_attach.defvjp(lambda x, probe, seen: (x, seen), lambda seen, dx: (dx, seen, None))


def _operand_stats(
    how: ProbeOptions, x: jax.Array, role: Role, probe: jax.Array, seed: Any, state: LinearState | None
) -> jax.Array:
    """Pack the statistics of x or dy, quantized as `linear` quantizes it."""
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
    """Dequantize a tensor to its values and to the scale of each element, both float32."""
    (usage, plane), *_ = q.planes.items()
    bits = lax.bitcast_convert_type(plane.data, jnp.uint8)
    ones = lax.bitcast_convert_type((bits & np.uint8(0)) | np.uint8(q.format.element.ones_byte), plane.data.dtype)
    of_ones = q.with_planes({usage: plane._replace(data=ones)})
    return q.dequantize(jnp.float32, usage=usage), of_ones.dequantize(jnp.float32, usage=usage)


def _slice_shard(values: jax.Array, w: jax.Array, spec: Any, gather_axes: tuple[str, ...]) -> jax.Array:
    """In `shard_map`, slice the local shard of `w` out of values of the gathered weight."""
    manual = set(mesh_of(w, spec).manual_axes).intersection(gather_axes)
    for axis, entry in enumerate(spec_of(spec, gather_axes or None)):
        if names := tuple(name for name in names_of(entry) if name in manual):
            size = w.shape[axis]
            values = lax.dynamic_slice_in_dim(values, lax.axis_index(names) * size, size, axis)
    return values


def _pack(x: jax.Array, value: jax.Array, scale: jax.Array, element: ElementFormat) -> jax.Array:
    """Compute the statistics of one tensor, or one shard, packed into float32 `[SIZE]`."""
    if not x.size:
        nothing = jnp.zeros(SIZE, jnp.float32).at[0].set(1).at[1].set(1).at[NUMBERS.index("scale_low")].set(jnp.inf)
        return nothing
    x = x if x.ndim else x[None]
    seen = step_sums(jnp, x, value.reshape(x.shape), scale.reshape(x.shape), element, _count)
    # A 1 that depends on the amax: under `vmap` on Explicit meshes it must be sharded as the arrays it is stacked with.
    one = jnp.where(jnp.isnan(seen.amax), 1.0, 1.0)
    numbers = jnp.stack([one, one, *(getattr(seen, name) for name in NUMBERS[2:])])
    rest, size = [], x.size
    for base in DIGITS:
        size, digit = divmod(size, base)
        rest.append(digit * one)
    return jnp.concatenate([numbers, *(getattr(seen, name) for name in COUNTS), jnp.stack(rest)])


def _count(mask: jax.Array) -> jax.Array:
    """Count true elements, as digits: integer sums cannot overflow, and each digit is exact in float32."""
    rows = jnp.sum(mask, axis=-1, dtype=jnp.int32)
    low, high = jnp.sum(rows % DIGITS[0]), jnp.sum(rows // DIGITS[0])
    high = high + low // DIGITS[0]
    return jnp.stack([low % DIGITS[0], high % DIGITS[1], high // DIGITS[1]]).astype(jnp.float32)


def _reduce(seen: jax.Array, probe: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Reduce packed statistics over the devices that share `probe`: by types, or over `axes` with `check_vma=False`."""
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
