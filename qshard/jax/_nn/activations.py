"""SwiGLU and RMSNorm, bit-equal to the PyTorch front end and the reference, and their quantizing forms.

XLA fuses nothing across custom calls, so `linear` reads the result of `swiglu` or `rms_norm` again for a per-tensor
amax. Between the products of `grouped_mlp`, amaxes of rows are passed on instead. `swiglu_quantize` and
`rms_norm_quantize` take the amax from the pass that computes the result, but have no gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from qshard._core import quantize_steps
from qshard._core.layers import SUM_ROWS, check_norm, check_pair
from qshard._core.validation import FormatLike, as_format, as_usage, quote
from qshard.formats import Format, Usage
from qshard.jax._ops import bind as ops
from qshard.jax._ops.amaxes import max_along, max_over
from qshard.jax._ops.mesh import AxisName, Spec, mesh_of, vary_alike
from qshard.jax._ops.second_derivatives import op_derivative_error, refuse_derivative
from qshard.jax._ops.validation import Seed, as_axes, check_array, check_dtype, check_spec, check_spec_fits
from qshard.jax._quantized.array import QuantizedArray
from qshard.jax._quantized.quantize import quantize
from qshard.jax._quantized.weight_scales import WeightScales
from qshard.jax._sharding import partitionable_ops
from qshard.jax._sharding.shard_spec import ShardSpec

_PARTS = 8
"""XLA may shard K of SwiGLU into this many parts. Each part has its own amax, and kernels are slow on shorter ones."""


def swiglu(gate: jax.typing.ArrayLike, up: jax.typing.ArrayLike) -> jax.Array:
    """Compute `silu(gate) * up` in fp32, rounded once to the dtype of the inputs. Differentiable.

    Args:
      gate: float32, bfloat16 or float16, of any shape.
      up: an array of the shape and dtype of `gate`.

    Returns:
      An array of the same shape and dtype, sharded as `gate`.

    Raises:
      TypeError: an input is not an array of such a dtype.
      ValueError: the inputs differ in shape or dtype.

    Results and gradients have the same bits under any sharding, without communication, whatever axes are sharded. On
    Auto meshes, shards of the last axis must be whole runs of `gcd(K, max(128, K // 8))` elements; other shards are
    gathered. On Explicit meshes, `up` is first resharded like `gate`.

    >>> gate, ones = jnp.array([-1.0, 0.0, 2.0]), jnp.ones(3)
    >>> [f"{h:.4f}" for h in swiglu(gate, ones)]
    ['-0.2689', '0.0000', '1.7616']
    >>> [f"{d:.4f}" for d in jax.grad(lambda gate: swiglu(gate, ones).sum())(gate)]
    ['0.0723', '0.5000', '1.0908']

    Source: arXiv:2002.05202.
    """
    return _swiglu(*_check_pair("swiglu", gate, up))


def swiglu_quantize(
    gate: jax.typing.ArrayLike,
    up: jax.typing.ArrayLike,
    fmt: FormatLike,
    *,
    usage: Usage = Usage.ROWWISE,
    axis_name: AxisName = None,
    spec: Spec = None,
    seed: Seed = None,
) -> QuantizedArray:
    """Compute `quantize(swiglu(gate, up), fmt)` without a second read of the activations for their amax.

    Per-tensor formats take the amax from the pass that computes `h = swiglu(gate, up)`; other formats run the two
    calls. Not differentiable: to train, pass `swiglu(gate, up)` to `linear`.

    Args:
      gate: float32, bfloat16 or float16, of any shape.
      up: an array of the shape and dtype of `gate`.
      fmt: the format of the result, or its name.
      usage: the planes to compute.
      axis_name: in `shard_map`, the mesh axes that shard h, as for `quantize`.
      spec: the sharding of h, as for `quantize`.
      seed: the seed of stochastic rounding, as for `quantize`.

    Returns:
      A QuantizedArray with the bits of the two calls.

    Raises:
      TypeError, ValueError: as for `swiglu` and `quantize`.

    Sharded inputs stay in place, as for `swiglu`; h is sharded, and amaxes reduced, as in `quantize`.

    >>> swiglu_quantize(jnp.ones((2, 4)), jnp.ones((2, 4)), "FP8_E4M3").dequantize()[0, 0]
    Array(0.7310586, dtype=float32)

    Source: arXiv:2002.05202.
    """
    arrays = _check_pair("swiglu_quantize", gate, up)
    return _quantize_result("swiglu_quantize", _swiglu_with_amax, arrays, (), fmt, usage, axis_name, spec, seed)


def rms_norm(x: jax.typing.ArrayLike, weight: jax.typing.ArrayLike, eps: float) -> jax.Array:
    """Compute `x / sqrt(mean(x^2) + eps) * weight` over the last axis, in fp32 and rounded once. Differentiable.

    Args:
      x: float32, bfloat16 or float16, `[*lead, K]`.
      weight: `[K]`, any of these dtypes.
      eps: 0 or more; static.

    Returns:
      `[*lead, K]` in the dtype of `x`, sharded as `x`.

    Raises:
      TypeError: an input is not an array of such a dtype, or `eps` is traced.
      ValueError: shapes do not match, or `eps` is negative.

    Results and the gradient of x have the same bits under any sharding of leading axes, and x stays in place. On Auto
    meshes, shards of the last leading axis must be whole runs of `gcd(its size, 32)` rows. If K is sharded, x and
    weight are gathered along it. The gradient of weight is a sum over rows, and so over devices.

    >>> rms_norm(jnp.array([[3.0, 4.0]]), jnp.array([1.0, 2.0]), 0.0)
    Array([[0.84852815, 2.2627418 ]], dtype=float32)

    Source: arXiv:1910.07467.
    """
    y = _rms_norm(*_check_norm("rms_norm", x, weight, eps), float(eps))
    sharding = jax.typeof(jnp.asarray(x)).sharding
    return jax.sharding.reshard(y, sharding) if jax.typeof(y).sharding.spec != sharding.spec else y


def rms_norm_quantize(
    x: jax.typing.ArrayLike,
    weight: jax.typing.ArrayLike,
    eps: float,
    fmt: FormatLike,
    *,
    usage: Usage = Usage.ROWWISE,
    axis_name: AxisName = None,
    spec: Spec = None,
    seed: Seed = None,
) -> QuantizedArray:
    """Compute `quantize(rms_norm(x, weight, eps), fmt)` without a second read of the result for its amax.

    Per-tensor formats take the amax from the pass that computes `y = rms_norm(x, weight, eps)`; other formats run the
    two calls. Not differentiable: to train, pass `rms_norm(x, weight, eps)` to `linear`.

    Args:
      x: float32, bfloat16 or float16, `[*lead, K]`.
      weight: `[K]`, any of these dtypes.
      eps: 0 or more; static.
      fmt: the format of the result, or its name.
      usage: the planes to compute.
      axis_name: in `shard_map`, the mesh axes that shard y, as for `quantize`.
      spec: the sharding of y, as for `quantize`.
      seed: the seed of stochastic rounding, as for `quantize`.

    Returns:
      A QuantizedArray with the bits of the two calls.

    Raises:
      TypeError, ValueError: as for `rms_norm` and `quantize`.

    Sharded `x` stays in place, as for `rms_norm`; y is sharded, and amaxes reduced, as in `quantize`.

    >>> rms_norm_quantize(jnp.ones((2, 4)), jnp.ones(4), 0.0, "FP8_E4M3").dequantize()[0, 0]
    Array(1., dtype=float32)

    Source: arXiv:1910.07467.
    """
    arrays = _check_norm("rms_norm_quantize", x, weight, eps)
    return _quantize_result(
        "rms_norm_quantize", _rms_norm_with_amax, arrays, (float(eps),), fmt, usage, axis_name, spec, seed
    )


def _quantize_result(
    op: str,
    make: Callable[..., tuple[jax.Array, jax.Array]],
    arrays: tuple[jax.Array, ...],
    given: tuple[float, ...],
    fmt: FormatLike,
    usage: Usage,
    axis_name: AxisName,
    spec: Spec,
    seed: Seed,
) -> QuantizedArray:
    """Quantize the result of `make(*arrays, *given)`, which also returns the amax of the result."""
    fmt, usage = as_format(fmt, op), as_usage(usage, op)
    check_spec(op, "spec", spec)
    axes = as_axes(op, axis_name)
    h, scales = _with_scales(arrays, op=op, make=make, given=given, fmt=fmt, axis_names=axes, spec=spec)
    return quantize(h, fmt, usage=usage, axis_name=axis_name, spec=spec, scales=scales, seed=seed)


@functools.partial(jax.jit, static_argnames=("op", "make", "given", "fmt", "axis_names", "spec"), inline=True)
def _with_scales(
    arrays: tuple[jax.Array, ...],
    *,
    op: str,
    make: Callable[..., tuple[jax.Array, jax.Array]],
    given: tuple[float, ...],
    fmt: Format,
    axis_names: tuple[str, ...],
    spec: Spec,
) -> tuple[jax.Array, WeightScales | None]:
    """Call `make`. For a per-tensor format, also compute the scale from the amax; otherwise return None for it."""
    h, amax = make(refuse_derivative(op_derivative_error, op, *arrays), *arrays[1:], *given)
    if not fmt.per_tensor:
        return h, None
    check_spec_fits(op, "spec", spec, mesh_of(h, spec), h.ndim)
    shard_spec = ShardSpec.of(h, axis_names, spec)
    made = quantize_steps.scales(partitionable_ops, fmt, max_over(shard_spec.axes if shard_spec.local else ())(amax))
    return h, WeightScales(made.scale, made.scale_inv)


# --- SwiGLU ---


@jax.custom_vjp
def _swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return _swiglu_with_amax(gate, up)[0]


def _swiglu_with_amax(gate: jax.Array, up: jax.Array) -> tuple[jax.Array, jax.Array]:
    h, amax = _over_runs("swiglu", gate, up)
    return h, amax


def _swiglu_forward(gate: jax.Array, up: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _swiglu_with_amax(gate, up)[0], (gate, up)


def _swiglu_backward(saved: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    d_gate, d_up, *_ = _over_runs("swiglu_grad", *saved, grad)
    return d_gate, d_up


_swiglu.defvjp(_swiglu_forward, _swiglu_backward)


@jax.custom_vjp
def swiglu_gate_up(gate_up: jax.Array) -> jax.Array:
    """Compute `swiglu` of rows `[..., 2 I]`, gate then up, as one product gives them. It copies neither half."""
    return gate_up_and_amaxes(gate_up)[0]


def gate_up_and_amaxes(gate_up: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute `swiglu_gate_up`, and the amax of each row of the result, fp32. Without a derivative."""
    halves = _halves(gate_up)
    h, amaxes = ops.swiglu_gate_up(halves, lead=halves.ndim - 2)
    return h, amaxes


