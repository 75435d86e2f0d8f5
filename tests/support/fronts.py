"""One small adapter for each front end, so that a test states a property once: `def test_x(front): ...`.

An adapter takes and gives NumPy arrays. Values keep their ml_dtypes dtype; codes (one-byte dtypes) come back as uint8,
since bits are what tests compare. Frameworks are imported when an adapter is made, never with this module.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import ml_dtypes
import numpy as np

from qshard import reference
from qshard.formats import Format
from qshard.recipes import Recipe, Role
from support import torch_ranks
from support.awkward import assert_bits_equal
from support.formats import usages_of

T = TypeVar("T")
Products = tuple[np.ndarray, np.ndarray, np.ndarray]
"""y, dx and dw of a linear layer."""
States = dict[Role, tuple[Any, Any]]
"""(scale, amax_history) of each tensor of a layer."""
PLANES = ("rowwise", "columnwise")
ROUNDED_TO_BFLOAT16 = 2.0**-7 + 2.0**-16
"""Of both operands. On GPUs also what FP8 GEMMs lose, whose sums keep 14 bits (arXiv:2412.19437)."""
PARTS = ("data", "scale_inv", "global_scale_inv")


class Front(Protocol):
    """What a test may ask of a front end.

    Attributes:
      name: "jax" or "torch".
      device: "cpu" or "cuda", where arrays are put.
      qshard: the front end's module, `qshard.jax` or `qshard.torch_bridge`.
      examples: how many cases of a product a test looks at: a call in JAX is compiled for each shape.
      result_roundings: how often a sum is rounded to the dtype of a product.
    """

    name: str
    device: str
    qshard: Any
    examples: int
    result_roundings: int

    def __init__(self, device: str) -> None: ...

    def devices(self) -> int:
        """How many devices, or ranks, there are."""

    def array(self, x: np.ndarray) -> Any:
        """The framework's array of `x`, on the device, with the same dtype and bits."""

    def numpy(self, array: Any) -> np.ndarray:
        """The NumPy array of `array`, with the same bits; one-byte dtypes as uint8."""

    def quantize(self, x: np.ndarray, fmt: Any, **options: Any) -> Any:
        """The front end's quantized object of `x`; `options` such as `usage` are passed on."""

    def dequantize(self, quantized: Any, dtype: Any = None, **options: Any) -> np.ndarray:
        """The values of a quantized object in a NumPy dtype; `options` such as `usage` are passed on."""

    def linear(self, x: np.ndarray, w: np.ndarray, dy: np.ndarray, recipe: Recipe, *, seed: int = 0) -> Products:
        """y, and the gradients of x and w where that of y is `dy`."""

    def operand_rounding(self, recipe: Recipe) -> float:
        """What a product may lose of the sum of its terms' magnitudes because operands are rounded."""

    def delayed_step(
        self, batches: Sequence[Products], recipe: Recipe, states: States
    ) -> tuple[list[Products], dict[Role, np.ndarray], States]:
        """A step of one layer over microbatches (x, w, dy): their products, the merged amaxes, and the states after."""


def some(front: Front, cases: Sequence[T], key: str) -> Sequence[T]:
    """As many of `cases` as the front end is to look at: the same in every run, and others for another key."""
    return random.Random(key).sample(cases, min(front.examples, len(cases)))


def assert_quantized(front: Front, actual: Any, expected: Any) -> None:
    """Both planes, which of them there are, their dtypes and every bit are those of `expected`, of the reference."""
    fmt = actual.format
    assert (fmt, dtype_name(actual)) == (expected.format, str(expected.dtype))
    assert (actual.global_scale_inv is None) == (expected.global_scale_inv is None)
    # A columnwise plane without elements does not tell how the rows were shaped.
    assert tuple(actual.shape) == expected.shape or (actual.rowwise is None and 0 in expected.shape)
    for name in PLANES:
        plane = getattr(actual, name)
        assert_plane(front, plane, getattr(expected, name), name)
        if plane is not None:
            assert (dtype_name(plane.data), dtype_name(plane.scale_inv)) == (fmt.data_dtype, fmt.scale_dtype)


def assert_plane(front: Front, actual: Any, expected: Any, name: str = "plane") -> None:
    """Codes and scales have the bits of the reference's, or there are none in both."""
    assert (actual is None) == (expected is None), name
    for part in PARTS:
        got, want = getattr(actual, part, None), getattr(expected, part, None)
        assert (got is None) == (want is None), f"{name}.{part}"
        if got is not None:
            assert_bits_equal(front.numpy(got), want, f"{name}.{part}")


