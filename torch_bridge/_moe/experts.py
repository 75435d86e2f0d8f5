"""`Experts`: the quantized form of modules that have the weights of all experts in 3-D parameters.

    SortedExperts    rows sorted by expert, as in torchtitan: its method `_grouped_mm`
    RoutedExperts    tokens with the experts of each, as in transformers: its `forward`

`convert` changes the class of a module to an extension of one of them.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qshard.torch_bridge._distributed.token_exchange import ExpertGroup, expert_group
from qshard.torch_bridge._experts.expert_parallel import local_experts
from qshard.torch_bridge._experts.stacked_experts import Experts
from qshard.torch_bridge._moe.expert_parallel import SumGradient
from qshard.torch_bridge._moe.grouped_mlp import Groups, apply_experts
from qshard.torch_bridge._ops.autograd_node import apply_node
from qshard.torch_bridge._quantized.validation import check_model

_SILU = ("SiLU", "SiLUActivation")
"""Names of the class in PyTorch and in transformers."""


class SortedExperts(Experts):
    """Experts of torchtitan: `forward` receives rows sorted by expert, and calls `_grouped_mm` for each product."""

    _of = nn.Module

    def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        """Compute `A @ B_t` for rows that end at `offs`, with `B_t` `[E, K, N]` as `torch._grouped_mm` takes it."""
        if self.recipe is None:
            return cast(Tensor, cast(Any, super())._grouped_mm(A=A, B_t=B_t, offs=offs))
        return self.multiply(A, B_t.transpose(-2, -1), torch.diff(offs, prepend=offs.new_zeros(1)))


class RoutedExperts(Experts):
    """Experts of transformers: `forward` receives tokens and their experts. It computes the same as their eager loop.

    `config._experts_implementation` has no effect on a converted module.
    """

    _of = nn.Module

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the experts of each token.

        Args:
          hidden_states: `[T, H]`.
          top_k_index: the experts of each token, `[T, k]`. An index outside of 0..E-1 names no expert and adds nothing.
          top_k_weights: the weight of each, `[T, k]`.

        Returns:
          `[T, H]`, in the dtype of `hidden_states`.
        """
        if self.recipe is None:
            return cast(Tensor, cast(Any, super()).forward(hidden_states, top_k_index, top_k_weights))
        this: Any = self
        up = "gate_up_proj" if "gate_up_proj" in self._parameters else "up_proj"

        has_norm, has_bias = getattr(self, "has_post_expert_norm", False), getattr(self, "has_bias", False)

        def down(rows: Tensor, groups: Groups) -> Tensor:
            y = self._project(rows, "down_proj", groups)
            return self._normalize(y) if has_norm else y

        weights: list[Tensor] = [getattr(self, up), this.down_proj]
        facts = (*(tuple(weight.shape[1:]) for weight in weights), hidden_states.dtype, self.recipe)
        made = apply_experts(
            hidden_states,
            top_k_index,
            top_k_weights,
            weights[0].shape[0],
            # Padding would reach the gradients of the norm and of biases.
            None if has_norm or has_bias else (self.recipe, self.recipe),
            lambda rows, groups: self._project(rows, up, groups),
            down,
            None if self._has_swiglu(up) else lambda h: self._activate(h, up),
            group=self.ep_group,
            local=[[weight] for weight in weights],
            facts=facts,
        )
        return made.to(hidden_states.dtype)

    def _project(self, x: Tensor, name: str, groups: Groups) -> Tensor:
        """Multiply by the weights `name` of each row's expert, and add its bias. Rows of no expert give zeros."""
        bias: Tensor | None = self.local(f"{name}_bias") if getattr(self, "has_bias", False) else None
        return self.multiply(x, self.local(name), groups, self.weight_layout, bias)

    def _normalize(self, y: Tensor) -> Tensor:
        """Normalize rows of results. All ranks have the norm, so its gradient is summed over them, as of one expert."""
        norm: nn.Module = cast(Any, self).post_expert_norm
        if self.ep_group is None:
            return cast(Tensor, norm(y))
        own = {name: apply_node(SumGradient, each, self.ep_group) for name, each in norm.named_parameters()}
        return cast(Tensor, torch.func.functional_call(norm, own, (y,)))

    def _has_swiglu(self, up: str) -> bool:
        """Return True if the activation is SwiGLU, which is computed in one pass, and rounded once."""
        this: Any = self
        is_default = up != "up_proj" and this._apply_gate.__name__ == "_default_apply_gate"
        return is_default and type(this.act_fn).__name__ in _SILU

    def _activate(self, h: Tensor, up: str) -> Tensor:
        this: Any = self
        activated: Tensor = this.act_fn(h) if up == "up_proj" else this._apply_gate(h)
        return activated


def parallelize_experts(model: nn.Module, ep_group: ExpertGroup) -> nn.Module:
    """Share the experts of a converted model of transformers between ranks: expert parallelism, in place.

    Each rank keeps the parameters of `E / R` experts, as DTensors, and sends rows of tokens to the ranks of their
    experts, as `MoE(ep_group=)` does. A norm after the experts stays on all ranks; its gradient is their sum.

    Args:
      model: after `convert`, and before `fully_shard` and before its optimizer is made. Ranks have the same values.
      ep_group: R ranks, a mesh axis or a process group. For FSDP2 pass an axis of the mesh that `fully_shard` gets.

    Returns:
      `model`.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: the model lacks such experts, they are sharded already, or R does not divide their number.

    >>> parallelize_experts(nn.Linear(32, 32), None)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    TypeError: parallelize_experts: ep_group (None) is not a ProcessGroup or a DeviceMesh of one axis; pass the ranks...
    """
    check_model("parallelize_experts", model)
    expert_group("parallelize_experts", ep_group)
    found = {name: module for name, module in model.named_modules() if isinstance(module, RoutedExperts)}
    if not found:
        raise ValueError(
            f"parallelize_experts: model ({type(model).__name__}) has no converted experts of transformers; call "
            "convert first, pass ep_group to MoE, or in torchtitan use its own expert parallelism"
        )
    for name, module in found.items():
        weights = [weight for weight in module._parameters.values() if weight is not None]
        if any(isinstance(weight, DTensor) for weight in weights):
            raise ValueError(
                f"parallelize_experts: {name} (DTensor) is sharded already; call it once, before fully_shard"
            )
        if module.recipe is None:
            raise ValueError(
                f"parallelize_experts: {name} has no recipe since switch_recipe(model, None); call it before the switch"
            )
        local_experts("parallelize_experts", weights[0].shape[0], module.recipe, ep_group)
    for module in found.values():
        module.share(ep_group)
    return model
