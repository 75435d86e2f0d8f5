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


# A NamedTuple, as eager PyTorch makes one for each operand of each call: a frozen dataclass takes twice as long.
class OperandSpec(NamedTuple):
    """How one operand is quantized.

    Attributes:
      format: of its codes.
      usage: the planes to make.
      role: the role in a layer, which separates its random numbers from those of the other operands; None: no layer.
      margin: under delayed scaling, powers of two of headroom; None: the operand's own amaxes make its scales.
      added_rows: rows of zeros that the matrix `[M, K]` gets, so that blocks along its rows are whole.
      op, name: of the operation and the operand, for errors.
    """

    format: Format
    usage: Usage
    role: Role | None = None
    margin: int | None = None
    added_rows: int = 0
    op: str = "quantize"
    name: str = "x"

    @staticmethod
    def of(
        recipe: Recipe, role: Role, usage: Usage, rows: int = 0, *, op: str = "linear", name: str = "x"
    ) -> OperandSpec:
        """The spec of the operand of a layer in `role`, a matrix of `rows` rows.

        >>> spec = OperandSpec.of(DelayedScaling(margin=1), Role.ACTIVATION, Usage.BOTH, 40)
        >>> print(spec.format, spec.margin, spec.added_rows)
        FP8_E4M3[nonfinite=nan] 1 0
        """
        margin = recipe.margin if isinstance(recipe, DelayedScaling) else None
        return OperandSpec(
            recipe.format(role), usage, role, margin, recipe.added_rows(role, usage, rows), op=op, name=name
        )

    def seed_of(self, seed: Array | None, xor: Callable[[Array, int], Array]) -> Array | None:
        """Derives the seed of the operand, `seed ^ ROLE_SEEDS[role]`; None if the format rounds to nearest.

        `xor(seed, number)` is the front end's XOR of pairs of words with a 64-bit number.
        """
        if seed is None or not self.format.stochastic:
            return None
        number = 0 if self.role is None else ROLE_SEEDS[self.role]
        return xor(seed, number) if number else seed

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

    A delayed scale of 0 means that no step has made one. Then the amax of `x` makes it, so `x` is read twice. With
    `reduce_max` `x` is always read twice, because the cast may need the reduced amax.

    Args:
      ops, x: as for `quantize_steps.quantize`. The caller has added `spec.added_rows`.
      scale: under delayed scaling, the scale from earlier steps; `[*lead]`, if `amax` and `reduce_max` are passed too.
      draws: of stochastic rounding.
      amax: of `x`, if it is known.
      reduce_max: merges the amax of `x` with the amaxes of the other shards of its tensor.
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
