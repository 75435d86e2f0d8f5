"""`linear`: three matrix products with quantized operands."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from qshard import pipeline
from qshard.formats import Format, Usage
from qshard.layout import plane, source, whole_units
from qshard.names import seed_missing, shown
from qshard.pipeline import Draws, Plane
from qshard.recipes import ROLE_SEEDS, Recipe, RecipeLike, Role, as_recipe, check_weight_format
from qshard.torch_bridge.arguments import check_contiguous, check_tensor
from qshard.torch_bridge.delayed import DelayedScale
from qshard.torch_bridge.fsdp.weight import ShardedWeight
from qshard.torch_bridge.gemm import Operand, matmul
from qshard.torch_bridge.ops import ops
from qshard.torch_bridge.parallel import Part, cut_of
from qshard.torch_bridge.tensor import QuantizedTensor
from qshard.torch_bridge.words import words

aten = torch.ops.aten


# Dynamo of torch 2.11 cannot iterate over an enum, on Python 3.12.
ROLES = tuple(Role)
OPERANDS = {Role.WEIGHT: "weight", Role.ACTIVATION: "x", Role.GRADIENT: "the gradient of y"}
"""What users of `linear` call them."""


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: RecipeLike,
    *,
    seed: int | Tensor | None = None,
    delayed: Mapping[Role, DelayedScale] | None = None,
) -> Tensor:
    """`y = x @ weight.T + bias`, with x, weight and the gradient of y quantized.

    | product | operands |
    | --- | --- |
    | `y = x @ w.T` | x rowwise, w rowwise |
    | `grad_x = grad_y @ w` | grad_y rowwise, w columnwise |
    | `grad_w = grad_y.T @ x` | grad_y columnwise, x columnwise |

    Args:
      x: float32, bfloat16 or float16, `[..., K]`.
      weight: `[N, K]`, float32, bfloat16 or float16; or a `QuantizedTensor` of the recipe's format for weights, with a
        rowwise plane.
      bias: `[N]` or None.
      recipe: the format of each role, or the name of a recipe, such as "MXFP8". The scales of x, and of the gradient of
        y, are those of this rank's tensor; of a DTensor, those of all of it.
      seed: an int, or int32 `[2]`, low word first, for formats that round stochastically: another one for each call.
      delayed: the state of each tensor under `DelayedScaling`. Its scales are used, and amaxes noted: those of x and
        weight now, that of the gradient in the backward pass.

    Returns:
      `[..., N]`, in the dtype of x. Gradients have the dtypes of what they are gradients of.

    Under tensor parallelism all operands are DTensors of one mesh, and so is the result: `parallel.py` says how each is
    cut. A `QuantizedTensor` may be what a rank has of the weight.

    Raises:
      TypeError: an operand is not a plain tensor of such a dtype, or another argument is not of its type; or some
        operands are DTensors and others are not.
      ValueError: operands do not fit each other; there is no seed, or no state of `DelayedScaling`; or an axis that is
        contracted is not whole blocks of its format, or is cut within one. The number of rows
        of x may be anything: where blocks run along it, operands get rows of zeros (`Recipe.added_rows`).

    >>> from qshard.recipes import CurrentScaling
    >>> x, w = torch.eye(2, requires_grad=True), torch.tensor([[1.0, 2.0], [4.0, 8.0]], requires_grad=True)
    >>> y = linear(x, w, None, CurrentScaling())
    >>> y.detach(), torch.autograd.grad(y.sum(), [x, w])
    (tensor([[1., 4.],
            [2., 8.]]), (tensor([[ 5., 10.],
            [ 5., 10.]]), tensor([[1., 1.],
            [1., 1.]])))

    Sources: arXiv:2209.05433.
    """
    recipe = as_recipe(recipe, "linear")
    if isinstance(x, DTensor) and isinstance(weight, DTensor):
        _check_shapes(x, weight, bias)
        cut = cut_of("linear", x, weight, recipe)
        y = cut.y(_product(cut.x(x), cut.weight(weight), recipe, seed, delayed, cut.parts))
    else:
        y = _product(x, weight, recipe, seed, delayed, {}, bias)
    return y if bias is None else y + bias.to(y.dtype)


def _product(
    x: Tensor,
    weight: Tensor,
    recipe: Recipe,
    seed: int | Tensor | None,
    delayed: Mapping[Role, DelayedScale] | None,
    parts: Mapping[Role, Part],
    bias: Tensor | None = None,
) -> Tensor:
    """`linear` of plain tensors, without the bias. `parts`: which they are of larger tensors, if they are."""
    _check_operands(x, weight, recipe)
    if not (parts and torch.compiler.is_compiling()):  # Dynamo knows no state of a part that it has made.
        _check_gathered(weight)
    if not parts:
        _check_shapes(x, weight, bias)
    if not recipe.stochastic:
        seed = None
    elif seed is None:
        raise ValueError(seed_missing("linear", type(recipe).__name__))
    else:
        seed = words("linear", "seed", seed, x.device).view(torch.int32)
    given: Sequence[Tensor] = ()
    if recipe.stateful != (delayed is not None):
        raise ValueError(
            f"linear: delayed ({'None' if delayed is None else 'given'}) is not what {type(recipe).__name__} takes; "
            "pass the DelayedScale of each role with DelayedScaling, and nothing with other recipes"
        )
    if delayed is not None:
        for role in ROLES:
            if role not in delayed:
                raise ValueError(f"linear: delayed has no state for {role}; pass a DelayedScale for each role")
        given = [t for role in ROLES for t in (delayed[role].scale, delayed[role].scale_inv)]
        given += [delayed[Role.GRADIENT].amax]
    y, *amaxes = _Linear.apply(x, weight, recipe, seed, parts, *given)
    if delayed is not None:
        # The amax of a gathered weight is not among them: the hook before the gather has noted it.
        for role, amax in zip((Role.ACTIVATION, Role.WEIGHT), amaxes, strict=False):
            delayed[role].observe(amax)
    result: Tensor = y
    return result


def check_shape(op: str, name: str, recipe: Recipe, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless a weight `[N, K]`, and what is multiplied with it, are whole blocks of their formats."""
    for one in Usage.BOTH.planes:
        plane(recipe.weight, shape, one, op=op, name=name)
    for role, axis, size in ((Role.ACTIVATION, "columns", shape[1]), (Role.GRADIENT, "rows", shape[0])):
        unit = whole_units(recipe.format(role), Usage.ROWWISE)[1]
        if size % unit:
            raise ValueError(
                f"{op}: {name} {shape} is multiplied with {role.value}s in blocks of {unit}, of "
                f"{recipe.format(role)}; pad the {axis} to {size + -size % unit}"
            )


