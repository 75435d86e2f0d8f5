"""Conversion of quantized tensors to plain tensors and JSON metadata, for files that other programs read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from qshard._core import serialization
from qshard._core.quantize_steps import Plane
from qshard._core.serialization import Description
from qshard._core.validation import quote
from qshard.formats import Usage
from qshard.torch_bridge._quantized.tensor import QuantizedTensor, from_description


def to_plain(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Convert quantized tensors to plain tensors of uint8 and float32, and JSON metadata that describes them.

    Args:
      values: by name: `QuantizedTensor`s, and any other values, which are returned unchanged.

    Returns:
      The tensors, by names such as `w.rowwise.data`, and the metadata, a dict with one string. `_core.serialization`
      defines the names. Memory is shared with `values`, except that no two results share memory, as safetensors
      requires: a tied weight is copied. A stale columnwise plane counts as absent and is left out.

    Raises:
      TypeError: `values` is not a dict, or a value is a dict or list of quantized tensors.
      ValueError: two results have the same name.

    Each rank converts its own tensors.

    >>> import torch
    >>> from qshard.formats import MXFP8_E4M3
    >>> from qshard.torch_bridge import quantize
    >>> q = quantize(torch.ones(2, 64), MXFP8_E4M3)
    >>> tensors, metadata = to_plain({"w": q, "b": torch.ones(2)})
    >>> {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    {'w.rowwise.data': (torch.uint8, (2, 64)), 'w.rowwise.scale_inv': (torch.uint8, (2, 2)), 'b': (torch.float32, (2,))}
    >>> from_plain(tensors, metadata)["w"]
    QuantizedTensor(MXFP8_E4M3, shape=(2, 64), dtype=torch.float32, device=cpu)

    With safetensors: `save_file(tensors, "w.safetensors", metadata)`.
    """
    tensors, metadata = serialization.plain(values, _parts_of)
    return _copy_shared_memory(tensors), metadata


def from_plain(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> dict[str, Any]:
    """Rebuild quantized tensors from the results of `to_plain`, or of `qshard.jax.to_plain`.

    Args:
      tensors: of a file, by name.
      metadata: of the same file. Tensors that it does not describe are returned unchanged; None describes none.

    Returns:
      Quantized tensors, which share memory with `tensors`, and the rest.

    Raises:
      TypeError: an argument is not a dict, or one of `tensors` is not a tensor.
      ValueError: the tensors do not match the metadata, or its version is newer than this library.

    >>> import torch
    >>> from qshard.torch_bridge import quantize
    >>> q = quantize(torch.tensor([[1.0, 0.5]]), "FP8_E4M3")
    >>> from_plain(*to_plain({"w": q}))["w"].dequantize()
    tensor([[1.0000, 0.5000]])
    """
    return serialization.restore(tensors, metadata, _restore_tensor)


def _parts_of(name: str, value: Any) -> tuple[Description, dict[Usage, Plane]] | None:
    if not isinstance(value, QuantizedTensor):
        return None
    description, planes = value.describe()
    contiguous = {
        usage: Plane(*(None if part is None else part.detach().contiguous() for part in parts))
        for usage, parts in planes.items()
    }
    return description, contiguous


def _copy_shared_memory(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with copies of the tensors that are in the memory of an earlier one."""
    seen: set[int] = set()
    found = dict(values)
    for name, value in values.items():
        if type(value) in (Tensor, Parameter) and value.numel():
            memory = value.untyped_storage().data_ptr()
            if memory in seen:
                found[name] = value.detach().clone()
            seen.add(memory)
    return found


def _restore_tensor(name: str, description: Description, planes: dict[Usage, Plane]) -> QuantizedTensor:
    for part, array in serialization.flat(planes).items():
        if not isinstance(array, Tensor):
            what = f"{serialization.key_of(name, part)} ({quote(array)}) is not a torch.Tensor"
            raise TypeError(f"from_plain: {what}; load the file with safetensors.torch")
    return from_description("from_plain", name, description, planes)
