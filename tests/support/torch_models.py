"""Models for tests of FSDP2: construction, sharding, training, memory and recorded collectives."""

from __future__ import annotations

import gc
import itertools
import time

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from qshard import reference
from qshard.torch_bridge import Linear, QuantizedTensor, update_scales
from support import torch_ranks
from support.fronts import TorchFront, assert_plane

FRONT = TorchFront("cpu")
SIZES = (20, 104, 3, 20)  # Over 3 ranks: weights of 104 rows are uneven; over 4, of 3 rows leave a rank without one.
BLOCK_SIZES = (32, 96, 64, 32)  # Whole blocks. Over 3 ranks, which cut them, the first weight is even, others are not.


class Wire(TorchDispatchMode):
    """Records (op, dtype, elements on this rank) of every collective, and the names of ops that compute.

    `shapes` has the name of each op of qshard, and the shape of its first operand.
    """

    def __init__(self):
        super().__init__()
        self.calls, self.launches, self.shapes = [], [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and "barrier" not in str(func):
            name = str(func).removeprefix("c10d.").split(".")[0].strip("_")
            is_coalesced = name.endswith("_coalesced")
            given = args[name.endswith("_base") or name == "allgather" or is_coalesced]  # Outputs are before inputs.
            tensors = given if isinstance(given, (list, tuple)) else [given]
            sizes = [tensor.numel() for tensor in tensors]
            self.calls.append((name.removesuffix("_base"), tensors[0].dtype, sum(sizes) if is_coalesced else sizes[0]))
        is_view = any(result.alias_info is not None for result in func._schema.returns) and not func._schema.is_mutable
        if not is_view and func.namespace in ("aten", "qshard") and "empty" not in str(func):
            self.launches.append(str(func))
            if func.namespace == "qshard" and args and isinstance(args[0], torch.Tensor):
                self.shapes.append((func._opname, tuple(args[0].shape)))
        return func(*args, **(kwargs or {}))

    def of(self, op):
        return [(dtype, count) for name, dtype, count in self.calls if name == op]


def void_amaxes(moe):
    """Write to h of a `MoE` in each call, and to gradients of both products, without changing them: amaxes are void."""

    @torch.no_grad()
    def before(w2, given):
        given[0].mul_(1)

    def after(product, given, y):
        if y.requires_grad:
            y.register_hook(lambda grad: grad.mul_(1))

    moe.w2.register_forward_pre_hook(before)
    for product in (moe.w13, moe.w2):
        product.register_forward_hook(after)


class SideBySide(nn.Sequential):
    """All layers take the same input, so that weights of any shapes have a forward together."""

    def forward(self, x):
        return torch.cat([layer(x) for layer in self], dim=-1)


def side_by_side(values, bias=False):
    """Build a layer for each of these weights."""
    layers = SideBySide(*(nn.Linear(*w.shape[::-1], bias=bias, dtype=FRONT.array(w).dtype) for w in values))
    with torch.no_grad():
        for layer, w in zip(layers, values, strict=True):
            layer.weight.copy_(FRONT.array(w))
    return layers.to(torch_ranks.device)


def model_of(bias=False, dtype=torch.float32, sizes=SIZES, seed=0):
    torch.manual_seed(seed)
    layers = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs, bias=bias, dtype=dtype), nn.GELU()]
    return nn.Sequential(*layers[:-1]).to(torch_ranks.device)


def sizes_for(recipe):
    return BLOCK_SIZES if recipe.weight.scaling.whole_blocks else SIZES


def shard(model, **options):
    options.setdefault("mesh", torch_ranks.mesh())
    for layer in model:
        if any(isinstance(module, nn.Linear) for module in layer.modules()):  # It may be a compiled one.
            fully_shard(layer, **options)
    return fully_shard(model, **options)


def linears(model):
    return [layer for layer in model.modules() if isinstance(layer, Linear)]


def batch(seed=0, columns=SIZES[0]):
    return torch.randn(6, columns, generator=torch.Generator().manual_seed(seed)).to(torch_ranks.device)


def whole(model):
    """Return copies of all parameters, gathered."""
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def planes(model):
    """Return copies of the gathered planes of each weight; a view would keep FSDP2 from freeing the memory."""
    made = []
    for layer in linears(model):
        layer.unshard()
        assert isinstance(layer.weight, QuantizedTensor)
        plane = layer.weight.rowwise
        made.append(plane._make(None if part is None else part.clone() for part in plane))
        layer.reshard()
    return made


def assert_gathers_the_whole(model, values=None, scales=None):
    """Assert the sharding law, for `values` or the current weights, and for `scales` or the weights' own scales."""
    layers = linears(model)
    formats = [layer.recipe.weight for layer in layers]
    values = values or [FRONT.numpy(layer.weight.full_tensor().detach().clone()) for layer in layers]
    for plane, w, fmt, scale in zip(planes(model), values, formats, scales or [None] * len(layers), strict=True):
        assert_plane(FRONT, plane, reference.quantize(w, fmt, scale=scale).rowwise, f"weight of {fmt}")


def resident() -> int:
    """Return the bytes of all tensors of this process."""
    time.sleep(0.02)  # A thread of gloo needs the GIL to drop the tensors of a collective that has ended.
    while gc.collect():  # Objects that tensors refer to are freed one collection later.
        pass
    plain = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter) and not t.is_meta]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in plain}.values())


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