def _check_operands(x: Tensor, weight: Tensor, recipe: Recipe) -> None:
    check_tensor("linear", "x", x)
    if isinstance(weight, QuantizedTensor):
        if weight.format is not recipe.weight and not torch.compiler.is_compiling():
            check_weight_format("linear", "weight", weight.format, recipe)
    else:
        check_tensor("linear", "weight", weight, sharded=_NOT_GATHERED)
        check_contiguous("linear", "weight", weight)


def _check_gathered(weight: Tensor) -> None:
    if isinstance(weight, ShardedWeight) and weight.scale_state.primary is not None:
        raise ValueError(
            f"linear: {weight.scale_state.name} (primary) is not gathered; call fully_shard(model) after "
            "convert(primary=True), on one rank too"
        )


def _check_shapes(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if weight.ndim != 2:
        raise ValueError(f"linear: weight {tuple(weight.shape)} does not have two axes; give weight as [N, K]")
    if x.ndim < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear: weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}; give weight as [N, K] and x as "
            "[*lead, K]"
        )
    if bias is not None:
        if not isinstance(bias, Tensor):
            raise TypeError(f"linear: bias ({shown(bias)}) is not a torch.Tensor or None; pass a tensor of [N]")
        if isinstance(weight, DTensor) and not isinstance(bias, DTensor):
            raise TypeError(
                "linear: bias (Tensor) is not a DTensor, as weight is; pass what distribute_tensor makes of it"
            )
        if tuple(bias.shape) != (weight.shape[0],):
            raise ValueError(
                f"linear: bias {tuple(bias.shape)} does not fit weight {tuple(weight.shape)}; give it as [N]"
            )
    if weight.device != x.device:
        raise ValueError(f"linear: weight (on {weight.device}) is not on the device of x, {x.device}; move it there")


