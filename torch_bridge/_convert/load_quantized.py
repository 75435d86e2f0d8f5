"""`load_quantized` and `freeze`: converted models with codes as weights, from a file or from their own values."""

from __future__ import annotations

import warnings
from os import PathLike
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qshard._core.operands import check_weight_format
from qshard._core.quantize_steps import Plane
from qshard._core.validation import closest
from qshard._files.reader import CheckpointReader
from qshard.torch_bridge._convert.export import quantized_weight
from qshard.torch_bridge._distributed.dtensor import local_box, local_of
from qshard.torch_bridge._distributed.fsdp1 import is_flattened_model
from qshard.torch_bridge._fsdp.weight import ShardedWeight
from qshard.torch_bridge._nn.linear import WeightLayer
from qshard.torch_bridge._nn.weight_module import WeightModule
from qshard.torch_bridge._quantized.tensor import QuantizedTensor
from qshard.torch_bridge._quantized.validation import check_model

OP = "load_quantized"
NAMED = 3  # tensors that an error names


@torch.no_grad()
def load_quantized(model: nn.Module, path: str | PathLike[str], *, strict: bool = True) -> nn.Module:
    """Load a checkpoint with quantized weights into a converted model.

    | weight in the model | becomes |
    | --- | --- |
    | of a converted layer, whole | codes of the file, frozen: a `QuantizedTensor` parameter without gradient |
    | of a converted layer, sharded or primary | values: each rank reads its part |
    | of any other layer | values in its own dtype |

    The codes are the bytes of the file. Values are `fl(code * scale)`, rounded to the dtype of the parameter. Files of
    MX and NV formats with blocks along K alone fit recipes with 2-D blocks: the forward pass multiplies their codes,
    and the gradient of x the dequantized weight.

    Args:
      model: after `convert`, and after `fully_shard` or `parallelize_module` if it is sharded. It may be on any device
        but meta; call `to_empty` first.
      path: a safetensors file, an index of shards, or a folder with either: of `qshard convert`, or in a format that
        `qshard convert` recognizes, such as DeepSeek, compressed-tensors or ModelOpt.
      strict: raise if the model or the checkpoint has a tensor that the other lacks. Scales of activations in the
        checkpoint never count.

    Returns:
      `model`.

    Raises:
      FileNotFoundError: the checkpoint or one of its files does not exist.
      ValueError: names or shapes differ, the codes of a whole weight are not in the weight format of its recipe, the
        checkpoint has quantized weights that are unknown, or the weights belong to a `ZeroOptimizer` or to
        `FullyShardedDataParallel`. The model is then unchanged.

    Not collective: every rank reads the checkpoint. Under FSDP2, HSDP and tensor parallelism, a weight that is sharded
    has values, and its gathers send codes that are computed from these values.

    >>> import tempfile
    >>> from safetensors.torch import save_file
    >>> from qshard.torch_bridge import convert, quantized_state_dict, to_plain
    >>> path = tempfile.mkdtemp() + "/codes.safetensors"
    >>> tensors, metadata = to_plain(quantized_state_dict(convert(nn.Sequential(nn.Linear(32, 32)), "MXFP8")))
    >>> save_file(tensors, path, metadata)
    >>> load_quantized(convert(nn.Sequential(nn.Linear(32, 32)), "MXFP8"), path)[0].weight
    QuantizedTensor(MXFP8_32x32[nonfinite=nan], shape=(32, 32), dtype=torch.float32, device=cpu)
    """
    check_model(OP, model)
    _check_owner(model)
    reader = CheckpointReader(path, OP)
    targets = {name: each for name, each in model.state_dict(keep_vars=True).items() if isinstance(each, Tensor)}
    layers = {f"{name}.weight" if name else "weight": each for name, each in _layers(model).items()}
    targets = {name: each for name, each in targets.items() if not _is_scaling_state(name, layers)}
    tied: dict[int, list[str]] = {}  # Names of one parameter. The file may have any of them.
    for name, target in targets.items():
        tied.setdefault(id(target), []).append(name)
    in_file = {id(each) for name, each in targets.items() if name in reader.weights or name in reader.arrays}
    _check_names(targets, {name for name, each in targets.items() if id(each) in in_file}, reader, strict)
    there = {name: each for name, each in targets.items() if name in reader.weights or name in reader.arrays}
    for name, target in there.items():
        _check_shape(reader, name, target)
        if name not in reader.weights and isinstance(local_of(target), QuantizedTensor):
            raise ValueError(f"{OP}: {name} has no codes in {path}, but is codes in the model; load into a new model")
    codes = {name: _codes(reader, name, layers[name]) for name in there if _takes_codes(name, reader, layers)}
    for name, target in there.items():
        if name in codes:
            weight = nn.Parameter(codes[name].to(target.device), requires_grad=False)
            for shared in tied[id(target)]:
                if shared in layers:
                    layers[shared].register_parameter("weight", weight)
                else:  # It has no use for codes.
                    _copy_values(reader, name, target)
        else:
            _copy_values(reader, name, target)
    return model


