"""Initialization of models on meta: every rank materializes one module at a time and keeps its slices."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from qshard.torch_bridge._delayed_scaling import DelayedScale
from qshard.torch_bridge._zero.weight import Ranks, ZeroParameter

Init = Callable[[nn.Module], object]


def default_device() -> torch.device:
    """Return the device that a model on meta is moved to: the current accelerator, or the CPU."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if found is None else torch.device(found.type, torch.accelerator.current_device_index())


def check_init(model: nn.Module, init: Init | None) -> None:
    """Raise ValueError if a module on meta has no method to initialize itself, and no `init` is given."""
    for name, module in model.named_modules():
        if init is None and _on_meta(module) and not isinstance(module, DelayedScale) and _init_of(module) is None:
            raise ValueError(
                f"ZeroOptimizer: {name} ({type(module).__name__}, on meta) has no reset_parameters or init_weights; "
                "pass init=, a function that initializes the tensors of a module"
            )


class MetaInit:
    """Materializes modules on meta one at a time, with values that do not depend on the number of ranks.

    The values depend on the seed of `torch.manual_seed` on the first rank and on the name of the module.
    """

    def __init__(
        self, model: nn.Module, weights: Sequence[ZeroParameter], init: Init | None, ranks: Ranks, to: torch.device
    ):
        self._init, self._device = init, to
        self._names = {id(module): name for name, module in model.named_modules()}
        self._modules = {id(module): module for module in model.modules() if _on_meta(module)}
        self._new_parameters: dict[int, nn.Parameter] = {}
        self._by_old = {id(weight.parameter): weight for weight in weights}
        if not self._modules:
            return
        seed = torch.tensor(torch.initial_seed() % 2**63, device=to)
        if ranks.size > 1:
            dist.broadcast(seed, group=ranks.group, group_src=0)
        self._seed = int(seed)
        trained = {id(module) for weight in weights for module, _ in weight.owners}
        for module in list(self._modules.values()):
            if isinstance(module, DelayedScale):
                module._apply(lambda t: torch.empty_like(t, device=to))  # `_apply` resets a scale that leaves meta.
                del self._modules[id(module)]
            elif id(module) not in trained:
                self._make(module)

    def make(self, weight: ZeroParameter) -> None:
        for module, _ in weight.owners:
            self._make(module)

    def _make(self, module: nn.Module) -> None:
        if self._modules.pop(id(module), None) is None:
            return
        for name, old in module._parameters.items():
            if old is not None and old.is_meta:
                if id(old) not in self._new_parameters:
                    new = nn.Parameter(torch.empty_like(old.detach(), device=self._device), old.requires_grad)
                    self._new_parameters[id(old)] = new
                    if id(old) in self._by_old:
                        self._by_old[id(old)].parameter = new
                module._parameters[name] = self._new_parameters[id(old)]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=self._device)
        key = f"{self._seed} {self._names[id(module)]}".encode()
        devices: list[Tensor | int] = []
        if self._device.type == "cuda":
            index = self._device.index
            devices = [torch.cuda.current_device() if index is None else index]
        with torch.random.fork_rng(devices), torch.no_grad():
            torch.manual_seed(int.from_bytes(hashlib.sha256(key).digest()[:7], "little"))
            if self._init is not None:
                self._init(module)
            else:
                own = _init_of(module)
                assert own is not None
                own()


def _on_meta(module: nn.Module) -> bool:
    own = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None and tensor.is_meta for tensor in own)


def _init_of(module: nn.Module) -> Callable[[], object] | None:
    own = getattr(module, "reset_parameters", None) or getattr(module, "init_weights", None)
    return own if callable(own) else None
