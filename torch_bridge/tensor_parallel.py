"""Tensor-parallel styles for `parallelize_module` that gather sequence-sharded tensors as codes.

    plan = {
        "norm": SequenceParallel(),                                    # PyTorch's
        "attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Shard(1)),
        "attention.q": ColwiseParallel(input_layouts=Shard(1)),        # these two are ours
        "attention.o": RowwiseParallel(output_layouts=Shard(1)),
    }

PyTorch's styles of the same names also work. They gather x and the gradient of y unquantized.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel as _ColwiseParallel
from torch.distributed.tensor.parallel import RowwiseParallel as _RowwiseParallel

from qshard.torch_bridge._nn.linear import Linear


class ColwiseParallel(_ColwiseParallel):
    """PyTorch's `ColwiseParallel`, except that a sequence-sharded input is quantized before it is gathered.

    Codes and scales are bit for bit what one device computes from the whole input, for every recipe. The gradient of
    the input is reduce-scattered. If the sequence is sharded unevenly or a shard boundary splits a block, the input is
    gathered unquantized. Layers that are not qshard's are parallelized by PyTorch's style.

    Args:
      overlap: multiply the rows of one rank while the codes of another are gathered. Codes have the same bits.
      layouts: `input_layouts`, `output_layouts` and `use_local_output`, as in PyTorch. To gather codes, pass
        `input_layouts=Shard(1)` for an input `[batch, sequence, K]`.

    >>> ColwiseParallel(input_layouts=Shard(1), overlap=True)
    ColwiseParallel(input_layouts=(Shard(dim=1),), output_layouts=(Shard(dim=-1),), use_local_output=True, overlap=True)

    Source: Korthikanti et al., arXiv:2205.05198.
    """

    desired_input_layouts: Any

    def __init__(self, *, overlap: bool = False, **layouts: Any):
        super().__init__(**layouts)
        self.overlap, self._torch_input = overlap, self.desired_input_layouts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.desired_input_layouts = self._torch_input
        if isinstance(module, Linear):
            self.desired_input_layouts, module.overlap = self.input_layouts, self.overlap
        made: nn.Module = super()._apply(module, device_mesh)
        return made

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, overlap={self.overlap})"


class RowwiseParallel(_RowwiseParallel):
    """PyTorch's `RowwiseParallel`, except that the gradient of a sequence-sharded output is gathered as codes.

    In the forward pass, ranks exchange partial sums of the output unquantized. Each rank adds the partial sums of its
    own rows in rank order. Layers that are not qshard's are parallelized by PyTorch's style.

    Args:
      overlap: exchange partial sums while the next ones are computed, and gather codes of the gradient while others
        are multiplied. Codes have the same bits.
      layouts: `input_layouts`, `output_layouts` and `use_local_output`, as in PyTorch. To gather the gradient as codes,
        pass `output_layouts=Shard(1)` for an output `[batch, sequence, N]`.

    >>> RowwiseParallel(output_layouts=Shard(1)).output_layouts
    (Shard(dim=1),)

    Source: Korthikanti et al., arXiv:2205.05198.
    """

    def __init__(self, *, overlap: bool = False, **layouts: Any):
        super().__init__(**layouts)
        self.overlap = overlap

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        (output,) = self.output_layouts
        if isinstance(module, Linear):
            module.overlap = self.overlap
            module.scatter_dim = output.dim if isinstance(output, Shard) and output.dim != -1 else None
        made: nn.Module = super()._apply(module, device_mesh)
        return made

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, overlap={self.overlap})"
