"""Adam and AdamW with low-precision states and exact masters: one multi-tensor kernel for all tensors of a group."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from qshard.adam import settings
from qshard.torch_bridge.ops import call_in_place, dtype_name
from qshard.torch_bridge.optim.adam_state import SCALED, check_group, initialize, memory_of

__all__ = ["Adam", "AdamW"]


class Adam(Optimizer):
    """`torch.optim.Adam` on float32 or 16-bit parameters, with states of few bits if asked for.

        m = beta1 m + (1 - beta1) g;   v = beta2 v + (1 - beta2) g g
        u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps);   p = p - lr u
        weight decay: g = g + decay p before, or, decoupled, u = u + decay p after

    Names, order and defaults of the first five arguments are torch's. `AdamW` decouples weight decay.

    All arithmetic is float32, in the order that NUMERICS.md states, so the results are the same bits on every device,
    and those of `qshard.jax.adam` and `qshard.jax.adamw`. A step is one launch for the settings and one for up to 240
    tensors of the same dtypes. Nothing waits for the device, so a step can be captured in a CUDA graph, after one that
    was not; then give `lr` as a tensor on the device, or it is fixed.

    States in float16 or FP8 have one float32 scale for every 128 elements of a row (a row is what follows the first
    axis), a power of two. A state of zeros stays zeros, and a second moment that is not 0 never becomes 0, which would
    blow up the next update. Rows are cut from a weight together with their scales, so that a shard's state is the shard
    of the state. Parameters with less than two axes keep float32 states in their place.

    Args:
      params: tensors, DTensors, sharded weights (`ShardedWeight`), or groups of them.
      lr: a number or a tensor of one.
      betas, eps, weight_decay: numbers.
      decoupled_weight_decay: whether this is AdamW: `torch.optim.Adam` has the argument too.
      exp_avg_dtype, exp_avg_sq_dtype: float32, bfloat16, float16, float8_e4m3fn or float8_e5m2.
      master_weights: what a 16-bit parameter lacks of its float32 value. "float32" keeps that value in the state;
        "remainder", for bfloat16, the 16 bits that the parameter lacks, which together are that value exactly (the
        parameter is then the nearest bfloat16, a tie going away from zero); None rounds in every step.

    State of a parameter: `step` (float32, on its device), `exp_avg`, `exp_avg_sq`, of which those with scales have
    `exp_avg_scale_inv`, `exp_avg_sq_scale_inv`; and `master` or `remainder`. Of a DTensor, all but `step` are DTensors.
    A state dict holds them as they are and loads them bit for bit; one of torch's Adam or AdamW loads too.

    Raises:
      ValueError, TypeError: a setting is not one of these.

    >>> weight = torch.nn.Parameter(torch.ones(2, 256, dtype=torch.bfloat16))
    >>> optimizer = Adam([weight], lr=0.25, exp_avg_dtype=torch.float8_e4m3fn, master_weights="remainder")
    >>> weight.grad = torch.ones_like(weight)
    >>> optimizer.step()
    >>> weight[0, 0].item(), optimizer.state[weight]["exp_avg_scale_inv"].shape
    (0.75, torch.Size([2, 2]))

    Sources: Kingma and Ba, arXiv:1412.6980.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled_weight_decay: bool = False,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        master_weights: str | None = None,
    ):
        self._hypers: dict[Any, tuple[Tensor, list[float]]] = {}
        self._steps: dict[Any, tuple[Tensor, list[Tensor]]] = {}
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
            "exp_avg_dtype": exp_avg_dtype,
            "exp_avg_sq_dtype": exp_avg_sq_dtype,
            "master_weights": master_weights,
            "capturable": True,  # Makes load_state_dict put `step` on the device of the parameter.
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, with settings that differ from those of the optimizer.

        Raises:
          ValueError, TypeError, NotImplementedError: a setting is not one that is known, or not for these parameters.
        """
        super().add_param_group(param_group)
        try:
            check_group(self.param_groups[-1])
        except BaseException:
            self.param_groups.pop()
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._hypers, self._steps = {}, {}
        for group in self.param_groups:  # One of torch.optim.AdamW lacks some settings.
            group.update({**self.defaults, **group, "capturable": True})
        for of_parameter in self.state.values():
            for name, value in of_parameter.items():
                if isinstance(value, _AsItIs):
                    of_parameter[name] = value.tensor

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state, bit for bit: tensors move to the device of their parameter and keep their dtype.

        torch's own would cast them to the dtype of the parameter.
        """
        keyed = {
            key: {n: _AsItIs(v) if isinstance(v, Tensor) and n != "step" else v for n, v in values.items()}
            for key, values in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": keyed})
        for parameter, of_parameter in self.state.items():
            for name, value in of_parameter.items():
                if isinstance(value, Tensor):
                    dtype = torch.float32 if name == "step" else value.dtype
                    of_parameter[name] = value.to(device=parameter.device, dtype=dtype)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, inv_grad_scale: Tensor | float | None = None) -> Any:
        """Updates every parameter that has a gradient.

        Args:
          closure: makes the gradients, and returns a loss.
          inv_grad_scale: a number that gradients are multiplied by first, as when the loss was scaled up.

        Returns:
          What `closure` returns.

        No communication: shards are updated where they are.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, group in enumerate(self.param_groups):
            for kind, tensors in self._tensors_by_kind(group).items():
                key = (index, kind)
                constants = torch.ops.qshard.adam_constants(
                    self._advance(key, [t.state for t in tensors]),
                    self._hyper((index, kind.device), group, inv_grad_scale),
                )
                decay = "decoupled" if group["decoupled_weight_decay"] else "coupled"
                _run(kind, constants, tensors, decay if group["weight_decay"] else "none")
        return loss

    def _tensors_by_kind(self, group: dict[str, Any]) -> dict[_Kind, list[_Tensors]]:
        """What to update: lists of tensors that one call can take, initialized."""
        found: dict[_Kind, list[_Tensors]] = {}
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse:
                raise NotImplementedError("Adam: grad (sparse) is not dense; make it so with .to_dense()")
            state = self.state[parameter]
            initialize(state, parameter, group)
            memory, grad = memory_of(parameter), memory_of(parameter.grad).contiguous()
            low = "remainder" if "remainder" in state else "master" if "master" in state else "none"
            parts = {name: memory_of(value) for name, value in state.items() if name != "step"}
            kind = _Kind(
                memory.device, memory.dtype, grad.dtype, low, parts["exp_avg"].dtype, parts["exp_avg_sq"].dtype
            )
            found.setdefault(kind, []).append(_Tensors(memory, grad, parts, state))
        return found

    def _advance(self, key: Any, states: Sequence[dict[str, Any]]) -> Tensor:
        """Adds one to the steps of some parameters, and gives them as one tensor, of which their states have views."""
        given = [state["step"] for state in states]
        known = self._steps.get(key)
        if (
            known is None
            or len(known[1]) != len(given)
            or any(a is not b for a, b in zip(known[1], given, strict=True))
        ):
            together = torch.stack(given)
            known = self._steps[key] = (together, list(together.unbind()))
            for state, view in zip(states, known[1], strict=True):
                state["step"] = view
        known[0].add_(1)
        return known[0]

    def _hyper(self, key: Any, group: dict[str, Any], inv_grad_scale: Tensor | float | None) -> Tensor:
        """The settings as `adam_constants` takes them, in memory that stays. Written where they have changed."""
        device: torch.device = key[1]
        scale = 1.0 if inv_grad_scale is None else inv_grad_scale
        beta1, beta2 = group["betas"]
        values = settings(group["lr"], beta1, beta2, group["eps"], group["weight_decay"], scale)
        numbers = [math.nan if isinstance(value, Tensor) else float(value) for value in values]
        if key not in self._hypers:
            self._hypers[key] = (torch.tensor(numbers, dtype=torch.float32, device=device), list(numbers))
        hyper, written = self._hypers[key]
        for i, value in enumerate(values):
            if isinstance(value, Tensor):
                hyper[i].copy_(value.reshape(()))
            elif written[i] != numbers[i]:
                hyper[i].fill_(numbers[i])
        written[:] = numbers
        return hyper


class AdamW(Adam):
    """`Adam` with decoupled weight decay, 0.01 by default as in `torch.optim.AdamW`.

    Other frameworks have other defaults: optax's `adamw`, and so `qshard.jax.adamw`, has 0.0001. The op is the same.

    Args:
      params, lr, betas, eps, weight_decay, exp_avg_dtype, exp_avg_sq_dtype, master_weights: as for `Adam`.

    >>> weight = torch.nn.Parameter(torch.ones(4))
    >>> weight.grad = torch.zeros(4)
    >>> AdamW([weight], lr=0.5, weight_decay=0.25).step()
    >>> weight.detach()
    tensor([0.8750, 0.8750, 0.8750, 0.8750])

    Sources: Loshchilov and Hutter, arXiv:1711.05101.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        master_weights: str | None = None,
    ):
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            decoupled_weight_decay=True,
            exp_avg_dtype=exp_avg_dtype,
            exp_avg_sq_dtype=exp_avg_sq_dtype,
            master_weights=master_weights,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # As in torch: that of an Adam would not decouple.
            group["decoupled_weight_decay"] = True


