"""4-bit codes of columns: FSDP2 joins them by the shape of the shard, which has twice as many."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from qshard.torch_bridge._distributed.dtensor import local_of

if TYPE_CHECKING:
    from qshard.torch_bridge._fsdp.scale_state import ScaleState


class JoinedColumns:
    """Until `end`, between the two hooks of a gather, FSDP2 takes shards of a weight to have the shape of `padded`.

    It puts the columns that ranks send next to each other by a size that it keeps of the shard, and there is no other
    way to tell it than that private attribute, the same in torch 2.11 to 2.15.
    """

    def __init__(self, state: ScaleState, padded: Tensor):
        self._param = _fsdp_param(state)
        self._size = self._param.padded_sharded_param_size
        self._param.padded_sharded_param_size = padded.shape

    def end(self) -> None:
        self._param.padded_sharded_param_size = self._size


def _fsdp_param(state: ScaleState) -> Any:
    """What FSDP2 knows of the weight."""
    model = state.passes.root
    for module in () if model is None else model.modules():
        if isinstance(module, FSDPModule):
            fsdp: Any = module._get_fsdp_state()
            groups = getattr(fsdp, "_fsdp_param_groups", None) or [fsdp._fsdp_param_group]
            for param in (param for group in groups if group is not None for param in group.fsdp_params):
                if getattr(local_of(param.sharded_param), "scale_state", None) is state:
                    return param
    raise NotImplementedError(
        f"fully_shard: {state.name} ({state.fmt}) is cut along columns, but no model is known that FSDP2 has it in; "
        "call update_scales(model) once after fully_shard, or cut its rows"
    )
