"""Tensors that layers save for backward: none that autograd saves anyway; bytes of a model, also with checkpoints."""

import math

import pytest
import torch
from torch.nn import functional as F

from qshard.formats import Usage
from qshard.layout import plane
from qshard.torch_bridge import convert
from support.formats import RECIPES
from support.llama import HEADS, Held, Llama, turns_of
from support.torch_fan import RECIPE, WIDTH, assert_equal, batch, casts, during_a_call, every_recipe, fan, gradients
from support.torch_graphs import compile_and_keep

SOURCES = {
    "relu": lambda h: F.relu(h),
    "a view of softmax": lambda h: h.view(-1, 4, WIDTH).softmax(-1).view(-1, WIDTH),
    "product": lambda h: F.silu(h) * (h + 1),
    "a view of a product": lambda h: (F.silu(h) * (h + 1)).view(2, -1, WIDTH),
    "written product": lambda h: (F.silu(h) * (h + 1)).add_(1),
    "product with a parameter's shape": lambda h: h * torch.ones(WIDTH, requires_grad=True),
    "gelu": lambda h: F.gelu(h),
}
HAD_AGAIN = ("relu", "a view of softmax", "product", "a view of a product")


@pytest.mark.each_value
@every_recipe
@pytest.mark.parametrize("source", SOURCES)
def test_what_autograd_keeps_anyway_is_not_kept_again(recipe, source):
    """The bits are those with saved codes."""
    made, sizes = [], []
    for hidden in (False, True):
        model, h = fan(recipe, count=2), batch(32, requires_grad=True)

        def made_within(h=h, model=model, hidden=hidden):
            x = SOURCES[source](h * 1)
            if hidden:  # Hides the producer that saves x.
                x = Hidden.apply(x)
            return model(x), x.grad_fn  # It keeps what it keeps without layers.

        with Held() as held:
            ys, graph = during_a_call(made_within)
            with_layers = held.now() - sum(y.untyped_storage().nbytes() for y in ys)
        made.append(gradients(model, [y.view(-1, WIDTH) for y in ys], [h]))
        h = batch(32, requires_grad=True)
        with Held() as held:
            x = SOURCES[source](h * 1)
            x = Hidden.apply(x) if hidden else x
            graph = x.grad_fn, x.grad_fn.next_functions  # In torch 2.11, a node in Python keeps none before it alive.
            del x
            sizes.append(with_layers - held.now())
        del graph
    assert_equal(*made)
    codes = 32 * WIDTH * recipe.activation.element.bits / 8
    assert sizes[1] >= codes
    assert sizes[0] < codes / 4 if source in HAD_AGAIN else sizes[0] == sizes[1]


class Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_factors_that_were_written_are_not_asked_for():
    """The backward pass raises PyTorch's own error, as without qshard."""
    layer, h = fan(RECIPE, count=1).layers[0], batch(requires_grad=True)
    a, b = h * 2, h * 3

    def product():
        x = a * b
        a.add_(1)
        return layer(x)

    y = during_a_call(product)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_parameter_must_stay_as_it_is_until_the_backward_pass():
    """As for `nn.Linear`: after a write, its codes would represent different values."""
    for write in (lambda p: p.add_(1), lambda p: p.shard.add_(1)):
        layer = fan(RECIPE, count=1).layers[0]
        y = layer(batch(requires_grad=True))
        with torch.no_grad():
            write(layer.weight)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_a_graph_can_be_gone_through_twice():
    model, x = fan(RECIPE), batch(requires_grad=True)
    loss = sum(y.sum() for y in model(F.relu(x)))
    first, second = (torch.autograd.grad(loss, [x, *model.parameters()], retain_graph=keep) for keep in (True, False))
    assert_equal(first, second)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", ["CurrentScaling", pytest.param("NVFP4", marks=pytest.mark.slow)])
