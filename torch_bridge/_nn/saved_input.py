"""x of linear layers: quantized once for all layers that take it, and kept for their backward passes in little room.

**Shared.** Layers that take the same tensor, such as q, k and v, or gate and up, use the same codes: the first
quantizes x, the others find the codes, and autograd keeps them once. Codes are shared only during one call of a
converted module (`module_calls.py`): its `forward` passes x to the layers, and nobody else writes to x meanwhile. One x
is remembered, by the object, its version, and all that codes depend on. It is forgotten when the call
ends, when x dies, when another comes, and when a layer comes that has had it.

A write to x in place, between two of the layers, bumps its version, so it is seen.

Under `torch.compile`, and while a CUDA graph is captured, nothing is remembered: compilers merge equal ops themselves,
and a captured graph must not read what was made outside of it. Nor is what is rounded stochastically.

Under delayed scaling the layers use the scale of the first, and each notes the amax in its own state. They see the same
amaxes, so their scales are the same from the first update on; and each of them is a scale for this very x.

**Had again.** Where autograd keeps x anyway, or what it is a product of, no codes are kept: the backward pass makes
them of that, the same bits.

| x | what is kept anyway | by |
| --- | --- | --- |
| the result of attention, relu, softmax, .. | x | what made it: `_saved_output`, `_saved_result` |
| `a * b`, and `swiglu(a, b)` (`activations.py`) | a and b | what made it |

The two are asked for only where no `saved_tensors_hooks` are in force, as under activation checkpointing: those of a
node may be unpacked once. There the codes are kept. They are kept too where x was made before the running call of a
module began: somebody may have written to it since.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qshard.formats import Usage
from qshard.torch_bridge._nn import activations, module_calls
from qshard.torch_bridge._nn.module_calls import cached_amax
from qshard.torch_bridge._ops.eager import may_reuse
from qshard.torch_bridge._quantized.gemm import Operand
from qshard.torch_bridge._torch_internals import (
    base_of,
    current_dispatch_mode,
    has_saved_tensors_hooks,
    saved_factors,
    saves_its_result,
)

Planes = tuple[dict[Usage, Operand], list[Tensor]]
"""Planes of one tensor, and, where its scale is given, its amax, to be noted, and that scale."""


class _Codes:
    """What was made of one x."""

    def __init__(self, x: weakref.ref[Tensor], version: int, key: Any):
        self.x, self.version, self.key = x, version, key
        self.layers: set[Hashable] = set()
        self.planes: dict[Usage, Operand] = {}
        self.others: list[Tensor] = []

    def serves(self, x: Tensor, key: Any, layer: Hashable) -> bool:
        return self.x() is x and self.version == x._version and bool(self.key == key) and layer not in self.layers


def planes_of(x: Tensor, usage: Usage, key: Any, layer: Hashable, make: Callable[[Usage], Planes]) -> Planes:
    """What `make(usage)` gives, of which those planes that were made of this x before are not made again.

    Args:
      x: any tensor.
      usage: the planes that are needed.
      key: all that they depend on, besides x: what is equal makes equal planes.
      layer: which one asks. One that asks again gets planes that are made anew.
      make: makes some of them.
    """
    call = module_calls.call_that_shares(x) if _is_remembered(x) else None
    if call is None:
        return make(usage)
    key = (key, *_surroundings(x))
    codes: _Codes | None = call.codes
    if codes is None or not codes.serves(x, key, layer):
        call.codes = None  # Frees it before there is more.
        codes = _Codes(weakref.ref(x, functools.partial(_forget, call)), x._version, key)
    missing = [one for one in usage.planes if one not in codes.planes]
    if missing:
        planes, codes.others = make(missing[0] if len(missing) == 1 else usage)
        codes.planes |= planes
        call.codes = codes
    codes.layers.add(layer)
    return {one: codes.planes[one] for one in usage.planes}, codes.others


def _forget(call: module_calls.ModuleCall, x: weakref.ref[Tensor]) -> None:
    """When x dies, which may be in another thread."""
    codes = call.codes
    if codes is not None and codes.x is x:
        call.codes = None


def _is_remembered(x: Tensor) -> bool:
    """Tensors without a version are not, nor are those that stand for others."""
    if not may_reuse(x) or type(x) not in (Tensor, torch.nn.Parameter):
        return False
    return not (x.is_inference() or torch.is_inference_mode_enabled())


def _surroundings(x: Tensor) -> tuple[Any, ...]:
    """Other streams do not wait for what this one makes, and who records ops must see those that make codes."""
    stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else None
    mode = current_dispatch_mode()
    return stream, None if mode is None else weakref.ref(mode)


class Source(NamedTuple):
    """What autograd keeps anyway, and how x can be had of it again.

    Attributes:
      again: makes x, in some shape with the same rows, and its amax, if that comes with it, of the tensors. The last of
        those may be the amax.
    """

    again: Callable[..., tuple[Tensor, Tensor | None]]
    tensors: tuple[Tensor, ...]


def source_of(x: Tensor) -> Source | None:
    """x itself, or two that it is made of; None where neither is kept."""
    if type(x) is not Tensor:
        return None
    base = base_of(x)
    whole = x if base is None else base
    node = whole.grad_fn
    if node is None or whole.output_nr != 0:
        return None
    if saves_its_result(node):
        return Source(_itself, (x.detach(),))
    made_by = _MADE_OF_TWO.get(type(node).__name__)
    if made_by is None or has_saved_tensors_hooks() or module_calls.call_that_made(x) is None:
        return None
    if x._version or x.shape.numel() != whole.shape.numel() or not (x.is_contiguous() and whole.is_contiguous()):
        return None
    saved: Any = node
    try:
        two = saved.saved_tensors[:2] if made_by is activations.swiglu_again else saved_factors(saved)
    except RuntimeError:  # One was written since, or the graph is freed: whoever goes backward is told then.
        return None
    # Parameters are left out: FSDP2 may have freed their memory when it is needed.
    if not all(one is not None and one.grad_fn is not None and one.shape == whole.shape for one in two):
        return None
    amax = cached_amax(x) if made_by is activations.swiglu_again else None
    return Source(made_by, (*(one.detach() for one in two), *([] if amax is None else [amax])))


def _itself(x: Tensor) -> tuple[Tensor, None]:
    return x, None


def _product(a: Tensor, b: Tensor) -> tuple[Tensor, None]:
    return torch.mul(a, b), None


_MADE_OF_TWO: dict[str, Callable[..., tuple[Tensor, Tensor | None]]] = {
    "MulBackward0": _product,
    activations.SWIGLU_NODE: activations.swiglu_again,
}
"""By the name of a node."""
