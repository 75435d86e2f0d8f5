"""Experts in PyTorch: `GroupedLinear` against a loop of its layers.

Operands are such that products are exact: codes of a few bits of mantissa and one exponent or two. Then the order of
sums is of no matter, and results are compared bit for bit.
"""

import contextlib
import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from qshard.formats import Usage
from qshard.gemm_dispatch import Gpu
from qshard.recipes import CurrentScaling, Role
from qshard.torch_bridge import GroupedLinear, Linear, convert, grouped_linear, update_scales
from qshard.torch_bridge._experts import fallback, tiles
from qshard.torch_bridge._experts.tiles import GroupedRows
from qshard.torch_bridge._nn.operands import LayerQuantizer, operand_spec
from qshard.torch_bridge._quantized.target_gpu import Target, multiply_for
from support.formats import MIXES, RECIPES
from support.torch_models import Wire

SIZES = (40, 0, 3, 129, 0, 17)
E, M, N, K = len(SIZES), 200, 64, 96
ENDS = torch.tensor(SIZES).cumsum(0).tolist()
ROWS = [slice(end - size, end) for size, end in zip(SIZES, ENDS, strict=True)]
ALL = {**RECIPES, **MIXES}


def exact(*shape, seed=0):
    """Signed numbers of {4, 5, 6, 7}, in each scale that a block or an expert has."""
    generator = torch.Generator().manual_seed(seed)
    signs, numbers = (torch.randint(*range_, shape, generator=generator) for range_ in ((0, 2), (4, 8)))
    return ((2 * signs - 1) * numbers).float()


def layer_of(recipe, device="cpu", n=N, k=K, bias=False):
    torch.manual_seed(0)
    layer = GroupedLinear(E, k, n, recipe=recipe, device=device, bias=bias)
    with torch.no_grad():
        for i, expert in enumerate(layer.experts):
            expert.weight.copy_(exact(n, k, seed=10 + i))
            if bias:
                expert.bias.copy_(exact(n, seed=20 + i))
    return layer


def step(layer, x, dy, groups=SIZES, call=None):
    x = x.clone().requires_grad_()
    y = (layer if call is None else call)(x, torch.tensor(groups) if type(groups) is tuple else groups)
    y.backward(dy)
    return y.detach(), x.grad, [expert.weight.grad for expert in layer.experts]


def looped(layer, x, dy, rows=ROWS):
    """The layer of each expert, alone on its rows."""
    y, dx = torch.zeros(len(x), dy.shape[1]), torch.zeros_like(x)
    for expert, own in zip(layer.experts, rows, strict=True):
        if own.start == own.stop:
            expert.weight.grad = torch.zeros_like(expert.weight)
            continue
        mine = x[own].clone().requires_grad_()
        made = expert(mine)
        made.backward(dy[own])
        y[own], dx[own] = made.detach(), mine.grad
    return y, dx, [expert.weight.grad for expert in layer.experts]


@pytest.fixture(params=["ops", "a call for each", "one call"])
def way(request):
    """Products: by ops; or without a cuBLASLt, for sizes on the host or on the device."""
    with contextlib.nullcontext() if request.param == "ops" else multiply_for(Target(Gpu((9, 0), cublaslt=0))):
        yield request.param


def groups_of(way, recipe, sizes=SIZES):
    """Return the sizes, or padded rows, whose sizes the host does not know."""
    sizes = torch.tensor(sizes)
    if way != "one call":
        return sizes
    rows, _ = tiles.tiles_of(tiles.tile_rows_of(sizes.device, recipe), M, sizes)
    return GroupedRows(rows, rows)


