"""Codes of the input x of linear layers: shared by layers with the same x, and saved for backward in little memory.

**Shared codes.** Layers that receive the same tensor, such as q, k and v, or gate and up, use the same codes: the first
layer quantizes x, the others find the codes, and autograd saves them once. Codes are shared only during one call of a
converted module (`module_calls.py`): its `forward` passes x to the layers, and nothing else writes to x meanwhile. The
cache holds one x, identified by object and version, in each format that its layers use. It is dropped when the call
ends, when x dies or when another x replaces it. If a layer requests the same x again, the codes in that format are
computed again. A write in place between two layers changes the version of x, so it is detected.

Nothing is cached under `torch.compile` or CUDA graph capture: compilers merge equal ops themselves, and a captured
graph must not read tensors from outside. Stochastically rounded codes are not cached either.

Under delayed scaling the layers use the scale of the first layer, and each records the amax in its own state. They see
equal amaxes, so their scales are equal from the first update on, and each of them is a valid scale for x.

**Recomputed codes.** If autograd already saves x, or the factors of x, no codes are saved. The backward pass recomputes
them with the same bits.

| x | saved tensor | saved by |
| --- | --- | --- |
| the result of attention, relu, softmax, ... | x | the node that computed x: `_saved_output`, `_saved_result` |
| `a * b`, and `swiglu(a, b)` (`activations.py`) | a and b | the node that computed x |

Factors are read only if no `saved_tensors_hooks` are active, as they are under activation checkpointing, because the
saved tensors of a node may be unpacked only once. Otherwise codes are saved. Codes are also saved if x was computed
before the running module call began, because something may have written to its factors since.

Compiled layers save codes too, unless `activation_memory_budget` of PyTorch is below 1. They then save x itself, which
PyTorch's partitioner does not store if other saved tensors give it: it repeats norms and activations, and no products.
Compiled kernels may round intermediate results of that repetition in other places.
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
from qshard.torch_bridge._nn.operands import matrix_of
from qshard.torch_bridge._ops.eager import is_compiling, may_reuse
from qshard.torch_bridge._quantized.gemm import Operand, Values
from qshard.torch_bridge._torch_internals import (
    base_of,
    current_dispatch_mode,
    has_memory_budget,
    has_saved_tensors_hooks,
    saved_factors,
    saves_its_result,
    stream_of,
)

Planes = tuple[dict[Usage, Operand | Values], list[Tensor]]
"""Planes of one tensor by usage; and under delayed scaling its amax, to be recorded, and its scale."""


class _CachedPlanes:
    """Planes of one x in one format, and the layers that have used them."""

    def __init__(self, key: Any):
        self.key = key
        self.layers: set[Hashable] = set()
        self.planes: dict[Usage, Operand | Values] = {}
        self.others: list[Tensor] = []


class _Codes:
    """All cached planes of one x: products of one layer may have other formats."""

    def __init__(self, x: weakref.ref[Tensor], version: int):
        self.x, self.version = x, version
        self.planes: list[_CachedPlanes] = []

    def are_of(self, x: Tensor) -> bool:
        return self.x() is x and self.version == x._version

    def take(self, key: Any, layer: Hashable) -> _CachedPlanes:
        """Return the entry of this key: an empty one if there is none yet, or if `layer` has used it."""
        for i, cached in enumerate(self.planes):
            if cached.key == key:
                if layer not in cached.layers:
                    return cached
                del self.planes[i]
                break
        self.planes.append(_CachedPlanes(key))
        return self.planes[-1]


def shared_planes(x: Tensor, usage: Usage, key: Any, layer: Hashable, make: Callable[[Usage], Planes]) -> Planes:
    """Return planes of x, and compute those that are not cached with `make`.

    Equal keys give equal planes: `key` is everything besides x that the planes depend on. A layer that requests the
    same x again gets newly computed planes.
    """
    call = module_calls.call_that_shares(x) if _is_remembered(x) else None
    if call is None:
        return make(usage)
    codes: _Codes | None = call.codes
    if codes is None or not codes.are_of(x):
        call.codes = None  # Frees the old codes before new ones are allocated.
        codes = _Codes(weakref.ref(x, functools.partial(_forget, call)), x._version)
    cached = codes.take((key, *_surroundings(x)), layer)
    missing = [one for one in usage.planes if one not in cached.planes]
    if missing:
        planes, cached.others = make(missing[0] if len(missing) == 1 else usage)
        cached.planes |= planes
        call.codes = codes
    cached.layers.add(layer)
    return {one: cached.planes[one] for one in usage.planes}, cached.others


def _forget(call: module_calls.ModuleCall, x: weakref.ref[Tensor]) -> None:
    """Drop the cached codes when x dies, possibly in another thread."""
    codes = call.codes
    if codes is not None and codes.x is x:
        call.codes = None


def _is_remembered(x: Tensor) -> bool:
    """Return True if codes of x may be cached: a plain tensor with a version counter, not traced and not captured."""
    if not may_reuse(x) or type(x) not in (Tensor, torch.nn.Parameter):
        return False
    return not (x.is_inference() or torch.is_inference_mode_enabled())


def _surroundings(x: Tensor) -> tuple[Any, ...]:
    """Return the stream and the dispatch mode that cached codes are bound to.

    Other streams do not wait for this one, and a mode that records ops must see the ops that compute the codes.
    """
    mode = current_dispatch_mode()
    return stream_of(x), None if mode is None else weakref.ref(mode)


class Source(NamedTuple):
    """Tensors that autograd saves anyway, and a function `again` that recomputes x from them.

    `again` returns x, in any shape with the same rows, and its amax or None. The last tensor may be the amax.
    """

    again: Callable[..., tuple[Tensor, Tensor | None]]
    tensors: tuple[Tensor, ...]


def source_of(x: Tensor, dtype: torch.dtype) -> Source | None:
    """Return the source to recompute x from: x itself or its two factors; None if autograd saves neither.

    Compiled layers save x in `dtype`, the dtype of its product.
    """
    if is_compiling():
        # `detach` makes another tensor even of x, which Dynamo does not accept twice.
        return Source(_itself, (matrix_of(x, dtype).detach(),)) if has_memory_budget() else None
    if type(x) is not Tensor:
        return None
    base = base_of(x)
    whole = x if base is None else base
    node = whole.grad_fn
    if node is None or whole.output_nr != 0:
        return None
    if saves_its_result(node):
        return Source(_itself, (x.detach(),))
    made_by = _FACTOR_NODES.get(type(node).__name__)
    if made_by is None or has_saved_tensors_hooks() or module_calls.call_that_made(x) is None:
        return None
    if x._version or x.shape.numel() != whole.shape.numel() or not (x.is_contiguous() and whole.is_contiguous()):
        return None
    saved: Any = node
    try:
        two = saved.saved_tensors[:2] if made_by is activations.recompute_swiglu else saved_factors(saved)
    # One was written to, or the graph was freed. The backward pass of that node raises its own error.
    except RuntimeError:
        return None
    # Parameters are excluded: FSDP2 may have freed their memory by then.
    if not all(one is not None and one.grad_fn is not None and one.shape == whole.shape for one in two):
        return None
    amax = cached_amax(x) if made_by is activations.recompute_swiglu else None
    return Source(made_by, (*(one.detach() for one in two), *([] if amax is None else [amax])))


def _itself(x: Tensor) -> tuple[Tensor, None]:
    return x, None


def _multiply_factors(a: Tensor, b: Tensor) -> tuple[Tensor, None]:
    return torch.mul(a, b), None


_FACTOR_NODES: dict[str, Callable[..., tuple[Tensor, Tensor | None]]] = {
    "MulBackward0": _multiply_factors,
    activations.SWIGLU_NODE: activations.recompute_swiglu,
}
"""Functions that recompute x from two factors, by the name of the autograd node."""
