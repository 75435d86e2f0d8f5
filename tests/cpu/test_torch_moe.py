"""`MoE` and `grouped_mlp` in PyTorch: modules, checkpointing, launches, and what is refused."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import qshard.torch_bridge as qt
from qshard.recipes import Role
from support.formats import RECIPES
from support.torch_graphs import calls_of, compile_and_keep
from support.torch_models import Wire, void_amaxes

H, WIDE, E, K = 64, 96, 5, 2
DYNAMO = pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")  # Dynamo's own.


def layer_of(recipe="CurrentScaling", **options):
    torch.manual_seed(0)
    return qt.MoE(H, WIDE, num_experts=E, top_k=K, recipe=recipe, **options)


def tokens(*shape, seed=1):
    return torch.randn(*shape, H, generator=torch.Generator().manual_seed(seed))


def step(layer, x, call=None):
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = (layer if call is None else call)(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]


def assert_same(made, want):
    for got, expected in zip(made, want, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_trains(name):
    layer = layer_of(RECIPES[name], shared_intermediate_size=32)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3)
    x, losses = tokens(4, 24), []
    want = tokens(4, 24, seed=2)
    for _ in range(6):
        loss = F.mse_loss(layer(x), want)
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
        optimizer.step()
        optimizer.zero_grad()
        qt.update_scales(layer)
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_the_layer_is_the_functions():
    """With its weights in one tensor each, and the shared expert by itself."""
    layer = layer_of(score_function="sigmoid", scale=2.5, expert_bias=True, shared_intermediate_size=32)
    layer.expert_bias.copy_(torch.linspace(-1, 1, E))
    x = tokens(3, 7)
    y, logits = layer(x, return_router_logits=True)
    assert torch.equal(logits, F.linear(x, layer.router.weight))
    options = {"score_function": "sigmoid", "scale": 2.5, "bias": layer.expert_bias}
    indices, weights = qt.topk_routing(logits, K, **options)
    w13, w2 = (torch.stack([expert.weight for expert in each.experts]) for each in (layer.w13, layer.w2))
    of_experts = qt.grouped_mlp(x, indices, weights, w13, w2, "CurrentScaling")
    shared = layer.shared["w2"](qt.swiglu(*layer.shared["w13"](x).chunk(2, -1)))
    assert torch.equal(y, of_experts + shared)
    # The largest bias is that of the last expert.
    assert (indices == E - 1).float().mean() > 1 / E


@pytest.mark.parametrize("name", ["CurrentScaling", "MXFP8"])
def test_checkpointing_keeps_bits(name):
    layer, x = layer_of(name), tokens(40)
    again = copy.deepcopy(layer)
    assert_same(step(again, x, lambda x: checkpoint(again, x, use_reentrant=False)), step(layer, x))


def test_a_checkpoint_of_the_model():
    layer, x = layer_of(expert_bias=True), tokens(9)
    other = qt.MoE(H, WIDE, num_experts=E, top_k=K, recipe="CurrentScaling", expert_bias=True)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))


@pytest.mark.parametrize("options", [{}, {"shared_intermediate_size": 32}], ids=["experts", "shared"])
def test_autocast(options):
    layer, x = layer_of(**options), tokens(12)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())


def test_convert_leaves_the_router():
    layer = layer_of()
    model = qt.convert(torch.nn.Sequential(layer, torch.nn.Linear(H, H)), "MXFP8")
    assert isinstance(model[1], qt.Linear)
    assert type(layer.router.weight) is torch.nn.Parameter
    model(tokens(8)).sum().backward()


def launches_of(experts, recipe):
    x = tokens(64).requires_grad_()
    w13, w2 = torch.randn(experts, 2 * 128, H), torch.randn(experts, H, 128)
    leaves = [w.requires_grad_() for w in (w13, w2)]
    logits = torch.randn(64, experts, requires_grad=True)
    with Wire() as wire:
        indices, weights = qt.topk_routing(logits, K)
        qt.grouped_mlp(x, indices, weights, *leaves, recipe).sum().backward()
    return [name for name in wire.launches if name.startswith("qshard") or "moe" in name]


@pytest.mark.parametrize("recipe", ["CurrentScaling", "BlockScaling"])
def test_launches_do_not_grow_with_experts(recipe):
    counts = [len(launches_of(experts, recipe)) for experts in (4, 32)]
    assert counts[0] == counts[1] > 0


def test_launches_of_a_permutation():
    counts = []
    for experts in (4, 300):
        indices = torch.randint(experts, (64, K))
        x = tokens(64).requires_grad_()
        with Wire() as wire:
            permutation = qt.moe_permutation(indices, experts)
            qt.moe_unpermute(qt.moe_permute(x, permutation), permutation, torch.rand(64, K)).sum().backward()
        counts.append(wire.launches)
    assert counts[0] == counts[1]
    # What a GPU would wait for.
    assert not [name for name in counts[0] if any(word in name for word in ("item", "_local_scalar", "nonzero"))]


@pytest.mark.parametrize("recipe", [None, "CurrentScaling"])
def test_no_tokens(recipe):
    x, weights = tokens(0).requires_grad_(), torch.zeros(0, K, requires_grad=True)
    w13, w2 = torch.randn(E, 2 * WIDE, H, requires_grad=True), torch.randn(E, H, WIDE, requires_grad=True)
    y = qt.grouped_mlp(x, torch.zeros(0, K, dtype=torch.int64), weights, w13, w2, recipe)
    y.square().sum().backward()
    assert (y.shape, x.grad.shape, weights.grad.shape) == ((0, H), (0, H), (0, K))
    assert not w13.grad.any()
    assert not w2.grad.any()


def test_delayed_scaling():
    """The states of both products are those of the layers."""
    layer, x = layer_of("DelayedScaling"), tokens(16)
    other = copy.deepcopy(layer)
    y = layer(x)
    y.square().sum().backward()
    routing = qt.topk_routing(other.router(x), K)
    experts = [[*each.experts] for each in (other.w13, other.w2)]
    weights = [[expert.weight for expert in each] for each in experts]
    states = tuple([{role: expert.delayed[role.value] for role in Role} for expert in each] for each in experts)
    made = qt.grouped_mlp(x, *routing, *weights, "DelayedScaling", delayed=states)
    made.square().sum().backward()
    assert torch.equal(made, y)
    for (name, mine), (_, theirs) in zip(other.named_buffers(), layer.named_buffers(), strict=True):
        assert torch.equal(mine, theirs), name
    assert all(expert.delayed["activation"].amax > 0 for each in experts for expert in each)


GOOD = {
    "x": torch.ones(8, H),
    "indices": torch.zeros(8, K, dtype=torch.int64),
    "weights": torch.ones(8, K),
    "w13": torch.ones(E, 2 * WIDE, H),
    "w2": torch.ones(E, H, WIDE),
    "recipe": "CurrentScaling",
}
WRONG = [
    ({"w13": torch.ones(E, WIDE, H)}, ValueError, r"grouped_mlp: w13 \(5, 96, 64\) and w2 \(5, 64, 96\) do not fit x"),
    (
        {"w13": torch.ones(E, H, 2 * WIDE)},
        ValueError,
        r"pass them as \[E, 2 I, H\] and \[E, H, I\] for weight_layout 'NK'",
    ),
    ({"w2": torch.ones(E + 1, H, WIDE)}, ValueError, r"grouped_mlp: w13 .* and w2 \(6, 64, 96\) do not fit"),
    ({"weight_layout": "KN"}, ValueError, r"pass them as \[E, H, 2 I\] and \[E, I, H\] for weight_layout 'KN'"),
    ({"weight_layout": "nk"}, ValueError, r"grouped_mlp: weight_layout \('nk'\) is not a layout; pass 'NK' for w13"),
    ({"indices": torch.zeros(7, K, dtype=torch.int64)}, ValueError, r"grouped_mlp: indices \(7, 2\) and weights"),
    ({"weights": torch.ones(8, K + 1)}, ValueError, r"grouped_mlp: indices \(8, 2\) and weights \(8, 3\) do not fit"),
    ({"indices": torch.zeros(8, K)}, TypeError, r"moe_permutation: indices \(torch.Tensor, .* are not int32 or int64"),
    ({"indices": [[0]]}, TypeError, r"grouped_mlp: indices \(\[\[0\]\]\) are not a torch.Tensor"),
    ({"w2": 3}, TypeError, r"grouped_mlp: w2 \(3\) are not tensors; pass one of all experts, or one for each"),
    ({"w13": []}, TypeError, r"grouped_mlp: w13 \(\[\]\) are not tensors"),
    ({"x": torch.ones(8, H, dtype=torch.int32)}, TypeError, r"grouped_mlp: x \(int32\)"),
    ({"recipe": "NVFP4"}, ValueError, "grouped_linear: NVFP4 uses stochastic rounding and needs `seeds`"),
]


@pytest.mark.parametrize(("wrong", "kind", "text"), WRONG, ids=[text[:30] for *_, text in WRONG])
def test_what_is_refused(wrong, kind, text):
    given = {**GOOD, **wrong}
    options = {"weight_layout": given.pop("weight_layout")} if "weight_layout" in given else {}
    with pytest.raises(kind, match=text):
        qt.grouped_mlp(*given.values(), **options)


PERMUTATION = qt.moe_permutation(GOOD["indices"], E)
CALLS = [
    (lambda: qt.moe_permutation(torch.zeros(3, dtype=torch.int64), E), r"indices \(3,\) are not \[T, k\]; pass the k"),
    (lambda: qt.moe_permutation(GOOD["indices"], 0), r"num_experts \(0\) is not positive"),
    (lambda: qt.moe_permute(torch.ones(9, H), PERMUTATION), r"moe_permute: x \(9, 64\) does not have 8 rows; pass x"),
    (
        lambda: qt.moe_unpermute(torch.ones(9, H), PERMUTATION),
        r"moe_unpermute: y \(9, 64\) does not have 16 rows; pass",
    ),
    (
        lambda: qt.moe_unpermute(torch.ones(16, H), PERMUTATION, torch.ones(8, 3)),
        r"moe_unpermute: weights \(8, 3\) are not \(8, 2\); pass one weight for each",
    ),
    (
        lambda: qt.topk_routing(torch.ones(8, E), E + 1),
        r"topk_routing: top_k \(6\) is not a number of experts of logits \(8, 5\)",
    ),
    (lambda: qt.topk_routing(torch.ones(8, E), 2, score_function="relu"), r"score_function \('relu'\) is not a score"),
    (lambda: qt.topk_routing(torch.ones(8, E), 2, bias=torch.ones(3)), r"bias \(3,\) is not one number for each of 5"),
    (lambda: qt.topk_routing(torch.ones(()), 1), r"logits \(\) have no axis of experts"),
    (lambda: layer_of(score_function="relu"), r"score_function \('relu'\) is not a score function"),
]


@pytest.mark.parametrize(("call", "text"), CALLS, ids=[text[:30] for _, text in CALLS])
def test_wrong_shapes_are_refused(call, text):
    with pytest.raises(ValueError, match=text):
        call()


@DYNAMO
@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.slow) for name in (None, "MXFP8")), "CurrentScaling"]
)
def test_compiled_in_one_graph(name):
    """The bits of eager calls. As there, only tokens are read for their amaxes."""
    torch._dynamo.reset()
    dtype = torch.float32 if name else torch.bfloat16  # PyTorch compiles its grouped product in bfloat16 only.
    leaves = [torch.randn(*shape).to(dtype) for shape in ((24, H), (24, E), (E, 2 * WIDE, H), (E, H, WIDE))]

    def run(x, logits, w13, w2):
        return qt.grouped_mlp(x, *qt.topk_routing(logits, K), w13, w2, name)

    found, (compiled, graphs) = [], compile_and_keep(run)
    for call in (run, compiled):
        given = [leaf.clone().requires_grad_() for leaf in leaves]
        y = call(*given)
        found.append([y.detach(), *torch.autograd.grad(y, given, torch.ones_like(y))])
    assert_same(found[1], found[0])
    assert [widths_in(graph) for graph in graphs] == ([[H, 1], [1, 1]] if name == "CurrentScaling" else [[], []])


def widths_in(graph):
    return [node.args[0].meta["val"].shape[1] for node in calls_of(graph, "amax_grouped")]


def change_results(layer):
    layer.w13.register_forward_hook(lambda module, given, y: y * 2)
    layer.w2.experts.register_forward_pre_hook(lambda module, given: (given[0] * 2, *given[1:]))


@pytest.mark.slow
@DYNAMO
@pytest.mark.parametrize("hooked", [False, True])
def test_a_compiled_layer(hooked):
    """Hooks see what they see in an eager layer, and amaxes are those of the values that they return."""
    torch._dynamo.reset()
    layer, x = qt.convert(layer_of(stacked=hooked, shared_intermediate_size=32), "CurrentScaling"), tokens(24)
    if hooked:
        change_results(layer)
    want = [a.clone() for a in step(layer, x)]
    compiled, graphs = compile_and_keep(layer)
    assert_same(step(layer, x, compiled), want)
    assert [widths_in(graph) for graph in graphs] == ([[H, WIDE], [H, 2 * WIDE]] if hooked else [[H, 1], [1, 1]])


def test_layers_pass_amaxes():
    """Only tokens are read for their amaxes. Writes to what comes after void the amaxes, and bits are the same."""
    layer, x = layer_of("CurrentScaling"), tokens(24)
    with Wire() as wire:
        passed = [a.clone() for a in step(layer, x)]
    assert widths_of_amaxes(wire) == [H, 1, 1, 1]  # x, h, and the gradients of y and of gate and up.
    void_amaxes(layer)
    with Wire() as wire:
        assert_same(step(layer, x), passed)
    assert widths_of_amaxes(wire) == [H, WIDE, H, 2 * WIDE]


def widths_of_amaxes(wire):
    return [shape[1] for op, shape in wire.shapes if op == "amax_grouped"]


@pytest.mark.parametrize("name", ["CurrentScaling", "BlockScaling", "MXFP8"])
def test_padded_rows_keep_bits(name):
    """`grouped_mlp` pads rows before the first product; the calls of its parts do in each product."""
    x, routing = tokens(24), qt.topk_routing(torch.randn(24, E), K)
    leaves = [x, routing[1], torch.randn(E, 2 * 128, H) / 8, torch.randn(E, H, 128) / 8]
    dy = tokens(24, seed=5)

    def in_parts(x, weights, w13, w2):
        permutation = qt.moe_permutation(routing[0], E)
        sizes, layout = permutation.group_sizes, {"weight_layout": "NK"}
        gate_up = qt.grouped_linear(qt.moe_permute(x, permutation), w13, sizes, name, **layout)
        h = qt.swiglu(*gate_up.chunk(2, -1))
        return qt.moe_unpermute(qt.grouped_linear(h, w2, sizes, name, **layout), permutation, weights)

    found = []
    for call in (lambda x, *rest: qt.grouped_mlp(x, routing[0], *rest, name), in_parts):
        given = [leaf.clone().requires_grad_() for leaf in leaves]
        y = call(*given)
        found.append([y.detach(), *torch.autograd.grad(y, given, dy)])
    assert_same(*found)
