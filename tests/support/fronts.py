"""One small adapter for each front end, so that a test states a property once: `def test_x(front): ...`.

An adapter takes and gives NumPy arrays. Values keep their ml_dtypes dtype; codes (one-byte dtypes) come back as uint8,
since bits are what tests compare. Frameworks are imported when an adapter is made, never with this module.
"""

from __future__ import annotations

from typing import Any, Protocol

import ml_dtypes
import numpy as np


class Front(Protocol):
    """What a test may ask of a front end.

    Attributes:
      name: "jax" or "torch".
      device: "cpu" or "cuda", where arrays are put.
      qshard: the front end's module, `qshard.jax` or `qshard.torch_bridge`.
    """

    name: str
    device: str
    qshard: Any

    def __init__(self, device: str) -> None: ...

    def device_exists(self) -> bool: ...

    def array(self, x: np.ndarray) -> Any:
        """The framework's array of `x`, on the device, with the same dtype and bits."""

    def numpy(self, array: Any) -> np.ndarray:
        """The NumPy array of `array`, with the same bits; one-byte dtypes as uint8."""

    def quantize(self, x: np.ndarray, fmt: Any, **options: Any) -> Any:
        """The front end's quantized object of `x`; `options` such as `usage` are passed on."""

    def dequantize(self, quantized: Any, dtype: Any = None) -> np.ndarray:
        """The values of a quantized object; `dtype` is a NumPy dtype."""


def codes(x: np.ndarray) -> np.ndarray:
    """`x`, with a one-byte dtype viewed as uint8."""
    return x.view(np.uint8) if x.dtype.itemsize == 1 else x


class JaxFront:
    name = "jax"

    def __init__(self, device: str) -> None:
        import jax

        import qshard.jax

        self.device, self.jax, self.qshard = device, jax, qshard.jax

    def device_exists(self) -> bool:
        try:
            return bool(self.jax.devices(self.device))
        except RuntimeError:  # JAX's answer for a platform that it cannot start.
            return False

    def array(self, x: np.ndarray) -> Any:
        return self.jax.device_put(x, self.jax.devices(self.device)[0])

    def numpy(self, array: Any) -> np.ndarray:
        return codes(np.asarray(array))

    def quantize(self, x: np.ndarray, fmt: Any, **options: Any) -> Any:
        return self.qshard.quantize(self.array(x), fmt, **options)

    def dequantize(self, quantized: Any, dtype: Any = None) -> np.ndarray:
        return self.numpy(quantized.dequantize(dtype))


class TorchFront:
    name = "torch"

    def __init__(self, device: str) -> None:
        import torch

        import qshard.torch_bridge

        self.device, self.torch, self.qshard = device, torch, qshard.torch_bridge
        # NumPy has no native twin of these: (ml_dtypes dtype, torch dtype, integer dtype that both can be viewed as).
        names = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
        self.foreign = [(np.dtype(getattr(ml_dtypes, name)), getattr(torch, name)) for name in names]

    def device_exists(self) -> bool:
        return self.device == "cpu" or self.torch.cuda.is_available()

    def array(self, x: np.ndarray) -> Any:
        x = np.ascontiguousarray(x).reshape(x.shape)  # ascontiguousarray makes a 0-d array 1-d.
        for numpy_dtype, torch_dtype in self.foreign:
            if x.dtype == numpy_dtype:
                bits = self.torch.from_numpy(x.view(f"u{x.dtype.itemsize}").copy())
                return bits.view(torch_dtype).to(self.device)
        return self.torch.from_numpy(x.copy()).to(self.device)

    def numpy(self, array: Any) -> np.ndarray:
        array = array.detach().cpu().contiguous()
        if array.dtype.itemsize == 1:
            return array.view(self.torch.uint8).numpy()
        for numpy_dtype, torch_dtype in self.foreign:
            if array.dtype == torch_dtype:
                return array.view(self.torch.uint16).numpy().view(numpy_dtype)
        return array.numpy()

    def quantize(self, x: np.ndarray, fmt: Any, **options: Any) -> Any:
        return self.qshard.quantize(self.array(x), fmt, **options)

    def dequantize(self, quantized: Any, dtype: Any = None) -> np.ndarray:
        return self.numpy(quantized.dequantize(None if dtype is None else self.dtype(dtype)))

    def dtype(self, numpy_dtype: Any) -> Any:
        """The torch dtype of the same name."""
        return getattr(self.torch, np.dtype(numpy_dtype).name)


FRONTS: dict[str, type[Front]] = {front.name: front for front in (JaxFront, TorchFront)}