@pytest.mark.parametrize("name", ALL)
def test_a_loop_over_experts(name, way):
    """In forward and both gradients, empty experts and rows of none among them."""
    recipe = ALL[name]
    if recipe.stochastic and name in MIXES and way == "one call":
        pytest.skip("as by a call for each, of which products are others")
    layer = layer_of(recipe)
    alone, x, dy = copy.deepcopy(layer), exact(M, K), exact(M, N, seed=2)
    groups = groups_of(way, recipe)
    (y, dx, dws), (want_y, want_dx, want_dws) = step(layer, x, dy, groups), looped(alone, x, dy)
    one = way == "one call"
    for got, want in ((y, want_y), (dx, want_dx), *zip(dws, want_dws, strict=True)):
        if one:  # Rounded to bfloat16, twice where there is a factor.
            assert torch.allclose(got, want, rtol=2**-7, atol=2**-7 * want.abs().max().item())
        elif any(recipe.format(role).scaling.global_scale for role in Role):  # Sums of its values are rounded.
            assert torch.allclose(got, want, rtol=1e-6, atol=1e-6 * want.abs().max().item())
        else:
            assert torch.equal(got, want)
    assert not y[ENDS[-1] :].any()
    assert not dx[ENDS[-1] :].any()
    assert not any(dw.any() for dw, size in zip(dws, SIZES, strict=True) if not size)
    if recipe.stateful:
        for a, b, size in zip(layer.experts, alone.experts, SIZES, strict=True):
            for role in [*Role] * bool(size):
                assert torch.equal(a.delayed[role.value].amax, b.delayed[role.value].amax)
        update_scales(layer)
        update_scales(alone)
        again, want = step(layer, x, dy, groups)[0], looped(alone, x, dy)[0]
        assert torch.allclose(again, want, rtol=2**-7) if one else torch.equal(again, want)


@pytest.mark.parametrize("role", [Role.ACTIVATION, Role.GRADIENT], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_codes_are_those_of_each_expert_alone(name, role):
    recipe = ALL[name]
    seeds = torch.arange(2 * E, dtype=torch.int32).view(E, 2)
    torch.manual_seed(1)
    x = torch.randn(M, K) * torch.logspace(-3, 3, M)[:, None]
    x[2, 3], x[60, 1] = torch.inf, torch.nan
    where, fits = tiles.tiles_of(tiles.tile_rows_of(x.device, recipe), M, torch.tensor(SIZES))
    assert fits.item() == 1
    scale, given = None, ()
    if recipe.stateful:
        scale = torch.tensor([0.0, 1.0, 2.0, 0.0, 4.0, 0.5])
    spec = operand_spec(recipe, role, Usage.BOTH)
    made, amaxes = tiles.quantize_experts(x, spec, where, seeds=seeds, scale=scale)
    of_experts = {usage: fallback._of_experts(side, where.stops.tolist()) for usage, side in made.items()}
    for expert, own in enumerate(ROWS):
        if own.start == own.stop:
            continue
        if recipe.stateful:
            given = [scale[expert]] * 3
        expected, seen = LayerQuantizer(recipe, seeds[expert], scales=given).quantize(x[own], role, Usage.BOTH)
        if seen is not None:
            assert_begins_with(amaxes[expert], seen)
        for usage, operand in expected.items():
            got = of_experts[usage][expert].parts
            for a, b in zip(got, operand.parts, strict=True):
                assert (a is None) == (b is None)
                if a is not None:
                    assert_begins_with(a, b)


def assert_begins_with(got, want):
    """Bit for bit; what is after it belongs to rows of zeros."""
    assert got.ndim == want.ndim
    own = got[tuple(slice(size) for size in want.shape)]
    assert torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (own, want)))


@pytest.mark.parametrize("sizes", [(0,) * E, (M, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0, M), (1,) * E], ids=str)
@pytest.mark.parametrize("name", ["CurrentScaling", "BlockScaling", "NVFP4"])
def test_sizes(sizes, name, way):
    layer, ends = layer_of(RECIPES[name]), torch.tensor(sizes).cumsum(0).tolist()
    rows = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    alone, x, dy = copy.deepcopy(layer), exact(M, K), exact(M, N, seed=2)
    groups = groups_of(way, layer.experts[0].recipe, sizes)
    (y, dx, dws), (want_y, want_dx, want_dws) = step(layer, x, dy, groups), looped(alone, x, dy, rows)
    for got, want in ((y, want_y), (dx, want_dx), *zip(dws, want_dws, strict=True)):
        assert torch.allclose(got, want, rtol=2**-7, atol=2**-7 * want.abs().max().item())
    assert not y[ends[-1] :].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", ["ops", "a call for each"], indirect=True)
