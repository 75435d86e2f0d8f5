"""Whole block quantizations for `bench_cpu_kernels.py`: fused ops of qshard, torch eager and jitted jnp.

The rivals compute the formulas of NUMERICS.md with ops of their framework, for finite values only, which is less work.
Elements below 8 bits are rounded through their ulp, and E2M1 is packed with shifts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from qshard.formats import FORMATS, ElementFormat, Format, Usage

Contenders = dict[str, tuple[float, Callable[[], object]]]

MEASURED = list(
    {(fmt.scale_dtype, fmt.element.bits, fmt.block): fmt for fmt in reversed(FORMATS.values()) if fmt.block}.values()
)[::-1]
"""Formats with blocks: the first element of each size."""
USAGES = {"rowwise": Usage.ROWWISE, "columnwise": Usage.COLUMNWISE, "both": Usage.BOTH}
GLOBAL_AMAX = 5.0


def cases() -> list[tuple[str, Format, str, float]]:
    """Return (row name, format, usage, bytes per element for x and for each plane with its scales) of each case."""
    found = []
    for fmt in MEASURED:
        assert fmt.block is not None
        scale = (4 if fmt.scale_dtype == "float32" else 1) / (fmt.block[0] * fmt.block[1])
        plane = 1 / fmt.element.codes_per_byte + scale
        for usage in USAGES:
            planes = 2 * plane - (scale if fmt.shares_codes else 0) if usage == "both" else plane
            found.append((f"quantize {fmt.name} {usage}", fmt, usage, 2 + planes))
    return found


class Recorder:
    """PyTorch ops for `quantize_steps` that record each call: its inputs, its outputs and a function to repeat it.

    A repeated call writes into the outputs of the first one.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Any, ...], tuple[Any, ...], Callable[[], object]]] = []

    def __getattr__(self, op: str) -> Callable[..., Any]:
        from qshard.op_table import table
        from qshard.torch_bridge._ops.bind import into, ops

        def run(*inputs: Any, **options: Any) -> Any:
            made = getattr(ops, op)(*inputs, **options)
            outputs = made if isinstance(made, tuple | list) else (made,)
            if op in table():
                attributes = {name: options[name] for name in table()[op].attributes if name != "split"}
                again = partial(getattr(into(*outputs), op), *inputs, **attributes)
            else:  # a copy with the last two axes swapped
                again = partial(outputs[0].copy_, inputs[0].mT)
            self.calls.append((inputs, outputs, again))
            return made

        return run

    def needed(self, results: list[Any]) -> list[Callable[[], object]]:
        """Return the calls that results depend on, in order."""
        wanted, calls = {id(result) for result in results}, []
        for inputs, outputs, again in reversed(self.calls):
            if any(id(output) in wanted for output in outputs):
                wanted.update(map(id, inputs))
                calls.append(again)
        return calls[::-1]


def qshard_quantize(x: Any) -> Contenders:
    """Return the calls of `quantize_steps.quantize`, with a given amax of the whole tensor."""
    import torch

    from qshard._core import quantize_steps

    whole = torch.tensor(GLOBAL_AMAX)
    contenders: Contenders = {}
    for name, fmt, usage, count in cases():
        recorder = Recorder()
        planes = quantize_steps.quantize(recorder, x, fmt, USAGES[usage], reduce_max=lambda _: whole)
        calls = recorder.needed([part for parts in planes.values() for part in parts if part is not None])

        def run(calls: list[Callable[[], object]] = calls) -> None:
            for call in calls:
                call()

        contenders[f"{name} qshard"] = (count, run)
    return contenders


def _planes(x: Any, fmt: Format, usage: str, plane: Callable[..., Any], transposed: Callable[..., Any]) -> list[Any]:
    """Compute codes and scales of one plane or both in a rival, stored as qshard does."""

    def packed(data: Any) -> Any:
        return data[:, ::2] | (data[:, 1::2] << 4) if fmt.element.bits == 4 else data

    results = []
    if usage != "columnwise" or fmt.shares_codes:
        data, scale_inv = plane(x, fmt, fmt.block)
        if usage != "columnwise":
            results += [packed(data), scale_inv]
    if usage != "rowwise":
        if not fmt.shares_codes:
            data, scale_inv = plane(x, fmt, fmt.block[::-1])
        if fmt.transposes_columns:
            data, scale_inv = transposed(data, scale_inv)
        results += [packed(data), scale_inv]
    return results