def test_compilers_quantize_and_keep_x_once(name):
    """Compilers merge equal ops, so they do not need the eager cache."""
    torch._dynamo.reset()
    sizes = []
    for count in (1, 3):
        run, graphs = compile_and_keep(fan(RECIPES[name], count=count))
        sum(y.sum() for y in run(batch(96, requires_grad=True))).backward()
        forward = graphs[0].graph
        of_x = [node for node in forward.nodes if node.op == "call_function" and casts([str(node.target)])]
        (output,) = (node for node in forward.nodes if node.op == "output")
        saved = {node for node in output.args[0] if node is not None}
        sizes.append(
            (len(of_x), sum(tuple(n.meta["val"].shape) in ((96, WIDTH), (WIDTH, 96), (WIDTH, 48)) for n in saved))
        )
    (one, kept), (three, kept_of_three) = sizes
    assert three == 1 + 3 * (one - 1)
    assert kept_of_three == kept + 2  # The other two results.


@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
def test_compiled_layers_save_parameters_and_no_codes_of_them():
    """As eager layers. A write to the parameter before the backward pass raises."""
    torch._dynamo.reset()
    layer, kept, x = fan(RECIPE, count=1).layers[0], [], batch(requires_grad=True)
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        run(x)
    assert sorted(t.dtype.itemsize * t.numel() for t in kept if t.numel() > 1) == [x.numel(), 4 * layer.weight.numel()]
    y = run(x)
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@every_recipe
def test_a_llama_block_keeps_at_most_52_bytes_a_token_and_width(recipe):
    """Where bf16 keeps 60: 16 of norms, 8 of attention, 24 of SwiGLU, and 12 of what linear layers take.

    With codes: 2 for q, k, v, gate and up, and none for what attention and SwiGLU keep anyway.
    """
    kept = {}
    width, length = 128, 192
    for name, made in (("bf16", None), ("quantized", recipe)):
        torch.manual_seed(0)
        model = Llama(width, 1).to(torch.bfloat16)
        model = model if made is None else convert(model, made)
        x, turns = torch.randn(2, length, width, dtype=torch.bfloat16, requires_grad=True), turns_of(length, width)
        with Held() as held:
            y = model(x, turns)
            kept[name] = held.now() - y.untyped_storage().nbytes()
    statistics = (HEADS + 2) * 4 * x.numel() // width  # fp32: of softmax, for each head, and of both norms.
    codes = plane(recipe.activation, (2 * length, width), Usage.COLUMNWISE)
    of_codes = math.prod(codes.data_shape) + math.prod(codes.scale_shape) * (1 if codes.scale_shape else 0)
    if recipe.activation.scale_dtype == "float32" and codes.scale_shape:
        of_codes += 3 * math.prod(codes.scale_shape)
    assert kept["bf16"] == 60 * x.numel() + statistics
    assert 0 <= kept["quantized"] - (48 * x.numel() + statistics + 2 * of_codes) <= 64  # Scales of whole tensors.
    assert kept["quantized"] <= 52 * x.numel()


@every_recipe
def test_with_activation_checkpointing_the_peak_is_lower_than_that_of_bf16(recipe):
    most = {}
    width, length = 64, 512
    for name, made in (("bf16", None), ("quantized", recipe)):
        torch.manual_seed(0)
        model = Llama(width, 2).to(torch.bfloat16)
        model = model if made is None else convert(model, made)
        x, turns = torch.randn(2, length, width, dtype=torch.bfloat16, requires_grad=True), turns_of(length, width)
        with Held() as held:
            model(x, turns, recompute=True).sum().backward()
        most[name] = held.most
    assert most["quantized"] < most["bf16"]


@every_recipe
def test_activation_checkpointing_gives_the_same_bits_and_multiplies_what_it_must(recipe):
    """Recomputation stops before the last layer's product, and only its operands are saved."""
    made, products = [], []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = convert(Llama(64, 1), recipe)
        x, turns = batch(32).view(1, 32, 64).requires_grad_(), turns_of(32, 64)
        with Held() as held:
            made.append(gradients(model, [model(x, turns, recompute)], [x]))
        products.append(held.ops.count("aten.mm.default"))
    if not recipe.stochastic:  # Recomputed, a layer takes the next seed.
        assert_equal(*made)
    assert products == [3 * 7, 3 * 7 + 6]
