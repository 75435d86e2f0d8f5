"""Adam and AdamW with low-precision states and exact masters: one multi-tensor kernel for each parameter group."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from qshard._core.optimizers import adam
from qshard._core.validation import join_names, quote
from qshard.op_table import multi_table
from qshard.torch_bridge._distributed.dtensor import local_of, wrapped_like
from qshard.torch_bridge._fsdp.refresh import recast
from qshard.torch_bridge._fsdp.weight import gradient_of, memory_of
from qshard.torch_bridge._ops.bind import dtype_name, ops
from qshard.torch_bridge._optim.adam_state import SCALED, Uncast, from_plain, to_plain
from qshard.torch_bridge._quantized.tensor import QuantizedTensor
from qshard.torch_bridge._quantized.validation import check_contiguous, check_dtype

_LISTS = [operand.name for operand in multi_table()["adam"].inputs if operand.many]


class Adam(Optimizer):
    """`torch.optim.Adam` for float32 or 16-bit parameters, with optional low-precision states.

        m = beta1 m + (1 - beta1) g;   v = beta2 v + (1 - beta2) g g
        u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps);   p = p - lr u
        weight decay: g = g + decay p before, or, decoupled, u = u + decay p after

    The first five arguments have the names, order and defaults of torch. `AdamW` decouples weight decay.

    Args:
      params: tensors, DTensors, sharded weights (`ShardedWeight`), or groups of them.
      lr: learning rate, a number or a tensor with one element.
      betas: decay rates of the two moments, in [0, 1).
      eps: added to the denominator.
      weight_decay: weight decay.
      decoupled_weight_decay: True for AdamW; `torch.optim.Adam` has the argument too.
      exp_avg_dtype: dtype of the first moment: float32, bfloat16, float16, float8_e4m3fn or float8_e5m2.
      exp_avg_sq_dtype: dtype of the second moment, one of the same.
      master_weights: how to store the float32 value of a 16-bit parameter. "float32" stores it in the state.
        "remainder", for bfloat16, stores the 16 bits that the parameter lacks: both together are the float32 value, and
        the parameter is the nearest bfloat16, with ties away from zero. None rounds in every step. A write to the
        parameter, as by `load_state_dict`, reaches the float32 value, but one through `data` of a plain parameter does
        not: PyTorch does not count it.

    Raises:
      ValueError: a setting is out of range, or a shard splits a block of scaled states.
      TypeError: a setting or a parameter has a wrong type.

    All arithmetic is float32 in the order that NUMERICS.md states, so the bits are the same on every device and in
    `qshard.jax.adam` and `qshard.jax.adamw`. A step is one launch for the settings and one for up to 240 tensors of the
    same dtypes. It never waits for the device, so a CUDA graph can capture it, after one step that was not captured. In
    a graph, pass `lr` as a tensor on the device; a number is fixed at capture.

    States in float16 or FP8 have one float32 power-of-two scale for every 128 elements of a row, where a row is
    everything after the first axis. A state of zeros stays zero. A second moment other than 0 never rounds to 0, which
    would blow up the next update. Rows are sharded together with their scales, so the state of a shard is the shard of
    the state. Parameters with fewer than two axes keep float32 states instead.

    The state of a parameter has `step` (float32, on its device), `exp_avg` and `exp_avg_sq`; scaled states add
    `exp_avg_scale_inv` and `exp_avg_sq_scale_inv`, and masters add `master` or `remainder`. For a DTensor, all but
    `step` are DTensors.

    A state dict loads bit for bit on any number of ranks. It contains plain values only: dtypes are names, and FP8 and
    int16 tensors, which gloo rejects, are bytes in a dict under the name of their dtype. It also loads state dicts of
    torch's Adam and AdamW, and they load ours if states are float32 without masters.

    >>> weight = torch.nn.Parameter(torch.ones(2, 256, dtype=torch.bfloat16))
    >>> optimizer = Adam([weight], lr=0.25, exp_avg_dtype=torch.float8_e4m3fn, master_weights="remainder")
    >>> weight.grad = torch.ones_like(weight)
    >>> optimizer.step()
    >>> weight[0, 0].item(), optimizer.state[weight]["exp_avg_scale_inv"].shape
    (0.75, torch.Size([2, 2]))

    Sources: Kingma and Ba, arXiv:1412.6980.
    """

    _op = "Adam"

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
        if isinstance(params, nn.Module):
            raise TypeError(f"{self._op}: params ({type(params).__name__}) is a module; pass its .parameters()")
        self._hypers: dict[Any, tuple[Tensor, list[float]]] = {}
        self._versions: dict[int, tuple[int, int]] = {}  # of parameters with masters, after the last step
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
            "capturable": True,  # `step` is on the device of the parameter.
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own, the arguments of the constructor.

        Raises:
          ValueError: a setting is out of range, or does not fit these parameters.
          TypeError: a setting or a parameter has a wrong type.
        """
        super().add_param_group(param_group)
        try:
            _check_group(self._op, self.param_groups[-1])
        except BaseException:
            self.param_groups.pop()
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        for parameter, of_parameter in state["state"].items():  # Raises before this optimizer changes.
            for name, value in of_parameter.items():
                if isinstance(value, Uncast):
                    of_parameter[name] = value.on(self._op, name, parameter)
        own = self.__dict__.get("param_groups", [])  # A copy has none.
        super().__setstate__(state)
        self._hypers, self._steps, self._versions = {}, {}, {}
        for group in self.param_groups:  # A state of torch.optim.AdamW lacks some settings.
            group.update({**self.defaults, **group, "capturable": True})
        for group, before in zip(self.param_groups, own, strict=False):
            # Names stay: a checkpoint has the names of one rank, and another rank may have other experts.
            group.pop("param_names", None)
            if "param_names" in before:
                group["param_names"] = before["param_names"]

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values that share memory with the optimizer, as in torch.

        >>> weight = torch.nn.Parameter(torch.ones(2, 128))
        >>> weight.grad = torch.ones_like(weight)
        >>> optimizer = Adam([weight], exp_avg_dtype=torch.float8_e4m3fn)
        >>> optimizer.step()
        >>> optimizer.state_dict()["state"][0]["exp_avg"]["float8_e4m3fn"].dtype
        torch.uint8
        """
        return to_plain(super().state_dict(), self.param_groups)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state bit for bit: tensors move to the device of their parameter and keep their dtype, unlike torch's.

        Raises:
          ValueError: a state is whole and its parameter is sharded.
        """
        super().load_state_dict(from_plain(state_dict))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, inv_grad_scale: Tensor | float | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
          closure: computes gradients and returns a loss.
          inv_grad_scale: a number that gradients are multiplied by first, such as the inverse of a loss scale.

        Returns:
          The loss of `closure`; None without one.

        Shards are updated locally. The step communicates only to recast primary weights, with one max-reduction for
        each process group, and to add gradients that are partial sums, as of norms under sequence parallelism.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update(inv_grad_scale)
        return loss

    def _update(self, inv_grad_scale: Tensor | float | None) -> None:
        self._adopt_writes()
        self._update_values(inv_grad_scale)
        self._versions = {id(parameter): _version_of(parameter) for parameter, _ in self._with_masters()}
        recast(p for group in self.param_groups for p in group["params"] if p.grad is not None)

    def _with_masters(self) -> Iterator[tuple[Tensor, Tensor]]:
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            master = self.state.get(parameter, {}).get("master")
            if master is not None:
                yield parameter, memory_of(master)

    def _adopt_writes(self) -> None:
        """Copy values that were written to 16-bit parameters since the last step into their masters."""
        for parameter, master in self._with_masters():
            if self._versions.get(id(parameter)) not in (None, _version_of(parameter)):
                memory = memory_of(parameter)
                master.copy_(torch.where(master.to(memory.dtype) == memory, master, memory.float()))

    def _update_values(self, inv_grad_scale: Tensor | float | None) -> None:
        for index, group in enumerate(self.param_groups):
            decay = ("decoupled" if group["decoupled_weight_decay"] else "coupled") if group["weight_decay"] else "none"
            for kind, members in self._by_kind(group).items():
                constants = ops.adam_constants(
                    self._advance((index, kind), [state for state, _ in members]),
                    self._hyper((index, kind[0]), group, inv_grad_scale),
                )
                _run(constants, [tensors for _, tensors in members], decay)

    def _to_update(self, group: dict[str, Any]) -> Iterable[tuple[dict[str, Any], Tensor]]:
        return [(self.state[p], p) for p in group["params"] if p.grad is not None]

    def _by_kind(self, group: dict[str, Any]) -> dict[Any, list[tuple[dict[str, Any], dict[str, Tensor]]]]:
        """Group states and local tensors by device and dtypes: one group is one launch."""
        found: dict[Any, list[tuple[dict[str, Any], dict[str, Tensor]]]] = {}
        for state, parameter in self._to_update(group):
            assert parameter.grad is not None
            if parameter.grad.is_sparse:
                raise NotImplementedError(f"{self._op}: grad (sparse) is not dense; call .to_dense() on it")
            initialize_state(state, parameter, group)
            low = state.get("remainder", state.get("master"))
            given = {"grad": gradient_of(parameter), "param": parameter, "low": low, **state}
            tensors = {name: memory_of(t) for name in _LISTS if (t := given.get(name)) is not None}
            if not tensors["grad"].is_contiguous():
                tensors["grad"] = tensors["grad"].contiguous()
            kind = (tensors["param"].device, *tensors, *[t.dtype for t in tensors.values()])
            found.setdefault(kind, []).append((state, tensors))
        return found

    def _advance(self, key: Any, states: Sequence[dict[str, Any]]) -> Tensor:
        """Increment the steps of some parameters, and return them as one tensor. Their states have views of it."""
        steps = [state["step"] for state in states]
        stacked, views = self._steps.get(key, (None, []))
        if stacked is None or list(map(id, views)) != list(map(id, steps)):
            stacked = torch.stack(steps)
            views = list(stacked.unbind())
            self._steps[key] = (stacked, views)
            for state, view in zip(states, views, strict=True):
                state["step"] = view
        return stacked.add_(1)

    def _hyper(self, key: Any, group: dict[str, Any], inv_grad_scale: Tensor | float | None) -> Tensor:
        """Return the settings for `adam_constants`, in persistent memory. Only changed settings are written."""
        scale = 1.0 if inv_grad_scale is None else inv_grad_scale
        beta1, beta2 = group["betas"]
        values = adam.settings(group["lr"], beta1, beta2, group["eps"], group["weight_decay"], scale)
        numbers = [math.nan if isinstance(value, Tensor) else float(value) for value in values]
        if key not in self._hypers:
            self._hypers[key] = (torch.tensor(numbers, dtype=torch.float32, device=key[1]), list(numbers))
        hyper, current = self._hypers[key]
        for i, value in enumerate(values):
            if isinstance(value, Tensor):
                hyper[i].copy_(value.reshape(()))
            elif current[i] != numbers[i]:
                hyper[i].fill_(numbers[i])
        current[:] = numbers
        return hyper


