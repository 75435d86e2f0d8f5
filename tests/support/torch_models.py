"""Models for tests of FSDP2: how they are made, sharded and trained, what they hold, and what travels meanwhile."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from qshard import reference
from qshard.torch_bridge import Linear, update_scales
from support import torch_ranks
from support.fronts import TorchFront

SIZES = (20, 104, 3, 20)  # Over 3 ranks: weights of 104 rows are uneven; over 4, of 3 rows leave a rank without one.


class Wire(TorchDispatchMode):
    """Records (op, dtype, elements on this rank) of every collective."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and "barrier" not in str(func):
            name = str(func).removeprefix("c10d.").split(".")[0].strip("_")
            # The input: gathers and scatters have the output before it.
            tensor = args[1] if name in ("_allgather_base", "allgather_base", "_reduce_scatter_base") else args[0]
            tensor = tensor[0] if isinstance(tensor, (list, tuple)) else tensor
            self.calls.append((name.strip("_").removesuffix("_base"), tensor.dtype, tensor.numel()))
        return func(*args, **(kwargs or {}))

    def of(self, op):
        return [(dtype, count) for name, dtype, count in self.calls if name == op]


def model_of(bias=False, dtype=torch.float32, sizes=SIZES):
    torch.manual_seed(0)
    layers = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs, bias=bias, dtype=dtype), nn.GELU()]
    return nn.Sequential(*layers[:-1]).to(torch_ranks.device)


def shard(model, **options):
    options.setdefault("mesh", torch_ranks.mesh())
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


def linears(model):
    return [layer for layer in model.modules() if isinstance(layer, Linear)]


def batch(seed=0, columns=SIZES[0]):
    return torch.randn(6, columns, generator=torch.Generator().manual_seed(seed)).to(torch_ranks.device)


def assert_gathers_the_whole(model):
    """The law, for the weights as they are now."""
    for layer in linears(model):
        whole = TorchFront("cpu").numpy(layer.weight.full_tensor().detach().clone())
        layer.unshard()
        expected = reference.quantize(whole, layer.weight.format).rowwise
        codes, scale_inv, _ = (None if t is None else t.clone().cpu() for t in layer.weight.rowwise)
        assert torch.equal(codes.view(torch.uint8), torch.from_numpy(expected.data))
        scale_inv = scale_inv if scale_inv.dtype == torch.float32 else scale_inv.view(torch.uint8)
        assert torch.equal(scale_inv, torch.from_numpy(expected.scale_inv))
        layer.reshard()


def losses_of(model, optimizer, steps=4, update=True, micro_batches=1):
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(micro_batches):
            if isinstance(model, nn.Module) and hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(micro == micro_batches - 1)
            loss = model(batch(step * micro_batches + micro, linears(model)[0].in_features)).square().mean()
            loss.backward()
        optimizer.step()
        if update:
            update_scales(model)
        losses.append(loss.item())
    return losses
