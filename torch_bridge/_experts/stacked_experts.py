"""Layers with the weights of all experts in one 3-D parameter, which FSDP2 and ZeRO gather as one stack of codes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from qshard.formats import FLOATS
from qshard.recipes import Recipe, check_weight_shape
from qshard.torch_bridge._distributed.dtensor import local_of
from qshard.torch_bridge._distributed.tensor_shards import ShardSpec
from qshard.torch_bridge._experts.grouped_linear import grouped_linear
from qshard.torch_bridge._experts.tiles import GroupedRows
from qshard.torch_bridge._fsdp.scale_state import ScaleState
from qshard.torch_bridge._fsdp.weight import ShardedWeight, plain, wrap
from qshard.torch_bridge._modules import Extends
from qshard.torch_bridge._nn.functional import WeightLayout
from qshard.torch_bridge._nn.linear import (
    _rank_of,
    _take_seed,
    check_not_sealed,
    moving_parameters,
    replace_parameter,
    wrap_weight,
)
from qshard.torch_bridge._ops.bind import dtype_name
from qshard.torch_bridge._quantized.validation import check_dtype


class Experts(Extends):
    """Base class of modules that multiply by 3-D weights with `grouped_linear`.

    Parameters keep their names and shapes. The instance stays one of its original class. 3-D weights become
    `ShardedWeight`s, which FSDP2 and ZeRO gather as codes, if the weight format of the recipe allows it; otherwise they
    stay plain and are gathered as values. So are weights that tensor parallelism shards within experts.

    Attributes:
      recipe: the format of each role.
      seed: for stochastic rounding, the seed of each expert: int32 `[E, 2]`, as in `Linear`. Each product uses it, and
        increments it on the device.
    """

    recipe: Recipe
    seed: Tensor | None
    scaling_buffers = ("seed",)

    @property
    def weight_layout(self) -> WeightLayout:
        return "KN" if getattr(self, "is_transposed", False) else "NK"

    def begin(self, recipe: Recipe, names: dict[str, str], root: nn.Module | None, primary: bool) -> None:
        """Set the recipe, and wrap the 3-D weights. `names` has the name in the model `root` of each."""
        self.recipe = recipe
        for own, name in names.items():
            self._wrap(own, name, root, primary)
        weight = self._parameters[next(iter(names))]
        assert weight is not None
        seed = torch.empty(weight.shape[0], 2, dtype=torch.int32, device=weight.device) if recipe.stochastic else None
        self.register_buffer("seed", seed, persistent=False)  # `scaling_state` saves it.
        self._reset_seed()

    def _wrap(self, own: str, name: str, root: nn.Module | None, primary: bool) -> None:
        weight = self._parameters[own]
        assert weight is not None
        if self.recipe.weight.gather_refusal is None:
            replace_parameter(weight, wrap_weight(weight, self.recipe, name, root, primary))
        elif isinstance(weight, ShardedWeight):  # Of an earlier recipe.
            replace_parameter(weight, nn.Parameter(plain(weight), weight.requires_grad))

    def _states(self) -> dict[str, ScaleState]:
        """The states of the weights that are gathered as codes, by name."""
        local = {name: local_of(weight) for name, weight in self._parameters.items() if weight is not None}
        return {name: own.scale_state for name, own in local.items() if isinstance(own, ShardedWeight)}

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter. Expert parallelism replaces a weight by the local experts through this method.

        Scales of a weight that tensor parallelism shards would need all parts of an expert, so it becomes plain.
        """
        old: Any = self._parameters.get(name)
        new: Any = param
        if isinstance(new, DTensor) and isinstance(old, ShardedWeight):
            state, values = old.scale_state, plain(new)
            if any(isinstance(each, Shard) and each.dim for each in new.placements):
                new = nn.Parameter(values, new.requires_grad)
            else:
                state.part = ShardSpec(tuple(new.shape), new.device_mesh, new.placements)
                new = nn.Parameter(wrap(values, state), new.requires_grad)
        super().register_parameter(name, new)

    def __getstate__(self) -> dict[str, Any]:
        weights = {name: (state.name, state.primary is not None) for name, state in self._states().items()}
        return {**super().__getstate__(), "_weights": weights}

    def __setstate__(self, state: dict[str, Any]) -> None:
        given = dict(state)
        weights = given.pop("_weights", {})
        super().__setstate__(given)
        for own, (name, primary) in weights.items():
            if type(self._parameters[own]) is nn.Parameter:  # Not in a copy.
                self._wrap(own, name, None, primary)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save plain tensors, so that the checkpoint loads without qshard and under any recipe."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, state in {} if keep_vars else self._states().items():
            value = destination[prefix + name] = plain(destination[prefix + name])
            if state.primary is not None:
                state.primary.watch(value)

    def _reset_seed(self) -> None:
        if self.seed is not None:
            self.seed.random_(-(2**31), 2**31)

    def multiply(
        self,
        x: Tensor,
        weights: Tensor,
        groups: Tensor | GroupedRows,
        layout: WeightLayout = "NK",
        bias: Tensor | None = None,
    ) -> Tensor:
        """Multiply rows by the weights of their experts, as `grouped_linear` does."""
        dtype = None
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            if dtype_name(x.dtype) not in FLOATS:
                x = x.to(dtype)
        seeds = None if self.seed is None else _take_seed(self.seed, _rank_of(weights))
        given: dict[str, Any] = {"bias": bias, "weight_layout": layout, "seeds": seeds, "dtype": dtype}
        y: Tensor = grouped_linear(x, weights, groups, self.recipe, **given)
        return y

    def _apply(self, fn: Any, recurse: bool = True) -> Experts:
        check_not_sealed(self, fn)
        was_meta = self.seed is not None and self.seed.is_meta
        with moving_parameters(self, next((state.name for state in self._states().values()), "weight")):
            super()._apply(fn, recurse)
        if was_meta and self.seed is not None and not self.seed.is_meta:
            self._reset_seed()
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, *others: Any) -> None:
        """Load parameters. If they replace parameters on meta, the seed leaves meta too."""
        for name, state in self._states().items() if metadata.get("assign_to_params_buffers", False) else ():
            loaded = state_dict.get(prefix + name)
            if isinstance(loaded, Tensor):
                if state.is_sealed:
                    assert state.primary is not None
                    state.primary.load(local_of(loaded))
                state_dict = {
                    **state_dict,
                    prefix + name: self._parameters[name] if state.is_sealed else wrap(loaded, state),
                }
        super()._load_from_state_dict(state_dict, prefix, metadata, *others)
        device = next(self.parameters(recurse=False)).device
        if self.seed is not None and self.seed.is_meta and device.type != "meta":
            self.seed = torch.empty_like(self.seed, device=device)
            self._reset_seed()

    def extra_repr(self) -> str:
        own = super().extra_repr()
        return ", ".join([own] * bool(own) + [f"recipe={self.recipe!r}"])


