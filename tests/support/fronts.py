"""One small adapter for each front end, to what support/front.py says a test may ask of it.

Frameworks are imported when an adapter is made, never with this module.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from qshard import reference
from qshard._core.flat_shards import FlatSlice, MasterPlan, plan_master
from qshard.formats import Format
from qshard.recipes import Recipe, Role
from support import torch_ranks
from support.awkward import assert_all_bits_equal
from support.formats import usages_of
from support.front import (
    PARTS,
    PLANES,
    Arrays,
    Front,
    Products,
    SlicedPlane,
    States,
    Trained,
    assert_plane,
    assert_quantized,
    codes,
    sliced,
    some,
    words,
)
from support.hlo import collectives

__all__ = ["FRONTS", "PARTS", "Front", "JaxFront", "TorchFront", "assert_plane", "assert_quantized", "sliced", "some"]

ROUNDED_TO_BFLOAT16 = 2.0**-7 + 2.0**-16
"""Of both operands. On GPUs also what FP8 GEMMs lose, whose sums keep 14 bits (arXiv:2412.19437)."""


@functools.cache
def jax_step(recipe: Recipe) -> Any:
    """Compiled once for each recipe and shape: y, dx, dw and what the gradient of `states` brings."""
    import jax

    import qshard.jax

    @jax.jit
    def step(x: Any, w: Any, dy: Any, options: Any, states: Any) -> Any:
        linear = lambda x, w, states: qshard.jax.linear(x, w, recipe, **options, **states)  # noqa: E731
        y, vjp = jax.vjp(linear, x, w, states)
        return y, *vjp(dy)

    return step


class JaxFront:
    name = "jax"
    examples = 1
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
        made = jax_step(recipe)(*map(self.array, (x, w, dy)), {"seed": words([seed])[0]}, {})
        y, dx, dw = map(self.numpy, made[:3])
        return y, dx, dw

    def gradients(
        self, function: Callable[..., Any], operands: Sequence[np.ndarray], grad: np.ndarray, *, exact: bool = True
    ) -> list[np.ndarray]:
        def run(operands: Any, grad: Any) -> Any:
            result, back = self.jax.vjp(function, *operands)
            return result, *back(grad)

        arrays = [self.array(x) for x in operands], self.array(grad)
        compiled = self.jax.jit(run)
        if not exact:
            return [self.numpy(x) for x in compiled(*arrays)]
        # Without a mesh, programs are of all devices, over which XLA may cut the rows of a sum.
        with self.jax.set_mesh(self.jax.make_mesh((1,), ("one",), devices=self.jax.devices(self.device)[:1])):
            made, eager = ([self.numpy(x) for x in way(*arrays)] for way in (compiled, run))
        assert_all_bits_equal(made, eager, "a compiled call, as an eager one")
        return made

    def operand_rounding(self, recipe: Recipe) -> float:
        formats = [recipe.format(role) for role in Role]
        codes = all(fmt.block is None for fmt in formats) and self.device == "cpu"
        # bfloat16 holds a code times a power of two as it is. Else both operands are rounded, each by 2^-8 at most.
        exact = codes or all(fmt.scaling.pow2 or fmt.scale_dtype == "float8_e8m0fnu" for fmt in formats)
        # Tensor cores that multiply codes in blocks keep some 14 bits of sums.
        on_tensor_cores = self.device == "cuda" and any(fmt.block and fmt.scale_dtype == "float32" for fmt in formats)
        return 0.0 if exact and not on_tensor_cores else ROUNDED_TO_BFLOAT16

    def delayed_step(
        self, batches: Sequence[Products], recipe: Recipe, states: States
    ) -> tuple[list[Products], dict[Role, np.ndarray], States]:
        fresh = self.qshard.init_delayed(recipe)

        def tensor(role: Role) -> Any:
            scale, history = (self.array(np.asarray(part, np.float32)) for part in states[role])
            return dataclasses.replace(getattr(fresh, role.value), scale=scale, amax_history=history)

        state = type(fresh)(**{role.value: tensor(role) for role in Role})
        made = [jax_step(recipe)(*map(self.array, batch), {}, {"state": state}) for batch in batches]
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
        odd = [(7 * shards, 33)] if fmt.block is None else []
        return [*odd, *((rows * shards, 128) for rows in ([128] if whole else [48, 128]))]

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

    def adam(
        self, params: Arrays, grads: Sequence[Arrays], moments: tuple[str, str], masters: bool, **options: float
    ) -> dict[str, Trained]:
        jax = self.jax
        optimizer = self.qshard.adamw(mu_dtype=moments[0], nu_dtype=moments[1], masters=masters, **options)

        @jax.jit
        def step(grads: Any, state: Any, params: Any) -> Any:
            updates, state = optimizer.update(grads, state, params)
            return jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, updates), state

        now = jax.tree.map(self.array, dict(params))
        state = optimizer.init(now)
        for grad in grads:
            now, state = step(jax.tree.map(self.array, dict(grad)), state, now)

        def parts(moment: Any) -> tuple[np.ndarray, np.ndarray | None]:
            data, scale_inv = moment if isinstance(moment, tuple) else (moment, None)
            return self.numpy(data), None if scale_inv is None else self.numpy(scale_inv)

        return {
            name: (
                self.numpy(now[name]),
                [parts(state.mu[name]), parts(state.nu[name])],
                self.numpy(state.master[name]) if masters else None,
            )
            for name in params
        }

    def plan(self, planes: Sequence[SlicedPlane], masters: Sequence[np.ndarray], rounded_to: str | None) -> MasterPlan:
        dtype = str(masters[0].dtype)
        return plan_master(
            [FlatSlice(shape, fmt, dtype, usage=usage, rounded_to=rounded_to) for fmt, usage, shape in planes]
        )

    def cast_slices(
        self,
        planes: Sequence[SlicedPlane],
        masters: Sequence[np.ndarray],
        starts: Sequence[int],
        seeds: Sequence[int],
        rounded_to: str | None = None,
    ) -> list[list[np.ndarray | None]]:
        plan = self.plan(planes, masters, rounded_to)
        cast = self.jax.jit(lambda m, starts, seeds: self.qshard.cast_master(None, m, starts, plan=plan, seeds=seeds))
        made = cast([self.array(m) for m in masters], words(starts), list(words(seeds)))
        return [[None if part is None else self.numpy(part) for part in parts] for parts in made]

    def assert_cut_masters(
        self,
        planes: Sequence[SlicedPlane],
        weights: Sequence[np.ndarray],
        cuts: Sequence[Sequence[int]],
        rounded_to: str | None = None,
    ) -> None:
        jax, world, plan = self.jax, len(cuts[0]) - 1, self.plan(planes, weights, rounded_to)
        mesh = jax.sharding.Mesh(np.array(jax.devices(self.device)[:world]), ("d",))
        starts = np.stack([words([cut[rank] for cut in cuts]) for rank in range(world)])
        # Of one length on all devices, as in SPMD programs: beyond a slice is what follows, and NaN past the end.
        lengths = [max(1, *np.diff(cut)) for cut in cuts]
        masters = []
        for w, cut, length in zip(weights, cuts, lengths, strict=True):
            padded = np.concatenate([w.reshape(-1), np.full(length, np.nan, w.dtype)])
            masters.append(np.stack([padded[start : start + length] for start in cut[:-1]]))

        def local(masters: Any, starts: Any) -> Any:
            flat = [m[0] for m in masters]
            made = self.qshard.cast_master(None, flat, starts[0], "d", plan=plan, seeds=range(len(planes)))
            return [piece.data[None] for piece in made], [piece[1:] for piece in made]

        specs = {"in_specs": jax.P("d"), "out_specs": (jax.P("d"), jax.P())}
        cast = jax.jit(jax.shard_map(local, mesh=mesh, **specs)).lower(masters, starts).compile()
        one = [("all-reduce", (f"s32[{plan.amaxes}]",))]
        found = collectives(cast)
        assert world == 1 or found == one, f"{found} is not one for all weights"
        pieces, scales = cast(masters, starts)
        joined = jax.jit(
            lambda pieces: [
                self.qshard.join_pieces(piece, list(cut[:-1]), fmt, shape, usage)
                for piece, cut, (fmt, usage, shape) in zip(pieces, cuts, planes, strict=True)
            ]
        )(pieces)
        for data, scale, want, (fmt, usage, _) in zip(
            joined, scales, sliced(planes, weights, rounded_to), planes, strict=True
        ):
            assert_plane(self, self.qshard.Plane(data, *scale), want, f"{fmt} {usage}")


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
        return torch_ranks.RANKS if self.device == "cpu" else torch_ranks.gpu_ranks()

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
        y = self.qshard.linear(*leaves, None, recipe, seed=self.array(words([seed])[0].view(np.int32)), delayed=delayed)
        y.backward(self.array(dy))
        y, dx, dw = map(self.numpy, (y, *(leaf.grad for leaf in leaves)))
        return y, dx, dw

    def gradients(
        self, function: Callable[..., Any], operands: Sequence[np.ndarray], grad: np.ndarray, *, exact: bool = True
    ) -> list[np.ndarray]:
        leaves = [self.array(x).requires_grad_() for x in operands]
        result = function(*leaves)
        result.backward(self.array(grad))
        return [self.numpy(x) for x in (result, *(leaf.grad for leaf in leaves))]

    def operand_rounding(self, recipe: Recipe) -> float:
        return 0.0 if self.device == "cpu" else ROUNDED_TO_BFLOAT16

    def delayed_step(
        self, batches: Sequence[Products], recipe: Recipe, states: States
    ) -> tuple[list[Products], dict[Role, np.ndarray], States]:
        kept = {role: self.qshard.DelayedScale(recipe, role, self.device) for role in Role}
        for role, (scale, history) in states.items():
            kept[role].scale.fill_(float(scale))
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

    def adam(
        self, params: Arrays, grads: Sequence[Arrays], moments: tuple[str, str], masters: bool, **options: float
    ) -> dict[str, Trained]:
        weights = {name: self.torch.nn.Parameter(self.array(x)) for name, x in params.items()}
        names = ("exp_avg", "exp_avg_sq")
        optimizer = self.qshard.AdamW(
            weights.values(),
            options["learning_rate"],
            weight_decay=options["weight_decay"],
            master_weights="float32" if masters else None,
            **{f"{name}_dtype": getattr(self.torch, dtype) for name, dtype in zip(names, moments, strict=True)},
        )
        for grad in grads:
            for name, weight in weights.items():
                weight.grad = self.array(grad[name])
            optimizer.step()

        def part(weight: Any, key: str) -> np.ndarray | None:
            return self.numpy(optimizer.state[weight][key]) if key in optimizer.state[weight] else None

        return {
            name: (
                self.numpy(weight),
                [(part(weight, key), part(weight, f"{key}_scale_inv")) for key in names],
                part(weight, "master"),
            )
            for name, weight in weights.items()
        }

    def slices(
        self, planes: Sequence[SlicedPlane], masters: Sequence[np.ndarray], rounded_to: str | None
    ) -> tuple[list[Any], list[Any], dict[str, Any]]:
        """Empty slices, masters, and the options of `cast_master`. A rank that has nothing of a weight gives none."""
        model = self.dtype(rounded_to or "float32")
        made = [
            self.qshard.QuantizedSlice.empty(fmt, shape, m.size, dtype=model, usage=usage, device=self.device)
            for (fmt, usage, shape), m in zip(planes, masters, strict=True)
        ]
        options = {"parity": "model" if rounded_to else "master", "dtype": self.dtype(masters[0].dtype)}
        return made, [self.array(m) if m.size else None for m in masters], options

    def cast_slices(
        self,
        planes: Sequence[SlicedPlane],
        masters: Sequence[np.ndarray],
        starts: Sequence[int],
        seeds: Sequence[int],
        rounded_to: str | None = None,
    ) -> list[list[np.ndarray | None]]:
        slices, arrays, options = self.slices(planes, masters, rounded_to)
        self.qshard.cast_master(slices, arrays, starts, seeds=seeds, **options)
        parts = [(s.data, s.scale_inv, s.global_scale_inv) for s in slices]
        return [[None if part is None else self.numpy(part) for part in each] for each in parts]

    def assert_cut_masters(
        self,
        planes: Sequence[SlicedPlane],
        weights: Sequence[np.ndarray],
        cuts: Sequence[Sequence[int]],
        rounded_to: str | None = None,
    ) -> None:
        arguments = {"planes": planes, "weights": weights, "cuts": cuts, "rounded_to": rounded_to}
        torch_ranks.run(len(cuts[0]) - 1, "dist/test_torch_master.py::cuts_masters", on=self.device, **arguments)

    def dtype(self, numpy_dtype: Any) -> Any:
        """The torch dtype of the same name."""
        return getattr(self.torch, np.dtype(numpy_dtype).name)


FRONTS: dict[str, type[Front]] = {front.name: front for front in (JaxFront, TorchFront)}