_NOT_GATHERED = (
    "call the module that fully_shard wraps, which gathers it; under tensor parallelism, pass x as a DTensor of the "
    "same mesh"
)


class _Linear(torch.autograd.Function):
    """`linear` without bias. What it keeps for the backward pass are codes: of x, columnwise, and of the weight."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        recipe: Recipe,
        seed: Tensor | None,
        parts: Mapping[Role, Part],
        *given: Tensor,
    ) -> tuple[Tensor, ...]:
        """`given`: of delayed scaling, scale and scale_inv of each role and the amax of the gradient; else nothing.

        Returns y and what amaxes there are, of x and of the weight. (Dynamo of torch 2.11 takes no None among results.)
        """
        grad_x, grad_w = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        ctx.x_shape, dtype = x.shape, x.dtype
        x = x.reshape(x.shape[:-1].numel(), x.shape[-1]).contiguous()
        xs, amaxes = _planes(x, recipe, Usage.BOTH if grad_w else Usage.ROWWISE, Role.ACTIVATION, seed, parts, given)
        if isinstance(weight, QuantizedTensor):  # Gathered by FSDP2, for example.
            ws = _planes_of(weight, grad_x)
        else:
            w = weight.shard if isinstance(weight, ShardedWeight) else weight
            ws, amax = _planes(w, recipe, Usage.BOTH if grad_x else Usage.ROWWISE, Role.WEIGHT, seed, parts, given)
            amaxes = amaxes + amax
        # A gathered weight is kept as it is: FSDP2 frees its memory, and fills it with the same codes before backward.
        kept = ws.get(Usage.COLUMNWISE, ws[Usage.ROWWISE])
        no_plane = (None,) * len(Plane._fields)
        x_parts = xs[Usage.COLUMNWISE].parts if grad_w else no_plane
        ctx.save_for_backward(*x_parts, *kept.parts, seed)
        ctx.parts = parts
        ctx.recipe, ctx.w_format, ctx.w_usage = recipe, kept.format, kept.usage
        ctx.dtype, ctx.w_dtype = dtype, weight.dtype
        ctx.given = given  # Not saved: autograd would object to the amax that is noted in it.
        y: Tensor = matmul(xs[Usage.ROWWISE], ws[Usage.ROWWISE], dtype, fast=True)
        # Not a view, to which FSDP2 could not attach its hooks.
        y = aten._unsafe_view.default(y, (*ctx.x_shape[:-1], y.shape[1]))
        ctx.mark_non_differentiable(*amaxes)
        return (y, *amaxes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        *saved, seed = ctx.saved_tensors
        half = len(Plane._fields)
        need_x, need_w = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        usage = Usage.BOTH if need_x and need_w else Usage.ROWWISE if need_x else Usage.COLUMNWISE
        grad = grad.reshape(grad.shape[:-1].numel(), grad.shape[-1]).contiguous()
        dys, amaxes = _planes(grad, ctx.recipe, usage, Role.GRADIENT, seed, ctx.parts, ctx.given)
        for amax in amaxes:
            noted = ctx.given[-1]
            noted.copy_(torch.maximum(noted, amax))
        grad_x = grad_w = None
        if need_x:
            w = Plane(*saved[half:])
            if ctx.w_usage is Usage.ROWWISE:
                w = pipeline.transposed(ops, w, ctx.w_format)
            grad_x = matmul(dys[Usage.ROWWISE], Operand(ctx.w_format, w, Usage.COLUMNWISE), ctx.dtype)
            grad_x = grad_x.view(ctx.x_shape)
        if need_w:
            x = Operand(ctx.recipe.format(Role.ACTIVATION), Plane(*saved[:half]), Usage.COLUMNWISE)
            grad_w = matmul(dys[Usage.COLUMNWISE], x, ctx.w_dtype)
        return grad_x, grad_w, None, None, None, *(None for _ in ctx.given)


def _planes_of(weight: QuantizedTensor, columnwise: bool) -> dict[Usage, Operand]:
    """The planes that a weight has, of which products need the rowwise one and what gives the `columnwise` one."""
    fmt = weight.format
    planes = {u: Operand(fmt, parts, u) for u in Usage.BOTH.planes if (parts := weight.parts(u)) is not None}
    if Usage.ROWWISE not in planes:
        raise ValueError("linear: weight (columnwise) has no rowwise plane; quantize it with usage=Usage.BOTH")
    if columnwise and Usage.COLUMNWISE not in planes and source(fmt, Usage.COLUMNWISE) not in planes:
        raise ValueError(
            f"linear: weight ({fmt}, rowwise) has no columnwise plane, which its rowwise one does not give; "
            "quantize it with usage=Usage.BOTH"
        )
    return planes


def _planes(
    x: Tensor,
    recipe: Recipe,
    usage: Usage,
    role: Role,
    seed: Tensor | None,
    parts: Mapping[Role, Part],
    given: Sequence[Tensor],
) -> tuple[dict[Usage, Operand], list[Tensor]]:
    """The planes of a matrix `[M, K]`, and its amax if its scale does not come from it.

    The rowwise plane is without the rows that are added for the columnwise one.
    """
    fmt, amaxes = recipe.format(role), []
    if given:
        at = 2 * ROLES.index(role)
        planes, amax = pipeline.quantize_delayed(ops, x, fmt, usage, given[at], given[at + 1])
        amaxes = [amax]
    else:
        planes = _quantized(x, recipe, usage, role, seed, parts.get(role))
    return {one: Operand(fmt, parts, one) for one, parts in planes.items()}, amaxes


def _quantized(
    x: Tensor, recipe: Recipe, usage: Usage, role: Role, seed: Tensor | None, part: Part | None
) -> dict[Usage, Plane]:
    fmt, rows = recipe.format(role), x.shape[0]
    added = recipe.added_rows(role, usage, rows)
    if added:
        x = torch.nn.functional.pad(x, (0, 0, 0, added))
    for one in usage.planes:
        plane(fmt, tuple(x.shape), one, op="linear", name=OPERANDS[role])
    if _NUMBERS_ARE_SYMBOLS and torch.compiler.is_compiling():
        fmt = _constant(fmt)
    draws = None
    if fmt.stochastic and seed is not None:
        if ROLE_SEEDS[role]:
            seed = seed ^ words("linear", "seed", ROLE_SEEDS[role], x.device)
        draws = Draws(seed, words("linear", "first", 0, x.device)) if part is None else part.draws(seed)
    merged = None if part is None else functools.partial(part.merged, by_row=fmt.scaling.global_scale == "row")
    planes = pipeline.quantize(ops, x, fmt, usage, reduce_max=merged, draws=draws)
    if added and Usage.ROWWISE in usage.planes:
        planes[Usage.ROWWISE] = pipeline.without_added_rows(planes[Usage.ROWWISE], fmt, rows)
    return planes


# Under `torch.compile(dynamic=True)` floats of an object become symbols. Dynamo of torch 2.13 fails on one in an
# autograd.Function, unless it is told that it is a constant; that of 2.11 cannot be told, and does not fail.
_NUMBERS_ARE_SYMBOLS = torch.__version__ >= "2.13"  # Compares versions, not strings.


class _Constant:
    """A format, or its scaling, some of whose attributes are constants to a compiler."""

    def __init__(self, real: Any, **constants: Any):
        self._real = real
        for name, value in constants.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _constant(fmt: Format) -> Format:
    eps, scale_max = _numbers(fmt)
    return cast(Format, _Constant(fmt, scaling=_Constant(fmt.scaling, eps=eps, scale_max=scale_max)))


@torch.compiler.assume_constant_result
def _numbers(fmt: Format) -> tuple[float, float]:
    return fmt.scaling.eps, fmt.scaling.scale_max
