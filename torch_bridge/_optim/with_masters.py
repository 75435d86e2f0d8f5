"""`WithMasters`: any optimizer of torch over the float32 masters of primary weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from qshard._core.validation import quote
from qshard.torch_bridge._distributed.dtensor import local_of, wrapped_like
from qshard.torch_bridge._fsdp.refresh import recast
from qshard.torch_bridge._fsdp.weight import ShardedWeight


class WithMasters(Optimizer):
    """An optimizer for models with primary weights: it updates their masters, then makes their codes anew.

    Args:
      params: as for any optimizer, after `fully_shard`: parameters, or groups of them. Those that are no primary
        weights are updated as they are.
      optimizer: the class to make, or a function of parameters that makes one, such as `torch.optim.SGD`.
      options: of `optimizer`.

    Attributes:
      inner: the optimizer that was made. Its states belong to masters; here they are by parameter, and the groups are
        those of this optimizer, so schedulers, `state_dict` and `torch.distributed.checkpoint` see what they expect.

    `step` is collective: one max-reduction for all weights, `recast`. `qshard.torch_bridge.Adam` needs no wrapper.

    >>> from qshard.torch_bridge import WithMasters
    >>> layer = nn.Linear(2, 2)
    >>> WithMasters(layer.parameters(), torch.optim.SGD, lr=0.5).inner.__class__.__name__
    'SGD'
    """

    def __init__(self, params: Any, optimizer: Callable[..., Optimizer], **options: Any):
        if not callable(optimizer):
            raise TypeError(
                f"WithMasters: optimizer ({quote(optimizer)}) is not a class; pass an optimizer class, such as "
                "torch.optim.SGD"
            )
        self._masters: dict[Tensor, Tensor] = {}
        super().__init__(params, {})
        groups = [{**group, "params": [self._master_of(p) for p in group["params"]]} for group in self.param_groups]
        self.inner = optimizer(groups, **options)
        for group, of_inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update({key: value for key, value in of_inner.items() if key != "params"})
        self.defaults = self.inner.defaults

    def _master_of(self, parameter: Tensor) -> Tensor:
        local = local_of(parameter)
        if isinstance(local, ShardedWeight) and (primary := local.scale_state.primary) is not None:
            master = wrapped_like(parameter, primary.take_master(local.shard))
            self._masters[parameter] = nn.Parameter(master, requires_grad=parameter.requires_grad)
            return self._masters[parameter]
        return parameter

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, with options of their own."""
        super().add_param_group(param_group)
        if "inner" in self.__dict__:
            group = self.param_groups[-1]
            self.inner.add_param_group({**group, "params": [self._master_of(p) for p in group["params"]]})
            group.update({key: value for key, value in self.inner.param_groups[-1].items() if key != "params"})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient. Collective.

        Args:
          closure: makes the gradients, and returns a loss. It is called once.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, of_inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            of_inner.update({key: value for key, value in group.items() if key != "params"})
        for parameter, master in self._masters.items():
            grad = parameter.grad
            master.grad = None if grad is None else grad.to(master.dtype)
        self.inner.step()
        recast(parameter for parameter in self._masters if parameter.grad is not None)
        for master in self._masters.values():
            master.grad = None
        self._show_states()
        return loss

    def _show_states(self) -> None:
        """The states of the inner optimizer, by parameter of this one."""
        self.state.clear()
        for group in self.param_groups:
            for parameter in group["params"]:
                key = self._masters.get(parameter, parameter)
                if key in self.inner.state:
                    self.state[parameter] = self.inner.state[key]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state: that of the inner optimizer, to which parameters are numbers."""
        self.inner.load_state_dict(state_dict)
        for group, of_inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update({key: value for key, value in of_inner.items() if key != "params"})
        self._show_states()
