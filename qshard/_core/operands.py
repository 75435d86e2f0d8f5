"""Operands of a quantized product, for both front ends: format, scale source, seed and padding of each role.

`OperandSpec` describes how to quantize an operand. `quantize_operand` does it with the steps of `quantize_steps`.
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


# A NamedTuple, because eager PyTorch builds one per operand and call, and a frozen dataclass takes twice as long.
class OperandSpec(NamedTuple):
    """Specification of the quantization of one operand.

    Attributes:
      format: format of its codes.
      usage: planes to compute.
      role: role in a layer, which gives the operand its own random bits; None outside a layer.
      margin: delayed scaling: headroom in powers of two; None: scales come from the operand's own amaxes.
      added_rows: zero rows appended to the matrix `[M, K]` so that blocks along its rows are whole.
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
        """Build the spec of the operand of a layer in `role`: a matrix of `rows` rows.

        >>> spec = OperandSpec.of(DelayedScaling(margin=1), Role.ACTIVATION, Usage.BOTH, 40)
        >>> print(spec.format, spec.margin, spec.added_rows)
        FP8_E4M3[nonfinite=nan] 1 0
        """
        margin = recipe.margin if isinstance(recipe, DelayedScaling) else None
        return OperandSpec(
            recipe.format(role), usage, role, margin, recipe.added_rows(role, usage, rows), op=op, name=name
        )

    def seed_of(self, seed: Array | None, xor: Callable[[Array, int], Array]) -> Array | None:
        """Derive the seed of the operand, `seed ^ ROLE_SEEDS[role]`; None if the format rounds to nearest.

        `xor(seed, number)` is the front end's XOR of a uint64 stored as two uint32 with a 64-bit int.
        """
        if seed is None or not self.format.stochastic:
            return None
        number = 0 if self.role is None else ROLE_SEEDS[self.role]
        return xor(seed, number) if number else seed

    def layouts(self, shape: Shape) -> dict[Usage, PlaneLayout]:
        """Return the layout of each plane for an operand of this shape, or raise ValueError if it splits blocks."""
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
    """Quantize an operand. Return its planes, and under delayed scaling the amax of `x`, otherwise None.

    A delayed scale of 0 means an empty history. The scale then comes from the amax of `x`, so `x` is read twice. With
    `reduce_max`, `x` is always read twice, because the cast may need the reduced amax.

    - `ops`: ops of a front end, as in `quantize_steps.quantize`.
    - `x`: the operand, with `spec.added_rows` already appended.
    - `scale`: delayed scale from earlier steps, `[]`, or `[*lead]` if neither `amax` nor `reduce_max` is passed.
    - `amax`: amax of `x`, if known.
    - `reduce_max`: max-reduction of the amax of `x` over the shards of its tensor.
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