@torch.no_grad()
def freeze(model: nn.Module) -> nn.Module:
    """Replace the weights of converted layers by their codes, so that calls do not quantize them again.

    Every call of a converted layer quantizes its weight, because any write to it must count. `freeze` ends that: the
    weight becomes a `QuantizedTensor` parameter without gradient, and its values are freed. Outputs have the same bits.
    An op that writes to a frozen weight raises. An optimizer that was built before still has the old parameters, and
    updates no weight of the model. Experts in 3-D parameters keep their values, with a warning.

    Args:
      model: after `convert`, not sharded.

    Returns:
      `model`.

    Raises:
      TypeError: `model` is not a module.
      ValueError: no layer of the model has a weight to freeze; a weight is sharded or primary; or the weights belong to
        a `ZeroOptimizer` or to `FullyShardedDataParallel`.

    >>> from qshard.torch_bridge import convert
    >>> freeze(convert(nn.Sequential(nn.Linear(32, 32)), "MXFP8"))[0].weight
    QuantizedTensor(MXFP8_32x32[nonfinite=nan], shape=(32, 32), dtype=torch.float32, device=cpu)
    """
    check_model("freeze", model)
    if (owner := _owner_of(model)) is not None:
        raise ValueError(
            f"freeze: the weights of model ({type(model).__name__}) belong to {owner}; load its state dict into a "
            "converted model without it, and freeze that"
        )
    layers = _layers(model)
    weights = {name: layer for name, layer in layers.items() if not isinstance(layer.weight, QuantizedTensor)}
    others = ((name, each) for name, each in model.named_modules() if name not in layers)
    stacks = [name for name, each in others if isinstance(each, WeightModule) and each.recipe is not None]
    if not layers:
        reason = "call convert first"
        if stacks:
            reason = f"{stacks[0] or 'the model'} has experts in a 3-D parameter, which keep their values"
        raise ValueError(f"freeze: the model has no converted layer with a weight of its own; {reason}")
    if stacks:
        more = f" and {len(stacks) - NAMED} more" if len(stacks) > NAMED else ""
        named = ", ".join(stacks[:NAMED])
        warnings.warn(f"freeze: {named}{more} (experts in 3-D parameters) keep their values", stacklevel=3)
    for name, layer in weights.items():
        local = local_of(layer.weight)
        if isinstance(layer.weight, DTensor) or not isinstance(local, ShardedWeight) or local.scale_state.primary:
            raise ValueError(
                f"freeze: {name}.weight is sharded or primary, so it keeps its values; freeze a whole model"
            )
    frozen: dict[int, nn.Parameter] = {}  # Shared weights stay shared.
    for layer in weights.values():
        if id(layer.weight) not in frozen:
            frozen[id(layer.weight)] = nn.Parameter(quantized_weight("freeze", layer.weight), requires_grad=False)
    for layer in weights.values():
        layer.register_parameter("weight", frozen[id(layer.weight)])
    return model


def _owner_of(model: nn.Module) -> str | None:
    """Return the optimizer or wrapper that owns the weights of a model, which are copies or shards of its own."""
    owner = "FullyShardedDataParallel" if is_flattened_model(model) else None
    for module in model.modules():
        owned = (each for each in module._parameters.values() if each is not None and each.requires_grad)
        if "zero_unit" in vars(module) or any(isinstance(each, QuantizedTensor) for each in owned):
            owner = "ZeroOptimizer"
    return owner


