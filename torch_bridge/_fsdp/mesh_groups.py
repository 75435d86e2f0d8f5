"""What FSDP2 gathers together, and what it is told to do that it cannot do with weights that are gathered as codes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from qshard.torch_bridge._distributed.dtensor import local_of


def check_reshards(model: nn.Module | None) -> None:
    """Raises where weights of ours are to be resharded to fewer ranks after forward, on every rank alike.

    FSDP2 keeps a part of what was gathered as a parameter that has a gradient, which codes cannot be, and gathers that
    without the hooks of the weight.

    Raises:
      NotImplementedError: `reshard_after_forward` of a module is a number of ranks.
    """
    for group in groups_of(model):
        if group.post_forward_mesh_info in (None, group.mesh_info):
            continue
        for parameter in group.fsdp_params:
            known = getattr(local_of(parameter.sharded_param), "scale_state", None)
            if known is not None:
                raise NotImplementedError(
                    f"fully_shard: {known.name} (reshard_after_forward="
                    f"{group.post_forward_mesh_info.shard_mesh_size}) is gathered as codes, which FSDP2 cannot "
                    "reshard to fewer ranks; pass True or False"
                )


def groups_of(model: nn.Module | None) -> Iterator[Any]:
    """The groups of parameters that FSDP2 gathers together: its `FSDPParamGroup`s."""
    for module in () if model is None else model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            # torch 2.11 has one group in each module.
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            yield from (group for group in groups if group is not None)