class AdamW(Adam):
    """`Adam` with decoupled weight decay, by default 0.01 as in `torch.optim.AdamW` (`qshard.jax.adamw`: 0.0001).

    Arguments and errors as for `Adam`. `decoupled_weight_decay` raises TypeError.

    >>> weight = torch.nn.Parameter(torch.ones(4))
    >>> weight.grad = torch.zeros(4)
    >>> AdamW([weight], lr=0.5, weight_decay=0.25).step()
    >>> weight.detach()
    tensor([0.8750, 0.8750, 0.8750, 0.8750])

    Sources: Loshchilov and Hutter, arXiv:1711.05101.
    """

    _op = "AdamW"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **options: Any,
    ):
        if "decoupled_weight_decay" in options:
            raise TypeError("AdamW: decoupled_weight_decay is always True; use Adam for decoupled_weight_decay=False")
        super().__init__(params, lr, betas, eps, weight_decay, decoupled_weight_decay=True, **options)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # As in torch: a state of Adam would not decouple.
            group["decoupled_weight_decay"] = True


def _version_of(parameter: Tensor) -> tuple[int, int]:
    """Return a number that changes when torch writes to a parameter. Writes through `data` do not count."""
    memory = memory_of(parameter)
    return memory.data_ptr(), memory._version