def dtype_name(array: Any) -> str:
    """The dtype's name, the same in every framework."""
    return str(array.dtype).removeprefix("torch.")


def codes(x: np.ndarray) -> np.ndarray:
    """`x`, with a one-byte dtype viewed as uint8."""
    return x.view(np.uint8) if x.dtype.itemsize == 1 else x

    def shapes_to_cut(self, fmt: Format, shards: int) -> list[tuple[int, int]]:
        """Weights whose rows ranks can cut, into uneven shards and parts of blocks too; none if `fmt` is refused."""

    def assert_law(self, weights: Sequence[np.ndarray], fmt: Format, shards: int) -> None:
        """Every one of `shards` ranks gathers the bits of each whole weight, or learns at once that it cannot."""


class JaxFront:
    name = "jax"
    examples = 2
    result_roundings = 2  # A GEMM of codes gives bfloat16, which is then scaled.

    def __init__(self, device: str) -> None:
        import jax

        import qshard.jax

        self.device, self.jax, self.qshard = device, jax, qshard.jax

    def devices(self) -> int:
        try:
            return len(self.jax.devices(self.device))
        except RuntimeError:  # JAX's answer for a platform that it cannot start.
            return 0

    def array(self, x: np.ndarray) -> Any:
        return self.jax.device_put(x, self.jax.devices(self.device)[0])

    def numpy(self, array: Any) -> np.ndarray:
        return codes(np.asarray(array))

    def quantize(self, x: np.ndarray, fmt: Any, **options: Any) -> Any:
        return self.qshard.quantize(self.array(x), fmt, **options)

    def dequantize(self, quantized: Any, dtype: Any = None, **options: Any) -> np.ndarray:
        return self.numpy(quantized.dequantize(dtype, **options))

    def linear(self, x: np.ndarray, w: np.ndarray, dy: np.ndarray, recipe: Recipe, *, seed: int = 0) -> Products:
        words = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)
        made = self.step(recipe)(*map(self.array, (x, w, dy)), {"seed": words}, {})
        y, dx, dw = map(self.numpy, made[:3])
        return y, dx, dw

    @functools.cache  # noqa: B019 - an adapter lives as long as a test.
    def step(self, recipe: Recipe) -> Any:
        """Compiled once for each recipe and shape: y, dx, dw and what the gradient of `states` brings."""

        @self.jax.jit
        def step(x: Any, w: Any, dy: Any, options: Any, states: Any) -> Any:
            linear = lambda x, w, states: self.qshard.linear(x, w, recipe, **options, **states)  # noqa: E731
            y, vjp = self.jax.vjp(linear, x, w, states)
            return y, *vjp(dy)

        return step

    def operand_rounding(self, recipe: Recipe) -> float:
        formats = [recipe.format(role) for role in Role]
        codes = all(fmt.block is None for fmt in formats) and self.device == "cpu"
        # bfloat16 holds a code times a power of two as it is. Else both operands are rounded, each by 2^-8 at most.
        exact = codes or all(fmt.scaling.pow2 or fmt.scale_dtype == "float8_e8m0fnu" for fmt in formats)
        return 0.0 if exact else ROUNDED_TO_BFLOAT16

    def delayed_step(
        self, batches: Sequence[Products], recipe: Recipe, states: States
    ) -> tuple[list[Products], dict[Role, np.ndarray], States]:
        fresh = self.qshard.init_delayed(recipe)

        def tensor(role: Role) -> Any:
            scale, history = (self.array(np.asarray(part, np.float32)) for part in states[role])
            return dataclasses.replace(getattr(fresh, role.value), scale=scale, amax_history=history)

        state = type(fresh)(**{role.value: tensor(role) for role in Role})
        made = [self.step(recipe)(*map(self.array, batch), {}, {"state": state}) for batch in batches]
        observed = functools.reduce(self.qshard.merge_observed, [seen["state"] for *_, seen in made])
        after = self.qshard.update_delayed(state, observed, recipe)
        return (
            [tuple(map(self.numpy, products)) for *products, _ in made],
            {role: self.numpy(getattr(observed, role.value).observed.amax) for role in Role},
            {
                role: (self.numpy(each.scale), self.numpy(each.amax_history))
                for role in Role
                for each in [getattr(after, role.value)]
            },
        )

    def shapes_to_cut(self, fmt: Format, shards: int) -> list[tuple[int, int]]:
        whole = fmt.scaling.four_over_six or fmt.hadamard or (fmt.scaling.whole_blocks and 48 * shards % max(fmt.block))
        return [(rows * shards, 128) for rows in ([128] if whole else [48, 128])]

    def assert_law(self, weights: Sequence[np.ndarray], fmt: Format, shards: int) -> None:
        jax, usage = self.jax, usages_of(fmt)[-1]
        devices, kinds = jax.devices(self.device)[:shards], (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((shards,), ("fsdp",), axis_types=kinds, devices=devices)

        def local(w: Any) -> Any:
            q = self.qshard.gather(self.qshard.quantize(w, fmt, usage=usage, axis_name="fsdp", seed=1), "fsdp")
            return jax.tree.map(lambda leaf: leaf[None], q)

        cut = jax.P("fsdp")
        run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=cut, out_specs=cut, check_vma=False))
        for w in weights:
            stacked, whole = jax.tree.map(self.numpy, run(w)), reference.quantize(w, fmt, usage, seed=1)
            for rank in range(shards):
                for name in PLANES:
                    assert_plane(
                        self, jax.tree.map(lambda a, i=rank: a[i], getattr(stacked, name)), getattr(whole, name)
                    )


