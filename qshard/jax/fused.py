"""SwiGLU, in the bits of PyTorch's front end and of the reference, and quantized with the amax of its own pass.

XLA merges nothing across custom calls: `linear` takes h, and reads it for its amax where its format has one of a
tensor. `swiglu_quantize` does not, for who needs codes and no gradient.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from qshard import pipeline
from qshard.formats import Format, Usage
from qshard.jax import ops, steps
from qshard.jax.arguments import as_axes, check_array, check_dtype, check_spec, check_spec_fits
from qshard.jax.array import QuantizedArray
from qshard.jax.cuts import AxisName, Cut, Spec, max_over, mesh_of, vary_alike
from qshard.jax.quantize import WeightScales, quantize
from qshard.jax.words import Seed
from qshard.names import FormatLike, as_format, as_usage


def swiglu(gate: jax.typing.ArrayLike, up: jax.typing.ArrayLike) -> jax.Array:
    """`silu(gate) * up`, in fp32 and rounded once.

    Args:
      gate, up: float32, bfloat16 or float16, of one shape and dtype.

    Returns:
      Of the same shape and dtype, and cut as `gate` is.

    Raises:
      TypeError: the two are not arrays of such a dtype.
      ValueError: they are not of one shape and dtype.

    The bits, and those of gradients, are the same however the two are sharded, and nothing moves: shards may cut any
    axis. On Auto meshes that is so for the last one if its shards are whole runs of `gcd(K, 128)`; others are gathered.
    On Explicit meshes, `up` is first cut as `gate` is.

    >>> gate, ones = jnp.array([-1.0, 0.0, 2.0]), jnp.ones(3)
    >>> [f"{h:.4f}" for h in swiglu(gate, ones)]
    ['-0.2689', '0.0000', '1.7616']
    >>> [f"{d:.4f}" for d in jax.grad(lambda gate: swiglu(gate, ones).sum())(gate)]
    ['0.0723', '0.5000', '1.0908']

    Source: arXiv:2002.05202.
    """
    return _swiglu(*_checked("swiglu", gate, up))


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
    """`quantize(swiglu(gate, up), fmt)`, which does not read h for its amax.

    A format with one scale for the tensor takes the amax of the pass that makes h. With other formats it is the two
    calls. Not differentiable: to train, pass `swiglu(gate, up)` to `linear`.

    Args:
      gate, up: as for `swiglu`.
      fmt, usage, axis_name, spec, seed: as for `quantize`, of h.

    Returns:
      A QuantizedArray, in the bits of the two calls.

    Raises:
      TypeError, ValueError: as `swiglu` and `quantize` do.

    Sharded `gate` and `up` stay where they are, as for `swiglu`; h is cut and reduced as `quantize` says.

    >>> swiglu_quantize(jnp.ones((2, 4)), jnp.ones((2, 4)), "FP8_E4M3").dequantize()[0, 0]
    Array(0.7310586, dtype=float32)

    Source: arXiv:2002.05202.
    """
    gate, up = _checked("swiglu_quantize", gate, up)
    fmt, usage = as_format(fmt, "swiglu_quantize"), as_usage(usage, "swiglu_quantize")
    check_spec("swiglu_quantize", "spec", spec)
    axes = as_axes("swiglu_quantize", axis_name)
    h, scales = _with_scales(gate, up, fmt=fmt, axis_names=axes, spec=spec)
    return quantize(h, fmt, usage=usage, axis_name=axis_name, spec=spec, scales=scales, seed=seed)


@functools.partial(jax.jit, static_argnames=("fmt", "axis_names", "spec"), inline=True)
def _with_scales(
    gate: jax.Array, up: jax.Array, *, fmt: Format, axis_names: tuple[str, ...], spec: Spec
) -> tuple[jax.Array, WeightScales | None]:
    """h, and what its one scale is made of its amax, if `fmt` has one scale and no blocks."""
    h, amax = _over_runs("swiglu", gate, up)
    if fmt.block is not None:
        return h, None
    check_spec_fits("swiglu_quantize", "spec", spec, mesh_of(h, spec), h.ndim)
    cut = Cut.of(h, axis_names, spec)
    made = pipeline.scales(steps, fmt, max_over(cut.axes if cut.local else ())(amax))
    return h, WeightScales(made.scale, made.scale_inv)


@jax.custom_vjp
def _swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    h: jax.Array = _over_runs("swiglu", gate, up)[0]
    return h


def _swiglu_forward(gate: jax.Array, up: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _swiglu(gate, up), (gate, up)


def _swiglu_backward(kept: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    d_gate, d_up, *_ = _over_runs("swiglu_grad", *kept, grad)
    return d_gate, d_up


_swiglu.defvjp(_swiglu_forward, _swiglu_backward)


def _checked(op: str, gate: Any, up: Any) -> tuple[jax.Array, jax.Array]:
    """The two as arrays that vary over the same manual axes, and on Explicit meshes are cut alike."""
    for name, x in (("gate", gate), ("up", up)):
        check_array(op, name, x)
        check_dtype(op, name, x)
    gate, up = jnp.asarray(gate), jnp.asarray(up)
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"{op}: up ({up.shape}, {up.dtype}) is not as gate is, ({gate.shape}, {gate.dtype}); give two arrays of "
            "one shape and dtype"
        )
    gate, up = vary_alike(gate, up)
    cut = jax.typeof(gate).sharding
    # Outside of custom_vjp, so that the gradient of `up` is cut as `up` is.
    return gate, up if jax.typeof(up).sharding.spec == cut.spec else jax.sharding.reshard(up, cut)


def _over_runs(op: str, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """An op on elements of arrays that are cut alike: results in their shape, and the amax of each, `[]`."""
    like = arrays[0]
    runs = [steps.split_rows(x) for x in arrays]
    lead = 0 if runs[0] is like else like.ndim
    made = getattr(ops, op)(*runs, lead=lead)
    elements = len(made) // 2  # The amaxes follow, in the same order.
    wholes = (steps.reshape_as(y, like) for y in made[:elements])
    return *wholes, *(steps.integer_max(amax, 0) for amax in made[elements:])
