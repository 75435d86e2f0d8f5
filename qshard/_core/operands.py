"""The operands of a quantized product: format, scale, seed and padding of each role, written once for both front ends.

`OperandSpec` says how one operand is quantized, and `quantize_operand` does it, by the steps of `quantize_steps`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from qshard._core import quantize_steps
from qshard._core.quantize_steps import Draws, Plane, Reduce
from qshard.formats import Format, Usage
from qshard.layout import PlaneLayout, Shape, plane
from qshard.recipes import ROLE_SEEDS, DelayedScaling, Recipe, Role

Array = Any


# A NamedTuple, as eager PyTorch makes one for each operand of each call: a frozen dataclass takes five times as long.
class OperandSpec(NamedTuple):
    """How one operand is quantized.

    Attributes:
      format: of its codes.
      usage: the planes to make.
      margin: under delayed scaling, powers of two of headroom; None: the operand's own amaxes make its scales.
      seed_xor: the seed of the layer XOR this is the seed of the operand.
      added_rows: rows of zeros that the matrix `[M, K]` gets, so that blocks along its rows are whole.
      op, name: of the operation and the operand, for errors.
    """

    format: Format
    usage: Usage
    margin: int | None = None
    seed_xor: int = 0
    added_rows: int = 0
    op: str = "quantize"
    name: str = "x"

    @staticmethod
    def of(
        recipe: Recipe, role: Role, usage: Usage, rows: int = 0, *, op: str = "linear", name: str = "x"
    ) -> OperandSpec:
        """The spec of the operand of a layer in `role`, a matrix of `rows` rows.

        >>> spec = OperandSpec.of(DelayedScaling(margin=1), Role.ACTIVATION, Usage.BOTH, 40)
        >>> print(spec.format, spec.margin, spec.seed_xor == 1 << 62, spec.added_rows)
        FP8_E4M3[nonfinite=nan] 1 True 0
        """
        margin = recipe.margin if isinstance(recipe, DelayedScaling) else None
        added = recipe.added_rows(role, usage, rows)
        return OperandSpec(recipe.format(role), usage, margin, ROLE_SEEDS[role], added, op, name)

    def seed_of(self, seed: Array | None, xor: Callable[[Array, int], Array]) -> Array | None:
        """The seed of the operand from that of its layer; None if the format rounds to nearest.

        `xor(seed, number)` is that of a front end, for 64-bit numbers as pairs of words. The highest bits of a seed
        tell roles apart, so it does not matter where a seed counts steps or ranks.
        """
        return None if seed is None or not self.format.stochastic else xor(seed, self.seed_xor)

    def layouts(self, shape: Shape) -> dict[Usage, PlaneLayout]:
        """The layout of each plane of an operand of this shape.

        Raises:
          ValueError: the format needs whole blocks, and `shape` does not have them.
        """
        return {each: plane(self.format, shape, each, op=self.op, name=self.name) for each in self.usage.planes}


def quantize_operand(
    ops: Any,
    x: Array,
    spec: OperandSpec,
    *,
    scale: Array | None = None,
    draws: Draws | None = None,
    amax: Array | None = None,
    reduce_max: Reduce | None = None,
) -> tuple[dict[Usage, Plane], Array | None]:
    """The planes of `x`, and under delayed scaling the amax of `x`, else None.

    A delayed scale of 0 says that there is no scale yet. Then the amax of `x` makes it, so `x` is read twice. With
    `reduce_max` it always is: the reduction comes before the cast, and may be needed.

    Args:
      ops, x: as for `quantize_steps.quantize`. Rows of zeros have been added.
      scale: under delayed scaling, that of earlier steps; with `amax` maybe several, for tensors along leading axes.
      draws: of stochastic rounding.
      amax: of `x`, if it is known.
      reduce_max: merges the amax of `x` with those of the other shards of its tensor.
    """
    fmt, usage = spec.format, spec.usage
    if spec.margin is None:
        return quantize_steps.quantize(ops, x, fmt, usage, reduce_max=reduce_max, draws=draws, amax=amax), None
    element, rowwise = {"element": fmt.element.name}, usage is Usage.ROWWISE
    options: dict[str, Any] = {**element, "nonfinite": fmt.nonfinite}
    if reduce_max is not None:
        amax = reduce_max(ops.amax_tensor(x, lead=0) if amax is None else amax)
        scale, scale_inv = ops.delayed_scale(amax, scale, margin=spec.margin, **element)
        if rowwise:
            codes = [ops.cast_tensor(x, scale, **options)]
        else:
            codes = ops.cast_transpose(x, scale, **quantize_steps.outer_axes(x), **options)
    elif rowwise:
        *codes, amax, scale_inv = ops.cast_delayed(x, scale, lead=0, margin=spec.margin, **options)
    else:
        *codes, amax, scale_inv = ops.cast_transpose_delayed(x, scale, batch=0, margin=spec.margin, **options)
    return quantize_steps.planes_of_one_scale(codes, usage, scale_inv), amax
