"""Preparation of converted layers for FSDP1, `FullyShardedDataParallel`.

FSDP1 flattens the parameters of a unit into one, gathers their values, and gives layers views of the result. So each
rank quantizes whole weights: codes and scales are the same as on one device, and amaxes need no reduction. Storage
between the forward and the backward pass of a layer:

| tensor | between forward and backward |
| --- | --- |
| weights | nothing: the backward pass quantizes the values that FSDP1 gathers for it |
| x | its codes, as always; with `activation_group`, each of its ranks, which have the same x, saves a part |
| scales and amaxes | float32 buffers, whatever FSDP1 casts buffers to; `update_scales` max-reduces amaxes |
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from qshard.torch_bridge._delayed_scaling import DelayedScale
from qshard.torch_bridge._distributed.activation_group import ActivationGroup
from qshard.torch_bridge._distributed.fsdp1 import attach_delayed, wrapper_of
from qshard.torch_bridge._fsdp.weight import ShardedWeight, plain
from qshard.torch_bridge._modules import modules_of, parameters_of
from qshard.torch_bridge._nn.linear import WeightLayer
from qshard.torch_bridge._nn.weight_module import replace_parameter
from qshard.torch_bridge._quantized.tensor import QuantizedTensor
from qshard.torch_bridge._quantized.validation import check_group, check_model


def prepare_modules_for_fsdp1(model: nn.Module, *, activation_group: dist.ProcessGroup | None = None) -> nn.Module:
    """Prepare converted layers for `FullyShardedDataParallel`, in place. Call it before the model is wrapped.

    Weights become plain parameters again, the same objects with the same values, because FSDP1 lacks the hooks by which
    FSDP2 gathers codes. With or without `use_orig_params`, in every sharding strategy, each layer quantizes the whole
    weight that FSDP1 gathers, in the dtype of `MixedPrecision(param_dtype=)`: the same codes as on one device.
    Codes of weights are not saved for backward, because FSDP1 gathers the weight again. Buffers of delayed scaling stay
    float32 under `MixedPrecision(buffer_dtype=)`.

    Args:
      model: after `convert`, or built from `Linear`; on any device, also meta.
      activation_group: ranks with the same activations, such as the ranks of hand-written tensor parallelism. Each rank
        saves 1/W of the codes of x for backward, which then gathers them, 1 or 1/2 byte an element. Do not pass the
        ranks of FSDP1: they have different batches. When a layer first saves codes, the ranks compare them, and all
        raise ValueError if they differ. Under `torch.compile` each rank saves all codes.

    Returns:
      `model`.

    Raises:
      TypeError: `model` is not a module, or `activation_group` is not a process group.
      ValueError: a parameter is a primary weight or codes, which FSDP1 cannot flatten, or a DTensor; or the model is
        already wrapped. The model is then unchanged, and nothing was communicated. FSDP1 itself raises for sharded
        weights that were not prepared.

    `update_scales` and `scaling_state` work as under FSDP2. With the wrapped model, `update_scales` reduces over the
    ranks of its shards and replicas.

    >>> from qshard.torch_bridge import convert
    >>> model = convert(nn.Sequential(nn.Linear(16, 16)), "CurrentScaling")
    >>> type(prepare_modules_for_fsdp1(model)[0].weight)
    <class 'torch.nn.parameter.Parameter'>

    Source: TransformerEngine, `prepare_te_modules_for_fsdp`.
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
                attach_delayed(weight, name, delayed)
    return model


def _check(model: nn.Module) -> None:
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
