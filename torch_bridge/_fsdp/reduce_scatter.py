"""Reduce-scatter of FSDP2 gradients that sends 16 or 8 bits and sums in float32, in the order of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from qshard.torch_bridge._distributed.ordered_sum import GradientWire, WireType
from qshard.torch_bridge._quantized.validation import check_model

_NAME = "reduce_gradients_in_order"


def reduce_gradients_in_order(model: nn.Module, dtype: WireType = torch.bfloat16) -> None:
    """Send the gradients of FSDP2 in `dtype`, and sum them in float32 in the order of ranks.

        gradient of a shard = (float32(g_0) + float32(g_1) + ...) / ranks,    g_i: the gradient of rank i in `dtype`

        MXFP8_E4M3:  |g_i - g| <= max(|g| / 16, amax / 229376),    amax: max |g| of the 32 elements of a block

    By default FSDP2 either sends `MixedPrecisionPolicy.reduce_dtype` float32, twice the bytes and one more conversion,
    or sums in bfloat16. The bits of this sum do not depend on the algorithm that the backend chooses.
    `ZeroOptimizer(reduce_dtype=dtype)` computes the same sum.

    Args:
      model: a model after `fully_shard`, with converted or plain layers. Each of its FSDP2 modules is set. To undo it,
        shard the model again.
      dtype: dtype of gradients on the wire: bfloat16, float16 or float32. If a layer computes its gradient in this
        dtype, as with `MixedPrecisionPolicy(param_dtype=dtype)`, nothing is rounded. Or "MXFP8_E4M3" or "MXFP8_E5M2":
        codes and scales, 8.25 bits an element, of the gradient in the dtype that FSDP2 reduces.

    Raises:
      TypeError: `model` is not a module, or `dtype` is something else.
      ValueError: no module of `model` is an FSDP2 module, or `dtype` is another format.

    Sharded gradients get their parameter's dtype, as always with FSDP2. Call it on all ranks, before the first
    backward. Each reduce-scatter becomes an all-to-all, which sends as many elements as a ring does. With replicas
    (HSDP) the sums of shards are all-reduced by the backend in float32. A block of MXFP8 is 32 consecutive elements of
    the buffer that a rank receives, so it may span two parameters. Infinities and NaN of a gradient arrive. Backward
    raises NotImplementedError after `set_gradient_divide_factor`, unless `set_force_sum_reduction_for_comms(True)` was
    called too.

    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from torch.distributed.fsdp import fully_shard
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,)))
    >>> reduce_gradients_in_order(model)
    >>> dist.destroy_process_group()
    """
    check_model(_NAME, model)
    wire = GradientWire.of(_NAME, "dtype", dtype)
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise ValueError(f"{_NAME}: no module of the model is an FSDP2 module; call fully_shard before")
    for module in modules:
        module.set_custom_reduce_scatter(_OrderedReduceScatter(wire))  # type: ignore[arg-type]


class _OrderedReduceScatter:
    """A custom `ReduceScatter` of one FSDP2 module."""

    def __init__(self, wire: GradientWire) -> None:
        self._wire = wire
        self._input_size: int | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the input in the wire dtype and the output in float32, whatever dtype FSDP2 requests.

        FSDP2 copies gradients into the input and shards out of the output, and both convert. It allocates the output
        after the input. Should that change, `__call__` converts.
        """
        is_output = self._input_size is not None and size[0] <= self._input_size  # Equal: a shard on one rank.
        self._input_size = None if is_output else size[0]
        return torch.empty(*size, dtype=torch.float32 if is_output else self._wire.dtype or dtype, device=device)

    @torch.no_grad()
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        ranks = group.size()
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise NotImplementedError(
                f"{_NAME}: set_gradient_divide_factor makes FSDP2 reduce by neither a sum nor a mean; "
                "call set_force_sum_reduction_for_comms(True) on each FSDP2 module"
            )
        total = output_tensor
        if total.dtype != torch.float32:
            total = torch.empty_like(output_tensor, dtype=torch.float32)
        values, own = input_tensor, total.numel()
        if padding := self._wire.padded(own) - own:
            values = F.pad(values.view(ranks, own), (0, padding)).view(-1)
        lengths, mean = [own + padding] * ranks, op == dist.ReduceOp.AVG
        for _ in self._wire.sum_in_order(values, lengths, total, group, fresh=True, mean=mean):
            pass
        if total is not output_tensor:
            output_tensor.copy_(total)
