"""The three quantized products of a linear head, on the local rows of one chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from qshard._core.losses import CHUNK_SEED_BIT, head_recipe
from qshard._core.operands import OperandSpec, check_weight_shape
from qshard.formats import Usage
from qshard.jax._gemm.gemm import apply_scale, gemm, row_product, stored_for
from qshard.jax._ops.mesh import names_of
from qshard.jax._quantized.array import QuantizedArray
from qshard.jax._quantized.quantize import quantize_shard
from qshard.jax._sharding.shard_spec import ShardSpec
from qshard.layout import source
from qshard.recipes import Recipe, RecipeLike, Role

_OP = "linear_cross_entropy"
_NAMES = {Role.WEIGHT: "w", Role.ACTIVATION: "x", Role.GRADIENT: "the gradient of logits"}


def check_recipe(given: RecipeLike, x: jax.Array, w: jax.Array, seed: Any) -> Recipe:
    """Check the recipe of a call against the arrays, and return it.

    ValueError if a head cannot use it, shapes do not fit its formats, the seed is missing, or types say that an array
    is sharded.
    """
    recipe = head_recipe(_OP, given, seed)
    for name, array in (("x", x), ("w", w)):
        sharding = jax.typeof(array).sharding
        if any(sharding.mesh.shape[axis] > 1 for entry in sharding.spec for axis in names_of(entry)):
            raise ValueError(
                f"{_OP}: recipe ({type(recipe).__name__}) needs local arrays, but {name} {array.shape} is sharded as "
                f"{sharding.spec}; call it inside jax.shard_map, with axis_name= if classes are sharded"
            )
    check_weight_shape(_OP, "w", recipe, w.shape)
    return recipe


@dataclass(frozen=True)
class QuantizedHead:
    """The recipe and seed of a call. The seed may be traced, so do not keep this object beyond a trace."""

    recipe: Recipe
    seed: jax.Array | None

    def weight(self, w: jax.Array, *, backward: bool) -> QuantizedArray:
        """Quantize w, once for all chunks."""
        usage = Usage.ROWWISE | (source(self.recipe.weight, Usage.COLUMNWISE) if backward else Usage(0))
        return self._quantized(w, Role.WEIGHT, usage, 0)

    def rows(self, x: jax.Array, chunk: Any, *, backward: bool) -> QuantizedArray:
        recipe, usage = self.recipe, Usage.ROWWISE
        if backward:
            usage |= stored_for(recipe.activation, recipe.gradient, Usage.COLUMNWISE)
        return self._quantized(x, Role.ACTIVATION, usage, chunk)

    def logits(self, xq: QuantizedArray, wq: QuantizedArray, rows: int, dtype: Any) -> jax.Array:
        made = row_product(xq, wq, Usage.ROWWISE, (rows,), 1, fast=True, out_sharding=None)
        return apply_scale(*made, dtype)

    def gradients(
        self, d: jax.Array, xq: QuantizedArray, wq: QuantizedArray, chunk: Any, dtype: Any, dw_dtype: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Compute the gradient of the rows of a chunk, and its addend to the gradient of w."""
        recipe, columns = self.recipe, Usage.COLUMNWISE
        usage = stored_for(recipe.gradient, recipe.weight, Usage.ROWWISE)
        usage |= stored_for(recipe.gradient, recipe.activation, columns)
        dq = self._quantized(d, Role.GRADIENT, usage, chunk)
        dx = apply_scale(*row_product(dq, wq, columns, (len(d),), 1, fast=False, out_sharding=None), dtype)
        dw = apply_scale(*gemm(dq, columns, xq, columns, dw_dtype, fast=False), dw_dtype)
        return dx, dw

    def _quantized(self, x: jax.Array, role: Role, usage: Usage, chunk: Any) -> QuantizedArray:
        operand, seed = OperandSpec.of(self.recipe, role, usage, len(x), op=_OP, name=_NAMES[role]), self.seed
        if seed is not None:
            of_chunk = jnp.stack([jnp.zeros((), jnp.uint32), jnp.asarray(chunk, jnp.uint32) << (CHUNK_SEED_BIT - 32)])
            seed = seed ^ of_chunk.view(seed.dtype)
        return quantize_shard(x, operand, ShardSpec(), None, seed)[0]
