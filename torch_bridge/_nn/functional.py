"""`linear`: three matrix products with quantized operands."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from qshard._core.validation import quote, seed_missing
from qshard.formats import Usage
from qshard.recipes import Recipe, RecipeLike, Role, as_recipe, check_state, check_weight_format
from qshard.torch_bridge._delayed_scaling import DelayedScale
from qshard.torch_bridge._distributed.activation_group import ActivationGroup, Join
from qshard.torch_bridge._distributed.dtensor import local_of
from qshard.torch_bridge._distributed.fsdp1 import flat_of
from qshard.torch_bridge._distributed.tensor_shards import LinearSharding, ShardSpec, linear_sharding
from qshard.torch_bridge._fsdp.weight import ShardedWeight
from qshard.torch_bridge._nn import linear_program, saved_input
from qshard.torch_bridge._nn.autograd import Gradients, How, Product, multiply
from qshard.torch_bridge._nn.module_calls import cached_amax
from qshard.torch_bridge._nn.operands import ROLES, LayerQuantizer, matrix_of, planes_of, values_of
from qshard.torch_bridge._ops.autograd_node import apply_node
from qshard.torch_bridge._ops.eager import is_compiling
from qshard.torch_bridge._ops.uint64 import words
from qshard.torch_bridge._quantized.gemm import Operand
from qshard.torch_bridge._quantized.plane_programs import transpose
from qshard.torch_bridge._quantized.tensor import QuantizedTensor
from qshard.torch_bridge._quantized.validation import check_contiguous, check_dtype, check_tensor
from qshard.torch_bridge._torch_internals import has_saved_tensors_hooks

WeightLayout = Literal["NK", "KN"]
"""How a weight lies in memory. "NK": `[N, K]`, as that of `nn.Linear`; "KN": `[K, N]`, as that of GPT-2's `Conv1D`."""

aten = torch.ops.aten


_W_SCALE = ROLES.index(Role.WEIGHT)
_X_SCALES = slice(ROLES.index(Role.ACTIVATION), ROLES.index(Role.ACTIVATION) + 1)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    recipe: RecipeLike | None = None,
    *,
    seed: int | Tensor | None = None,
    delayed: Mapping[Role, DelayedScale] | None = None,
    dtype: torch.dtype | None = None,
    scatter_dim: int | None = None,
    overlap: bool = False,
    activation_group: ActivationGroup | None = None,
    weight_layout: WeightLayout = "NK",
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
      dtype: x is rounded to it first, and y has it; by default that of x.
      scatter_dim: of DTensors whose weight is cut along K: the axis of rows along which y is cut as it is summed. The
        codes of its gradient are gathered, not its values.
      overlap: whether rows that are cut (`sequence_parallel.py`) travel while others are multiplied. The bits are the
        same.
      activation_group: ranks that have this very x, and keep codes of it together (`prepare_modules_for_fsdp1`). The
        backward pass is collective then.
      weight_layout: "NK", or "KN" for a weight of `[K, N]`, as GPT-2's `Conv1D` has it: `y = x @ weight + bias`. Codes
        of it lie as it does. Not for DTensors.

    Returns:
      `[..., N]`. Gradients have the dtypes of what they are gradients of.

    Layers that a module calls with the same x, such as q, k and v, quantize it once, if `convert` was given that module
    or one above it. For the backward pass a layer keeps codes of x, unless autograd keeps x, or factors of x, anyway:
    `saved_input.py` has the rules. A parameter is kept as it is, so it must not be written in place before the backward
    pass, as that of `nn.Linear`. A second derivative raises, and so do transforms of `torch.func`.

    Under tensor parallelism all operands are DTensors of one mesh, and so is the result: `tensor_shards.py` says how
    each is cut. A `QuantizedTensor` may be what a rank has of the weight.

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
    given_bias: Any = bias
    if recipe is None and isinstance(given_bias, str | Recipe | type):
        raise TypeError(
            f"linear: bias ({quote(given_bias)}) is a recipe, but the third argument is the bias; pass linear(x, "
            "weight, None, recipe), or recipe="
        )
    recipe = as_recipe(recipe, "linear")
    if weight_layout not in ("NK", "KN"):
        raise ValueError(
            f"linear: weight_layout ({quote(weight_layout)}) is not a layout; pass 'NK' for weight [N, K] or 'KN' for "
            "weight [K, N]"
        )
    is_kn = weight_layout == "KN"
    if is_kn and (isinstance(x, DTensor) or isinstance(weight, DTensor)):
        raise TypeError("linear: weight (DTensor) does not support weight_layout='KN'; pass it as [N, K]")
    # Dynamo would hold a graph to the id, and compile alike layers one by one, of which a few are its limit.
    cut, shared, layer = None, x, 0 if is_compiling() else _id_of(weight)
    if isinstance(x, DTensor) and isinstance(weight, DTensor):
        _check_shapes(x, weight, bias)
        if scatter_dim is not None and scatter_dim < 0:
            scatter_dim += x.ndim
        cut = linear_sharding("linear", x, weight, recipe, scatter_dim, overlap)
        is_there = x.placements == cut.parts[Role.ACTIVATION].placements
        given_x, x, weight = local_of(x), cut.x(x), cut.weight(weight)
        shared = given_x if is_there else x  # Each call makes another object of the one part that layers share.
    elif scatter_dim is not None:
        raise ValueError(
            f"linear: scatter_dim ({scatter_dim}) needs DTensors; pass x and weight as DTensors, or leave it out"
        )
    parts = {} if cut is None else cut.parts
    check_tensor("linear", "x", x)
    check_operand("linear", weight, recipe)
    if cut is None:
        _check_shapes(x, weight, bias, is_kn)
    if not (parts and is_compiling()):  # Dynamo knows no state of a part that it has made.
        check_gathered(weight)
    if dtype is not None:
        check_dtype("linear", "dtype", dtype)
    if not recipe.stochastic:
        seed = None
    elif seed is None:
        raise ValueError(seed_missing("linear", type(recipe).__name__))
    else:
        seed = words("linear", "seed", seed, x.device).view(torch.int32)
    given: list[Tensor] = []
    advice = "a DelayedScale for each role"
    check_state("linear", "delayed", None if delayed is None else "given", recipe, advice)
    if delayed is not None:
        for role in ROLES:
            if role not in delayed:
                raise ValueError(f"linear: delayed has no state for {role}; pass a DelayedScale for each role")
        given = [*(delayed[role].scale for role in ROLES), delayed[Role.GRADIENT].amax]
    dtype = x.dtype if dtype is None else dtype
    y = _product(x, weight, recipe, seed, given, delayed, dtype, cut, shared, layer, activation_group, is_kn)
    y = y if cut is None else cut.y(y)
    return y if bias is None else y + bias.to(y.dtype)


