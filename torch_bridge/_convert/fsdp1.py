"""FSDP1, `FullyShardedDataParallel`, around converted layers.

FSDP1 flattens the parameters of a unit to one, gathers their values, and gives layers views of what it has gathered. So
each rank quantizes whole weights, alike: codes and scales are those of one device, and nothing has to be reduced for
them. What layers keep between their passes:

| what | between forward and backward |
| --- | --- |
| weights | nothing: the backward pass makes codes of what FSDP1 gathers for it |
| x | its codes, as anywhere; or a part of them on each rank of `activation_group`, which all have that x |
| scales and amaxes | buffers, in float32 whatever FSDP1 casts buffers to; `update_scales` max-reduces amaxes |
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from qshard.torch_bridge._delayed_scaling import DelayedScale
from qshard.torch_bridge._distributed.activation_group import ActivationGroup
from qshard.torch_bridge._distributed.fsdp1 import note_delayed, wrapper_of
from qshard.torch_bridge._fsdp.weight import ShardedWeight, plain
from qshard.torch_bridge._module_tree import modules_of, parameters_of
from qshard.torch_bridge._nn.linear import WeightLayer, replace_parameter
from qshard.torch_bridge._quantized.tensor import QuantizedTensor
from qshard.torch_bridge._quantized.validation import check_group, check_model


def prepare_modules_for_fsdp1(model: nn.Module, *, activation_group: dist.ProcessGroup | None = None) -> nn.Module:
    """Makes converted layers ready for `FullyShardedDataParallel`, in place: call it before the model is wrapped.

    Weights become plain parameters again, the same objects with the same values: FSDP1 has no hooks by which FSDP2
    gathers codes. With `use_orig_params` or without, in every sharding strategy, each layer quantizes the whole weight
    that FSDP1 has gathered, in the dtype of `MixedPrecision(param_dtype=)`: the codes of one device. None are kept for
    the backward pass, for which FSDP1 gathers the weight again. Buffers of delayed scaling stay float32 under
    `MixedPrecision(buffer_dtype=)`.

    Args:
      model: after `convert`, or with `Linear`s in it, on any device, also meta.
      activation_group: ranks that have the very same activations, as those of tensor parallelism by hand. Each keeps
        1/W of the codes of x from forward to backward, which then gathers them, a byte an element or half a byte. Not
        the ranks of FSDP1: they have other batches, and with the same ones would train no faster. The first time that
        a layer keeps codes, ranks compare them, and raise ValueError, all of them, if they differ. Under
        `torch.compile` each rank keeps all.

    Returns:
      `model`.

    Raises:
      ValueError: a parameter is a primary weight, or codes, which FSDP1 cannot flatten; or is a DTensor; or the model
        is wrapped already. Nothing has been changed then, and nothing sent. FSDP1 raises for sharded weights that were
        not prepared.

    `update_scales` and `scaling_state` serve DelayedScaling as under FSDP2; given the wrapped model, `update_scales`
    reduces over its ranks, those of shards and of replicas.

    >>> from qshard.torch_bridge import convert
    >>> model = convert(nn.Sequential(nn.Linear(16, 16)), "CurrentScaling")
    >>> type(prepare_modules_for_fsdp1(model)[0].weight)
    <class 'torch.nn.parameter.Parameter'>

    Sources: TransformerEngine, `prepare_te_modules_for_fsdp`.
    """
    check_model("prepare_modules_for_fsdp1", model)
    check_group("prepare_modules_for_fsdp1", activation_group)
    _check(model)
    for module in modules_of(model):
        if isinstance(module, DelayedScale):
            module.keep_bits()
        elif isinstance(module, WeightLayer):
            module.activation_group = None if activation_group is None else ActivationGroup(activation_group)
    for weight in parameters_of(model):
        if isinstance(weight, ShardedWeight):
            name, delayed = weight.scale_state.name, weight.scale_state.delayed
            replace_parameter(weight, nn.Parameter(plain(weight), weight.requires_grad))
            if delayed is not None:
                note_delayed(weight, name, delayed)
    return model


def _check(model: nn.Module) -> None:
    """Raises ValueError if FSDP1 cannot have `model`."""
    for name, module in model.named_modules():
        if (wrapper := wrapper_of(module)) is not None:
            raise ValueError(
                f"prepare_modules_for_fsdp1: {name or 'model'} ({wrapper}) has already taken the weights of its "
                "layers; call it after convert and before wrapping the model"
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            kind, do = "DTensor", "shard it with fully_shard instead"
        elif isinstance(parameter, QuantizedTensor):
            kind, do = f"QuantizedTensor, {parameter.format}", "dequantize it, or use fully_shard"
        elif isinstance(parameter, ShardedWeight) and parameter.scale_state.primary is not None:
            kind, do = f"primary, {parameter.scale_state.fmt}", "convert with primary=False, or use fully_shard"
        else:
            continue
        raise ValueError(f"prepare_modules_for_fsdp1: {name} ({kind}) is not a plain tensor, which FSDP1 needs; {do}")
