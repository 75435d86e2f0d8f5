"""One block that covers a matrix, quantized by one op, against the separate ops for one scale."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from qshard.torch_bridge._ops.bind import into, ops

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ELEMENTS = ("float8_e4m3fn", "float8_e5m2")
SPECIAL = {"normal": None, "infinity": float("inf"), "minus infinity": float("-inf"), "nan": float("nan")}
RULES = [
    {"eps": eps, "pow2": pow2, "nonfinite": nonfinite}
    for eps, pow2, nonfinite in itertools.product((0.0, 2.0), (False, True), ("saturate", "nan"))
]
SCALES = {"rounding": "up", "scale_dtype": "float32"}


def matrices(shape: tuple[int, int], dtype: torch.dtype, device: str, skew: int = 0) -> Iterator[Tensor]:
    """Yield matrices with the special values of an amax: zeros, subnormals, and infinities and NaN in any place.

    With `skew`, the memory of a matrix begins that many elements after an aligned address.
    """
    count = shape[0] * shape[1]
    generator = torch.Generator().manual_seed(count)
    memory = torch.zeros(count + skew, dtype=dtype, device=device)
    x = memory[skew:].view(shape)
    for place, value in enumerate(SPECIAL.values()):
        x.copy_(3 * torch.randn(shape, generator=generator))
        if value is not None:
            x.view(-1)[(count - 1) * place // 3] = value
        yield x
    # The amax is the first element, the last, and one of few that are not zeros.
    for place in (0, count - 1, count // 2):
        x.view(-1)[place] = -1000.0
        yield x
        x.zero_()
    yield x
    x.fill_(torch.finfo(dtype).smallest_normal / 4)
    yield x


def separate_ops(x: Tensor, element: str, rule: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, transposed codes and scale_inv."""
    scale, scale_inv = ops.scale_from_amax(ops.amax_tensor(x), element=element, **rule)
    codes = ops.cast_tensor(x, scale, element=element)
    both, codes_t = ops.cast_transpose(x, scale, element=element)
    assert torch.equal(both, codes)
    return codes, codes_t, scale_inv


def whole_block(x: Tensor, element: str, rule: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of an op that quantizes x as one block."""
    return {"block_rows": x.shape[0], "block_cols": x.shape[1], "element": element, **SCALES, **rule}


def check(
    shapes: Sequence[tuple[int, int]], dtype: torch.dtype, element: str, device: str, skews: Sequence[int]
) -> None:
    """Compare both ops with the separate ops, bit for bit. Results are `skew` bytes after an aligned address."""
    for shape, skew in itertools.product(shapes, skews):
        for number, x in enumerate(matrices(shape, dtype, device, skew)):
            rule = RULES[(number + skew) % len(RULES)] if x.numel() > 2**20 else None
            for each in RULES if rule is None else [rule]:
                codes, codes_t, scale_inv = separate_ops(x, element, each)
                options = whole_block(x, element, each)
                memory = torch.full((3 * x.numel() + skew,), 0xA5, dtype=torch.uint8, device=device)
                one, rowwise, columnwise = memory[skew:].view(3, *shape)
                columnwise = columnwise.view(shape[::-1])
                scales = torch.full((3, 1, 1), 77.0, device=device)
                into(one, scales[0]).quantize_block(x, **options)
                into(rowwise, scales[1], columnwise, scales[2]).quantize_square_both(x, outer=0, **options)
                where = f"{shape} {dtype} {element} {each}, skew {skew}, matrix {number}"
                assert torch.equal(one, codes), where
                assert torch.equal(rowwise, codes), where
                assert torch.equal(columnwise, codes_t), where
                assert scales.view(torch.int32).flatten().tolist() == 3 * [scale_inv.view(torch.int32).item()], where
