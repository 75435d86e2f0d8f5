"""FLOPs of products, for `torch.utils.flop_counter` and for `torch.compile`, which computes cheap results again.

Without a formula a product counts as free: `activation_memory_budget` of torch.compile would repeat it in the backward
pass before a cast.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from qshard.formats import ELEMENTS
from qshard.op_table import OpSpec

__all__ = ["flops_of", "register_flops"]


def register_flops(spec: OpSpec) -> None:
    """Register the FLOPs of an op if it is a product: 2 m n k, as for `torch.mm`.

    In grouped products every row counts, also padding and rows after the last stop: the stops are on the device.

    >>> from torch.utils.flop_counter import FlopCounterMode
    >>> a, b, one = torch.zeros(3, 16, dtype=torch.uint8), torch.zeros(5, 16, dtype=torch.uint8), torch.ones(())
    >>> options = {"a_element": "float8_e4m3fn", "b_element": "float8_e4m3fn", "fast": True, "workspace": 0}
    >>> with FlopCounterMode(display=False) as counter:
    ...     result = torch.ops.qshard.gemm(a, one, b, one, **options, dtype=torch.float32)
    >>> counter.get_total_flops() == 2 * 3 * 5 * 16
    True
    """

    def flops(*operands: Any, out_val: object = None, **attributes: Any) -> int:
        given = zip(spec.inputs, operands, strict=True)
        return flops_of(spec, [(x[0] if operand.many else x).shape for operand, x in given], attributes)

    if _is_product(spec):
        register_flop_formula(getattr(torch.ops.qshard, spec.name), get_raw=True)(flops)


def flops_of(spec: OpSpec, shapes: Sequence[Sequence[int]], attributes: Mapping[str, Any]) -> int:
    """Return the FLOPs of an op on operands with these shapes; 0 unless it is a product."""
    if not _is_product(spec):
        return 0
    extents: dict[str, int] = {}  # Of m, n and k, by the name of the axis in the row.
    for operand, shape in zip(spec.inputs, shapes, strict=True):
        if operand.name in ("a", "b"):
            *_, rows, columns = shape
            element = ELEMENTS.get(attributes.get(f"{operand.name}_element", ""))
            per_byte = 2 if operand.dtype == "packed" else element.codes_per_byte if element else 1
            extents |= {operand.terms[-2][0]: rows, operand.terms[-1][0]: columns * per_byte}
    return 2 * math.prod(extents.values())


def _is_product(spec: OpSpec) -> bool:
    return spec.name.startswith("gemm")