def gate_up_grad_and_amaxes(gate_up: jax.Array, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute the gradient of `gate_up` from the gradient of the result, and the amax of each of its rows."""
    halves = _halves(gate_up)
    made, amaxes = ops.swiglu_gate_up_grad(halves, grad, lead=halves.ndim - 2)
    return made.reshape(gate_up.shape), amaxes


def _halves(gate_up: jax.Array) -> jax.Array:
    *lead, size = gate_up.shape
    return gate_up.reshape(*lead, 2, size // 2)  # Not -1, for arrays without rows.


swiglu_gate_up.defvjp(
    lambda gate_up: (swiglu_gate_up(gate_up), gate_up),
    lambda gate_up, grad: (gate_up_grad_and_amaxes(gate_up, grad)[0],),
)


def _check_pair(op: str, gate: Any, up: Any) -> tuple[jax.Array, jax.Array]:
    """Check both inputs, cast them to vary over the same manual axes, and shard `up` like `gate` on Explicit meshes."""
    for name, x in (("gate", gate), ("up", up)):
        check_array(op, name, x)
        check_dtype(op, name, x)
    gate, up = jnp.asarray(gate), jnp.asarray(up)
    check_pair(op, gate.shape, str(gate.dtype), up.shape, str(up.dtype))
    gate, up = vary_alike(gate, up)
    sharding = jax.typeof(gate).sharding
    # Outside of the custom_vjp, so that the gradient of `up` is sharded as `up`.
    return gate, up if jax.typeof(up).sharding.spec == sharding.spec else jax.sharding.reshard(up, sharding)


def _over_runs(op: str, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Run an elementwise op on equally sharded arrays. Returns the results in their shape, then the amax of each."""
    like = arrays[0]
    runs = [partitionable_ops.split_rows(x, longest=x.shape[-1] // _PARTS) if x.ndim else x for x in arrays]
    lead = 0 if runs[0] is like else like.ndim
    made = getattr(ops, op)(*runs, lead=lead)
    elements = len(made) // 2  # The second half is the amaxes, in the same order.
    wholes = (partitionable_ops.reshape_as(y, like) for y in made[:elements])
    return *wholes, *(max_along(amax) for amax in made[elements:])


# --- RMSNorm ---


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    return _rms_norm_with_amax(x, weight, eps)[0]


def _rms_norm_forward(x: jax.Array, weight: jax.Array, eps: float) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    y, _, rstd = _normalize(x, weight, eps)
    return y, (x, weight, rstd)


def _rms_norm_backward(_: float, saved: tuple[jax.Array, ...], grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight, rstd = saved
    rows, lead = partitionable_ops.split_lead(x)
    grad_rows, _ = partitionable_ops.split_lead(grad)
    dx, dweight, _ = ops.rms_norm_grad(
        rows, _broadcast_weight(weight, rows, lead), rstd, grad_rows, lead=lead, rows=SUM_ROWS
    )
    return partitionable_ops.reshape_as(dx, x), jnp.sum(dweight, axis=tuple(range(lead))).astype(weight.dtype)


_rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


def _rms_norm_with_amax(x: jax.Array, weight: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    y, amax, _ = _normalize(x, weight, eps)
    return y, amax


def _normalize(x: jax.Array, weight: jax.Array, eps: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return y, its amax `[]`, and the factor 1/rms of each row, in the matrices of `split_lead`."""
    rows, lead = partitionable_ops.split_lead(x)
    y, rstd, amax = ops.rms_norm(rows, _broadcast_weight(weight, rows, lead), eps=eps, lead=lead)
    return partitionable_ops.reshape_as(y, x), max_along(amax), rstd


def _broadcast_weight(weight: jax.Array, rows: jax.Array, lead: int) -> jax.Array:
    """Repeat the weight for each matrix of `split_lead`: XLA shards an op only along axes that all operands have."""
    return jnp.broadcast_to(weight, (*rows.shape[:lead], weight.shape[0])) if lead else weight


def _check_norm(op: str, x: Any, weight: Any, eps: Any) -> tuple[jax.Array, jax.Array]:
    """Check x and weight, cast them to vary over the same manual axes, and unshard weight, and K of x.

    A sharded weight, as with FSDP, would otherwise shard y on Auto meshes.
    """
    for name, array in (("x", x), ("weight", weight)):
        check_array(op, name, array)
        check_dtype(op, name, array)
    x, weight = jnp.asarray(x), jnp.asarray(weight)
    if isinstance(eps, jax.core.Tracer):
        raise TypeError(f"{op}: eps ({quote(eps)}) is traced; pass a Python number")
    check_norm(op, x.shape, weight.shape, eps)
    x, weight = vary_alike(x, weight)
    mesh, sharding = mesh_of(x), jax.typeof(x).sharding
    # Outside of the custom_vjp, so that gradients are sharded as the inputs.
    if mesh.explicit_axes:
        whole = NamedSharding(mesh, PartitionSpec(*sharding.spec[:-1], None))
        x = x if sharding.spec == whole.spec else jax.sharding.reshard(x, whole)
        weight = jax.sharding.reshard(weight, NamedSharding(mesh, PartitionSpec(None)))
    elif mesh.auto_axes:
        weight = lax.with_sharding_constraint(weight, NamedSharding(mesh, PartitionSpec(None)))
    return x, weight
