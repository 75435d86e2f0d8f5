"""Smoke test of an installed qshard on one framework, or on none, without pytest: `python -P tests/smoke.py jax`.

Quantizes in a format of each kind and runs a linear layer forward and backward. Quantized tensors must have the bits of
`qshard.reference`, and products the bits of NumPy, on small integers whose sums are exact.
"""

import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

import qshard
from qshard import _ffi, formats, reference
from qshard.recipes import MXFP8

FORMATS = ["FP8_E4M3", "FP8_128x128", "MXFP8_E4M3", "MXFP6_E2M3", "MXFP4", "NVFP4"]
Products = list[np.ndarray]


class Jax:
    def __init__(self) -> None:
        import jax

        import qshard.jax

        self.jax, self.qshard = jax, qshard.jax
        self.array, self.numpy = jax.numpy.asarray, np.asarray

    def products(self, x: np.ndarray, w: np.ndarray, dy: np.ndarray) -> Products:
        y, pull = self.jax.vjp(self.jax.jit(lambda x, w: self.qshard.linear(x, w, MXFP8())), x, w)
        return [np.asarray(array) for array in (y, *pull(self.array(dy)))]


class Torch:
    def __init__(self) -> None:
        import torch

        import qshard.torch_bridge

        self.torch, self.qshard = torch, qshard.torch_bridge
        self.array = torch.from_numpy
        self.check_errors()

    def check_errors(self) -> None:
        """Check an error of a kernel, which passes through PyTorch. A wheel has a C++ runtime of its own."""
        try:
            self.torch.ops.qshard.amax_tensor(self.torch.ones(2), lead=2)
        except ValueError:
            return
        raise SystemExit("smoke: a wrong call of torch.ops.qshard raised no ValueError")

    def numpy(self, tensor: Any) -> np.ndarray:
        return (tensor.view(self.torch.uint8) if tensor.itemsize == 1 else tensor).numpy()

    def products(self, x: np.ndarray, w: np.ndarray, dy: np.ndarray) -> Products:
        operands = [self.array(x).requires_grad_(), self.array(w).requires_grad_()]
        y = self.qshard.linear(*operands, None, MXFP8())
        return [array.detach().numpy() for array in (y, *self.torch.autograd.grad(y, operands, self.array(dy)))]


def same(name: str, actual: np.ndarray, expected: np.ndarray) -> None:
    if actual.shape != expected.shape or actual.tobytes() != expected.tobytes():
        raise SystemExit(f"smoke: {name} differs from the reference:\n{actual}\n{expected}")


def check_simd() -> None:
    """A build without processor detection runs everywhere, slowly and without a word."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    if {"avx2", "bmi2", "fma"} <= set(flags) and _ffi.simd_targets() == ["scalar"]:
        raise SystemExit("smoke: this processor has AVX2, and the kernels found only scalar")


def main(framework: str) -> None:
    check_simd()
    if framework == "none":
        print(qshard.build_info())
        return
    front = {"jax": Jax, "torch": Torch}[framework]()
    rng = np.random.default_rng(0)
    x = rng.standard_normal((128, 256)).astype(np.float32)
    for fmt in (getattr(formats, name) for name in FORMATS):
        actual, expected = front.qshard.quantize(front.array(x), fmt), reference.quantize(x, fmt)
        same(f"{fmt}: scale_inv", front.numpy(actual.rowwise.scale_inv), expected.rowwise.scale_inv)
        same(f"{fmt}: dequantize", front.numpy(actual.dequantize()), expected.dequantize())
    x, w, dy = (rng.integers(-3, 4, shape).astype(np.float32) for shape in [(64, 96), (32, 96), (64, 32)])
    expected = {"y": x @ w.T, "dx": dy @ w, "dw": dy.T @ x}
    for name, actual in zip(expected, front.products(x, w, dy), strict=True):
        same(f"linear: {name}", actual, expected[name])
    print(
        f"qshard {metadata.version('qshard')}, {framework} {metadata.version(framework)}, {_ffi.simd()}: the same bits"
    )


if __name__ == "__main__":
    main(sys.argv[1])