def _product(
    x: Tensor,
    weight: Tensor,
    recipe: Recipe,
    seed: Tensor | None,
    given: list[Tensor],
    delayed: Mapping[Role, DelayedScale] | None,
    dtype: torch.dtype,
    cut: LinearSharding | None,
    shared: Tensor,
    layer: Hashable,
    activation_group: ActivationGroup | None,
    is_kn: bool,
) -> Tensor:
    """`linear` of plain tensors, without bias.

    Args:
      cut: which parts they are of larger tensors, if they are.
      shared: what tells one x from another, for layers that take the same.
      layer: which layer it is.
      activation_group: who keeps parts of the codes of x.
      is_kn: the weight is `[K, N]`.
    """
    parts: Mapping[Role, ShardSpec] = {} if cut is None else cut.parts
    x_rows, y_rows = (None, None) if cut is None else (cut.x_rows, cut.y_rows)
    eager, stochastic = not is_compiling(), recipe.format(Role.ACTIVATION).stochastic
    has_grad = torch.is_grad_enabled()
    need_x, need_w = has_grad and x.requires_grad, has_grad and weight.requires_grad
    source = saved_input.source_of(x) if need_w and eager and not stochastic and not parts else None
    x_usage = Usage.BOTH if need_w and source is None else Usage.ROWWISE

    quantizer = LayerQuantizer(recipe, seed, parts, given)

    def make(usage: Usage) -> saved_input.Planes:
        known = cached_amax(x) if x.dtype == dtype else None
        planes, amax = quantizer.quantize(matrix_of(x, dtype), Role.ACTIVATION, usage, known)
        return planes, [] if amax is None else [amax, *given[_X_SCALES]]

    if stochastic:
        xs, others = make(x_usage)
    else:
        key = (*_key(recipe, dtype), parts.get(Role.ACTIVATION))
        xs, others = saved_input.planes_of(shared, x_usage, key, layer, make)
    if delayed is not None:
        amax, *given[_X_SCALES] = others  # The scale may be that of another layer.
        delayed[Role.ACTIVATION].observe(amax)

    x_row, w_format, w_again = xs[Usage.ROWWISE], recipe.weight, False
    y: Tensor | None = None
    # The plane of the weight, as it lies, that each pass contracts.
    forward, backward = (Usage.COLUMNWISE, Usage.ROWWISE) if is_kn else (Usage.ROWWISE, Usage.COLUMNWISE)
    ws: dict[Usage, Operand] = {}
    # Under hooks something is recomputed, and the product comes in a node of its own.
    one_node = eager and not has_saved_tensors_hooks()
    if isinstance(weight, QuantizedTensor):  # Gathered by FSDP2, for example. The hook before it has noted its amax.
        w_format, ws = weight.format, planes_of(weight, need_x or is_kn)
        if is_kn and forward not in ws:
            ws[forward] = Operand(w_format, transpose(ws[backward].parts, w_format), forward)
    else:
        # What is no parameter may be there for this product alone, and has more bytes than its codes.
        w_again = need_x and eager and (isinstance(weight, torch.nn.Parameter) or flat_of(weight) is not None)
        if one_node and not parts and not is_kn and (w_again or not need_x):
            scale = given[_W_SCALE] if given else None
            y, w_amax = linear_program.product(x_row, values_of(weight), recipe, scale, seed, dtype)
        if y is None:
            w_usage = Usage.BOTH if need_x and not w_again else forward
            ws, w_amax = quantizer.quantize(values_of(weight), Role.WEIGHT, w_usage)
        if delayed is not None:
            delayed[Role.WEIGHT].observe(cast(Tensor, w_amax))
    shape = (*x.shape[:-1], weight.shape[1 if is_kn else 0]) if cut is None else cut.y_shape(x, weight.shape[0])
    if y is not None:
        y = aten._unsafe_view.default(y, shape)
    elif one_node or not (need_x or need_w):
        y = multiply(x_row, ws[forward], dtype, shape, x_rows, y_rows)
    if y is not None and not (need_x or need_w):
        return y
    of_x: Sequence[Tensor | None] = ()
    if need_w:
        of_x = xs[Usage.COLUMNWISE].parts if source is None else source.tensors
    join: Join | None = None
    if activation_group is not None and need_w and source is None and eager:
        of_x, join = activation_group.split(xs[Usage.COLUMNWISE].parts)
    of_w: Sequence[Tensor | None] = ()
    kept_usage = None
    if w_again:
        # The version of a wrapper does not count what is written to the tensor inside.
        of_w = (weight.shard,) if isinstance(weight, ShardedWeight) else ()
    elif need_x:
        # A gathered weight is kept as it is: FSDP2 frees its memory, and fills it with the same codes before backward.
        w = ws[backward] if backward in ws else ws[forward]
        of_w, kept_usage = w.parts, w.usage
    # Dynamo takes no tensor twice, and what is kept as codes has its scale.
    scales = [scale if eager or i >= _X_SCALES.stop else None for i, scale in enumerate(given)]
    x_again = None if source is None else source.again
    sizes = len(given), len(of_x), shape
    how = How(recipe, dtype, x_again, w_again, w_format, kept_usage, *sizes, parts, x_rows, y_rows, join, is_kn)
    made: Tensor = apply_node(Gradients, x, weight, how, seed, None if y is None else (y,), *scales, *of_x, *of_w)
    if y is None:
        w = ws[forward]
        made = Product.apply(made, dtype, x_row.format, w.format, is_kn, (x_rows, y_rows), *x_row.parts, *w.parts)
    return made


