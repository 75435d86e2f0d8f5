"""`LinearCrossEntropy`, the linear head of a model that returns its loss, and its quantized form."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qshard.torch_bridge._distributed.dtensor import places_tensors
from qshard.torch_bridge._losses.linear_cross_entropy import Observer, linear_cross_entropy, observing
from qshard.torch_bridge._nn.linear import Linear


class LinearCrossEntropy(nn.Linear):
    """Linear head of a model that returns the loss if labels are passed, and logits otherwise.

    FSDP2 and ZeRO gather its weight, as for every module. `convert` replaces it by a head with quantized operands,
    except under `DelayedScaling`. It has no bias. Under `parallelize_module` with a `ColwiseParallel`, PyTorch's or the
    one in `tensor_parallel`, each rank has a shard of the classes. The loss covers all classes and is a plain tensor on
    every rank; `output_layouts` applies to logits only. Labels must be the same on all ranks.

    Args:
      in_features: K.
      out_features: number of classes.
      loss: options of `linear_cross_entropy`, such as `z_loss`.

    >>> import torch
    >>> head = LinearCrossEntropy(8, 16, z_loss=1e-4)
    >>> x = torch.ones(2, 3, 8)
    >>> head(x).shape, head(x, torch.zeros(2, 3, dtype=torch.int64)).shape
    (torch.Size([2, 3, 16]), torch.Size([]))
    """

    def __init__(self, in_features: int, out_features: int, *, device: Any = None, dtype: Any = None, **loss: Any):
        super().__init__(in_features, out_features, bias=False, device=device, dtype=dtype)
        self.loss = loss

    def forward(self, input: Tensor, labels: Tensor | None = None) -> Tensor:
        """Compute the loss of `labels`, or logits without labels, as `linear_cross_entropy` does."""
        if labels is None:
            return super().forward(input)
        weight = self.weight if "recipe" in self.loss else self.weight.to(input.dtype)
        return linear_cross_entropy(input, weight, labels, **self.loss)

    def register_forward_pre_hook(self, hook: Any, **options: Any) -> Any:
        """Register a hook. Hooks of `parallelize_module` get, and return, only the first input: not the labels."""

        def place(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return hook(module, inputs[:1]), *inputs[1:]

        return super().register_forward_pre_hook(place if places_tensors(hook) else hook, **options)

    def register_forward_hook(self, hook: Any, **options: Any) -> Any:
        """Register a hook. A hook of `parallelize_module` runs on logits only: the loss is the same on every rank."""

        def place(module: nn.Module, inputs: Any, output: Tensor) -> Any:
            return hook(module, inputs, output) if isinstance(output, DTensor) else output

        return super().register_forward_hook(place if places_tensors(hook) else hook, **options)


class QuantizedHead(Linear, LinearCrossEntropy):
    """`LinearCrossEntropy` with quantized operands; `convert` creates it. `observer` is called as `Observer`."""

    _of = LinearCrossEntropy

    observer: Observer | None = None

    def forward(self, input: Tensor, labels: Tensor | None = None) -> Tensor:
        if labels is None:
            return super().forward(input)
        if self.recipe is None:
            return LinearCrossEntropy.forward(self, input, labels)
        operands = self.call_operands(input)
        x = operands.input if operands.dtype is None else operands.input.to(operands.dtype)
        given = {**self.loss, "recipe": self.recipe, "seed": operands.seed}
        with contextlib.nullcontext() if self.observer is None else observing(self.observer):
            return linear_cross_entropy(x, operands.weight, labels, **given)
