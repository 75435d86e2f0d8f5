"""A linear layer whose three matrix products take quantized operands."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qshard.recipes import Recipe, Role
from qshard.torch_bridge import _pipeline
from qshard.torch_bridge._gemm import matmul
from qshard.torch_bridge._scales import ScaleState
from qshard.torch_bridge._tensor import QuantizedTensor
from qshard.torch_bridge._weight import ShardedWeight, plain, wrap

__all__ = ["Linear", "linear"]

ops, aten = torch.ops.qshard, torch.ops.aten


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> Tensor:
    """`y = x @ weight.T + bias`, with x, weight and the gradient of y quantized.

    | product | operands |
    | --- | --- |
    | `y = x @ w.T` | x rowwise, w rowwise |
    | `grad_x = grad_y @ w` | grad_y rowwise, w columnwise |
    | `grad_w = grad_y.T @ x` | grad_y columnwise, x columnwise |

    Args:
      x: float32, bfloat16 or float16, `[..., K]`.
      weight: `[N, K]`, float32, bfloat16 or float16; or a `QuantizedTensor` with a rowwise plane.
      bias: `[N]` or None.
      recipe: the format of each role. The scale of x, and of the gradient of y, is that of this rank's tensor.

    Returns:
      `[..., N]`, in the dtype of x. Gradients have the dtypes of what they are gradients of.

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
    y: Tensor = _Linear.apply(x, weight, recipe)
    return y if bias is None else y + bias.to(y.dtype)


class _Linear(torch.autograd.Function):
    """`linear` without bias. What it keeps for the backward pass are codes: of x, transposed, and of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
        x_format, w_format = recipe.format(Role.ACTIVATION), recipe.format(Role.WEIGHT)
        grad_x, grad_w = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        ctx.x_shape, dtype = x.shape, x.dtype
        x = x.reshape(-1, x.shape[-1]).contiguous()

        x_scales = _pipeline.scales_of(x_format, _pipeline.amax_of(x_format, x))
        x_t = None
        if grad_w:
            x_codes, x_t = _pipeline.cast_both(x_format, x, x_scales)
        else:
            x_codes = _pipeline.cast(x_format, x, x_scales)

        w_t = None
        if isinstance(weight, QuantizedTensor):  # Gathered by FSDP2, for example.
            w_format, w_codes, w_scale_inv = weight.format, weight._rowwise_data, weight._scale_inv
            if w_codes is None or w_scale_inv is None:
                raise ValueError("linear: weight (columnwise) has no rowwise plane; quantize it with one")
        else:
            w = weight.shard if isinstance(weight, ShardedWeight) else weight
            w_scales = _pipeline.scales_of(w_format, _pipeline.amax_of(w_format, w))
            w_scale_inv = w_scales.scale_inv
            if grad_x:
                w_codes, w_t = _pipeline.cast_both(w_format, w, w_scales)
            else:
                w_codes = _pipeline.cast(w_format, w, w_scales)

        # A gathered weight is kept as it is: FSDP2 frees its memory, and fills it with the same codes before backward.
        kept_w = w_t if w_t is not None else w_codes
        ctx.save_for_backward(x_t, x_scales.scale_inv, kept_w, w_scale_inv)
        ctx.w_is_transposed = w_t is not None
        ctx.recipe, ctx.w_format, ctx.dtype, ctx.w_dtype = recipe, w_format, dtype, weight.dtype
        y: Tensor = matmul((x_format, x_codes, x_scales.scale_inv), (w_format, w_codes, w_scale_inv), dtype, fast=True)
        # Not a view, to which FSDP2 could not attach its hooks.
        y = aten._unsafe_view.default(y, (*ctx.x_shape[:-1], y.shape[1]))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_format, w_format = ctx.recipe.format(Role.ACTIVATION), ctx.w_format
        grad_format = ctx.recipe.format(Role.GRADIENT)
        x_t, x_scale_inv, w, w_scale_inv = ctx.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1]).contiguous()
        scales = _pipeline.scales_of(grad_format, _pipeline.amax_of(grad_format, grad))
        grad_t = None
        if ctx.needs_input_grad[1]:
            codes, grad_t = _pipeline.cast_both(grad_format, grad, scales)
        else:
            codes = _pipeline.cast(grad_format, grad, scales)

        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            w_t = w if ctx.w_is_transposed else ops.transpose(w, batch=0)
            grad_x = matmul((grad_format, codes, scales.scale_inv), (w_format, w_t, w_scale_inv), ctx.dtype)
            grad_x = grad_x.view(ctx.x_shape)
        if grad_t is not None:
            grad_w = matmul((grad_format, grad_t, scales.scale_inv), (x_format, x_t, x_scale_inv), ctx.w_dtype)
        return grad_x, grad_w, None


class Linear(nn.Linear):
    """`nn.Linear` with quantized matrix products, whose weight FSDP2 gathers as codes.

    The weight stays what it was: a parameter in high precision, for any optimizer, saved as a plain tensor. Each
    forward quantizes it; under `fully_shard` each rank quantizes its shard, and codes are gathered.

    Args:
      in_features, out_features, bias, device, dtype: as for `nn.Linear`.
      recipe: the format of each role, for example `CurrentScaling()`.

    >>> from qshard.recipes import CurrentScaling
    >>> layer = Linear(8, 4, bias=False, recipe=CurrentScaling())
    >>> layer(torch.ones(2, 8)).shape, layer.state_dict()["weight"].__class__.__name__
    (torch.Size([2, 4]), 'Tensor')
    """

    recipe: Recipe

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        recipe: Recipe | None = None,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        if recipe is None:
            raise TypeError("Linear: recipe (None) is not a recipe; pass one of qshard.recipes")
        _pipeline.require_supported("Linear", *(recipe.format(role) for role in Role))
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.recipe = recipe
        self._wrap_weight(ScaleState(recipe.format(Role.WEIGHT), "weight", self))

    def _wrap_weight(self, state: ScaleState) -> None:
        weight = ShardedWeight(self.weight.detach(), state)
        self.weight = nn.Parameter(weight, requires_grad=self.weight.requires_grad)

    def _state(self) -> ScaleState | None:
        local = self.weight._local_tensor if isinstance(self.weight, DTensor) else self.weight
        return local.scale_state if isinstance(local, ShardedWeight) else None

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """A checkpoint holds plain tensors: it loads without qshard, and under any other recipe."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:
            destination[prefix + "weight"] = plain(destination[prefix + "weight"])

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any, **kwargs: Any
    ) -> None:
        state, key = self._state(), prefix + "weight"
        if state is not None:
            if local_metadata.get("assign_to_params_buffers", False) and key in state_dict:
                state_dict = {**state_dict, key: wrap(state_dict[key], state)}
            state.current = False
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Linear:
        super()._apply(fn, recurse)
        state = self._state()
        if state is not None:
            state.current = False
        return self

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))
        return linear(input, self.weight, self.bias, self.recipe)

    def extra_repr(self) -> str:
        roles = ", ".join(f"{role.value}={self.recipe.format(role)}" for role in Role)
        return f"{super().extra_repr()}, {roles}"
