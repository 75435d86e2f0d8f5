"""Expert parallelism in JAX: devices that share experts against one device with all experts and all tokens."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import qshard.jax as qj
from qshard._core.operands import OperandSpec
from qshard.formats import Usage
from qshard.jax._experts.expert_parallel import exchanged_rows, quantize_dispatched
from qshard.jax._experts.tiles import quantize_tiles, tiles_of
from qshard.jax._experts.token_exchange import TokenExchange
from qshard.layout import is_transposed
from qshard.recipes import Role
from support.awkward import assert_bits_equal
from support.hlo import collectives
from support.jax_expert_parallel import (
    ALL,
    W2,
    W13,
    WIDE,
    E,
    H,
    K,
    R,
    T,
    assert_close,
    experts,
    mesh_of,
    normal,
    states_of,
    step,
    tokens,
)

CASES = [
    pytest.param(name, load, marks=[] if name == "CurrentScaling" else pytest.mark.slow, id=f"{name}-{load}")
    for name in ALL
    for load in ("uneven", "empty")
]
EP = P("ep")


@functools.cache
def one_device(name):
    return jax.jit(functools.partial(step, name=name))


@functools.cache
def devices_of(name, **options):
    run = functools.partial(step, name=name, ep_axis="ep", **options)
    return jax.jit(jax.shard_map(run, mesh=mesh_of(ep=R), in_specs=(EP,) * 7, out_specs=(EP,) * 6))


@pytest.mark.parametrize(("name", "load"), CASES)
def test_is_one_device(name, load):
    """Results are those of one device up to the order of sums, and observed amaxes are the same bits."""
    given = *tokens(load), W13, W2, states_of(name)
    found, expected = devices_of(name)(*given), one_device(name)(*given)
    assert_close(found, expected)
    assert not np.asarray(found[0])[(given[3] < 0).all(-1)].any()
    assert not np.asarray(found[3])[3 if load == "uneven" else slice(2, None)].any()
    jax.tree.map(lambda a, b: assert_bits_equal(np.asarray(a), np.asarray(b)), found[5], expected[5])


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "CurrentScaling" else pytest.mark.slow) for name in ALL if ALL[name]],
)
@pytest.mark.parametrize("role", [Role.ACTIVATION, pytest.param(Role.GRADIENT, marks=pytest.mark.slow)], ids=str)
def test_codes(name, role):
    codes_are_those_of_one_device(name, role, Usage.BOTH)


@pytest.mark.parametrize(
    "name", ["BlockScaling", *(pytest.param(n, marks=pytest.mark.slow) for n in ("MXFP8", "MXFP4"))]
)
def test_codes_of_blocks(name):
    codes_are_those_of_one_device(name, Role.GRADIENT, Usage.ROWWISE)


def codes_are_those_of_one_device(name, role, usage):
    """Planes of a local expert are, bit for bit, planes of its rows from all devices on one device."""
    recipe = ALL[name]
    x, _, _, indices = tokens("uneven", width=128)
    operand = OperandSpec.of(recipe, role, usage)
    scales = np.linspace(1, 2, E, dtype=np.float32) if recipe.stateful else None
    seeds = np.arange(2 * E, dtype=np.uint32).reshape(E, 2) if recipe.stochastic else None

    def sorted_rows(x, indices):
        permutation = qj.moe_permutation(indices, E)
        return qj.moe_permute(x, permutation), permutation.group_sizes

    def alone(x, indices, seeds, scales):
        rows, sizes = sorted_rows(x, indices)
        tiles = tiles_of(recipe, rows.shape[0], sizes)
        return quantize_tiles(rows, operand, tiles, axes=(), seeds=seeds, scales=scales), tiles

    def shared(x, indices, seeds, scales):
        rows, sizes = sorted_rows(x, indices)
        exchange = TokenExchange.of(sizes, rows.shape[0], ("ep",), None)
        tiles = exchanged_rows(exchange, recipe)[0].x
        given = {"axes": (), "seeds": seeds, "scales": scales}
        made = quantize_dispatched(rows, operand, tiles, exchange, **given), tiles
        return jax.tree.map(lambda part: part[None], made)

    run = jax.shard_map(shared, mesh=mesh_of(ep=R), in_specs=(EP,) * 4, out_specs=EP)
    (found, amax), tiles = jax.jit(run)(x, indices, seeds, scales)
    (want, want_amax), want_tiles = jax.jit(alone)(x, indices, seeds, scales)
    if amax is not None:
        assert_bits_equal(np.asarray(amax).reshape(-1), np.asarray(want_amax))
    own = functools.partial(part_of_expert, operand.format)
    for expert in range(E):
        rank, local = divmod(expert, E // R)
        for usage, plane in want.planes.items():
            parts = zip(found.plane(usage), plane, strict=True)
            for a, b in ((np.asarray(a)[rank], b) for a, b in parts if b is not None):
                one = jax.tree.map(lambda part, rank=rank: np.asarray(part)[rank], tiles)
                a, b = own(a, one, local, usage), own(b, want_tiles, expert, usage)
                if operand.usage is Usage.ROWWISE:  # Scales of padding, whose codes are 0, are not defined.
                    of_rows = own(plane.data, want_tiles, expert, usage)
                    used = np.asarray(of_rows).astype(np.float32).any(1)
                    a, b = a[used], b[used]
                assert_bits_equal(a, b)


def part_of_expert(fmt, part, tiles, expert, usage):
    """Return what one expert has of codes or scales: its own scale, or its padded rows of a matrix."""
    part, (start, stop) = np.asarray(part), np.append(0, tiles.stops)[expert : expert + 2]
    if part.ndim == 1:
        return part[expert]
    axis = 1 if usage is Usage.COLUMNWISE and is_transposed(fmt, usage) else 0
    each = tiles.rows.shape[0] // part.shape[axis]
    return np.take(part, np.arange(start // each, stop // each), axis)


def test_what_is_sent():
    """Codes of x and of dy are sent, and values of y and dx. Blocks send values."""
    given = *tokens("uneven"), W13, W2, None
    run = devices_of("CurrentScaling").lower(*given).compile()
    sent = [array for kind, arrays in collectives(run) for array in arrays if kind == "all-to-all"]
    found = {kind: sum(array.startswith(kind) for array in sent) for kind in ("u8", "f32")}
    assert found["u8"] == found["f32"] > 0, sent


def test_blocks_send_codes_without_gradients():
    """Codes and scales of x are sent in a forward pass alone, and results are those of one device."""
    x, weights, _, indices = tokens("uneven", width=128)
    w13, w2 = experts(128, 128)

    def forward(x, weights, indices, w13, w2, **options):
        return qj.grouped_mlp(x, indices, weights, w13, w2, "BlockScaling", **options)

    local = functools.partial(forward, ep_axis="ep")
    run = jax.jit(jax.shard_map(local, mesh=mesh_of(ep=R), in_specs=(EP,) * 5, out_specs=EP))
    given = x, weights, indices, w13, w2
    assert_close([run(*given)], [jax.jit(forward)(*given)])
    found = collectives(run.lower(*given).compile())
    sent = {array for kind, arrays in found for array in arrays if kind == "all-to-all"}
    rows = f"1,{T * K}"
    assert sent == {f"u8[{rows},128]", f"f32[{rows},1]", f"f32[{rows},128]"}  # Codes and scales of x, and y.
    assert sum(len(arrays) for kind, arrays in found if kind == "all-to-all") == 3 * R


@pytest.mark.parametrize("kind", ["even", "one device", "some left out", "one source"])
def test_long_chunks_arrive_in_parts(kind):
    """Rows of 1 KiB, 4096 on each device. The longest chunk is sent at once, or in up to four parts."""

    def local(rows, sizes):
        exchange = TokenExchange.of(sizes, rows.shape[0], ("ep",), None)
        return exchange.combine(exchange.dispatch(rows))

    count, sizes = 4096, np.zeros((R, E), np.int32)
    if kind == "even":
        sizes[:] = count // E
    elif kind == "one device":
        sizes[:, -1] = count
    elif kind == "some left out":
        sizes[:] = (np.arange(E) + np.arange(R)[:, None]) % E * 90
    else:
        sizes[1, E // 2] = count - 7
    rows = normal(R * count, 256)
    run = jax.jit(jax.shard_map(local, mesh=mesh_of(ep=R), in_specs=EP, out_specs=EP))
    in_use = np.arange(count) < sizes.sum(1)[:, None]
    assert_bits_equal(np.asarray(run(rows, sizes.reshape(-1))), np.where(in_use.reshape(-1, 1), rows, np.float32(0)))


@pytest.mark.parametrize(
    "name", ["CurrentScaling", *(pytest.param(n, marks=pytest.mark.slow) for n in ("MXFP8", "none"))]
)
def test_with_fsdp(name):
    """Eight devices: four share experts, and FSDP shards the weights of each over two groups of tokens."""
    sharded, rows = P("ep", "fsdp"), P(("fsdp", "ep"))
    given = tokens("uneven", 2 * R)
    options = {"ep_axis": "ep", "gather_axis": "fsdp", "weight_spec": sharded}

    def local(*given):
        return step(*given, None, name=name, **options)[:5]

    specs, results = (*(rows,) * 4, sharded, sharded), (*(rows,) * 3, sharded, sharded)
    run = jax.jit(jax.shard_map(local, mesh=mesh_of(fsdp=2, ep=R), in_specs=specs, out_specs=results))
    compiled = run.lower(*given, W13, W2).compile()
    found = compiled(*given, W13, W2)
    halves = [one_device(name)(*(np.split(each, 2)[i] for each in given), W13, W2, None)[:5] for i in range(2)]
    parts = [[np.asarray(half[i]) for half in halves] for i in range(5)]
    assert_close(found, [*map(np.concatenate, parts[:3]), *map(sum, parts[3:])])
    gathers = [array for kind, arrays in collectives(compiled) for array in arrays if kind == "all-gather"]
    if ALL[name] is not None:
        assert {f"u8[2,{2 * WIDE},{H}]", f"u8[2,{H},{WIDE}]"} <= set(gathers), gathers


@pytest.mark.parametrize(
    "name", ["CurrentScaling", *(pytest.param(n, marks=pytest.mark.slow) for n in ("MXFP8", "none"))]
)
def test_capacity(name):
    """Rows that fit give the same; one row too many gives NaN on all devices, and in the gradients."""
    run, states = devices_of(name, capacity_factor=1.0), (W13, W2, None)
    fits, *rest = tokens("spread")
    assert_close(run(fits, *rest, *states), one_device(name)(fits, *rest, *states))
    rest[-1] = rest[-1].copy()
    rest[-1][rest[-1] == E - 1] = 0
    y, dx, dweights, *of_weights, _ = run(fits, *rest, *states)
    assert all(np.isnan(part).all() for part in (y, dx, dweights))
    assert all(np.isnan(part).any(axis=(1, 2)).all() for part in of_weights)


def test_other_axes_are_auto():
    """In a `shard_map` over the axis of experts alone, XLA shards the tokens of a device over the other axis."""
    x, weights, _, indices = tokens("uneven")
    given = x, indices, weights, W13, W2
    mesh, options = mesh_of(fsdp=2, ep=R), {"in_specs": (EP,) * 5, "out_specs": EP}

    def forward(*given, **options):
        return qj.grouped_mlp(*given, "CurrentScaling", **options)

    local = functools.partial(forward, ep_axis="ep")
    found = jax.jit(jax.shard_map(local, mesh=mesh, axis_names={"ep"}, **options))(*given)
    assert_close([found], [jax.jit(forward)(*given)])


def test_states_without_types():
    """With `check_vma=False` the exchange knows that devices of "ep" share scales; other axes need `axis_name`."""
    x, weights, dy, indices = tokens("uneven")
    given = x, weights, dy, indices, W13, W2, states_of("DelayedScaling")
    run = functools.partial(step, name="DelayedScaling", ep_axis="ep")

    def trace(given=given, **sizes):
        jax.eval_shape(jax.shard_map(run, mesh=mesh_of(**sizes), in_specs=EP, out_specs=EP, check_vma=False), *given)

    trace(one=1, ep=R)
    trace([each[:0] for each in given[:4]] + [*given[4:]], ep=R)  # Without tokens nothing is exchanged.
    with pytest.raises(ValueError, match=r"hides which devices share state; pass as axis_name the axes of \('dp',\)"):
        trace(dp=2, ep=R)


@pytest.mark.slow
def test_remat_and_several_axes():
    """Under `jax.checkpoint`, and with experts over two mesh axes, results are the same."""
    given = *tokens("uneven"), W13, W2
    axes = P(("a", "b"))

    def local(x, weights, dy, indices, w13, w2):
        call = lambda *a: qj.grouped_mlp(a[0], indices, a[1], *a[2:], "CurrentScaling", ep_axis=("a", "b"))  # noqa: E731
        y, vjp = jax.vjp(jax.checkpoint(call), x, weights, w13, w2)
        return y, *vjp(dy)

    run = jax.shard_map(local, mesh=mesh_of(a=2, b=2), in_specs=(axes,) * 6, out_specs=(axes,) * 5)
    assert_close(jax.jit(run)(*given), one_device("CurrentScaling")(*given, None))


@pytest.mark.parametrize("name", ["CurrentScaling", "none"])
def test_no_tokens(name):
    """Devices with arrays of no rows get zero gradients."""
    x, weights, dy, indices = (each[:0] for each in tokens("uneven"))
    found = devices_of(name)(x, weights, dy, indices, W13, W2, None)
    assert found[0].shape == (0, H)
    assert not any(np.asarray(part).any() for part in found[3:5])


def inside(**options):
    x, weights, _, indices = tokens("uneven")
    call = lambda x, indices, weights, w13, w2: qj.grouped_mlp(x, indices, weights, w13, w2, "MXFP8", **options)  # noqa: E731
    run = jax.shard_map(call, mesh=mesh_of(ep=R), in_specs=(EP,) * 5, out_specs=EP)
    return jax.eval_shape(run, x, indices, weights, W13, W2)


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: inside(ep_axis="tp"), ValueError, r"ep_axis \('tp'\) is not an axis of an enclosing jax.shard_map"),
        (lambda: inside(ep_axis=3), TypeError, r"ep_axis \(3\) is not a mesh axis name or a tuple"),
        (
            lambda: inside(ep_axis="ep", axis_name="ep"),
            ValueError,
            "axis_name and ep_axis both have 'ep', but rows of one",
        ),
        (
            lambda: inside(ep_axis="ep", capacity_factor=0),
            ValueError,
            r"capacity_factor \(0\) is not a positive number; pass",
        ),
        (lambda: inside(capacity_factor=1.5), ValueError, r"capacity_factor \(1.5\) is for expert parallelism; pass"),
    ],
)
def test_what_is_refused(call, kind, text):
    with pytest.raises(kind, match=f"grouped_mlp: {text}"):
        call()
