"""Errors of second derivatives, by the name of the public function.

Ops have no derivative, and raise as they are differentiated, each by its own name. The rules of a `jax.custom_vjp` call
ops; so there it is a gradient that is differentiated, and the error names the function that it is a gradient of.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from qshard._core.validation import no_second_derivative

_INSTEAD = {
    "ragged_dot": "multiply with jax.lax.ragged_dot",
    "swiglu": "use jax.nn.silu(gate) * up",
    "rms_norm": "write it with jnp.mean and jax.lax.rsqrt",
    "cross_entropy": "use one of optax.losses",
    "linear_cross_entropy": "use one of optax.losses on x @ w.T",
}
_PRODUCT = "multiply with jnp.matmul"


def second_derivative(op: str) -> NotImplementedError:
    """The error of a derivative of a gradient of `op`."""
    instead = _INSTEAD.get(op, _PRODUCT)
    return NotImplementedError(
        no_second_derivative(op, f"{instead}, or stop the gradient of x with jax.lax.stop_gradient(x)")
    )


def of_op(primitive: str) -> Exception:
    """The error of a differentiated op, where the public function is not known."""
    function = primitive.removesuffix("_grad")
    if function in _INSTEAD:
        return second_derivative(function)
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
    """The rules `fwd(config, x, ..)` and `bwd(config, kept, dy)` of a `jax.custom_vjp`, for its `defvjp`.

    Args:
      op: the public function; None: `config.op` is.
      fwd: keeps codes for `bwd`, and no operand: the program would hold a second copy of the operand.
    """

    def held_fwd(config: Any, x: jax.Array, *rest: Any) -> Any:
        return fwd(config, _hold(second_derivative, op or config.op, x, *_floats(rest)), *rest)

    def held_bwd(config: Any, kept: Any, dy: jax.Array) -> Any:
        return bwd(config, kept, _hold(second_derivative, op or config.op, dy, *_floats(kept)))

    return held_fwd, held_bwd


def _floats(tree: Any) -> list[jax.Array]:
    return [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact)]


def without_derivative(op: str, x: jax.Array, *others: jax.Array) -> jax.Array:
    """`x` for a function `op` that rounds to codes, and so has no first derivative."""
    held: jax.Array = _hold(of_op, op, x, *others)
    return held


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _hold(error: Callable[[str], Exception], op: str, x: jax.Array, *others: jax.Array) -> jax.Array:
    """`x`, which raises if it, or one of the others, is differentiated. No op in a compiled program."""
    return x


@_hold.defjvp
def _raise_at_derivative(error: Callable[[str], Exception], op: str, *_: Any) -> Any:
    raise error(op)