@pytest.mark.parametrize("name", ["CurrentScaling", "MXFP8"])
def test_biases(name, dtype, way):
    """Each expert's, not in rows after the last group; the gradient of an expert without rows is zeros."""
    layer = layer_of(RECIPES[name], bias=True).to(dtype)
    alone, x, dy = copy.deepcopy(layer), exact(M, K).to(dtype), exact(M, N, seed=2).to(dtype)
    (y, dx, _), (want_y, want_dx, _) = step(layer, x, dy), looped(alone, x, dy)
    for got, want in ((y, want_y), (dx, want_dx)):
        assert torch.allclose(got.float(), want.float(), rtol=2**-6, atol=2**-6 * want.abs().max().item())
    for got, want, own in zip(layer.experts, alone.experts, ROWS, strict=True):
        assert got.bias.grad.dtype == dtype
        if own.start == own.stop:
            assert not got.bias.grad.any()
        else:  # Integers: their sums are exact in float32.
            assert torch.equal(got.bias.grad, dy[own].float().sum(0).to(dtype))
            assert torch.equal(want.bias.grad.float(), got.bias.grad.float()) or dtype != torch.float32
    assert not y[ENDS[-1] :].any()
    bias = torch.zeros(E, N, requires_grad=True)
    y = grouped_linear(x.float(), torch.ones(E, N, K), torch.tensor(SIZES), name, weight_layout="NK", bias=bias)
    (of_bias,) = torch.autograd.grad(y, [bias], dy.float())  # Nothing else requires a gradient.
    assert torch.equal(of_bias, torch.stack([dy[own].float().sum(0) for own in ROWS]))


def test_no_rows_at_all():
    layer = layer_of(CurrentScaling())
    x = torch.zeros(0, K, requires_grad=True)
    y = layer(x, torch.zeros(E, dtype=torch.int32))
    y.sum().backward()
    assert (y.shape, x.grad.shape) == ((0, N), (0, K))
    assert not any(expert.weight.grad.any() for expert in layer.experts)


@pytest.mark.parametrize("name", ["CurrentScaling", "MXFP8"])
def test_what_may_not_change_bits(name, way):
    layer, x, dy = layer_of(RECIPES[name]), torch.randn(M, K), torch.randn(M, N)
    groups = groups_of(way, RECIPES[name])
    y, dx, dws = step(layer, x, dy, groups)
    layer.zero_grad()
    again = step(layer, x, dy, groups, call=lambda *given: checkpoint(layer, *given, use_reentrant=False))
    assert torch.equal(again[0], y)
    assert torch.equal(again[1], dx)
    assert all(torch.equal(a, b) for a, b in zip(again[2], dws, strict=True))
    with torch.no_grad():
        assert torch.equal(layer(x, groups.int() if isinstance(groups, torch.Tensor) else groups), y)
    stacked = torch.stack([expert.weight.detach() for expert in layer.experts]).requires_grad_()
    made = grouped_linear(x, stacked, groups, RECIPES[name], weight_layout="NK")
    made.backward(dy)
    assert torch.equal(made, y)
    assert torch.equal(stacked.grad, torch.stack(dws))
    transposed = stacked.detach().transpose(1, 2).contiguous().requires_grad_()
    made = grouped_linear(x, transposed, groups, RECIPES[name], weight_layout="KN")
    made.backward(dy)
    assert torch.equal(made, y)
    assert torch.equal(transposed.grad.transpose(1, 2), stacked.grad)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x, groups).dtype == torch.bfloat16
    for expert in layer.experts:
        expert.weight.requires_grad_(False)
    mine = x.clone().requires_grad_()
    layer(mine, groups).backward(dy)
    assert torch.equal(mine.grad, dx)


