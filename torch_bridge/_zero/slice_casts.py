"""From masters to what layers see: the cast of all own slices, with one reduction."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from qshard._core.quantize_steps import Scales
from qshard.torch_bridge._ops.collectives import max_over_ranks
from qshard.torch_bridge._optim.cast_master import CastPlan, Parity, cast_master
from qshard.torch_bridge._zero.weight import Weight


class Cast:
    """Slices that are cast together: all with scales of their amaxes, or all with delayed ones."""

    def __init__(self, weights: Sequence[Weight], parity: Parity):
        self._pieces = [weight.quantized for weight in weights if weight.quantized is not None]
        self._masters = [weight.master.detach().view(-1) for weight in weights]
        self.delayed = [weight.delayed for weight in weights if weight.delayed is not None]
        self._parity = parity
        self._plan = CastPlan(self._pieces, parity=parity)
        self._starts = self._plan.words("starts", [weight.start for weight in weights])

    def cast(self, group: dist.ProcessGroup | None) -> None:
        """One all-reduce, if scales are made."""
        if self.delayed:
            scales = [Scales(state.scale, state.scale_inv) for state in self.delayed]
            known = [state.knows_scale() for state in self.delayed]
            if not all(known):
                whole = max_over_ranks(torch.stack(self._amaxes()), group).unbind()
                scales = [Scales(*state.scales_under(a)) for state, a in zip(self.delayed, whole, strict=True)]
            self._plan.cast(self._pieces, self._masters, self._starts, scales)
        elif self._pieces:
            cast_master(self._pieces, self._masters, self._starts, group, parity=self._parity, plan=self._plan)

    def observe(self) -> None:
        """Notes the amaxes of the slices; `update_delayed` makes those of whole weights of them."""
        if self.delayed:
            for state, amax in zip(self.delayed, self._amaxes(), strict=True):
                state.observe(amax)

    def _amaxes(self) -> list[Tensor]:
        return [amax.view(()) for amax in self._plan.amaxes(self._masters, self._starts)]