class _AsItIs:
    """Holds a tensor that load_state_dict is not to cast."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


class _Kind(NamedTuple):
    """What the tensors of a call have in common."""

    device: torch.device
    param: torch.dtype
    grad: torch.dtype
    low: str
    exp_avg: torch.dtype
    exp_avg_sq: torch.dtype


class _Tensors(NamedTuple):
    """A parameter as the kernel sees it: local, plain tensors."""

    param: Tensor
    grad: Tensor
    parts: dict[str, Tensor]  # of the state
    state: dict[str, Any]


def _run(kind: _Kind, constants: Tensor, tensors: Sequence[_Tensors], decay: str) -> None:
    def part(name: str) -> list[Tensor]:
        return [_as_bytes(t.parts[name]) for t in tensors]

    def scales(name: str, dtype: torch.dtype) -> list[Tensor]:
        return part(f"{name}_scale_inv") if dtype in SCALED else []

    call_in_place(
        "adam",
        [
            constants,
            [t.grad for t in tensors],
            [t.param for t in tensors],
            [] if kind.low == "none" else part(kind.low),
            part("exp_avg"),
            scales("exp_avg", kind.exp_avg),
            part("exp_avg_sq"),
            scales("exp_avg_sq", kind.exp_avg_sq),
        ],
        {
            "decay": decay,
            "exp_avg_dtype": dtype_name(kind.exp_avg),
            "exp_avg_sq_dtype": dtype_name(kind.exp_avg_sq),
            "low": kind.low,
            "update": False,
        },
    )


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
