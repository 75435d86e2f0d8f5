"""`Experts`: modules with the weights of all experts in 3-D parameters, which are gathered as stacks of codes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from qshard._core.validation import WeightLayout
from qshard.recipes import Recipe
from qshard.torch_bridge._distributed.dtensor import local_of
from qshard.torch_bridge._distributed.tensor_shards import ShardSpec
from qshard.torch_bridge._distributed.token_exchange import ExpertGroup, expert_group, expert_mesh
from qshard.torch_bridge._experts.grouped_linear import grouped_linear
from qshard.torch_bridge._experts.tiles import GroupedRows
from qshard.torch_bridge._fsdp.weight import ShardedWeight, plain, wrap
from qshard.torch_bridge._nn.weight_module import WeightModule, replace_parameter


class Experts(WeightModule):
    """Base class of modules that multiply by 3-D weights with `grouped_linear`.

    Parameters keep their names and shapes. The instance stays one of its original class. 3-D weights become
    `ShardedWeight`s, which FSDP2 and ZeRO gather as codes, if the weight format of the recipe allows it; otherwise they
    stay plain and are gathered as values. So are weights that tensor parallelism shards within experts.

    Attributes:
      recipe: the format of each role.
      seed: for stochastic rounding, the seed of each expert: int32 `[E, 2]`, as in `Linear`. Each product uses it, and
        increments it on the device. A DTensor if the weights are, under expert parallelism.
      delayed: under `DelayedScaling`, the `DelayedScale` of each role, of all experts. Only for modules of one weight.
      ep_group: expert parallelism: the ranks that share the experts; None without it. The parameters are then DTensors,
        and experts are sharded over their last mesh axis.
    """

    ep_group: dist.ProcessGroup | None = None

    @property
    def weight_layout(self) -> WeightLayout:
        return "KN" if getattr(self, "is_transposed", False) else "NK"

    def begin(self, recipe: Recipe, names: dict[str, str], root: nn.Module | None, primary: bool) -> None:
        """Set the recipe, and wrap the 3-D weights. `names` has the name in the model `root` of each."""
        self.recipe = recipe
        self._modules.pop("delayed", None)
        for own, name in names.items():
            self._wrap_own(own, name, root, primary)
        self._begin_scaling(
            next(iter(self._states().values()), None), self._empty_seed() if recipe.stochastic else None
        )

    def _empty_seed(self) -> Tensor:
        weight: Any = next(each for each in self._parameters.values() if each is not None and each.ndim == 3)
        state = next(iter(self._states().values()), None)
        part = None if state is None else state.part  # Under FSDP2 the weight is sharded, but the seeds are not.
        if part is None and self.has_local_experts:
            part = ShardSpec(tuple(weight.shape), weight.device_mesh, weight.placements)
        experts = weight.shape[0] if part is None else part.box.size[0]
        seed = torch.empty(experts, 2, dtype=torch.int32, device=weight.device)
        if part is None:
            return seed
        size = torch.Size((part.shape[0], 2))
        return DTensor.from_local(seed, part.mesh, part.placements, run_check=False, shape=size, stride=(2, 1))

    def _gathered_recipe(self) -> Recipe | None:
        """Return the recipe of gathered codes; None if values are gathered, as for formats without gathers."""
        refused = self.recipe is not None and self.recipe.weight.gather_refusal is not None
        return None if refused else self.recipe

    @property
    def has_local_experts(self) -> bool:
        """True under expert parallelism, unless FSDP2 shards the local experts now."""
        own = next(each for each in self._parameters.values() if each is not None)
        return self.ep_group is not None and isinstance(own, DTensor) and own.device_mesh.ndim == 1

    def local(self, name: str) -> Any:
        """Return a parameter, or under expert parallelism the part of the local experts. None if there is none."""
        parameter: Any = getattr(self, name)
        return parameter.to_local() if parameter is not None and self.has_local_experts else parameter

    def share(self, ep_group: ExpertGroup) -> None:
        """Keep the local experts of whole parameters `[E, ...]`, as DTensors that are sharded over `ep_group`."""
        mesh, self.ep_group = expert_mesh(ep_group), expert_group("Experts", ep_group)
        rank, ranks = self.ep_group.rank(), self.ep_group.size()
        for name, whole in [*self._parameters.items()]:
            if whole is not None:
                own = plain(whole).detach().chunk(ranks)[rank].clone()
                shard = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
                self.register_parameter(name, nn.Parameter(shard, whole.requires_grad))
        if self.seed is not None:
            own = self.seed.chunk(ranks)[rank].clone()
            self.seed = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)

    def _wrap_own(self, own: str, name: str, root: nn.Module | None, primary: bool) -> None:
        weight = self._parameters[own]
        assert weight is not None
        assert self.recipe is not None
        if self.recipe.weight.gather_refusal is None:
            replace_parameter(weight, self._wrap(weight, name, root, primary))
        elif isinstance(local_of(weight), ShardedWeight):  # Of an earlier recipe.
            replace_parameter(weight, nn.Parameter(plain(weight), weight.requires_grad))

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

    def multiply(
        self,
        x: Tensor,
        weights: Tensor,
        groups: Tensor | GroupedRows,
        layout: WeightLayout = "NK",
        bias: Tensor | None = None,
    ) -> Tensor:
        """Multiply rows by the weights of their experts, as `grouped_linear` does."""
        assert self.recipe is not None
        x, _, seeds, delayed, dtype = self.operands_of_call(x, weights)
        given: dict[str, Any] = {
            "bias": bias,
            "weight_layout": layout,
            "seeds": seeds,
            "delayed": delayed,
            "dtype": dtype,
        }
        y: Tensor = grouped_linear(x, weights, groups, self.recipe, **given)
        return y

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, *others: Any) -> None:
        """Load parameters. If they replace parameters on meta, seeds and delayed scales leave meta too."""
        for name in self._states() if metadata.get("assign_to_params_buffers", False) else ():
            loaded = state_dict.get(prefix + name)
            if isinstance(loaded, Tensor):
                state_dict = {**state_dict, prefix + name: self._assigned(name, loaded)}
        super()._load_from_state_dict(state_dict, prefix, metadata, *others)
        device = next(self.parameters(recurse=False)).device
        if device.type != "meta":
            self._make_state(device)