def torch_quantize(x: Any) -> Contenders:
    import torch

    def codes(blocks: Any, fmt: Format, scale: Any) -> Any:
        y = blocks.float() * scale
        if fmt.element.bits == 8:
            return y.clamp_(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        return few_bits(y, fmt.element)

    def few_bits(y: Any, element: ElementFormat) -> Any:
        a, least, mantissa = y.abs().clamp_(max=element.max), 1 - element.bias, element.mantissa_bits
        exponent = (a.view(torch.int32) >> 23).clamp_(min=least + 127)
        units = a * ((254 + mantissa - exponent) << 23).view(torch.float32)  # in the last place
        code = torch.round(units).to(torch.int32) + ((exponent - (least + 127)) << mantissa)
        return (code | (y.signbit().to(torch.int32) << (element.bits - 1))).to(torch.uint8)

    def scales(amax: Any, fmt: Format) -> tuple[Any, Any]:
        if fmt.scale_dtype == "float32":
            scale = torch.where(amax > 0, 448 / amax, 1.0)
            scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
            return scale, 1 / scale
        if fmt.scaling.global_scale is None:
            v = (amax * (1 / fmt.element.max)).view(torch.int32)
            e = (v >> 23) + ((v & 0x7FFFFF) != 0)
            return ((254 - e) << 23).view(torch.float32), e.to(torch.uint8)
        s = 2688 / GLOBAL_AMAX
        d = (amax * (s / 6)).clamp_(max=448).to(torch.float8_e4m3fn)
        return (1 / (d.float() * (1 / s))).clamp_(max=3.4028234e38), d.view(torch.uint8)

    def plane(x: Any, fmt: Format, block: tuple[int, int]) -> tuple[Any, Any]:
        (rows, cols), (m, k) = block, x.shape
        blocks = x.view(m // rows, rows, k // cols, cols)
        scale, scale_inv = scales(blocks.abs().amax((1, 3), keepdim=True).float(), fmt)
        return codes(blocks, fmt, scale).view(m, k), scale_inv.view(m // rows, k // cols)

    def transposed(data: Any, scale_inv: Any) -> tuple[Any, Any]:
        return data.t().contiguous(), scale_inv.t().contiguous()

    return {
        f"{name} torch": (count, lambda f=fmt, u=usage: _planes(x, f, u, plane, transposed))
        for name, fmt, usage, count in cases()
    }


def jnp_quantize(x: Any, wait: Callable[..., Callable[[], object]]) -> Contenders:
    import jax
    import jax.numpy as jnp

    def bits(v: Any) -> Any:
        return jax.lax.bitcast_convert_type(v, jnp.int32)

    def power(v: Any) -> Any:
        return jax.lax.bitcast_convert_type(v, jnp.float32)

    def codes(y: Any, fmt: Format) -> Any:
        if fmt.element.bits == 8:
            return jnp.clip(y, -448, 448).astype(jnp.float8_e4m3fn)
        element, least, mantissa = fmt.element, 1 - fmt.element.bias, fmt.element.mantissa_bits
        a = jnp.minimum(jnp.abs(y), element.max)
        exponent = jnp.maximum(bits(a) >> 23, least + 127)
        units = a * power((254 + mantissa - exponent) << 23)  # in the last place
        code = jnp.round(units).astype(jnp.int32) + ((exponent - (least + 127)) << mantissa)
        return (code | (jnp.signbit(y) << (element.bits - 1))).astype(jnp.uint8)

    def scales(amax: Any, fmt: Format) -> tuple[Any, Any]:
        if fmt.scale_dtype == "float32":
            scale = power(bits(jnp.where(amax > 0, 448 / amax, 1.0)) & 0x7F800000)
            return scale, 1 / scale
        if fmt.scaling.global_scale is None:
            v = bits(amax * jnp.float32(1 / fmt.element.max))
            e = (v >> 23) + ((v & 0x7FFFFF) != 0)
            return power((254 - e) << 23), e.astype(jnp.uint8)
        s = jnp.float32(2688 / GLOBAL_AMAX)
        d = jnp.minimum(amax * (s / 6), 448).astype(jnp.float8_e4m3fn)
        return jnp.minimum(1 / (d.astype(jnp.float32) * (1 / s)), 3.4028234e38), d

    def plane(x: Any, fmt: Format, block: tuple[int, int]) -> tuple[Any, Any]:
        (rows, cols), (m, k) = block, x.shape
        blocks = x.reshape(m // rows, rows, k // cols, cols).astype(jnp.float32)
        scale, scale_inv = scales(jnp.max(jnp.abs(blocks), (1, 3), keepdims=True), fmt)
        return codes(blocks * scale, fmt).reshape(m, k), scale_inv.reshape(m // rows, k // cols)

    def transposed(data: Any, scale_inv: Any) -> tuple[Any, Any]:
        return jax.lax.optimization_barrier(data).T, scale_inv.T

    return {
        f"{name} jnp": (count, wait(lambda x, f=fmt, u=usage: _planes(x, f, u, plane, transposed), x))
        for name, fmt, usage, count in cases()
    }
