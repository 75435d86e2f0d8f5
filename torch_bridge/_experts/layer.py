"""`GroupedLinear`: the linear layers of experts, with a parameter for each expert or one for all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from qshard._core.validation import quote
from qshard.recipes import NO_PRODUCTS, Recipe, RecipeLike, as_recipe
from qshard.torch_bridge._distributed.token_exchange import ExpertGroup
from qshard.torch_bridge._experts.expert_parallel import LocalExperts, local_experts
from qshard.torch_bridge._experts.grouped_linear import grouped_linear
from qshard.torch_bridge._experts.stacked_layer import StackedExperts
from qshard.torch_bridge._experts.tiles import GroupedRows
from qshard.torch_bridge._fsdp.scale_state import Passes
from qshard.torch_bridge._fsdp.weight import ShardedWeight
from qshard.torch_bridge._nn.linear import Linear


class GroupedLinear(nn.Module):
    """One `Linear` per expert, applied to all tokens in one call. Tokens are sorted by expert.

    Under FSDP2 call `update_scales(model)` once after `fully_shard`. Then one all-reduce of amaxes serves the whole
    model, instead of one per layer.

    Args:
      num_experts: number of experts.
      in_features: K of each expert.
      out_features: N of each expert.
      bias: add a learned bias to the rows of each expert.
      recipe: the format of each role, or its name.
      ep_group: expert parallelism: R ranks that share the experts. Rank r has experts `r * E / R` to `(r + 1) * E / R`,
        and `group_sizes` has their sizes. With equal seeds of the random number generator, ranks have the initial
        weights of one layer with all experts. The caller exchanges the rows; `MoE` does.
      stacked: hold all experts in one parameter `[E, N, K]`. FSDP2 and ZeRO then gather it as one `QuantizedStack`, and
        the work of the host does not grow with the number of experts.

    Attributes:
      experts: if `stacked`, a module with the parameters `weight` `[E, N, K]` and `bias` `[E, N]`; with `ep_group` they
        are DTensors. Otherwise one `Linear` per local expert. In state dicts their names have their indices among all
        experts. Each weight is sharded by FSDP2 or ZeRO, gathered as codes, saved, moved and kept as codes under
        `convert(primary=True)`, like the weight of any `Linear`. State dicts of both forms load into both.

    Raises:
      ValueError: `num_experts` is not positive, the ranks of `ep_group` do not divide it, or as for `Linear`.
      NotImplementedError: `DelayedScaling` with `ep_group`.

    >>> from qshard.recipes import CurrentScaling
    >>> layer = GroupedLinear(3, 32, 16, recipe=CurrentScaling())
    >>> layer(torch.ones(6, 32), torch.tensor([2, 0, 3])).shape, sorted(layer.state_dict())[0]
    (torch.Size([6, 16]), 'experts.0.weight')
    """

    experts: nn.ModuleList | StackedExperts
    is_one_layer = True

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        recipe: RecipeLike,
        ep_group: ExpertGroup | None = None,
        stacked: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if not hasattr(num_experts, "__index__") or num_experts < 1:
            raise ValueError(
                f"GroupedLinear: num_experts ({quote(num_experts)}) is not positive; pass an integer of at least 1"
            )
        recipe = as_recipe(recipe, "GroupedLinear", by_product=False)
        layer: dict[str, Any] = {"bias": bias, "recipe": recipe, "device": device, "dtype": dtype}
        if stacked:
            self.experts = StackedExperts(num_experts, in_features, out_features, ep_group=ep_group, **layer)
            return
        local = local_experts("GroupedLinear", num_experts, recipe, ep_group)
        # Each rank draws the weights of all experts, one at a time, and keeps its own.
        layers = enumerate(Linear(in_features, out_features, **layer) for _ in range(num_experts))
        self.experts = LocalExperts((each for expert, each in layers if expert in local), local.start)
        for expert in self.experts:
            weight = cast(ShardedWeight, expert.weight)
            weight.scale_state.passes = Passes.of(self)  # All experts share one refresh of scales.

    @classmethod
    def of(cls, layers: Iterable[nn.Module]) -> GroupedLinear:
        """Build the layer from converted `Linear`s of one recipe and shape, all with bias or none; else ValueError."""
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self.experts = nn.ModuleList(layers)
        of = [layer for layer in self.experts if isinstance(layer, Linear)]
        alike = {(layer.recipe, tuple(layer.weight.shape), layer.bias is None) for layer in of}
        if len(of) != len(self.experts) or len(alike) != 1:
            raise ValueError(
                f"GroupedLinear.of: layers ({quote([*self.experts])}) are not converted Linear layers of one recipe "
                "and shape, all with bias or none; call convert on them first"
            )
        as_recipe(of[0].recipe, "GroupedLinear.of", by_product=False)
        return self

    def forward(self, input: Tensor, group_sizes: Tensor | GroupedRows) -> Tensor:
        """Apply expert e to the rows of its group, as `grouped_linear` does. `input` is sorted by expert."""
        if isinstance(self.experts, StackedExperts):
            y: Tensor = self.experts(input, group_sizes)
            return y
        layers = cast(list[Linear], [*self.experts])
        recipe = layers[0].recipe
        assert recipe is not None
        first = layers[0].call_operands(input)
        seeds = delayed = None
        if first.seed is None and first.delayed is None:
            weights = [first.weight, *(layer.weight for layer in layers[1:])]
        else:
            called = [first, *(layer.call_operands(input) for layer in layers[1:])]
            weights = [one.weight for one in called]
            seeds = None if first.seed is None else torch.stack([cast(Tensor, one.seed) for one in called])
            delayed = None if first.delayed is None else [one.delayed for one in called]
        bias = None if layers[0].bias is None else _stacked_biases(layers, first.dtype)
        how: dict[str, Any] = {"bias": bias, "seeds": seeds, "delayed": delayed, "dtype": first.dtype}
        y = grouped_linear(first.input, weights, group_sizes, recipe, **how)
        return y

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        """Split tensors of all experts, from a layer with `stacked=True`. `StackedExperts` stacks separate tensors."""
        stacks = [name for name in ("weight", "bias") if f"{prefix}experts.{name}" in state_dict]
        for name in () if isinstance(self.experts, StackedExperts) else stacks:
            for expert, values in enumerate(state_dict.pop(f"{prefix}experts.{name}")):
                if str(expert) in self.experts._modules:
                    state_dict[f"{prefix}experts.{expert}.{name}"] = values
        super()._load_from_state_dict(state_dict, prefix, *others)

    @property
    def weights(self) -> list[Tensor]:
        """The weights of the local experts: one for each, or one for all."""
        # FSDP1 replaces parameters by views of one parameter, which `parameters()` leaves out.
        layers = [self.experts] if isinstance(self.experts, StackedExperts) else [*self.experts]
        return [cast(Tensor, layer.weight) for layer in layers]

    @property
    def layer_of_experts(self) -> Linear | StackedExperts:
        """The first expert, or all of them. `recipe` and the last two axes of `weight` describe each expert."""
        return self.experts if isinstance(self.experts, StackedExperts) else cast(Linear, self.experts[0])

    def extra_repr(self) -> str:
        return f"num_experts={len(self.experts)}"


def _stacked_biases(layers: Iterable[Linear], dtype: torch.dtype | None) -> Tensor:
    """Return the biases of all experts, `[E, N]`, in `dtype`, the dtype of autocast if it is on.

    The result has this dtype anyway, and under autocast `torch.stack` rejects other 16-bit dtypes.
    """
    each = [cast(Tensor, layer.bias) for layer in layers]
    return torch.stack(each if dtype is None else [bias.to(dtype) for bias in each])


def unfit_grouped_layers(model: nn.Module, recipes: Mapping[nn.Module, Recipe | None]) -> dict[nn.Module, str]:
    """Return the layers of experts in `model` that cannot have their new recipe, and the reason."""
    lists = [module.experts for module in model.modules() if isinstance(module, GroupedLinear)]
    experts = [each for layers in lists if not isinstance(layers, StackedExperts) for each in layers]
    new = {each: recipes.get(each) for each in experts}
    return {each: f"{own} {NO_PRODUCTS}" for each, own in new.items() if own is not None and own.by_product}
