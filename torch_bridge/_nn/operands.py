"""The operands of `linear`: planes of x, of the weight and of the gradient of y, each of its role's format."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from qshard._core import quantize_steps
from qshard._core.quantize_steps import Draws, Plane
from qshard.formats import Format, Usage
from qshard.layout import plane, source
from qshard.recipes import ROLE_SEEDS, DelayedScaling, Recipe, Role
from qshard.torch_bridge._distributed.tensor_shards import Part
from qshard.torch_bridge._fsdp.weight import ShardedWeight
from qshard.torch_bridge._ops.bind import ops
from qshard.torch_bridge._ops.uint64 import constant_words
from qshard.torch_bridge._quantized import plane_programs
from qshard.torch_bridge._quantized.gemm import Operand
from qshard.torch_bridge._quantized.tensor import QuantizedTensor

# Dynamo of torch 2.11 cannot iterate over an enum, on Python 3.12.
ROLES = tuple(Role)
OPERANDS = {Role.WEIGHT: "weight", Role.ACTIVATION: "x", Role.GRADIENT: "the gradient of y"}
"""What users of `linear` call them."""


def matrix_of(x: Tensor, dtype: torch.dtype, columns: int | None = None) -> Tensor:
    """`[M, K]` of `[*lead, K]`."""
    if x.ndim == 2 and x.dtype == dtype and columns in (None, x.shape[1]) and x.is_contiguous():
        return x.detach() if x.requires_grad else x
    columns = x.shape[-1] if columns is None else columns
    rows = x.shape[:-1].numel() if columns == x.shape[-1] else x.numel() // columns  # Also where a part has no columns.
    return x.detach().to(dtype).reshape(rows, columns).contiguous()


def values_of(weight: Tensor) -> Tensor:
    return weight.shard if isinstance(weight, ShardedWeight) else weight.detach()


def planes_of(weight: QuantizedTensor, columnwise: bool) -> dict[Usage, Operand]:
    """The planes that a weight has, of which products need the rowwise one and what gives the `columnwise` one."""
    fmt, parts, others = weight.format, weight.parts(Usage.ROWWISE), weight.parts(Usage.COLUMNWISE)
    if parts is None:
        raise ValueError("linear: weight (columnwise) has no rowwise plane; quantize it with usage=Usage.BOTH")
    there = {Usage.ROWWISE: Operand(fmt, parts)}
    if others is not None:
        there[Usage.COLUMNWISE] = Operand(fmt, others, Usage.COLUMNWISE)
    elif columnwise and source(fmt, Usage.COLUMNWISE) is not Usage.ROWWISE:
        raise ValueError(
            f"linear: weight ({fmt}, rowwise) has no columnwise plane, which its rowwise one does not give; "
            "quantize it with usage=Usage.BOTH"
        )
    return there


def quantized(
    x: Tensor,
    recipe: Recipe,
    usage: Usage,
    role: Role,
    seed: Tensor | None,
    parts: Mapping[Role, Part],
    given: Sequence[Tensor],
    amax: Tensor | None = None,
) -> tuple[dict[Usage, Operand], list[Tensor]]:
    """The planes of a matrix `[M, K]`, and its amax if its scale does not come from it.

    The rowwise plane is without the rows that are added for the columnwise one. `amax`: of x, if what made it has
    taken it.
    """
    fmt, amaxes, part = recipe.format(role), [], parts.get(role)
    if given:
        margin, scale = cast(DelayedScaling, recipe).margin, given[ROLES.index(role)]
        if part is not None and part.groups():  # It may be the first scale, which all parts share.
            there, seen = quantize_steps.quantize_delayed(ops, x, fmt, usage, scale, margin, reduce_max=part.merged)
        else:
            made, seen = plane_programs.quantized_delayed(x, scale, fmt, usage, margin)
            there = plane_programs.planes_of(made)
        amaxes = [seen]
    else:
        there = _scaled(x, recipe, usage, role, seed, part, amax)
    return {one: Operand(fmt, parts, one) for one, parts in there.items()}, amaxes


def _scaled(
    x: Tensor,
    recipe: Recipe,
    usage: Usage,
    role: Role,
    seed: Tensor | None,
    part: Part | None,
    amax: Tensor | None,
) -> dict[Usage, Plane]:
    fmt, rows = recipe.format(role), x.shape[0]
    added = recipe.added_rows(role, usage, rows)
    if added:
        x = torch.nn.functional.pad(x, (0, 0, 0, added))
    merged = None
    draws = draws_of(fmt, role, seed, x.device)
    if part is not None:
        draws = None if draws is None else part.draws(draws.seed)
        merged = functools.partial(part.merged, by_row=fmt.scaling.global_scale == "row")
    check = functools.partial(_check, x, fmt, usage, role)
    made = plane_programs.quantized(x, fmt, usage, draws=draws, reduce_max=merged, amax=amax, check=check)
    there = plane_programs.planes_of(made)
    if added and Usage.ROWWISE in usage.planes:
        there[Usage.ROWWISE] = quantize_steps.without_added_rows(there[Usage.ROWWISE], fmt, rows)
    return there


def draws_of(fmt: Format, role: Role, seed: Tensor | None, device: torch.device) -> Draws | None:
    """The random numbers of a matrix, by the seed of its layer; None: it takes none."""
    seed = seeds_of(fmt, role, seed)
    return None if seed is None else Draws(seed, constant_words(0, device))


def seeds_of(fmt: Format, role: Role, seed: Tensor | None) -> Tensor | None:
    """The seed of a tensor, by that of its layer; or of several, `[.., 2]`. None: it takes none."""
    if seed is None or not fmt.stochastic:
        return None
    return seed ^ constant_words(ROLE_SEEDS[role], seed.device) if ROLE_SEEDS[role] else seed


def _check(x: Tensor, fmt: Format, usage: Usage, role: Role) -> None:
    check_planes(tuple(x.shape), fmt, usage, role)


def check_planes(shape: tuple[int, ...], fmt: Format, usage: Usage, role: Role) -> None:
    """Raises ValueError unless a matrix has these planes: some formats need whole blocks."""
    for one in usage.planes:
        plane(fmt, shape, one, op="linear", name=OPERANDS[role])
