"""`WithMasters`: any torch optimizer on the float32 masters of primary weights."""

from __future__ import annotations

import inspect
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
    """Optimizer for models with primary weights: updates their masters, then casts them to codes.

    Args:
      params: parameters or groups of them, after `fully_shard`. Parameters that are not primary weights are updated
        directly.
      optimizer: an optimizer class, such as `torch.optim.SGD`, or a function of parameters that returns an optimizer.
      options: options of `optimizer`.

    Attributes:
      inner: the optimizer of the masters. Its states are also available here by parameter, and the groups are shared,
        so schedulers, `state_dict` and `torch.distributed.checkpoint` work as usual.

    Raises:
      TypeError: `optimizer` is not callable, or its steps need a closure, like LBFGS.

    `step` is collective: one max-reduction for all weights. `qshard.torch_bridge.Adam` updates masters without this
    wrapper.

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
        closure = inspect.signature(self.inner.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise TypeError(
                f"WithMasters: optimizer ({type(self.inner).__name__}) evaluates a closure within its steps, when "
                "codes are not cast yet; pass another optimizer"
            )
        for group, of_inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update({key: value for key, value in of_inner.items() if key != "params"})
        self.defaults = self.inner.defaults

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Raise TypeError: the masters belong to the weights of one model."""
        raise TypeError(
            "WithMasters: it has the masters of its model, so it cannot be pickled or copied; save state_dict(), and "
            "load it into the optimizer of the other model"
        )

    def _master_of(self, parameter: Tensor) -> Tensor:
        local = local_of(parameter)
        if isinstance(local, ShardedWeight) and (primary := local.scale_state.primary) is not None:
            master = wrapped_like(parameter, primary.take_master(local.shard))
            self._masters[parameter] = nn.Parameter(master, requires_grad=parameter.requires_grad)
            return self._masters[parameter]
        return parameter

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own, as for `torch.optim.Optimizer`."""
        super().add_param_group(param_group)
        if "inner" in self.__dict__:
            group = self.param_groups[-1]
            self.inner.add_param_group({**group, "params": [self._master_of(p) for p in group["params"]]})
            group.update({key: value for key, value in self.inner.param_groups[-1].items() if key != "params"})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, and return the loss of `closure`. Collective."""
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
        self._expose_states()
        return loss

    def _expose_states(self) -> None:
        self.state.clear()
        for group in self.param_groups:
            for parameter in group["params"]:
                key = self._masters.get(parameter, parameter)
                if key in self.inner.state:
                    self.state[parameter] = self.inner.state[key]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, or of the inner optimizer over the same parameters."""
        self.inner.load_state_dict(state_dict)
        for group, of_inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update({key: value for key, value in of_inner.items() if key != "params"})
        self._expose_states()
