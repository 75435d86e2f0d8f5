"""`numerics_of`: statistics of a training step, for weights, activations and gradients of quantized layers."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from qshard._core.operands import quantize_operand
from qshard._core.validation import quote
from qshard.formats import Format, Usage
from qshard.layout import plane
from qshard.numerics import _kernels as kernels
from qshard.numerics._arrays import ShardedArray, splits_blocks
from qshard.numerics._rectangles import compare_shards
from qshard.numerics._training_steps import COUNTS, LayerStats, StepStats, Totals, layer_stats
from qshard.recipes import NO_PRODUCTS, Recipe, Role
from qshard.torch_bridge._distributed.dtensor import local_of
from qshard.torch_bridge._distributed.scaling_state import plain_name
from qshard.torch_bridge._experts.layer import GroupedLinear
from qshard.torch_bridge._experts.stacked_experts import Experts
from qshard.torch_bridge._fsdp.weight import ShardedWeight, memory_of
from qshard.torch_bridge._losses.heads import LinearCrossEntropy
from qshard.torch_bridge._nn.linear import WeightLayer
from qshard.torch_bridge._nn.operands import ROLES, operand_spec
from qshard.torch_bridge._numerics import as_sharded
from qshard.torch_bridge._ops.bind import ops
from qshard.torch_bridge._ops.collectives import max_over_ranks
from qshard.torch_bridge._probe_calls import ExpertsCall, LayerCall, Measured, measure_plane, scales_of
from qshard.torch_bridge._quantized.validation import check_group, check_model

SUMS = ("signal", "noise", *COUNTS, "elements", "calls")


def numerics_of(model: nn.Module, *, group: dist.ProcessGroup | None = None, weights: bool = True) -> Watch:
    """Measure a step: the weight, activations and gradients of each `Linear` of `model`.

        with numerics_of(model) as seen:
            loss = model(x)
            loss.backward()
        print(seen.stats().of("blocks.0.up", Role.GRADIENT).zeros_made)

    Each tensor is quantized once more, as the layer does it, and compared with its exact values. The rowwise plane is
    measured, with the layer's scales and random numbers. Weights are measured when the context begins. No bit of the
    step changes. Experts of a `GroupedLinear` are separate layers, such as `up.experts.0`, with the rows of their
    groups. A `LinearCrossEntropy` with labels counts one call per chunk of rows, and its gradients are gradients of
    logits.

    Args:
      model: on any device, sharded or not, with layers that `convert` created, and not compiled by `torch.compile`.
      group: the ranks to merge statistics over. The default is all ranks, or this process if `torch.distributed` is not
        initialized.
      weights: measure weights too. If False, only forward and backward passes are measured.

    Returns:
      A `Watch`. Its `stats()` returns a `StepStats` with a row per layer and role, the same on all ranks.

    Raises:
      TypeError: `model` is not a module, or `group` is not a process group.
      ValueError: `model` has no `Linear` of qshard.

    A `LinearCrossEntropy(recipe=...)` that `convert` did not create, and experts in 3-D parameters, are not measured,
    and a warning names them.

    Under FSDP2 each rank measures its shard of a weight and its own activations and gradients. Amaxes are reduced as in
    quantization, and `stats()` runs two all-reduces, of 15 numbers per row. All ranks of the group must enter the
    context together and call `stats()` together. Counts are exact; sums are in float32. Several calls of a layer, as in
    gradient accumulation, are summed. Recomputation under activation checkpointing is not counted.

    The cost per operand is a cast, two reads of codes, and about 20 passes over float32, several times the layer's own
    casts (benchmarks/bench_watch.py). Outside the context it costs nothing.

    >>> import qshard.torch_bridge as qt
    >>> model = qt.convert(nn.Sequential(nn.Linear(16, 32, bias=False)), "CurrentScaling")
    >>> with numerics_of(model) as seen:
    ...     model(torch.full((4, 16), 2.0)).sum().backward()
    >>> row = seen.stats().of("0", Role.ACTIVATION)
    >>> row.amax, row.sqnr_db, row.elements, round(448 * row.scale_low, 6)
    (2.0, inf, 64, 2.0)
    """
    check_model("numerics_of", model)
    check_group("numerics_of", group)
    modules = {".".join(plain_name(model, name)): module for name, module in model.named_modules()}
    layers = {name: module for name, module in modules.items() if isinstance(module, WeightLayer) and module.recipe}
    if unsupported := next((name for name, layer in layers.items() if _recipe_of(layer).by_product), None):
        raise NotImplementedError(
            f"numerics_of: {unsupported} ({layers[unsupported].recipe}) {NO_PRODUCTS}; convert the model with a recipe "
            "without them"
        )
    grouped = [
        module
        for module in modules.values()
        if isinstance(module, GroupedLinear) and not isinstance(module.experts, Experts)
    ]
    if not layers:
        raise ValueError(
            f"numerics_of: model ({quote(type(model))}) has no converted layer; convert it with a recipe first"
        )
    others = [
        name
        for name, module in modules.items()
        if isinstance(module, LinearCrossEntropy) and not isinstance(module, WeightLayer) and "recipe" in module.loss
    ]
    if others:
        warnings.warn(
            f"numerics_of: {', '.join(others)} (LinearCrossEntropy with recipe=) are not measured; convert them with "
            "the recipe instead",
            stacklevel=2,
        )
    if experts := [name for name, module in modules.items() if isinstance(module, Experts)]:
        warnings.warn(
            f"numerics_of: {', '.join(experts)} (3-D parameters of experts) are not measured; use a GroupedLinear "
            "with a layer for each expert",
            stacklevel=2,
        )
    return Watch(layers, group, weights, grouped)


class Watch:
    """Context that measures layers, as returned by `numerics_of`."""

    def __init__(
        self,
        layers: dict[str, WeightLayer],
        group: dist.ProcessGroup | None,
        weights: bool,
        grouped: Sequence[GroupedLinear] = (),
    ):
        self._layers, self._group, self._weights, self._grouped = layers, group, weights, grouped
        self._handles: list[Any] = []
        self._seen: dict[tuple[str, Role], Measured] = {}
        self._totals: dict[tuple[str, Role], Totals] = {}
        self._stats: StepStats | None = None

    def __enter__(self) -> Watch:
        if self._handles:
            raise RuntimeError("numerics_of: this context was already entered; call numerics_of again for another step")
        self._seen, self._totals, self._stats = {}, {}, None
        if self._weights:
            for name, layer in self._layers.items():
                self._measure_weight(name, layer)
        names: dict[nn.Module, str] = {layer: name for name, layer in self._layers.items()}
        for name, layer in self._layers.items():
            self._hook(layer, functools.partial(LayerCall, self.add, name, layer))
        for layers in self._grouped:
            experts = [(names[each], cast(WeightLayer, each)) for each in cast(nn.ModuleList, layers.experts)]
            self._hook(layers, functools.partial(ExpertsCall, self.add, experts))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for layer in self._layers.values():
            layer.__dict__.pop("observer", None)

    def _hook(self, module: nn.Module, call: Any) -> None:
        """Create `call(inputs)` before each call of the module, and hook its `measure_gradient` on the result."""
        calls: list[Any] = []

        @torch.no_grad()
        def before(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            calls[:] = [call(*inputs, **named)]

        def after(module: nn.Module, inputs: tuple[Any, ...], y: Any) -> None:
            if calls and isinstance(y, Tensor) and y.requires_grad:
                self._handles.append(y.register_hook(calls[0].measure_gradient))
            calls.clear()

        self._handles.append(module.register_forward_hook(after))
        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))

    def add(self, name: str, role: Role, measured: Measured) -> None:
        self._seen.setdefault((name, role), []).extend(measured)
        self._totals.setdefault((name, role), Totals()).calls += 1

    @torch.no_grad()
    def _measure_weight(self, name: str, layer: WeightLayer) -> None:
        """Measure local shards: on the host if a block is split, rounding is stochastic or scales are per row."""
        weight, fmt = layer.weight, _recipe_of(layer).weight
        if not isinstance(local_of(weight), ShardedWeight):  # Codes of a ZeroOptimizer, or a computed weight.
            return
        whole = as_sharded(weight, "numerics_of")
        where = plane(fmt, whole.shape, Usage.ROWWISE, op="numerics_of", name=name)
        scales = scales_of(layer)
        if fmt.stochastic or splits_blocks(where, whole) or fmt.row_scaled:
            self._totals[name, Role.WEIGHT] = _on_the_host(whole, fmt)
            return
        local = memory_of(weight)
        matrix = local.reshape(-1, local.shape[-1]).contiguous()
        reduce_max = functools.partial(max_over_ranks, group=getattr(whole.others, "groups", ()))
        spec = operand_spec(_recipe_of(layer), Role.WEIGHT, Usage.ROWWISE)
        scale = scales[ROLES.index(Role.WEIGHT)] if scales else None
        planes, _ = quantize_operand(ops, matrix, spec, scale=scale, reduce_max=reduce_max)
        if whole.rectangles:  # Only the first replica counts.
            self.add(name, Role.WEIGHT, measure_plane(matrix, planes[Usage.ROWWISE], fmt))

    def stats(self) -> StepStats:
        """Return the rows, merged over all ranks. Within the context, it covers the calls so far.

        Raises:
          RuntimeError: no forward pass of any layer was measured on any rank.
        """
        if self._stats is not None:
            return self._stats
        keys = [(name, role) for name in self._layers for role in Role]
        totals = [self._total(key) for key in keys]
        self._reduce(totals)
        if not any(total.calls for (_, role), total in zip(keys, totals, strict=True) if role is Role.ACTIVATION):
            raise RuntimeError(
                f"numerics_of: no forward pass of its {len(self._layers)} layers was seen; run the step inside the "
                "with block, without torch.compile"
            )
        rows: list[LayerStats] = []
        for (name, role), total in zip(keys, totals, strict=True):
            if total.calls:
                rows.append(layer_stats(name, role, _recipe_of(self._layers[name]).format(role), total))
        stats = StepStats(tuple(rows))
        if not self._handles:
            self._stats = stats
        return stats

    def _total(self, key: tuple[str, Role]) -> Totals:
        total, found = Totals(), self._seen.get(key, [])
        values = torch.stack([packed for packed, _ in found]).cpu().tolist() if found else []
        for (amax, signal, noise, low, high, *counts), (_, elements) in zip(values, found, strict=True):
            named = {name: int(count) for name, count in zip(COUNTS, counts, strict=True)}
            square = amax * amax
            total += Totals(amax, signal * square, noise * square, low, high, **named, elements=elements)
        if key in self._totals:
            total += self._totals[key]
        return total

    def _reduce(self, totals: Sequence[Totals]) -> None:
        group = self._group
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(group) == 1:
            return
        device = torch.device("cpu")
        if "nccl" in dist.get_backend(group):
            device = torch.device("cuda", torch.cuda.current_device())
        sums = torch.tensor([[float(getattr(t, name)) for name in SUMS] for t in totals], dtype=torch.float64)
        # Reduced by maximum. The last one is negated, so its minimum is found.
        most = torch.tensor([[t.amax, t.scale_high, -t.scale_low] for t in totals], dtype=torch.float64)
        for values, op in ((sums, dist.ReduceOp.SUM), (most, dist.ReduceOp.MAX)):
            there = values.to(device)
            dist.all_reduce(there, op=op, group=group)
            values.copy_(there)
        for total, of_sums, of_most in zip(totals, sums.tolist(), most.tolist(), strict=True):
            for name, value in zip(SUMS, of_sums, strict=True):
                setattr(total, name, value if name in SUMS[:2] else int(value))
            total.amax, total.scale_high, total.scale_low = of_most[0], of_most[1], -of_most[2]


def _recipe_of(layer: WeightLayer) -> Recipe:
    assert layer.recipe is not None
    return layer.recipe


def _on_the_host(whole: ShardedArray, fmt: Format) -> Totals:
    """Measure the local part of a weight with the kernels of `qshard.numerics`."""
    total = Totals(calls=int(bool(whole.rectangles)))
    for rectangle in compare_shards(whole, fmt, Usage.ROWWISE, 0, "numerics_of"):
        sums = rectangle.sums(lambda elements: None)
        there = kernels.ops.amax_tensor(np.where(np.isfinite(rectangle.x), rectangle.x, 0).astype(np.float32), lead=0)
        scales = rectangle.scales[np.isfinite(rectangle.scales) & (rectangle.scales > 0)]
        total += Totals(
            amax=float(there),
            signal=sums.signal,
            noise=sums.noise,
            scale_low=float(scales.min(initial=np.inf)),
            scale_high=float(scales.max(initial=0.0)),
            **{name: getattr(sums, name) for name in COUNTS},
            elements=sums.elements,
        )
    return total
