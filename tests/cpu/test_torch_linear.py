"""`Linear` and `convert`: a module that is otherwise `nn.Linear`. Its products are in test_linear.py."""

import copy
import io

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from qshard.formats import FP8_E4M3, FP8_E5M2, MXFP8_E4M3, Usage
from qshard.recipes import MXFP8, NVFP4, CurrentScaling, DelayedScaling, Recipe
from qshard.torch_bridge import (
    DelayedScale,
    Linear,
    QuantizedTensor,
    ShardedWeight,
    convert,
    freeze,
    linear,
    load_scaling_state,
    quantize,
    scaling_state,
    update_scales,
)
from support.formats import RECIPES
from support.fronts import TorchFront
from support.products import operands

FRONT = TorchFront("cpu")
RECIPE = CurrentScaling()
OTHER = CurrentScaling(weight=FP8_E4M3.with_options(pow2=True), gradient=FP8_E4M3)
MIX = Recipe(weight=FP8_E5M2, activation=FP8_E5M2.with_options(eps=1.0), gradient=FP8_E5M2.with_options(pow2=True))
COMPILED = ("DelayedScaling", "NVFP4")
"""Recipes with states and with seeds; compiled layers of the others are slow."""
"""One of each kind of scales, state and seed, for what takes long; the others are slow."""
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())


def model(recipe=None, bias=True, seed=0):
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(32, 64, bias=bias), nn.GELU(), nn.Linear(64, 32, bias=bias))
    return module if recipe is None else convert(module, recipe)


def states(module):
    return [m for m in module.modules() if isinstance(m, DelayedScale)]


def train(module, steps, optimizer=None):
    """The losses of learning the identity."""
    optimizer = optimizer or torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for step in steps:
        optimizer.zero_grad()
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
        loss = (module(x) - x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        update_scales(module)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("grad_x", "grad_w"), [(True, False), (False, True), (False, False)])
def test_only_what_is_asked_for_is_made(grad_x, grad_w):
    x, w, dy = (FRONT.array(a) for a in operands((4, 8)))
    both = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    linear(*both, None, RECIPE).backward(dy)
    x.requires_grad_(grad_x)
    w.requires_grad_(grad_w)
    y = linear(x, w, None, RECIPE)
    if y.requires_grad:
        y.backward(dy)
    for tensor, other in zip((x, w), both, strict=True):
        assert (tensor.grad is not None) == tensor.requires_grad
        assert tensor.grad is None or torch.equal(tensor.grad, other.grad)


@pytest.mark.parametrize("grad_x", [False, True])
def test_what_is_kept_for_backward_is_codes_of_x(grad_x):
    """And the parameter, which is there anyway, if x has a gradient."""
    kept = []
    x, w = torch.randn(64, 32, requires_grad=grad_x), nn.Parameter(torch.randn(48, 32))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        linear(x, w, None, RECIPE)
    memory = {t.untyped_storage().data_ptr() for t in kept} - {w.untyped_storage().data_ptr()}
    assert [(t.dtype, t.numel()) for t in kept if t.data_ptr() in memory and t.numel() > 1] == [(torch.uint8, 64 * 32)]
    assert any(t is w for t in kept) == grad_x


@pytest.mark.parametrize("recipe", [RECIPE, MXFP8(weight=MXFP8_E4M3)], ids=["transposes", "two planes"])
def test_a_weight_that_is_codes_already(recipe):
    """As FSDP2 hands it over, with the gradient going to the parameter that it stands for."""
    x, w, dy = (FRONT.array(a) for a in operands((32, 64), 32))
    rowwise, both = (quantize(w, recipe.weight, usage=usage) for usage in (Usage.ROWWISE, Usage.BOTH))
    whole, codes = w.clone().requires_grad_(), nn.Parameter(rowwise if recipe.weight.shares_codes else both)
    xs = [x.clone().requires_grad_() for _ in range(2)]
    for a, b in zip(xs, (whole, codes), strict=True):
        linear(a, b, None, recipe).backward(dy)
    assert torch.equal(xs[0].grad, xs[1].grad)
    assert torch.equal(whole.grad, codes.grad)
    assert type(codes.grad) is torch.Tensor
    with pytest.raises(ValueError, match=r"weight .columnwise. has no rowwise plane"):
        linear(x, quantize(w, recipe.weight, usage=Usage.COLUMNWISE), None, recipe)
    if not recipe.weight.shares_codes:
        with pytest.raises(ValueError, match=r"linear: weight .MXFP8_E4M3, rowwise. has no columnwise plane"):
            linear(xs[0], rowwise, None, recipe)


