"""Delayed scaling: the scale of a tensor comes from the amaxes of earlier steps, kept in buffers of its layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from qshard.names import shown
from qshard.recipes import RecipeLike, Role, as_delayed
from qshard.torch_bridge.arguments import check_group, check_model
from qshard.torch_bridge.ops import ops
from qshard.torch_bridge.quantize import max_over_ranks


class DelayedScale(nn.Module):
    """What one tensor of a layer carries from step to step. All of it is fp32, whatever the model is moved to.

    Attributes:
      scale, scale_inv: `[]`, of this step: they encode and decode.
      amax: `[]`, the largest that this rank has seen since the last update, over all its microbatches.
      amax_history: `[history]`, of the steps before, the oldest first.
    """

    scale: Tensor
    scale_inv: Tensor
    amax: Tensor
    amax_history: Tensor

    def __init__(self, recipe: RecipeLike, role: Role, device: Any = None):
        super().__init__()
        recipe = as_delayed(recipe, "DelayedScale")
        if not isinstance(role, Role):
            raise TypeError(f"DelayedScale: role ({shown(role)}) is not a Role; pass one, such as Role.WEIGHT")
        self.options = {
            "element": recipe.format(role).element.name,
            "margin": recipe.margin,
            "most_recent": recipe.algorithm == "most_recent",
        }
        shapes = recipe.state_shapes
        for name in ("scale", "scale_inv", "amax", "amax_history"):
            shape = shapes.get(name, shapes["scale"])
            self.register_buffer(name, torch.empty(shape, dtype=torch.float32, device=device))
        self.reset()

    def reset(self) -> None:
        """The state before the first step: codes of the values themselves."""
        for buffer, value in ((self.scale, 1), (self.scale_inv, 1), (self.amax, 0), (self.amax_history, 0)):
            buffer.fill_(value)

    def observe(self, amax: Tensor) -> None:
        """Takes the amax of one use of the tensor. The amax of several is their maximum, in any order."""
        self.amax.copy_(torch.maximum(self.amax, amax))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DelayedScale:
        """As bits: what changes the dtype of a model changes that of floats."""
        was_meta = self.scale.is_meta
        for name, buffer in self._buffers.items():
            assert buffer is not None
            self._buffers[name] = fn(buffer.view(torch.int32)).view(torch.float32)
        if was_meta and not self.scale.is_meta:
            self.reset()
        return self

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, *others: Any
    ) -> None:
        """A checkpoint of another recipe has no such state: then it stays as it is."""
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, [], *others)


@torch.no_grad()
def update_delayed(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Makes the scales of the next step from the amaxes of this one, for all tensors of `model` at once.

        the amax of the step, reduced over ranks, enters the history, and the oldest leaves
        scale = min(fl(fl(max * 2^-margin) / a), FLT_MAX), with a = max(history), or the amax itself ("most_recent")

    A tensor that was not used, or is all zeros, keeps its scale and history; so a second call changes nothing. Where a
    is infinite or NaN the scale stays.

    Args:
      model: layers of it have a `DelayedScaling` recipe. Without any there is nothing to do.
      group: the ranks that train `model` together; all ranks by default. Collective: an all-reduce of 4 bytes a tensor.

    Call it on all ranks once a step, after backward; `update_scales` does. It waits for nothing on the host, so a CUDA
    graph may hold it.

    Sources: TransformerEngine, `amax_and_scale_update_after_reduction`.
    """
    check_model("update_delayed", model)
    check_group("update_delayed", group)
    states = [module for module in model.modules() if isinstance(module, DelayedScale)]
    if not states:
        return
    amax = torch.stack([state.amax for state in states])
    if dist.is_initialized():
        max_over_ranks(amax, dist.group.WORLD if group is None else group)
    old: list[Tensor] = []
    new: list[Tensor] = []
    kinds: dict[Any, list[int]] = {}
    for i, state in enumerate(states):
        kinds.setdefault((*state.options.values(), state.amax_history.shape), []).append(i)
    for chosen in kinds.values():
        alike = [states[i] for i in chosen]
        histories, scales, inverses = ops.update_delayed_scale(
            amax if len(kinds) == 1 else torch.stack([amax[i] for i in chosen]),
            torch.stack([state.amax_history for state in alike]),
            torch.stack([state.scale for state in alike]),
            **alike[0].options,
        )
        old += [buffer for state in alike for buffer in (state.amax_history, state.scale, state.scale_inv)]
        new += [part for parts in zip(histories, scales, inverses, strict=True) for part in parts]
    torch._foreach_copy_(old, new)
    torch._foreach_zero_([state.amax for state in states])
