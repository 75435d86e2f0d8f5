"""Styles for `parallelize_module` under which codes travel between layers that `convert` has made.

    plan = {
        "norm": SequenceParallel(),                                    # PyTorch's
        "attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Shard(1)),
        "attention.q": ColwiseParallel(input_layouts=Shard(1)),        # these two are ours
        "attention.o": RowwiseParallel(output_layouts=Shard(1)),
    }

PyTorch's own styles of these names work too, and gather x, and the gradient of y, as values.
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
    """PyTorch's `ColwiseParallel`, whose input may stay cut along the sequence: the layer gathers its codes.

    Codes and scales are those that one device makes of the whole input, for every recipe. Its gradient is
    reduce-scattered. A sequence that is not cut evenly, or not between blocks, is gathered as values.

    Args:
      layouts: `input_layouts`, `output_layouts` and `use_local_output`, as for PyTorch's. With `Shard(1)` of
        `[batch, sequence, K]` as `input_layouts` codes travel.
      overlap: codes of one rank travel while those of another are multiplied. The bits are the same.

    Layers that are not qshard's are PyTorch's matter.

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
    """PyTorch's `RowwiseParallel`, whose output may be cut along the sequence: codes of its gradient are gathered.

    Partial sums of the output are scattered as values, and each rank adds those of its rows in the order of ranks.

    Args:
      layouts: `input_layouts`, `output_layouts` and `use_local_output`, as for PyTorch's. With `Shard(1)` of
        `[batch, sequence, N]` as `output_layouts` codes travel in the backward pass.
      overlap: sums travel while others are made, and codes of the gradient likewise. The bits are the same.

    Layers that are not qshard's are PyTorch's matter.

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