def _run(constants: Tensor, members: Sequence[dict[str, Tensor]], decay: str) -> None:
    first = members[0]
    low = "none" if "low" not in first else "remainder" if first["low"].dtype == torch.int16 else "master"
    lists = [[tensors[name] for tensors in members if name in tensors] for name in _LISTS]
    lists = [[t.view(torch.uint8) for t in each] if each and each[0].dtype.itemsize == 1 else each for each in lists]
    dtypes = {f"{name}_dtype": dtype_name(first[name].dtype) for name in ("exp_avg", "exp_avg_sq")}
    ops.adam(constants, *lists, decay=decay, **dtypes, keeps=low, update=False)


def initialize_state(state: dict[str, Any], parameter: Tensor, group: dict[str, Any]) -> None:
    if not _is_complete(state, parameter, group):
        _complete(state, parameter, group)


def _is_complete(state: dict[str, Any], parameter: Tensor, group: dict[str, Any]) -> bool:
    """Return True if no state is missing. It runs in every step."""
    if "step" not in state or "exp_avg" not in state or "exp_avg_sq" not in state:
        return False
    if state["exp_avg"].dtype in SCALED and "exp_avg_scale_inv" not in state:
        return False
    if state["exp_avg_sq"].dtype in SCALED and "exp_avg_sq_scale_inv" not in state:
        return False
    has_all = parameter.dtype == torch.float32 or group["master_weights"] is None
    return has_all or "master" in state or "remainder" in state