class TorchFront:
    name = "torch"
    examples = 24

    def __init__(self, device: str) -> None:
        import torch

        import qshard.torch_bridge

        self.result_roundings = 1 if device == "cpu" else 2
        self.device, self.torch, self.qshard = device, torch, qshard.torch_bridge
        # NumPy has no native twin of these: (ml_dtypes dtype, torch dtype, integer dtype that both can be viewed as).
        names = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
        self.foreign = [(np.dtype(getattr(ml_dtypes, name)), getattr(torch, name)) for name in names]

    def devices(self) -> int:
        return torch_ranks.RANKS if self.device == "cpu" else int(self.torch.cuda.device_count())

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

    def dequantize(self, quantized: Any, dtype: Any = None, **options: Any) -> np.ndarray:
        return self.numpy(quantized.dequantize(None if dtype is None else self.dtype(dtype), **options))

    def linear(
        self, x: np.ndarray, w: np.ndarray, dy: np.ndarray, recipe: Recipe, *, seed: int = 0, delayed: Any = None
    ) -> Products:
        leaves = [self.array(x).requires_grad_(), self.array(w).requires_grad_()]
        words = self.array(np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32).view(np.int32))
        y = self.qshard.linear(*leaves, None, recipe, seed=words, delayed=delayed)
        y.backward(self.array(dy))
        y, dx, dw = map(self.numpy, (y, *(leaf.grad for leaf in leaves)))
        return y, dx, dw

    def operand_rounding(self, recipe: Recipe) -> float:
        return 0.0 if self.device == "cpu" else ROUNDED_TO_BFLOAT16

    def delayed_step(
        self, batches: Sequence[Products], recipe: Recipe, states: States
    ) -> tuple[list[Products], dict[Role, np.ndarray], States]:
        kept = {role: self.qshard.DelayedScale(recipe, role, self.device) for role in Role}
        for role, (scale, history) in states.items():
            kept[role].scale.fill_(float(scale))
            kept[role].scale_inv.fill_(float(np.float32(1) / np.float32(scale)))
            kept[role].amax_history.copy_(self.array(np.asarray(history, np.float32)))
        products = [self.linear(*batch, recipe, delayed=kept) for batch in batches]
        amaxes = {role: self.numpy(state.amax.clone()) for role, state in kept.items()}
        self.qshard.update_delayed(self.torch.nn.ModuleList(kept.values()))
        after = {role: (self.numpy(state.scale), self.numpy(state.amax_history)) for role, state in kept.items()}
        return products, amaxes, after

    def shapes_to_cut(self, fmt: Format, shards: int) -> list[tuple[int, int]]:
        if fmt.gather_refusal is not None:
            return []
        # Rows that are even, uneven, fewer than ranks; whole blocks that ranks cut, or leave to some of them alone.
        if fmt.block is None:
            return [(rows, 20) for rows in (1, 3, 8, 100, 104, 105, 128)]
        return [
            (rows, 160)
            for rows in ((32, 64, 96, 160, 1, 100, 300) if not fmt.scaling.whole_blocks else (32, 64, 96, 160))
        ]

    def assert_law(self, weights: Sequence[np.ndarray], fmt: Format, shards: int) -> None:
        case = "gather_values" if weights else "refuses_to_shard"
        torch_ranks.run(
            shards,
            f"dist/test_torch_law.py::{case}",
            on=self.device,
            fmt=fmt,
            **({"values": weights} if weights else {}),
        )

    def dtype(self, numpy_dtype: Any) -> Any:
        """The torch dtype of the same name."""
        return getattr(self.torch, np.dtype(numpy_dtype).name)


FRONTS: dict[str, type[Front]] = {front.name: front for front in (JaxFront, TorchFront)}
