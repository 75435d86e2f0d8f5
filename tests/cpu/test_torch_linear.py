"""`Linear` and `convert`: a module that is otherwise `nn.Linear`. Its products are in test_linear.py."""

import copy
import io

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from qshard.formats import FP8_E4M3, FP8_E5M2, Usage
from qshard.recipes import MXFP8, CurrentScaling, Recipe, Role
from qshard.torch_bridge import Linear, QuantizedTensor, ShardedWeight, convert, linear, quantize
from support.fronts import TorchFront
from support.products import operands

FRONT = TorchFront("cpu")
RECIPE = CurrentScaling()
OTHER = CurrentScaling(weight=FP8_E4M3.with_options(pow2=True), gradient=FP8_E4M3)
MIX = Recipe(weight=FP8_E5M2, activation=FP8_E5M2.with_options(eps=1.0), gradient=FP8_E5M2.with_options(pow2=True))
# Dynamo of torch 2.13 does what torch.autograd 2.13 has deprecated.
compiles = pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")


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


def test_what_is_kept_for_backward_is_codes():
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        linear(torch.randn(64, 32), torch.randn(48, 32, requires_grad=True), None, RECIPE)
    assert sorted((t.dtype, t.numel()) for t in kept if t.numel() > 1) == [
        (torch.uint8, 48 * 32),
        (torch.uint8, 64 * 32),
    ]


def test_an_empty_batch():
    x, w = torch.empty(0, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    linear(x, w, None, RECIPE).sum().backward()
    assert x.grad.shape == (0, 8)
    assert not w.grad.any()


def test_a_weight_that_is_codes_already():
    """As FSDP2 hands it over: rowwise, with the gradient going to the parameter that it stands for."""
    x, w, dy = (FRONT.array(a) for a in operands((5, 16)))
    whole, codes = w.clone().requires_grad_(), nn.Parameter(quantize(w, RECIPE.weight))
    xs = [x.clone().requires_grad_() for _ in range(2)]
    for a, b in zip(xs, (whole, codes), strict=True):
        linear(a, b, None, RECIPE).backward(dy)
    assert torch.equal(xs[0].grad, xs[1].grad)
    assert torch.equal(whole.grad, codes.grad)
    assert type(codes.grad) is torch.Tensor
    with pytest.raises(ValueError, match=r"weight .columnwise. has no rowwise plane"):
        linear(x, quantize(w, RECIPE.weight, usage=Usage.COLUMNWISE), None, RECIPE)


def model(bias=True):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 32, bias=bias), nn.GELU(), nn.Linear(32, 20, bias=bias))


def step(module, x):
    """Output, gradient of x and gradients of parameters of one forward and backward."""
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = module(x)
    y.square().mean().backward()
    return [y, x.grad, *(p.grad for p in module.parameters())]


@compiles
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("bias", [True, False])
def test_compiled_forward_and_backward(backend, bias):
    """In one graph. Inductor may reassociate what is around the products, such as the mean: that is the tolerance."""
    torch._dynamo.reset()
    module, x = convert(model(bias), RECIPE), torch.randn(3, 5, 20)
    expected = step(module, x)
    for got, want in zip(step(torch.compile(module, fullgraph=True, backend=backend), x), expected, strict=True):
        if backend == "aot_eager":
            assert torch.equal(got, want)
        else:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


@compiles
@pytest.mark.parametrize("recipe", [RECIPE, MIX, MXFP8()], ids=["current", "mix", "mxfp8"])
def test_compiled_code_serves_other_batch_sizes_and_weights(recipe):
    torch._dynamo.reset()
    count = CompileCounterWithBackend("aot_eager")
    module = convert(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), recipe)
    compiled = torch.compile(module, fullgraph=True, backend=count, dynamic=True)
    for batch in (3, 5, 8):
        x = torch.randn(batch, 32)
        with torch.no_grad():
            module[0].weight.mul_(0.9)
        for got, want in zip(step(compiled, x), step(module, x), strict=True):
            assert torch.equal(got, want)
    assert count.frame_count <= 2  # Torch 2.11 traces the second time without the constants of the first.


def test_autocast_casts_the_input():
    layer, x = convert(model(), RECIPE)[0], torch.randn(4, 20)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert torch.equal(y, layer(x.bfloat16()))
    assert y.dtype == torch.bfloat16