def _complete(state: dict[str, Any], parameter: Tensor, group: dict[str, Any]) -> None:
    memory = memory_of(parameter)

    def zeros(dtype: torch.dtype) -> Tensor:
        return wrapped_like(parameter, torch.zeros(memory.shape, dtype=dtype, device=memory.device))

    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=memory.device)
    for name in ("exp_avg", "exp_avg_sq"):
        if name in state:
            if state[name].dtype in SCALED and f"{name}_scale_inv" not in state:
                raise ValueError(
                    f"Adam: state {name} ({dtype_name(state[name].dtype)}) has no {name}_scale_inv; load the state as "
                    "float32"
                )
            continue
        dtype = group[f"{name}_dtype"]
        if dtype in SCALED and parameter.ndim < 2:
            dtype = torch.float32
        state[name] = zeros(dtype)
        if dtype in SCALED:
            scales = torch.ones(_blocks(memory.shape), dtype=torch.float32, device=memory.device)
            state[f"{name}_scale_inv"] = wrapped_like(parameter, scales, _blocks(parameter.shape))
    if memory.dtype != torch.float32 and not {"master", "remainder"} & state.keys():
        if group["master_weights"] == "float32":
            state["master"] = wrapped_like(parameter, memory.float())
        elif group["master_weights"] == "remainder":
            state["remainder"] = zeros(torch.int16)


def _blocks(shape: Sequence[int]) -> tuple[int, int]:
    return shape[0], -(-math.prod(shape[1:]) // adam.BLOCK)


def _check_group(op: str, group: dict[str, Any]) -> None:
    for name in ("lr", "eps", "weight_decay"):
        adam.check_setting(op, name, group[name])
    if isinstance(group["lr"], Tensor) and group["lr"].numel() != 1:
        raise ValueError(f"{op}: lr {tuple(group['lr'].shape)} is not one number; pass a scalar tensor")
    betas = group["betas"]
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise ValueError(f"{op}: betas ({quote(betas)}) is not a pair of numbers; pass a pair, such as (0.9, 0.999)")
    for i, beta in enumerate(betas):
        adam.check_setting(op, f"betas[{i}]", beta, is_beta=True)
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        dtype = group[name]
        adam.check_state_dtype(op, name, dtype, dtype_name(dtype) if isinstance(dtype, torch.dtype) else "", "torch.")
    if group["master_weights"] not in (None, "remainder", "float32"):
        raise ValueError(
            f"{op}: master_weights ({group['master_weights']!r}) is not None, 'remainder' or 'float32'; pass one of "
            "these"
        )
    for parameter in group["params"]:
        _check_parameter(op, parameter, group)


def _check_parameter(op: str, parameter: Tensor, group: dict[str, Any]) -> None:
    """Raise if a parameter is unsupported. All ranks raise: nothing here depends on the local shard."""
    local = local_of(parameter)
    shape = tuple(parameter.shape)
    if isinstance(local, QuantizedTensor):
        raise TypeError(
            f"{op}: parameter {shape} is a QuantizedTensor, which has no float values; pass its master to the optimizer"
        )
    check_dtype(op, f"parameter {shape}", parameter.dtype)
    if group["master_weights"] == "remainder" and parameter.dtype == torch.float16:
        raise TypeError(
            f"{op}: parameter {shape} (float16) does not support master_weights='remainder', only bfloat16 does; pass "
            "master_weights='float32'"
        )
    check_contiguous(op, f"parameter {shape}", memory_of(parameter))
    scaled = {group["exp_avg_dtype"], group["exp_avg_sq_dtype"]} & set(SCALED)
    if scaled and parameter.ndim >= 2 and isinstance(parameter, DTensor):
        for i, placement in enumerate(parameter.placements):
            axis = getattr(placement, "dim", 0)
            row, shards = math.prod(parameter.shape[1:]), parameter.device_mesh.size(i)
            if axis > 1 or (axis == 1 and (parameter.shape[1] % shards or row // shards % adam.BLOCK)):
                raise ValueError(
                    f"{op}: parameter {shape} (axis {axis} in {shards} shards) is not sharded on blocks of "
                    f"{adam.BLOCK}, as states in {join_names(map(dtype_name, scaled))} need; shard axis 0, or keep "
                    "states in bfloat16"
                )