class StackedExperts(Experts):
    """The experts of a `GroupedLinear` in one parameter, `weight` `[E, N, K]`.

    State dicts of a `GroupedLinear` with a parameter for each expert load, too: their weights are stacked.
    """

    _of = nn.Module

    def __init__(self, experts: int, inputs: int, outputs: int, *, recipe: Recipe, device: Any, dtype: Any):
        super().__init__()
        if recipe.stateful:
            raise ValueError(
                f"GroupedLinear: recipe ({type(recipe).__name__}) has no scales by expert for one parameter; pass "
                "CurrentScaling(), or stacked=False"
            )
        check_weight_shape("GroupedLinear", "weight", recipe, (outputs, inputs))
        check_dtype("GroupedLinear", "dtype", torch.get_default_dtype() if dtype is None else dtype)
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs, device=device, dtype=dtype))
        self.begin(recipe, {"weight": "weight"}, self, primary=False)
        self.reset_parameters()

    is_one_layer = True

    def reset_parameters(self) -> None:
        """Initialize the weights like one `nn.Linear` after the other, and reset the seeds."""
        bound = math.sqrt(3) * nn.init.calculate_gain("leaky_relu", math.sqrt(5)) / math.sqrt(self.weight.shape[-1])
        nn.init.uniform_(self.weight, -bound, bound)
        self._reset_seed()

    def __len__(self) -> int:
        return int(self.weight.shape[0])

    def forward(self, x: Tensor, groups: Tensor | GroupedRows) -> Tensor:
        """Multiply the rows of each expert by its weight. Arguments as in `grouped_linear`."""
        return self.multiply(x, self.weight, groups)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        each = [f"{prefix}{expert}.weight" for expert in range(len(self))]
        if f"{prefix}weight" not in state_dict and all(key in state_dict for key in each):
            state_dict[f"{prefix}weight"] = torch.stack([state_dict.pop(key) for key in each])
        super()._load_from_state_dict(state_dict, prefix, *others)
