"""Numbers in a dtype that kernels take."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Floats:
    """Numbers in a dtype that kernels take, and how many of them were beyond float32."""

    array: NDArray[Any]
    beyond: int = 0

    @property
    def dtype(self) -> str:
        return str(self.array.dtype)


@np.errstate(all="ignore")
def as_float(x: Any, op: str) -> Floats:
    """`x` in NumPy, as float32, bfloat16 or float16. What has one of these dtypes is not copied on the host."""
    if hasattr(x, "detach"):  # torch
        x = _of_torch(x.detach().cpu())
    array = np.from_dlpack(x) if hasattr(x, "__dlpack__") and not hasattr(x, "__array__") else np.asarray(x)
    if array.dtype.kind in "cOSUMm" or array.dtype.names:
        raise TypeError(f"{op}: x ({array.dtype}) is not an array of real numbers; take its parts")
    if array.dtype.name in ("float32", "bfloat16", "float16") and array.dtype.isnative:
        return Floats(array)
    narrow = array.astype(np.float32)
    if array.dtype.kind != "f" or array.dtype.itemsize <= 4:
        return Floats(narrow)
    return Floats(
        narrow, int(np.count_nonzero((np.isinf(narrow) & np.isfinite(array)) | ((narrow == 0) & (array != 0))))
    )


def _of_torch(x: Any) -> Any:
    """In NumPy. Of a bfloat16 tensor the same memory; those of fewer bits are exact in float32."""
    torch = sys.modules["torch"]
    if x.dtype == torch.bfloat16:
        return x.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy() if x.dtype in (torch.float16, torch.float64) or not x.is_floating_point() else x.float().numpy()