# Dynamo of torch 2.13 does what torch.autograd 2.13 has deprecated.
@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(recipe, id=name, marks=[] if name in COMPILED else pytest.mark.slow)
        for name, recipe in {**RECIPES, "mix": MIX}.items()
    ],
)
def test_compiled_steps_give_the_same_bits(recipe, backend):
    """In one graph for any batch, where torch can. Seeds and scales advance in it, once a microbatch."""
    torch._dynamo.reset()
    count = CompileCounterWithBackend(backend)
    # Inductor adds up the gradients of biases in another order, and has another GELU.
    eager = model(recipe) if backend == "aot_eager" else model(recipe, bias=False)[::2]
    compiled = copy.deepcopy(eager)
    dynamic = torch.__version__ >= "2.13"  # README says what 2.11 cannot do.
    run = torch.compile(compiled, fullgraph=True, backend=count, dynamic=dynamic)
    for rows in (32, 5, 8):
        xs, dy = torch.randn(2, rows, 32), torch.randn(rows, 32)
        made = []
        for module, call in ((eager, eager), (compiled, run)):
            module.zero_grad()
            inputs = [x.clone().requires_grad_() for x in xs]
            ys = [call(x) for x in inputs]
            for y in ys:
                y.backward(dy)
            made.append(
                [*ys, *(t.grad for t in (*inputs, *module.parameters())), *(b.clone() for b in module.buffers())]
            )
            with torch.no_grad():
                module[0].weight.mul_(0.9)
            update_scales(module)
        for got, want in zip(*made, strict=True):
            assert torch.equal(got, want)
    assert count.frame_count <= (2 if dynamic else 3)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # From `load` of torch 2.11.
@pytest.mark.parametrize("recipe", ["CurrentScaling", "NVFP4"])
@torch.no_grad()
def test_exported_for_inference_the_bits_are_the_same(recipe):
    """Frozen weights are in the file as codes."""
    layers, x, file = model(recipe), torch.randn(8, 32), io.BytesIO()
    want = layers(x)
    assert torch.equal(torch.export.export(layers, (x,)).module()(x), want)
    freeze(layers)
    torch.export.save(torch.export.export(layers, (x,)), file)
    file.seek(0)
    assert torch.equal(torch.export.load(file).module()(x), want)


