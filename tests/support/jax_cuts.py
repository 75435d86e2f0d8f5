"""Random shardings of tensors over meshes of one or two axes, and the check of the sharding law for each.

The law: gather(quantize(shards)) == quantize(whole), bit for bit, unless `refusal` expects an error.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from qshard import reference
from qshard.formats import Format, Usage
from qshard.jax import gather, gathered_weight, init_delayed, linear, quantize
from qshard.layout import matrix_shape, plane
from qshard.recipes import Recipe, Role
from support.awkward import TAME, assert_bits_equal, awkward_values, fits
from support.formats import COMBINED, GATHERED

SEED = 0x0123456789ABCDEF
NAMES = "ab"
SIZES = (1, 2, 3, 4, 8)
MESHES = [(n,) for n in SIZES] + [(a, b) for a in SIZES for b in SIZES if a * b in SIZES]
KINDS = ("Auto", "Explicit", "shard_map", "shard_map, unchecked")
Names = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A tensor, its sharding, and the calls that gather it.

    Attributes:
      kind: JAX sharding mode; "unchecked" is check_vma=False.
      sizes: mesh sizes; the axes are "a" and "b".
      entries: mesh axes that shard each axis of the tensor.
      gathers: mesh axes of each call of `gather`.
      told: on an Auto mesh, whether `quantize` gets `spec`.
      jitted: whether everything is one compiled program.
      platform: "cpu", or "cuda" for GPUs.
    """

    kind: str
    sizes: tuple[int, ...]
    entries: tuple[Names, ...]
    shape: tuple[int, ...]
    fmt: Format
    usage: Usage = Usage.ROWWISE
    gathers: tuple[Names, ...] = ()
    told: bool = True
    jitted: bool = True
    seed: int = 0
    platform: str = "cpu"

    def __str__(self) -> str:
        return ", ".join(str(getattr(self, field.name)) for field in dataclasses.fields(self))

    @property
    def local(self) -> bool:
        return self.kind.startswith("shard_map")

    @property
    def mesh(self) -> Any:
        kinds = (AxisType.Explicit if self.kind == "Explicit" else AxisType.Auto,) * len(self.sizes)
        devices = jax.devices(self.platform)[: math.prod(self.sizes)]
        return jax.make_mesh(self.sizes, tuple(NAMES[: len(self.sizes)]), axis_types=kinds, devices=devices)

    @property
    def counts(self) -> list[int]:
        return [self.count(names) for names in self.entries]

    def count(self, names: Names) -> int:
        return math.prod(self.sizes[NAMES.index(name)] for name in names)

    @property
    def values(self) -> np.ndarray:
        """Return values with regions, of shard and block size, that are all 0, -0, tiny or constant."""
        x, rng = awkward_values(self.shape, self.seed, kinds=TAME), np.random.default_rng(self.seed)
        for value in (0.0, -0.0, 1e-40, -1e-38, 3.0):
            if rng.random() < 0.6:
                parts = rng.choice([1, 2, 4, 8], len(self.shape))
                first = rng.integers(parts)
                ends = zip(self.shape, parts, first, strict=True)
                x[tuple(slice(i * size // n, (i + 1) * size // n) for size, n, i in ends)] = value
        return x


def spec_of(entries: tuple[Names, ...]) -> P:
    return P(*(names or None for names in entries))


@st.composite
def _cuts(draw: Any, ndim: int) -> tuple[tuple[int, ...], tuple[Names, ...]]:
    """Draw a mesh, and the tensor axis that each mesh axis shards, if any."""
    sizes, entries = draw(st.sampled_from(MESHES)), [()] * ndim
    for name in draw(st.permutations(NAMES[: len(sizes)])):
        if (axis := draw(st.integers(-1, ndim - 1))) >= 0:
            entries[axis] = (*entries[axis], name)
    return sizes, tuple(entries)


@st.composite
def tensors(draw: Any, kinds: tuple[str, ...] = KINDS) -> Case:
    """Draw tensors of one to three axes, in every format with every option."""
    fmt, ndim = draw(st.sampled_from(COMBINED)), draw(st.integers(1, 3))
    by_row = fmt.scaling.global_scale == "row"
    usage = Usage.ROWWISE if by_row else draw(st.sampled_from([Usage.ROWWISE, Usage.COLUMNWISE, Usage.BOTH]))
    sizes, entries = draw(_cuts(ndim))
    case = Case(kind=draw(st.sampled_from(kinds)), sizes=sizes, entries=entries, shape=(), fmt=fmt, usage=usage)
    units = [draw(st.sampled_from([1, 3, 4, 8, 16, 24, 32, 64, 128])) for _ in range(ndim)]
    units[: ndim - 2] = [draw(st.sampled_from([1, 2, 3])) for _ in units[: ndim - 2]]
    shape = tuple(n * unit for n, unit in zip(case.counts, units, strict=True))
    if not fits(fmt, shape, usage):
        ends = (math.lcm(n, 32) * draw(st.sampled_from([1, 2, 3])) for n in case.counts[-2:])
        shape = (*shape[:-2], *ends)
    assume(fits(fmt, shape, usage) and math.prod(shape) < 1 << 17)
    gathers: list[Names] = []
    for name in draw(st.permutations([name for names in entries for name in names])):
        if gathers and draw(st.booleans()):
            gathers[-1] = (*gathers[-1], name)
        else:
            gathers.append((name,))
    if not case.local:  # There, results may stay sharded.
        gathers = gathers[: draw(st.integers(0, len(gathers)))]
    rest = {"told": draw(st.booleans()), "jitted": draw(st.booleans()), "seed": draw(st.integers(0, 99))}
    return dataclasses.replace(case, shape=shape, gathers=tuple(gathers), **rest)


def refusal(case: Case) -> str | None:
    """Return the error text if a format or a call of `gather` rejects the sharding, else None."""
    planes = [plane(case.fmt, case.shape, usage) for usage in case.usage.planes]
    folded = [where for where in planes if where.block and (where.transposed or not where.rows_apart)]
    inner = {name for names in case.entries[1:-1] for name in names if case.count((name,)) > 1}
    if case.local and inner:
        rows = case.shape[-2] // case.counts[-2]
        if any(rows % where.block[where.transposed] for where in folded):
            return "whose rows are not adjacent"
    if case.kind != "Auto" or case.told:
        for where in planes:
            if where.block and (where.rotated or case.fmt.slice_refusal) and _breaks(case, where, planes):
                return "splits blocks of"
    entries = case.entries
    for names in case.gathers:
        for axis in entries if case.local else ():
            several = [name for name in axis if case.count((name,)) > 1]
            kept = [name for name in several if name not in names]
            if several[: len(kept)] != kept:
                return "alone are not adjacent"
        transposed = any(where.transposed for where in planes) and case.kind != "Explicit"
        if inner.intersection(names) and (transposed or (case.local and folded)):
            return "does not shard the first or last axis"
        entries = _without(entries, names)
    return None


def _breaks(case: Case, where: Any, planes: list[Any]) -> bool:
    """Return whether shards split blocks of a plane, or blocks span matrices (for formats of whole blocks).

    If a mesh may shard any axis, leading axes are not merged: none of them, if one after the first is sharded.
    """
    rows, cols = where.block[::-1] if where.transposed else where.block
    inner = any(n > 1 for n in case.counts[1:-1])
    (size, width), (n, of_width) = (
        matrix_shape(case.shape),
        (case.counts[0] if len(case.shape) > 1 else 1, case.counts[-1]),
    )
    whole = all(case.shape[-2] % each.block[each.transposed] == 0 for each in planes) if len(case.shape) > 2 else False
    if len(case.shape) > 2 and (inner or (whole and not case.local and math.prod(case.sizes) > 1)):
        size, n = case.shape[-2], case.counts[-2]
    return bool(size // n % rows or width // of_width % cols)


def _without(entries: tuple[Names, ...], names: Names) -> tuple[Names, ...]:
    return tuple(tuple(name for name in each if name not in names) for each in entries)


def check_tensor(case: Case) -> None:
    """Assert the law, or the expected error."""
    expected = refusal(case)
    if expected is None:
        _check_law(case)
    else:
        with pytest.raises(ValueError, match=expected):
            _check_law(case)


def _check_law(case: Case) -> None:
    mesh, spec, w = case.mesh, spec_of(case.entries), case.values
    whole = reference.quantize(w, case.fmt, case.usage, seed=SEED)
    cast = functools.partial(quantize, fmt=case.fmt, usage=case.usage, seed=SEED)
    sharded = jax.device_put(w, NamedSharding(mesh, spec))
    if case.local:
        axes = tuple(name for names in case.entries for name in names)

        def local(w: Any) -> Any:
            return _copies(_gathered(case, cast(w, axis_name=axes or None, spec=spec)))

        checked = case.kind == "shard_map"
        every = P(mesh.axis_names)
        q = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=every, check_vma=checked))(sharded)
        for device in range(mesh.size):
            assert_planes(q, whole, device)
        return
    told = spec if case.told else None
    with jax.set_mesh(mesh):
        if case.jitted:
            q = jax.jit(lambda w: _gathered(case, cast(w, spec=told)))(sharded)
        else:
            q = cast(sharded, spec=told)
            assert_planes(q, whole)
            q = _gathered(case, q)
        assert_planes(q, whole)


def _gathered(case: Case, q: Any) -> Any:
    entries = case.entries
    for names in case.gathers:
        q = gather(q, names[0] if len(names) == 1 else names, spec=spec_of(entries))
        entries = _without(entries, names)
    return q


def _copies(q: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[None], q)


def assert_planes(q: Any, whole: Any, index: Any = ()) -> None:
    for name in ("rowwise", "columnwise"):
        for part in ("data", "scale_inv", "global_scale_inv"):
            got, want = (getattr(getattr(planes, name), part, None) for planes in (q, whole))
            assert (got is None) == (want is None), f"{name}.{part}"
            if got is not None:
                assert_bits_equal(np.asarray(got)[index], want, f"{name}.{part}")


@st.composite
def weights(draw: Any, kinds: tuple[str, ...] = KINDS) -> tuple[Case, str]:
    """Draw weights for `linear`, each with the name of its recipe."""
    name, (sizes, entries) = draw(st.sampled_from(list(GATHERED))), draw(_cuts(2))
    case = Case(kind=draw(st.sampled_from(kinds)), sizes=sizes, entries=entries, shape=(), fmt=GATHERED[name].weight)
    # MX and NVFP4 require whole blocks in the whole weight.
    shape = tuple(math.lcm(n, 32) * draw(st.sampled_from([1, 2, 3])) for n in case.counts)
    axes = tuple(axis for names in entries for axis in names)
    if case.kind == "Auto":  # XLA partitions the other axes, as in tensor parallelism.
        axes = axes[: draw(st.integers(0, len(axes)))]
    return dataclasses.replace(case, shape=shape, gathers=(axes,), seed=draw(st.integers(0, 99))), name


def check_linear(case: Case, name: str) -> None:
    """Assert that the gathered weight is bit-exact, and y, dx and dw match one device up to summation order."""
    (axes,), mesh, spec, recipe = case.gathers, case.mesh, spec_of(case.entries), GATHERED[name]
    rng, rows = np.random.default_rng(case.seed), 128 * case.count(axes)  # Whole blocks on each device.
    x, dy = (rng.standard_normal((rows, size)).astype(np.float32) for size in case.shape[::-1])
    options, batch = {"weight_spec": spec, "gather_axis": axes or None}, P(axes or None)
    args, cuts = (x, case.values, dy, _state_of(recipe)), (batch, spec, batch, P())

    def step(x: Any, w: Any, dy: Any, state: Any, *, axis_name: Any = None, **options: Any) -> Any:
        options |= {"seed": SEED}
        whole = gathered_weight(w, recipe, state=state, **options)
        layer = lambda x, w, state: linear(x, w, recipe, axis_name=axis_name, state=state, **options)  # noqa: E731
        y, vjp = jax.vjp(layer, x, w, state)
        return whole, y, *vjp(dy)[:2]

    def local(*args: Any) -> Any:
        whole, *rest = step(*args, axis_name=axes, **options)
        return _copies(whole), *rest

    want = jax.jit(step)(*args)
    if case.local:
        outs, checked = (P(mesh.axis_names), batch, batch, spec), case.kind == "shard_map"
        got = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=cuts, out_specs=outs, check_vma=checked))(*args)
    else:
        with jax.set_mesh(mesh):
            placed = [jax.device_put(arg, NamedSharding(mesh, cut)) for arg, cut in zip(args, cuts, strict=True)]
            got = jax.jit(functools.partial(step, **options))(*placed)
    for device in range(mesh.size) if case.local else [()]:
        assert_planes(got[0], want[0], device)
    for what, actual, expected in zip(("y", "dx", "dw"), got[1:], want[1:], strict=True):
        atol = 1e-5 * np.abs(expected).max() + 1e-30  # The order of fp32 sums.
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=atol, err_msg=what)


def _state_of(recipe: Recipe) -> Any:
    if not recipe.stateful:
        return None
    fresh, scales = init_delayed(recipe), zip(Role, (3.0, 7.3, 0.77), strict=True)
    scaled = {
        role.value: dataclasses.replace(getattr(fresh, role.value), scale=jnp.float32(scale)) for role, scale in scales
    }
    return dataclasses.replace(fresh, **scaled)
