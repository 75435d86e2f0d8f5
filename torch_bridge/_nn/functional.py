"""`linear`: the linear function with quantized GEMM operands, and its argument checks."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from qshard._core.operands import check_state
from qshard._core.validation import WeightLayout, as_layout, quote, seed_missing
from qshard.formats import Usage
from qshard.recipes import NO_PRODUCTS, Recipe, RecipeLike, Role, as_recipe
from qshard.torch_bridge._delayed_scaling import DelayedScale
from qshard.torch_bridge._distributed.activation_group import ActivationGroup, Join
from qshard.torch_bridge._distributed.dtensor import local_of
from qshard.torch_bridge._distributed.fsdp1 import flat_of
from qshard.torch_bridge._distributed.sequence_parallel import Rows
from qshard.torch_bridge._distributed.tensor_shards import LinearSharding, ShardSpec, linear_sharding
from qshard.torch_bridge._fsdp.weight import ShardedWeight
from qshard.torch_bridge._nn import linear_program, saved_input
from qshard.torch_bridge._nn.autograd import LinearNode, ProductNode, SavedLayout, compute_y
from qshard.torch_bridge._nn.module_calls import cached_amax
from qshard.torch_bridge._nn.operands import (
    ROLES,
    LayerQuantizer,
    check_gathered,
    check_operand,
    check_shapes,
    matrix_of,
    planes_of_weight,
    values_of,
)
from qshard.torch_bridge._nn.weight_amax import whole_amax
from qshard.torch_bridge._ops.autograd_node import apply_node, check_no_tangent
from qshard.torch_bridge._ops.eager import is_compiling
from qshard.torch_bridge._ops.programs import run_in_graph
from qshard.torch_bridge._ops.uint64 import as_uint64
from qshard.torch_bridge._quantized.gemm import Operand
from qshard.torch_bridge._quantized.plane_programs import transpose
from qshard.torch_bridge._quantized.tensor import QuantizedTensor
from qshard.torch_bridge._quantized.validation import check_dtype, check_tensor
from qshard.torch_bridge._torch_internals import has_saved_tensors_hooks

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
    """Compute `y = x @ weight.T + bias` with x, weight and the gradient of y quantized.

    | product | operands |
    | --- | --- |
    | `y = x @ w.T` | x rowwise, w rowwise |
    | `grad_x = grad_y @ w` | grad_y rowwise, w columnwise |
    | `grad_w = grad_y.T @ x` | grad_y columnwise, x columnwise |

    Args:
      x: float32, bfloat16 or float16, `[..., K]`.
      weight: `[N, K]`, float32, bfloat16 or float16; or a `QuantizedTensor` with a rowwise plane, in the recipe's
        weight format, or in blocks of one row where that has 2-D blocks, as engines write them. The gradient of x then
        multiplies the dequantized weight.
      bias: `[N]`, or None.
      recipe: the format of each role, or the name of a recipe, such as "MXFP8".
      seed: for stochastic rounding, an int or a uint64 as int32 `[2]`, low word first. Pass a new seed in each call.
      delayed: the state of each role under `DelayedScaling`. The call uses its scales and records amaxes: of x and
        weight in the forward pass, of the gradient of y in the backward pass.
      dtype: the dtype that x is rounded to first, and the dtype of y. The default is the dtype of x.
      scatter_dim: for DTensors with a weight sharded along K: the axis of y along which the sum over ranks is
        scattered. The gradient of y is then gathered as codes.
      overlap: overlap communication of sequence-sharded rows with GEMMs (`sequence_parallel.py`). Codes have the
        same bits.
      activation_group: ranks with the same x that each save a part of its codes (`prepare_modules_for_fsdp1`). The
        backward pass then runs a collective.
      weight_layout: "NK", or "KN" for a weight `[K, N]`, as in GPT-2's `Conv1D`: `y = x @ weight + bias`. The codes
        have the layout of the weight. DTensors must be "NK".

    Returns:
      `[..., N]`. Each gradient has the dtype of its input.

    Raises:
      TypeError: an operand is not a tensor of a supported dtype, another argument has the wrong type, or only some
        operands are DTensors.
      ValueError: shapes do not fit; a seed or the state of `DelayedScaling` is missing; or a contracted axis is not
        whole blocks of its format, or a shard boundary splits its blocks. The number of rows of x may be anything:
        where blocks run along rows, operands are padded with rows of zeros (`Recipe.added_rows`).

    For a plain x, the scales of x and of the gradient of y depend on this rank's data only. Under tensor parallelism
    all operands and the result are DTensors of one mesh, and scales depend on the whole tensors; `tensor_shards.py`
    lists the shardings. The local shard of the weight may be a `QuantizedTensor`.

    Layers that receive the same x in one module call, such as q, k and v, quantize it once, if `convert` was called on
    that module or on a parent. Codes of x are saved for backward, unless autograd already saves x or its factors
    (`saved_input.py`). A weight that is a parameter is saved by reference, as in `nn.Linear`: do not write to it before
    the backward pass. Second derivatives, transforms of `torch.func`, and `torch.export` with gradients raise.

    >>> from qshard.recipes import CurrentScaling
    >>> x, w = torch.eye(2, requires_grad=True), torch.tensor([[1.0, 2.0], [4.0, 8.0]], requires_grad=True)
    >>> y = linear(x, w, None, CurrentScaling())
    >>> y.detach(), torch.autograd.grad(y.sum(), [x, w])
    (tensor([[1., 4.],
            [2., 8.]]), (tensor([[ 5., 10.],
            [ 5., 10.]]), tensor([[1., 1.],
            [1., 1.]])))

    Source: arXiv:2209.05433.
    """
    given_bias: Any = bias
    if recipe is None and isinstance(given_bias, str | Recipe | type):
        raise TypeError(
            f"linear: bias ({quote(given_bias)}) is a recipe, but the third argument is the bias; pass linear(x, "
            "weight, None, recipe), or recipe="
        )
    recipe = as_recipe(recipe, "linear")
    is_kn = as_layout("linear", weight_layout, "weight") == "KN"
    if is_kn and (isinstance(x, DTensor) or isinstance(weight, DTensor)):
        raise TypeError("linear: weight (DTensor) does not support weight_layout='KN'; pass it as [N, K]")
    # Dynamo would guard on the id and compile equal layers one by one, until its recompilation limit.
    sharding, shared, layer = None, x, 0 if is_compiling() else _id_of(weight)
    if isinstance(x, DTensor) and isinstance(weight, DTensor):
        check_shapes(x, weight, bias)
        if scatter_dim is not None and scatter_dim < 0:
            scatter_dim += x.ndim
        sharding = linear_sharding("linear", x, weight, recipe, scatter_dim, overlap)
        is_there = x.placements == sharding.parts[Role.ACTIVATION].placements
        given_x, x, weight = local_of(x), sharding.x(x), sharding.weight(weight)
        # `sharding.x` returns a new object in each call, so layers that share x compare the local tensor.
        shared = given_x if is_there else x
    elif scatter_dim is not None:
        raise ValueError(
            f"linear: scatter_dim ({scatter_dim}) needs DTensors; pass x and weight as DTensors, or leave it out"
        )
    parts = {} if sharding is None else sharding.parts
    check_tensor("linear", "x", x)
    if recipe.by_product and (sharding is not None or activation_group is not None):
        what = "a DTensor" if activation_group is None else "with activation_group="
        raise NotImplementedError(f"linear: x is {what}, but recipe ({recipe}) {NO_PRODUCTS}; pass one without")
    check_operand("linear", weight, recipe, frozen=weight_layout == "NK")
    if not weight.is_contiguous():
        weight = weight.contiguous()
    if sharding is None:
        check_shapes(x, weight, bias, is_kn)
    if not (parts and is_compiling()):  # Dynamo loses the scale state of a shard that it created.
        check_gathered(weight)
    if dtype is not None:
        check_dtype("linear", "dtype", dtype)
    if not recipe.stochastic:
        seed = None
    elif seed is None:
        raise ValueError(seed_missing("linear", type(recipe).__name__))
    else:
        seed = as_uint64("linear", "seed", seed, x.device).view(torch.int32)
    scale_args: list[Tensor] = []
    advice = "a DelayedScale for each role"
    check_state("linear", "delayed", None if delayed is None else "given", recipe, advice)
    if delayed is not None:
        for role in ROLES:
            if role not in delayed:
                raise ValueError(f"linear: delayed has no state for {role}; pass a DelayedScale for each role")
        scale_args = [*(delayed[role].scale for role in ROLES), delayed[Role.GRADIENT].amax]
    dtype = x.dtype if dtype is None else dtype
    has_grad = torch.is_grad_enabled()
    needs = has_grad and x.requires_grad, has_grad and weight.requires_grad
    call = _Call(recipe, seed, scale_args, delayed, dtype, sharding, shared, layer, activation_group, is_kn, *needs)
    y = _linear_of_plain(call, x, weight)
    y = y if sharding is None else sharding.y(y)
    return y if bias is None else y + bias.to(y.dtype)


class _Call(NamedTuple):
    """One call of `linear` on plain tensors: its checked arguments, and what follows from them.

    Attributes:
      scales: under delayed scaling the scale of each role, then the amax buffer of the gradient; otherwise empty.
      shared: identifies x to the layers that share its codes.
      layer: identifies the layer to them.
      need_x: whether x needs a gradient; `need_w` the same for the weight.
    """

    recipe: Recipe
    seed: Tensor | None
    scales: list[Tensor]
    delayed: Mapping[Role, DelayedScale] | None
    dtype: torch.dtype
    sharding: LinearSharding | None
    shared: Tensor
    layer: Hashable
    activation_group: ActivationGroup | None
    is_kn: bool
    need_x: bool
    need_w: bool

    @property
    def parts(self) -> Mapping[Role, ShardSpec]:
        return {} if self.sharding is None else self.sharding.parts

    @property
    def rows(self) -> tuple[Rows | None, Rows | None]:
        """The shardings of the rows of x and of y under sequence parallelism."""
        return (None, None) if self.sharding is None else (self.sharding.x_rows, self.sharding.y_rows)

    @property
    def w_usages(self) -> tuple[Usage, Usage]:
        """The planes of the stored weight that the forward and the backward pass contract."""
        return (Usage.COLUMNWISE, Usage.ROWWISE) if self.is_kn else (Usage.ROWWISE, Usage.COLUMNWISE)

    def quantizer(self, recipe: Recipe | None) -> LayerQuantizer:
        return LayerQuantizer(recipe, self.seed, self.parts, self.scales)

    def y_shape(self, x: Tensor, weight: Tensor) -> tuple[int, ...]:
        if self.sharding is not None:
            return self.sharding.y_shape(x, weight.shape[0])
        return (*x.shape[:-1], weight.shape[1 if self.is_kn else 0])


def _linear_of_plain(call: _Call, x: Tensor, weight: Tensor) -> Tensor:
    """Compute `linear` of plain tensors, without bias."""
    eager, (forward, dgrad, wgrad) = not is_compiling(), call.recipe.products
    stochastic = wgrad is not None and wgrad.format(Role.ACTIVATION).stochastic
    # Delayed scales are not inputs of compiled nodes, so these save codes.
    may_recompute = call.need_w and not stochastic and not call.parts and (eager or not call.scales)
    source = saved_input.source_of(x, call.dtype) if may_recompute else None
    saves_x, is_shared = call.need_w and source is None, forward is wgrad
    xs = _quantize_x(call, x, forward, Usage.BOTH if saves_x and is_shared else Usage.ROWWISE)
    if saves_x and not is_shared:
        xs |= _quantize_x(call, x, wgrad, Usage.COLUMNWISE)
    x_row, shape = xs[Usage.ROWWISE], call.y_shape(x, weight)
    # With saved-tensor hooks, checkpointing may recompute this, so the product is a separate node.
    one_node = eager and not has_saved_tensors_hooks()
    # A tensor that is not a parameter may be temporary, and is larger than its codes: save the codes. Compiled layers
    # also save them under tensor parallelism and under delayed scaling.
    w_again = call.need_x and not isinstance(weight, QuantizedTensor) and _stays_in_memory(weight)
    w_again = w_again and (eager or not (call.parts or call.scales))
    ws: dict[Usage, Any] = {}
    w_amax: Tensor | None = None
    y = _multiply_program(call, forward, x_row, weight, w_again, shape) if one_node else None
    program = None if eager else _compiled_forward(call, x_row, weight, w_again, shape)
    if program is not None:
        if not (call.need_x or call.need_w):
            return run_in_graph(*program, 1)[0]
    elif y is None:
        ws, w_amax = _planes_of_weight(call, forward, dgrad, weight, w_again)
        if one_node or not (call.need_x or call.need_w):
            y = compute_y(x_row, ws[call.w_usages[0]], call.dtype, shape, *call.rows)
    if y is not None and not (call.need_x or call.need_w):
        if eager:
            check_no_tangent((x, weight), LinearNode.op, LinearNode.instead)
        return y
    how, saved = _saved_operands(call, xs, source, weight, ws, w_amax if w_again else None, w_again, shape)
    result: Tensor = apply_node(LinearNode, x, weight, how, call.seed, None if y is None else (y,), *saved)
    if y is None:
        if program is not None:
            (parts, text), w_format = program, None
        else:
            w, text = ws[call.w_usages[0]], None
            parts, w_format = (*x_row.parts, *w.parts), w.format
        options = call.dtype, x_row.format, w_format, call.is_kn, call.rows, text
        result = ProductNode.apply(result, *options, *parts)
    return result


def _quantize_x(call: _Call, x: Tensor, recipe: Recipe | None, usage: Usage) -> dict[Usage, Any]:
    """Quantize x, or take its planes from a layer that shares x, and record its amax under delayed scaling."""
    scales, quantizer = call.scales, call.quantizer(recipe)

    def make(usage: Usage) -> saved_input.Planes:
        known = cached_amax(x) if x.dtype == call.dtype else None
        planes, amax = quantizer.quantize(matrix_of(x, call.dtype), Role.ACTIVATION, usage, known)
        return planes, [] if amax is None else [amax, *scales[_X_SCALES]]

    if recipe is not None and recipe.format(Role.ACTIVATION).stochastic:
        planes, others = make(usage)
    else:
        key = (*_key(recipe, call.dtype), call.parts.get(Role.ACTIVATION))
        planes, others = saved_input.shared_planes(call.shared, usage, key, call.layer, make)
    if call.delayed is not None:
        amax, *scales[_X_SCALES] = others  # Another layer that shares x may have chosen the scale.
        call.delayed[Role.ACTIVATION].observe(amax)
    return planes


def _stays_in_memory(weight: Tensor) -> bool:
    return isinstance(weight, torch.nn.Parameter) or (not is_compiling() and flat_of(weight) is not None)


def _multiply_program(
    call: _Call, recipe: Recipe | None, x: Operand, weight: Tensor, w_again: bool, shape: tuple[int, ...]
) -> Tensor | None:
    """Quantize the weight and compute y in one call; None if the weight is quantized or no program can do it."""
    if recipe is None or isinstance(weight, QuantizedTensor) or call.parts or call.is_kn:
        return None
    if call.need_x and not w_again:
        return None
    scale = call.scales[_W_SCALE] if call.scales else None
    y, amax = linear_program.run_forward(x, values_of(weight), recipe, scale, call.seed, call.dtype, shape)
    if y is not None and call.delayed is not None:
        call.delayed[Role.WEIGHT].observe(cast(Tensor, amax))
    return y


def _compiled_forward(
    call: _Call, x: Operand, weight: Tensor, w_again: bool, shape: tuple[int, ...]
) -> tuple[tuple[Tensor, ...], str] | None:
    """Return the inputs and the program that quantizes the weight and computes y in a compiled graph; or None."""
    if isinstance(weight, QuantizedTensor) or call.parts or call.is_kn or call.scales or call.recipe.by_product:
        return None
    if call.need_x and not w_again:
        return None
    return linear_program.compiled_forward(x, values_of(weight), call.recipe, call.seed, call.dtype, shape)


def _planes_of_weight(
    call: _Call, of_forward: Recipe | None, of_dgrad: Recipe | None, weight: Tensor, w_again: bool
) -> tuple[dict[Usage, Any], Tensor | None]:
    """Return the plane of the weight for the forward pass, and the one for the backward pass if it is saved.

    Also returns the amax of the whole weight if other ranks have shards of it (`weight_amax.py`).
    """
    forward, backward = call.w_usages
    if isinstance(weight, QuantizedTensor):  # Gathered by FSDP2, for example. FSDP2's hook has recorded its amax.
        there = planes_of_weight(weight, call.need_x or call.is_kn, call.recipe)
        if call.is_kn and forward not in there:
            there[forward] = Operand(weight.format, transpose(there[backward].parts, weight.format), forward)
        return there, None
    values, saves_codes = values_of(weight), call.need_x and not w_again
    both = saves_codes and of_forward is of_dgrad
    usage = Usage.BOTH if both else forward
    whole = whole_amax(weight, values, call.parts.get(Role.WEIGHT), call.recipe.weight)
    planes, amax = call.quantizer(of_forward).quantize(values, Role.WEIGHT, usage, whole=whole)
    if saves_codes and not both:
        planes |= call.quantizer(of_dgrad).quantize(values, Role.WEIGHT, backward)[0]
    if call.delayed is not None:
        call.delayed[Role.WEIGHT].observe(cast(Tensor, amax))
    return planes, whole


def _saved_operands(
    call: _Call,
    xs: dict[Usage, Any],
    source: saved_input.Source | None,
    weight: Tensor,
    ws: dict[Usage, Any],
    w_amax: Tensor | None,
    w_again: bool,
    y_shape: tuple[int, ...],
) -> tuple[SavedLayout, list[Tensor | None]]:
    """Return what `LinearNode` saves: scales, tensors of x, tensors of the weight, and their layout."""
    eager, (forward, backward) = not is_compiling(), call.w_usages
    of_x: Sequence[Tensor | None] = ()
    join: Join | None = None
    if source is not None:
        of_x = source.tensors
    elif call.need_w:
        of_x = xs[Usage.COLUMNWISE].parts
        if call.activation_group is not None and eager:
            of_x, join = call.activation_group.split(xs[Usage.COLUMNWISE].parts)
    of_w: Sequence[Tensor | None] = ()
    w_usage = w_format = None
    if w_again:
        # Save the tensor inside the wrapper: the version counter of the wrapper misses writes to it.
        of_w = (w_amax, *((weight.shard,) if isinstance(weight, ShardedWeight) else ()))
    elif call.need_x:
        # A gathered weight is saved as it is: FSDP2 frees its memory and gathers the same codes before backward.
        w = ws[backward] if backward in ws else ws[forward]
        of_w, w_usage, w_format = w.parts, w.usage, w.format
    # Dynamo does not accept the same input twice, and saved codes already include their scale.
    scales = [scale if eager or i >= _X_SCALES.stop else None for i, scale in enumerate(call.scales)]
    x_again = None if source is None else source.again
    sizes = len(scales), len(of_x), y_shape
    how = SavedLayout(
        call.recipe, call.dtype, x_again, w_again, w_format, w_usage, *sizes, call.parts, *call.rows, join, call.is_kn
    )
    return how, [*scales, *of_x, *of_w]


def _id_of(weight: Tensor) -> Hashable:
    flat = flat_of(weight) if type(weight) is Tensor else None
    return id(weight) if flat is None else (id(flat), weight.storage_offset())


def _key(recipe: Recipe | None, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return everything besides the values of x that its planes depend on."""
    if recipe is None:
        return None, dtype
    rows = recipe.added_rows(Role.ACTIVATION, Usage.BOTH, 1)
    return recipe.format(Role.ACTIVATION), rows, dtype, recipe if recipe.stateful else None