@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(recipe, id=name, marks=[] if name in COMPILED else pytest.mark.slow)
        for name, recipe in RECIPES.items()
    ],
)
def test_alike_layers_share_what_is_compiled(recipe):
    """Else a model of more layers than Dynamo compiles versions of a function runs the rest eagerly, without a word."""
    torch._dynamo.reset()
    blocks = [convert(nn.Sequential(nn.Linear(64, 64, bias=False), nn.GELU()), recipe) for _ in range(3)]
    x = torch.randn(32, 64, requires_grad=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for block in blocks:
            block.compile(backend="aot_eager")
            block(x).sum().backward()


def test_seeds_of_stochastic_rounding():
    """Each forward takes the next one; the same run again gives the same bits."""
    torch.manual_seed(0)
    layer, x, dy = Linear(32, 32, recipe=NVFP4()), torch.randn(16, 32), torch.randn(16, 32)
    saved, seed = copy.deepcopy(scaling_state(layer)), layer.seed.clone()

    def gradient():
        layer.zero_grad()
        layer(x).backward(dy)
        return layer.weight.grad.clone()

    first, second = gradient(), gradient()
    assert not torch.equal(first, second)
    assert torch.equal(layer.seed, seed + torch.tensor([2, 0], dtype=torch.int32))
    load_scaling_state(layer, saved)
    assert torch.equal(gradient(), first)
    torch.manual_seed(0)
    assert torch.equal(Linear(32, 32, recipe=NVFP4()).seed, seed)
    torch.library.opcheck(torch.ops.qshard.take_seed.default, (seed.clone(), 3))
    with pytest.raises(ValueError, match="linear: NVFP4 uses stochastic rounding and needs `seed`; pass a new seed on"):
        linear(x, layer.weight, None, NVFP4())


def test_autocast_casts_the_input():
    layer, x = model(RECIPE)[0], torch.randn(4, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert torch.equal(y, layer(x.bfloat16()))
    assert y.dtype == torch.bfloat16


def test_linear_module_is_what_convert_makes():
    made, converted, x = Linear(32, 64, True, RECIPE), model(RECIPE)[0], torch.randn(4, 32)
    assert type(made) is type(converted)
    made.load_state_dict(converted.state_dict())
    assert torch.equal(made(x), converted(x))
    assert repr(made) == f"Linear(in_features=32, out_features=64, bias=True, recipe={RECIPE!r})"


OPTIMIZERS = [
    *((torch.optim.AdamW, {"lr": 1e-2, name: True}) for name in ("foreach", "fused")),
    (torch.optim.AdamW, {"lr": 1e-2, "foreach": False}),
    *((torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": foreach}) for foreach in (True, False)),
]


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS, ids=str)
def test_optimizers_keep_plain_states_and_learn(kind, options):
    for recipe in RECIPES.values():
        module = model(recipe)
        optimizer = kind(module.parameters(), **options)
        losses = train(module, range(12), optimizer)
        assert losses[-1] < 0.95 * losses[0]
        held = [value for state in optimizer.state.values() for value in state.values()]
        assert {type(value) for value in held if isinstance(value, torch.Tensor)} == {torch.Tensor}


@every_recipe
def test_checkpoints_hold_plain_tensors_and_load_anywhere(recipe):
    """Into `nn.Linear`, and under any recipe, where states that the saver did not have are as new."""
    module, plain = model(recipe), model(seed=1)
    train(module, range(2))
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    plain.load_state_dict(saved)
    assert torch.equal(plain[0].weight, module[0].weight.shard)
    assert isinstance(module.state_dict(keep_vars=True)["0.weight"], nn.Parameter)
    for other in RECIPES.values():
        for source, assign in ((saved, False), (plain.state_dict(), False), (plain.state_dict(), True)):
            made = model(other, seed=1)
            made.load_state_dict(source, assign=assign)
            assert isinstance(made[0].weight, ShardedWeight)
            assert isinstance(made[0].weight, nn.Parameter)
            assert torch.equal(made[0].weight.shard, module[0].weight.shard)
            assert all(state.scale == 0 for state in states(made))


@every_recipe
def test_a_checkpoint_resumes_with_the_same_bits(recipe):
    """With scales, amaxes and seeds, which have a state of their own."""
    module = model(recipe)
    train(module, range(4))
    saved, scaling = copy.deepcopy([module.state_dict(), scaling_state(module)])
    other = model(recipe, seed=1)
    other.load_state_dict(saved)
    load_scaling_state(other, scaling)
    for name, tensor in [*other.state_dict().items(), *scaling_state(other).items()]:
        assert torch.equal(tensor, {**saved, **scaling}[name]), name
    assert train(module, (5, 6)) == train(other, (5, 6))


@every_recipe
def test_a_copied_model_goes_its_own_way(recipe):
    """With what its layers share shared among its own."""
    module = model()
    module.add_module("again", nn.Linear(64, 32))
    module.again.weight = module[2].weight
    convert(module, recipe)
    other = copy.deepcopy(module)
    state, copied = module[0].weight.scale_state, other[0].weight.scale_state
    assert copied is not state
    assert (copied.passes.root, state.passes.root) == (other, module)
    assert isinstance(other[0].weight, ShardedWeight)
    with torch.no_grad():
        other[0].weight.zero_()
        for buffer in other.buffers():
            buffer.fill_(3)
    assert module[0].weight.shard.any()
    assert not any((buffer == 3).any() for buffer in module.buffers())
    if recipe.stateful:
        assert len(states(module)) == 8
        for each in (module, other):
            assert each.again.delayed["weight"] is each[2].delayed["weight"] is each[2].weight.scale_state.delayed
    convert(module, RECIPE)
    assert not states(module)


@every_recipe
def test_moving_a_model(recipe):
    """Of its state all stays as it was, in fp32 too."""
    module = model(recipe)
    train(module, range(1))
    before = [buffer.clone() for buffer in module.buffers()]
    module.to(torch.bfloat16)
    assert isinstance(module[0].weight, ShardedWeight)
    assert module[0].weight.dtype == module[0].weight.shard.dtype == torch.bfloat16
    for a, b in zip(before, module.buffers(), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    meta = module.to("meta")
    assert meta[0].weight.is_meta
    empty = meta.to_empty(device="cpu")
    assert isinstance(empty[0].weight, ShardedWeight)
    assert all(state.scale == 0 and not state.amax_history.any() for state in states(empty))
    empty[0].reset_parameters()
    assert empty[0].weight.shard.isfinite().all()


def test_everything_else_on_the_weight_is_in_high_precision():
    weight = model(RECIPE)[0].weight
    for result in (weight + 1, weight.sum(), weight.clone(), torch.zeros_like(weight), weight @ weight.t()):
        assert type(result) is torch.Tensor
    for view in (weight.t(), weight[0], weight[:3], weight.detach(), weight.view(-1), weight.unsqueeze(0)):
        assert isinstance(view, ShardedWeight)  # A write to it is a write to the weight.
        assert view.shard.untyped_storage().data_ptr() == weight.shard.untyped_storage().data_ptr()
    assert torch.equal(nn.functional.linear(torch.eye(32), weight), weight.shard.t())
    assert not isinstance(weight.detach(), QuantizedTensor)


def test_convert_changes_linear_layers_in_place():
    module = model()
    module.add_module("again", nn.Linear(64, 32))
    module.again.weight = module[2].weight  # Tied.
    kept, values = list(module), [p.detach().clone() for p in module.parameters()]
    called = []
    module[0].register_forward_hook(lambda *_: called.append(1))
    assert convert(module, RECIPE) is module
    assert [a is b for a, b in zip(module, kept, strict=True)] == [True] * 4
    assert [type(m) for m in module] == [Linear, nn.GELU, Linear, Linear]
    assert module.again.weight is module[2].weight
    assert all(torch.equal(a.detach() + 0, b) for a, b in zip(module.parameters(), values, strict=True))
    module[0](torch.randn(2, 32))
    assert called
    assert module[2].weight.scale_state.name == "2.weight"


def test_convert_with_a_filter_and_again_with_another_recipe():
    module = convert(model(), RECIPE, filter=lambda layer, name: name == "0" and layer.in_features == 32)
    assert [type(m) for m in module] == [Linear, nn.GELU, nn.Linear]
    convert(module, OTHER)
    assert [m.recipe for m in (module[0], module[2])] == [OTHER] * 2
    assert module[0].weight.scale_state.fmt == OTHER.weight
    assert type(module[0].weight.shard) is torch.Tensor


def test_convert_keeps_frozen_weights_frozen():
    module = model()
    module[0].weight.requires_grad_(False)
    convert(module, RECIPE)
    assert [p.requires_grad for p in module.parameters()] == [False, True, True, True]


def test_convert_on_meta():
    with torch.device("meta"):
        module = model()
    assert convert(module, RECIPE)[0].weight.is_meta


def tied_to_an_embedding():
    module = nn.ModuleDict({"embedding": nn.Embedding(8, 20), "head": nn.Linear(20, 8)})
    module["head"].weight = module["embedding"].weight
    return module


@pytest.mark.parametrize(
    ("make", "recipe", "error", "text"),
    [
        (
            tied_to_an_embedding,
            RECIPE,
            ValueError,
            r"ModuleDict\) has no layer that can be converted: head \(tied to embedding\.weight\)",
        ),
        (nn.GELU, RECIPE, ValueError, r"convert: model \(GELU\) has no nn\.Linear that filter= selects; pass"),
        (
            lambda: nn.Sequential(nn.Linear(20, 32)),
            MXFP8(),
            ValueError,
            r"convert: 0\.weight \(32, 20\) is not a whole number of 32x32 blocks of",
        ),
    ],
    ids=["tied", "nothing", "format"],
)
def test_what_convert_refuses(make, recipe, error, text):
    module = make()
    with pytest.raises(error, match=text):
        convert(module, recipe)
    assert not any(isinstance(m, Linear) for m in module.modules())


def test_linear_needs_a_recipe():
    with pytest.raises(TypeError, match=r"Linear: recipe .None. is not a recipe"):
        Linear(4, 4)
    with pytest.raises(ValueError, match=r"Linear: weight \(4, 4\) is not a whole number of 32x32 blocks"):
        Linear(4, 4, recipe=MXFP8())
    with pytest.raises(ValueError, match=r"linear: DelayedScaling needs `delayed`; pass a DelayedScale"):
        linear(torch.ones(2, 4), torch.ones(3, 4), None, DelayedScaling())