def test_linear_module_is_what_convert_makes():
    torch.manual_seed(0)
    made = Linear(20, 32, True, RECIPE)
    converted = convert(model()[0], RECIPE)
    x = torch.randn(4, 20)
    assert type(made) is type(converted)
    assert torch.equal(made.bias.new_zeros(1) + made(x).shape[-1], made.bias.new_zeros(1) + converted(x).shape[-1])
    made.load_state_dict(converted.state_dict())
    assert torch.equal(made(x), converted(x))
    assert all(f"{role.value}={RECIPE.format(role)}" in repr(made) for role in Role)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize(
    "make", [torch.optim.AdamW, lambda p, foreach: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=foreach)]
)
def test_optimizers_keep_plain_states_and_learn(make, foreach):
    module = convert(model(), RECIPE)
    optimizer = make(module.parameters(), foreach=foreach)
    x = torch.randn(16, 20)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (module(x) - x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    states = [value for state in optimizer.state.values() for value in state.values()]
    assert {type(value) for value in states if isinstance(value, torch.Tensor)} == {torch.Tensor}


def test_fused_adamw():
    module = convert(model(), RECIPE)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    before = module[0].weight.shard.clone()
    step(module, torch.randn(4, 20))
    optimizer.step()
    assert not torch.equal(module[0].weight.shard, before)


def test_checkpoints_hold_plain_tensors_and_load_anywhere():
    module, plain = convert(model(), RECIPE), model()
    with torch.no_grad():
        module[0].weight.mul_(2)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    plain.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(plain[0].weight, module[0].weight.shard)
    for assign in (False, True):
        other = convert(model(), RECIPE)
        other.load_state_dict(plain.state_dict(), assign=assign)
        assert isinstance(other[0].weight, ShardedWeight)
        assert isinstance(other[0].weight, nn.Parameter)
        assert torch.equal(other[0].weight.shard, plain[0].weight)
    assert isinstance(module.state_dict(keep_vars=True)["0.weight"], nn.Parameter)


def test_a_copied_model_goes_its_own_way():
    module = convert(model(), RECIPE)
    other = copy.deepcopy(module)
    state, copied = module[0].weight.scale_state, other[0].weight.scale_state
    assert copied is not state
    assert (copied.root, state.root) == (other, module)
    assert isinstance(other[0].weight, ShardedWeight)
    with torch.no_grad():
        other[0].weight.zero_()
    assert module[0].weight.shard.any()


def test_moving_a_model():
    module = convert(model(), RECIPE).to(torch.bfloat16)
    assert isinstance(module[0].weight, ShardedWeight)
    assert module[0].weight.dtype == module[0].weight.shard.dtype == torch.bfloat16
    meta = module.to("meta")
    assert meta[0].weight.is_meta
    empty = meta.to_empty(device="cpu")
    assert isinstance(empty[0].weight, ShardedWeight)
    empty[0].reset_parameters()
    assert empty[0].weight.shard.isfinite().all()


def test_everything_else_on_the_weight_is_in_high_precision():
    weight = convert(model(), RECIPE)[0].weight
    for result in (weight + 1, weight.sum(), weight.clone(), torch.zeros_like(weight), weight @ weight.t()):
        assert type(result) is torch.Tensor
    for view in (weight.t(), weight[0], weight[:3], weight.detach(), weight.view(-1), weight.unsqueeze(0)):
        assert isinstance(view, ShardedWeight)  # A write to it is a write to the weight.
        assert view.shard.untyped_storage().data_ptr() == weight.shard.untyped_storage().data_ptr()
    assert torch.equal(nn.functional.linear(torch.eye(20), weight), weight.shard.t())
    assert not isinstance(weight.detach(), QuantizedTensor)


def test_convert_changes_linear_layers_in_place():
    module = model()
    module.add_module("again", nn.Linear(32, 20))
    module.again.weight = module[2].weight  # Tied.
    kept, values = list(module), [p.detach().clone() for p in module.parameters()]
    called = []
    module[0].register_forward_hook(lambda *_: called.append(1))
    assert convert(module, RECIPE) is module
    assert [a is b for a, b in zip(module, kept, strict=True)] == [True] * 4
    assert [type(m) for m in module] == [Linear, nn.GELU, Linear, Linear]
    assert module.again.weight is module[2].weight
    assert all(torch.equal(a.detach() + 0, b) for a, b in zip(module.parameters(), values, strict=True))
    module[0](torch.randn(2, 20))
    assert called
    assert module[2].weight.scale_state.name == "2.weight"


def test_convert_with_a_filter_and_again_with_another_recipe():
    module = convert(model(), RECIPE, filter=lambda layer, name: name == "0" and layer.in_features == 20)
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
            r"head.weight \(embedding.weight too\) is not of linear layers alone",
        ),
        (nn.GELU, RECIPE, ValueError, "GELU. has no nn.Linear that filter= keeps"),
        (
            model,
            MXFP8(),
            ValueError,
            r"convert: 0: weight: x \(32, 20\) is not a whole number of 32x32 blocks .* or leave the layer out",
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
    with pytest.raises(ValueError, match=r"Linear: weight: x \(4, 4\) is not a whole number of 32x32 blocks"):
        Linear(4, 4, recipe=MXFP8())