def test_biases_under_autocast_to_another_dtype_of_16_bits():
    """Under it `torch.stack` rejects float16."""
    layer, x, groups = layer_of("CurrentScaling", bias=True), exact(M, K), torch.tensor(SIZES)
    want = copy.deepcopy(layer).bfloat16()(x.bfloat16(), groups)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer.half()(x.half(), groups), want)


@pytest.mark.parametrize("as_list", [False, True], ids=["one tensor", "list"])
@pytest.mark.parametrize("name", ["CurrentScaling", "BlockScaling", "MXFP8", "MXFP4", "NVFP4"])
def test_launches_do_not_grow_with_experts(name, as_list):
    """Of qshard and of torch, in forward and backward. Products of values take more than products of codes."""
    counts = []
    for experts in (2, 16):
        w = torch.randn(experts, 128, 128)
        weights = [one.clone().requires_grad_() for one in w] if as_list else [w.requires_grad_()]
        x = torch.randn(64, 128, requires_grad=True)
        sizes, seeds = torch.full((experts,), 64 // experts), torch.zeros(experts, 2, dtype=torch.int32)
        how = {"seeds": seeds} if name == "NVFP4" else {}
        with Wire() as wire:
            if as_list:
                y = grouped_linear(x, weights, sizes, name, **how)
            else:
                y = grouped_linear(x, weights[0], sizes, name, weight_layout="NK", **how)
            torch.autograd.grad(y, [x, *weights], torch.ones_like(y))
        counts.append(wire.launches)
    assert len(counts[0]) == len(counts[1]), counts
    most = {"CurrentScaling": 20, "BlockScaling": 20, "MXFP8": 20, "NVFP4": 50}
    if not as_list and name in most:
        assert len(counts[0]) <= most[name], counts[0]


@pytest.mark.parametrize(("name", "gathers"), [("CurrentScaling", 0), ("DelayedScaling", 0), ("BlockScaling", 2)])
def test_products_with_one_scale_need_no_gather(name, gathers):
    """They write the rows of x, in forward and backward."""
    with Wire() as wire:
        step(layer_of(ALL[name], n=128, k=128), exact(M, 128), exact(M, 128))
    assert wire.launches.count("qshard.combine_rows.default") == gathers


@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", ["CurrentScaling", "BlockScaling", "DelayedScaling", "MXFP8", "NVFP4"])
def test_compiled_without_a_break(name):
    """Sizes are data of the graph: others need no new graph, and sizes that do not fit raise."""
    torch._dynamo.reset()
    layer, x, dy = layer_of(RECIPES[name], bias=True), exact(M, K), exact(M, N, seed=2)
    compiled, eager = torch.compile(layer, backend="aot_eager", fullgraph=True), copy.deepcopy(layer)
    for sizes in (SIZES, SIZES[::-1]):
        expected, got = step(eager, x, dy, sizes), step(layer, x, dy, sizes, call=compiled)
        for a, b in zip((*got[:2], *got[2]), (*expected[:2], *expected[2]), strict=True):
            assert torch.equal(a, b)
    if name == "CurrentScaling":
        with torch._dynamo.config.patch(error_on_recompile=True):
            compiled(x.requires_grad_(), torch.tensor((M, *SIZES[1:])[:E]) * 0)
            with pytest.raises(RuntimeError, match="group_sizes are negative or exceed the rows of x"):
                compiled(x, torch.tensor([M, 1, 0, 0, 0, 0]))


def test_layers_that_are_there():
    layers = torch.nn.ModuleList(torch.nn.Linear(K, N, bias=False) for _ in range(E))
    with pytest.raises(ValueError, match=r"GroupedLinear\.of: layers \(of type list\) are not converted Linear layers"):
        GroupedLinear.of(layers)
    layer = GroupedLinear.of(convert(layers, "MXFP8"))
    assert isinstance(layer.experts[0], Linear)
    x = torch.randn(M, K)
    assert torch.allclose(layer(x, torch.tensor(SIZES))[: SIZES[0]], layers[0](x[: SIZES[0]]), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"GroupedLinear\.of: layers \(of type list\) are not converted Linear"):
        GroupedLinear.of([convert(torch.nn.Linear(K, N, bias=bias), "MXFP8") for bias in (True, False)])


WRONG = [
    (
        {"sizes": [200, 1, 0, 0, 0, 0]},
        ValueError,
        r"group_sizes \(sum 201, minimum 0\) are negative or exceed the rows of x",
    ),
    ({"sizes": [9, -1, 0, 0, 0, 0]}, ValueError, r"group_sizes \(sum 8, minimum -1\) are negative or exceed the rows"),
    ({"sizes": [9, 1]}, ValueError, r"group_sizes \(int64 \(2,\)\) is not one int32 or int64 for each of 6 experts"),
    ({"sizes": [9.0] * 6}, ValueError, r"group_sizes \(float32 \(6,\)\) is not one int32 or int64 for each of"),
    ({"x": torch.ones(4, 7)}, ValueError, r"weights \(64, 96\) do not fit x \(4, 7\); pass each as \[N, K\], all of"),
    ({"x": torch.ones(4, 2, K)}, ValueError, r"weights \(64, 96\) do not fit x \(4, 2, 96\)"),
    ({"x": torch.ones(4, K, dtype=torch.int32)}, TypeError, r"grouped_linear: x \(int32\)"),
    (
        {"weights": torch.ones(E, K, K)},
        ValueError,
        r"weight_layout \(None\) is not a layout; pass 'NK' for weights \[E, N, K\]",
    ),
    (
        {"weight_layout": "KN"},
        ValueError,
        r"weight_layout \('KN'\) is for one tensor of all experts, but weights is a list",
    ),
    ({"weights": []}, ValueError, r"weights \(none\) do not fit x"),
    ({"weights": [torch.ones(N, K), torch.ones(N, 2 * K)]}, ValueError, r"weights \(64, 96\), \(64, 192\) do not fit"),
    ({"weights": 2}, TypeError, r"weights \(2\) are not tensors of values or a list; pass"),
    ({"weights": [torch.ones(48, K)] * E, "recipe": "MXFP8"}, ValueError, r"weights \(48, 96\) is not a whole number"),
    ({"bias": 2}, TypeError, r"grouped_linear: bias \(2\) is not a torch\.Tensor or None"),
    ({"bias": torch.ones(N)}, ValueError, r"bias \(64,\) does not fit 6 experts with weights of 64 rows; pass bias as"),
    ({"recipe": "NVFP4"}, ValueError, r"grouped_linear: NVFP4 uses stochastic rounding and needs `seeds` as int32 \(6"),
    ({"recipe": "NVFP4", "seeds": torch.zeros(6, 2)}, ValueError, "grouped_linear: NVFP4 uses stochastic rounding and"),
    (
        {"recipe": "NVFP4", "seeds": torch.zeros(6, 3, dtype=torch.int32)},
        ValueError,
        "grouped_linear: NVFP4 uses stochastic rounding and needs `seeds`",
    ),
    ({"recipe": "NVFP4", "seeds": [5] * 6}, TypeError, "grouped_linear: NVFP4 uses stochastic rounding and needs"),
    ({"recipe": "DelayedScaling"}, ValueError, "grouped_linear: DelayedScaling needs `delayed`; pass a dict of"),
    ({"delayed": [{}] * 6}, ValueError, "grouped_linear: delayed is for DelayedScaling, and the recipe is"),
]


@pytest.mark.parametrize(("wrong", "kind", "text"), WRONG, ids=[text[:24] for *_, text in WRONG])
def test_what_is_refused(wrong, kind, text):
    given = {"x": torch.ones(M, K), "weights": [torch.ones(N, K)] * E, "sizes": list(SIZES), "recipe": "CurrentScaling"}
    given |= wrong
    options = {name: given[name] for name in ("bias", "delayed", "seeds", "weight_layout") if name in given}
    with pytest.raises(kind, match=text):
        grouped_linear(given["x"], given["weights"], torch.tensor(given["sizes"]), given["recipe"], **options)
