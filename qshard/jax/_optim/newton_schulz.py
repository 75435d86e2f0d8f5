"""Newton-Schulz of whole matrices on one device, with products in bfloat16 or, in the first steps, in FP8."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from qshard._core.optimizers import muon as core
from qshard.formats import FP8_E4M3, Usage
from qshard.jax._gemm.gemm import apply_scale, gemm
from qshard.jax._quantized.array import QuantizedArray
from qshard.jax._quantized.quantize import quantize


class NewtonSchulz(NamedTuple):
    """Settings of Newton-Schulz.

    The first `fp8_steps` steps multiply in FP8 if the shape fits: `core.fitting_fp8_steps`.
    """

    coefficients: tuple[float, float, float]
    steps: int
    eps: float
    fp8_steps: int = 0
    fp8_min_side: int = core.FP8_MIN_SIDE

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the orthogonalized bfloat16 matrix `[N, K]`, or matrices `[E, N, K]`.

        Products are accumulated in float32, and each of the three results of a step is rounded once. A product in FP8
        is also rounded before it is scaled.
        """
        a, b, c = self.coefficients
        is_tall = x.shape[-2] > x.shape[-1]
        wide = (x.mT if is_tall else x).astype(jnp.float32)
        norm = jnp.sqrt(jnp.sum(wide * wide, axis=(-2, -1), keepdims=True))
        x = (wide / (norm + self.eps)).astype(jnp.bfloat16)

        def step(_: Any, x: jax.Array) -> jax.Array:
            gram = _product(x, x.mT).astype(jnp.bfloat16)
            polynomial = (b * gram.astype(jnp.float32) + c * _product(gram, gram)).astype(jnp.bfloat16)
            return (a * x.astype(jnp.float32) + _product(polynomial, x)).astype(jnp.bfloat16)

        in_fp8 = core.fitting_fp8_steps(self.fp8_steps, self.fp8_min_side, x.shape)
        if in_fp8:
            fp8_step = self._fp8_step if x.ndim == 2 else jax.vmap(self._fp8_step)
            x = lax.fori_loop(0, in_fp8, lambda _, x: fp8_step(x), x)
        x = lax.fori_loop(in_fp8, self.steps, step, x)
        return x.mT if is_tall else x

    def _fp8_step(self, x: jax.Array) -> jax.Array:
        """Run a step of a matrix. A and B are symmetric, so each serves as its own transpose."""
        a, b, c = self.coefficients
        of_x = quantize(x, FP8_E4M3, usage=Usage.BOTH)
        gram = _code_product(of_x, of_x, Usage.ROWWISE).astype(jnp.bfloat16)
        of_gram = quantize(gram, FP8_E4M3)
        square = _code_product(of_gram, of_gram, Usage.ROWWISE)
        polynomial = quantize((b * gram.astype(jnp.float32) + c * square).astype(jnp.bfloat16), FP8_E4M3)
        product = _code_product(polynomial, of_x, Usage.COLUMNWISE)
        return (a * x.astype(jnp.float32) + product).astype(jnp.bfloat16)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def _code_product(a: QuantizedArray, b: QuantizedArray, contracted: Usage) -> jax.Array:
    """Multiply the rows of `a` and the contracted axis of `b`: the bfloat16 product of codes, scaled in float32."""
    product, scale = gemm(a, Usage.ROWWISE, b, contracted, jnp.bfloat16, fast=False)
    return apply_scale(product, scale, jnp.float32)