def _id_of(weight: Tensor) -> Hashable:
    """Tells one weight from others, in all passes. FSDP1 makes a new view of its flat parameter for each."""
    flat = flat_of(weight) if type(weight) is Tensor else None
    return id(weight) if flat is None else (id(flat), weight.storage_offset())


def _key(recipe: Recipe, dtype: torch.dtype) -> tuple[Any, ...]:
    """All that the planes of an activation depend on, besides its values."""
    rows = recipe.added_rows(Role.ACTIVATION, Usage.BOTH, 1)
    return recipe.format(Role.ACTIVATION), rows, dtype, recipe if recipe.stateful else None


def check_operand(op: str, weight: Tensor, recipe: Recipe) -> None:
    """Raises unless it is a weight for a recipe, gathered if it is sharded."""
    if isinstance(weight, QuantizedTensor):
        if weight.format is not recipe.weight and not is_compiling():
            check_weight_format(op, "weight", weight.format, recipe)
    else:
        check_tensor(op, "weight", weight, sharded=_NOT_GATHERED)
        check_contiguous(op, "weight", weight)


def check_gathered(weight: Tensor) -> None:
    if isinstance(weight, ShardedWeight) and weight.scale_state.primary is not None:
        raise ValueError(
            f"linear: {weight.scale_state.name} (primary) is not gathered; call fully_shard(model) after "
            "convert(primary=True), even on one rank"
        )


def _check_shapes(x: Tensor, weight: Tensor, bias: Tensor | None, is_kn: bool = False) -> None:
    lies = "[K, N]" if is_kn else "[N, K]"
    if weight.ndim != 2:
        raise ValueError(f"linear: weight {tuple(weight.shape)} does not have two axes; pass weight as {lies}")
    if x.ndim < 1 or x.shape[-1] != weight.shape[0 if is_kn else 1]:
        raise ValueError(
            f"linear: weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}; pass weight as {lies} and x as "
            "[*lead, K]"
        )
    if bias is not None:
        if not isinstance(bias, Tensor):
            raise TypeError(f"linear: bias ({quote(bias)}) is not a torch.Tensor or None; pass a tensor of [N]")
        if isinstance(weight, DTensor) and not isinstance(bias, DTensor):
            raise TypeError("linear: bias is not a DTensor, but weight is; pass both as DTensors, or neither")
        if tuple(bias.shape) != (weight.shape[1 if is_kn else 0],):
            raise ValueError(
                f"linear: bias {tuple(bias.shape)} does not fit weight {tuple(weight.shape)}; pass bias as [N]"
            )
    if weight.device != x.device:
        raise ValueError(f"linear: weight (on {weight.device}) is not on the device of x, {x.device}; move it there")


_NOT_GATHERED = (
    "call the module that fully_shard wraps, which gathers it; under tensor parallelism, pass x as a DTensor of the "
    "same mesh"
)
