"""`StackedExperts`: the layers of a `GroupedLinear` in one parameter."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from qshard._core.operands import check_weight_shape
from qshard.recipes import Recipe
from qshard.torch_bridge._distributed.dtensor import local_box, local_of, wrapped_like
from qshard.torch_bridge._distributed.token_exchange import ExpertGroup, expert_group, expert_mesh
from qshard.torch_bridge._experts.expert_parallel import local_experts
from qshard.torch_bridge._experts.stacked_experts import Experts
from qshard.torch_bridge._experts.tiles import GroupedRows
from qshard.torch_bridge._quantized.validation import check_dtype


class StackedExperts(Experts):
    """The experts of a `GroupedLinear` in one parameter, `weight` `[E, N, K]`, and with a bias also `bias` `[E, N]`.

    Under expert parallelism they are DTensors that are sharded over the ranks that share the experts. So optimizers and
    `torch.distributed.checkpoint` know that ranks have different experts, and FSDP2 shards them over another mesh axis.
    """

    _of = nn.Module
    is_one_layer = True

    def __init__(
        self,
        experts: int,
        inputs: int,
        outputs: int,
        *,
        recipe: Recipe,
        bias: bool,
        ep_group: ExpertGroup | None,
        device: Any,
        dtype: Any,
    ):
        super().__init__()
        check_weight_shape("GroupedLinear", "weight", recipe, (outputs, inputs))
        check_dtype("GroupedLinear", "dtype", torch.get_default_dtype() if dtype is None else dtype)
        local = len(local_experts("GroupedLinear", experts, recipe, ep_group))
        mesh = None if ep_group is None else expert_mesh(ep_group)
        self.ep_group = None if ep_group is None else expert_group("GroupedLinear", ep_group)

        def new(*shape: int) -> nn.Parameter:
            values = torch.empty(local, *shape, device=device, dtype=dtype)
            shard = values if mesh is None else DTensor.from_local(values, mesh, [Shard(0)], run_check=False)
            return nn.Parameter(shard)

        self.weight = new(outputs, inputs)
        self.bias = new(outputs) if bias else None
        self._draw_each()
        self.begin(recipe, {"weight": "weight"}, self, primary=False)

    def reset_parameters(self) -> None:
        """Initialize the experts like one `nn.Linear` after the other, and reset seeds and delayed scales.

        Each rank draws the values of all experts, one at a time. So with equal seeds of the random number generator
        they do not depend on the number of ranks.
        """
        self._draw_each()
        self._reset_state()

    @torch.no_grad()
    def _draw_each(self) -> None:
        bound = 1 / math.sqrt(max(1, self.weight.shape[-1]))
        own = [(parameter, local_box(parameter).slices) for parameter in self.parameters(recurse=False)]
        for expert in range(len(self)):
            for parameter, (experts, *part) in own:
                values = torch.empty(parameter.shape[1:], dtype=parameter.dtype, device=parameter.device)
                nn.init.uniform_(values, -bound, bound)
                if experts.start <= expert < experts.stop:
                    local_of(parameter)[expert - experts.start].copy_(values[(*part,)])

    def __len__(self) -> int:
        return int(self.weight.shape[0])

    def forward(self, x: Tensor, groups: Tensor | GroupedRows) -> Tensor:
        """Multiply the rows of each expert by its weight. Arguments as in `grouped_linear`."""
        return self.multiply(x, self.local("weight"), groups, bias=self.local("bias"))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        """Load the parameters. Experts may have a tensor each, and tensors of all experts may be whole."""
        for name, parameter in self.named_parameters(recurse=False):
            key, part = prefix + name, local_box(parameter).slices
            each = [f"{prefix}{expert}.{name}" for expert in range(len(self))]
            if key not in state_dict and all(one in state_dict for one in each[part[0]]):
                local = torch.stack([state_dict[one] for one in each[part[0]]])[:, *part[1:]]
                state_dict[key] = wrapped_like(parameter, local.contiguous())
                for one in each:
                    state_dict.pop(one, None)
            given, is_sharded = state_dict.get(key), isinstance(parameter, DTensor)
            if is_sharded and type(given) in (Tensor, nn.Parameter) and given.shape == parameter.shape:
                state_dict[key] = wrapped_like(parameter, given.detach()[part].contiguous())
        super()._load_from_state_dict(state_dict, prefix, *others)
