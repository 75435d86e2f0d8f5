"""Errors of derivatives that do not exist, which name the public function.

Ops have no derivative, and raise under their own name when they are differentiated. The rules of a `jax.custom_vjp`
call ops. If such a rule is differentiated, the error names its public function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from qshard._core.validation import no_second_derivative
from qshard.jax._ops.scheduling import residuals_as_bits, residuals_from_bits

_INSTEAD = {
    "ragged_dot": "multiply with jax.lax.ragged_dot",
    "swiglu": "use jax.nn.silu(gate) * up",
    "rms_norm": "write it with jnp.mean and jax.lax.rsqrt",
    "cross_entropy": "use one of optax.losses",
    "linear_cross_entropy": "use one of optax.losses on x @ w.T",
}
_PRODUCT = "multiply with jnp.matmul"


def second_derivative_error(op: str) -> NotImplementedError:
    """Return the error for differentiating a gradient of `op`."""
    instead = _INSTEAD.get(op, _PRODUCT)
    return NotImplementedError(
        no_second_derivative(op, f"{instead}, or stop the gradient of x with jax.lax.stop_gradient(x)")
    )


def op_derivative_error(primitive: str) -> Exception:
    """Return the error for differentiating an op, where the public function is unknown."""
    function = primitive.removesuffix("_grad")
    if function in _INSTEAD:
        return second_derivative_error(function)
    if primitive.startswith("dequantize"):
        return TypeError(
            f"{primitive}: codes have no gradient; exclude them from differentiation (argnums=), or train a "
            "PrimaryWeight with qshard.jax.value_and_grad"
        )
    return TypeError(
        f"{primitive}: quantization has no derivative; use qshard.jax.linear, or stop the gradient with "
        "jax.lax.stop_gradient(x)"
    )


def rules_of_product(op: str | None, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> tuple[Any, Any]:
    """Return the rules `fwd(config, x, ..)` and `bwd(config, kept, dy)`, wrapped to raise at second derivatives.

    `op` is for errors; None: `config.op`. `fwd` saves codes for `bwd` but no operand, or the program would hold a
    second copy of it. Codes are saved as bits, which `jax.checkpoint` does not round.
    """

    def checked_fwd(config: Any, x: jax.Array, *rest: Any) -> Any:
        x = refuse_derivative(second_derivative_error, op or config.op, x, *_floats(rest))
        y, kept = fwd(config, x, *rest)
        return y, residuals_as_bits(kept)

    def checked_bwd(config: Any, kept: Any, dy: jax.Array) -> Any:
        dy = refuse_derivative(second_derivative_error, op or config.op, dy, *_floats(kept))
        return bwd(config, residuals_from_bits(kept), dy)

    return checked_fwd, checked_bwd


def _floats(tree: Any) -> list[jax.Array]:
    return [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact)]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def refuse_derivative(error: Callable[[str], Exception], op: str, x: Any, *others: Any) -> Any:
    """Return the tree `x`, and raise if it, or one of the others, is differentiated. Compiled programs have no op."""
    return x


@refuse_derivative.defjvp
def _raise_at_derivative(error: Callable[[str], Exception], op: str, *_: Any) -> Any:
    raise error(op)
