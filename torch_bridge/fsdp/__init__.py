"""FSDP2: weights that are gathered as codes, and the scales that ranks make of them together."""

from qshard.torch_bridge.fsdp.scales import update_scales
from qshard.torch_bridge.fsdp.weight import ShardedWeight

__all__ = ["ShardedWeight", "update_scales"]