def _check_owner(model: nn.Module) -> None:
    if (owner := _owner_of(model)) is not None:
        raise ValueError(
            f"{OP}: the weights of model ({type(model).__name__}) belong to {owner}; load before convert, which gives "
            f"the model values, then call convert and {owner}, or shard it with fully_shard"
        )


def _layers(model: nn.Module) -> dict[str, WeightLayer]:
    """Return the converted layers that have a recipe now."""
    return {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, WeightLayer) and module.recipe is not None and "weight" in module._parameters
    }


def _is_scaling_state(name: str, layers: dict[str, WeightLayer]) -> bool:
    """Return whether an entry of a state dict is a delayed scale or a seed, which checkpoints of codes do not have."""
    module, _, last = name.rpartition(".")
    if last == "seed":
        return f"{module}.weight" in layers
    return ".delayed." in name or name.startswith("delayed.")


def _takes_codes(name: str, reader: CheckpointReader, layers: dict[str, WeightLayer]) -> bool:
    """Return whether a weight becomes codes: it is of a converted layer, whole, and not primary."""
    if name not in layers or name not in reader.weights:
        return False
    weight = layers[name].weight
    local = local_of(weight)
    is_primary = isinstance(local, ShardedWeight) and local.scale_state.primary is not None
    return not isinstance(weight, DTensor) and not is_primary


def _codes(reader: CheckpointReader, name: str, layer: WeightLayer) -> QuantizedTensor:
    recipe, what = layer.recipe, reader.weights[name]
    assert recipe is not None
    found = reader.read_codes(name, recipe.weight)
    if found is None:
        check_weight_format(OP, name, what.format, recipe, frozen=True)
        found = reader.read_codes(name, what.format)
        assert found is not None
    plane, fmt = found
    return QuantizedTensor(fmt, what.shape, getattr(torch, what.dtype), rowwise=_tensors(plane))


def _tensors(plane: Plane) -> Plane:
    return Plane(*(None if part is None else torch.from_numpy(part) for part in plane))


def _copy_values(reader: CheckpointReader, name: str, target: Tensor) -> None:
    """Copy the values of a tensor, or of this rank's part of it, into a parameter or buffer."""
    local, part = local_of(target), local_box(target).slices
    values = reader.read_values(name, part) if name in reader.weights else reader.read(name, part)
    source = _from_numpy(values).reshape(local.shape).to(local.device, local.dtype)
    state = local.scale_state if isinstance(local, ShardedWeight) else None
    if state is not None and state.is_sealed:
        assert state.primary is not None
        state.primary.load(source)
    else:
        local.copy_(source)


def _from_numpy(values: NDArray[Any]) -> Tensor:
    if values.dtype.name == "bfloat16":
        return torch.from_numpy(values.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(values)


def _check_names(targets: dict[str, Tensor], present: set[str], reader: CheckpointReader, strict: bool) -> None:
    """Raise if a tensor has no partner. The file has `present`, perhaps under the name of a tied tensor."""
    there = reader.weights.keys() | reader.arrays.keys()
    missing = [name for name in targets if name not in present]
    extra = [name for name in there if name not in targets and not name.rpartition(".")[2].endswith("_scale")]
    if len(missing) == len(targets) or (strict and (missing or extra)):
        which, of = (missing, "the model") if missing else (sorted(extra), "the checkpoint")
        more = f" and {len(which) - NAMED} more" if len(which) > NAMED else ""
        like = closest(which[0], there if missing else targets, "the names") if there and targets else "it is empty"
        names = ", ".join(which[:NAMED])
        raise ValueError(f"{OP}: {names}{more} of {of} has no partner ({like}); rename them, or pass strict=False")


def _check_shape(reader: CheckpointReader, name: str, target: Tensor) -> None:
    shape = reader.weights[name].shape if name in reader.weights else reader.arrays[name].shape
    if tuple(target.shape) != tuple(shape):
        raise ValueError(f"{OP}: {name} {shape} is not {tuple(target.shape)}, its shape in the model; build that model")
    if target.is_meta:
        raise ValueError(f"{OP}: {name} is on meta; call model.to_empty(device=...) first")
