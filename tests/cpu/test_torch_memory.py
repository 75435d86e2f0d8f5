"""What `Linear` keeps for the backward pass: the same bits in less memory. Layers that share x quantize it once."""

import copy
import gc
import itertools
import math
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.nn import functional as F

from qshard.formats import Usage
from qshard.layout import plane
from qshard.recipes import MXFP8, CurrentScaling, DelayedScaling
from qshard.torch_bridge import convert, update_scales
from qshard.torch_bridge._nn.module_calls import follow_calls, running
from support.formats import RECIPES
from support.llama import HEADS, Held, Llama, turns_of

WIDTH = 64
RECIPE = CurrentScaling()
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


class Fan(nn.Module):
    """Layers that share x."""

    def __init__(self, count=3, width=WIDTH, frozen=()):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))
        for i in frozen:
            self.layers[i].weight.requires_grad_(False)

    def forward(self, x, apart=False):
        return [layer(x * 1 if apart else x) for layer in self.layers]


def fan(recipe, **options):
    torch.manual_seed(0)
    return convert(Fan(**options), recipe)


def seeded(model, recipe):
    """Another model of the same values, which draws the random numbers that the last call of `model` has drawn."""
    other = fan(recipe, count=len(model.layers))
    for ours, theirs in zip(model.layers, other.layers, strict=True):
        if ours.seed is not None:
            theirs.seed.copy_(ours.seed)
            theirs.seed[0] -= 1
    return other


def batch(rows=40, seed=1, **options):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed), **options)


def casts(ops):
    """How often something was quantized."""
    return sum(name.startswith(("qshard.cast", "qshard.quantize")) for name in ops)


class Outer(nn.Module):
    """A module that runs a function, as `forward` of a converted one."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        follow_calls(self)

    def forward(self, function):
        return function()


during_a_call = Outer()


def remembered():
    (call,) = running()
    return call.codes


def gradients(model, ys, xs):
    torch.manual_seed(2)
    loss = sum((y.float() * torch.randn_like(y, dtype=torch.float32)).sum() for y in ys)
    loss.backward()
    return [*ys, *(x.grad for x in xs), *(p.grad for p in model.parameters() if p.requires_grad)]


def assert_equal(got, want):
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@every_recipe
@pytest.mark.parametrize("frozen", [(), (0,), (1, 2)], ids=str)
def test_layers_that_share_x_give_the_bits_of_layers_that_do_not(recipe, frozen):
    """Each has its gradient, also where the first needs none, so that the codes for it are made later."""
    made = []
    for apart in (False, True):
        model = fan(recipe, frozen=frozen)
        x = batch(requires_grad=True)
        made.append([*gradients(model, model(x, apart), [x]), *model.buffers()])
    assert_equal(*made)


@every_recipe
@pytest.mark.parametrize("train", [True, False])
def test_x_is_quantized_once(recipe, train):
    """Each further layer quantizes its weight alone."""
    counts = []
    for layers in (1, 3):
        model, x = fan(recipe, count=layers), batch(32, requires_grad=train)
        with torch.set_grad_enabled(train), Held() as held:
            model(x)
        counts.append(casts(held.ops))
    one, three = counts
    assert three - 1 == 3 * (one - 1) > 0


def test_what_makes_layers_quantize_x_again():
    model, x = fan(RECIPE, count=2), batch()
    first, second = model.layers
    twice = fan(MXFP8(), count=1).layers[0]

    def count(call):
        with torch.no_grad(), Held() as held:
            during_a_call(call)
        return casts(held.ops)

    def both(between=lambda: None, other=second):
        first(x)
        between()
        other(x)

    assert count(both) == 3  # Two weights and x.
    assert count(lambda: both(lambda: x.add_(1))) == 4
    assert count(lambda: both(lambda: x.detach().add_(1))) == 4
    assert count(lambda: both(lambda: first(batch(seed=3)))) == 6
    assert count(lambda: both(other=twice)) == 4
    assert count(lambda: both(other=first)) == 4  # Another pass: any write to x counts.
    assert count(lambda: (during_a_call(lambda: first(x)), second(x))) == 4  # That call is over.
    assert count(lambda: (first(x), during_a_call(lambda: second(x)))) == 4

    def rounded():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            first(x)
        second(x)

    assert count(rounded) == 4
    with torch.no_grad(), Held() as held:
        both()
    assert casts(held.ops) == 4  # Outside of a module that convert knows.
    with torch.inference_mode():
        inference = batch()
        assert count(lambda: (first(inference), second(inference))) == 4


def write_by_numpy(x, values):
    x.detach().numpy()[:] = values.numpy()


def write_to_data(x, values):
    x.data.copy_(values)


def write_by_dlpack(x, values):
    torch.from_dlpack(x.detach()).copy_(values)


unseen = pytest.mark.parametrize("write", [write_by_numpy, write_to_data, write_by_dlpack])


@unseen
@every_recipe
def test_writes_between_calls_count_even_those_that_autograd_does_not_see(recipe, write):
    """Each model is given all batches in the same memory, one model after the other."""
    models, x = [fan(recipe, count=2) for _ in range(2)], batch()
    for model in models:
        for seed in range(3):
            write(x, batch(seed=seed))
            for got, want in zip(model(x), seeded(model, recipe)(batch(seed=seed)), strict=True):
                assert torch.equal(got, want)


@unseen
def test_writes_between_a_call_and_one_layer_of_it_count(write):
    """As of a module with branches, each of which calls one layer; and of layers outside of a module."""
    first, second = fan(RECIPE, count=2).layers
    branches, x = Outer(first, second), batch()
    for way in (branches, lambda layer: layer()):
        way(lambda: first(x))
        write(x, batch(seed=7))
        assert torch.equal(way(lambda: second(x)), second(batch(seed=7)))


@unseen
def test_a_product_that_was_written_is_not_made_again_of_its_factors(write):
    """Between modules, of which PyTorch sees nothing either."""
    layer, h = fan(RECIPE, count=1), batch(requires_grad=True)
    x = F.silu(h) * (h + 1)
    write(x, batch(seed=7))
    gradients = []
    for given in (x, batch(seed=7)):
        layer.zero_grad()
        sum(layer(given)).sum().backward()
        gradients.append(layer.layers[0].weight.grad)
    assert torch.equal(*gradients)


def test_a_module_that_raises_has_ended():
    """Whatever raises: what comes later shares nothing with it."""
    first, second = fan(RECIPE, count=2).layers
    x = batch()
    for error in (ValueError, KeyboardInterrupt):

        def stopped(error=error):
            first(x)
            raise error

        outer = Outer(first, second)
        with pytest.raises(error):
            outer(stopped)
        outer(lambda: None)
        write_to_data(x, batch(seed=3))
        assert torch.equal(outer(lambda: second(x)), second(batch(seed=3)))
    assert not [*running()]


def test_hooks_are_registered_once_and_copied():
    model = fan(RECIPE)
    convert(model, RECIPE)
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert len(each._forward_pre_hooks) == len(each._forward_hooks) == 1
        with torch.no_grad(), Held() as held:
            each(batch())
        assert casts(held.ops) == 4


class Adapter(nn.Module):
    """A layer in a module of its own, as adapters have it, which is passed x by keyword."""

    def __init__(self):
        super().__init__()
        self.base, self.low = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.base(x) + self.low(x)


class Adapters(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = Adapter(), Adapter()

    def forward(self, x):
        return self.q(x=x) + self.k(x=x)


def test_layers_in_modules_that_pass_x_on_share_its_codes():
    model = convert(Adapters(), RECIPE)
    with torch.no_grad(), Held() as held:
        model(batch())
    assert casts(held.ops) == 5


def test_a_write_in_place_between_layers_is_seen():
    first, second = fan(RECIPE, count=2).layers
    x = batch()

    def written():
        return first(x), second(x.mul_(3))

    before, after = during_a_call(written)
    assert torch.equal(after, second(batch() * 3))
    assert torch.equal(before, first(batch()))


def test_under_autocast_x_is_rounded_once_and_the_gradients_are_added_as_before():
    """In the dtype of x. Autocast alone would keep three copies of it in bfloat16."""
    made = []
    for apart in (False, True):
        model, x = fan(RECIPE), batch(requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16), Held() as held:
            ys = model(x, apart)
        if not apart:
            assert sum(name == "aten._to_copy.default" for name in held.ops) == 1 + len(ys)  # x, and each result.
        made.append(gradients(model, ys, [x]))
    assert_equal(*made)
    x = torch.ones(2, WIDTH, dtype=torch.int64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model.layers[0](x), model.layers[0](x.bfloat16()))


def test_delayed_scaling_with_states_that_differ():
    """The second layer takes the codes of the first. Both see the amax, so their scales come to be the same."""
    model, x = fan(DelayedScaling(history=1), count=2), batch(requires_grad=True)
    first, second = (layer.delayed["activation"] for layer in model.layers)
    model(batch() * 4)
    update_scales(model)
    first_scale = first.scale.clone()
    second.scale.mul_(0.5)
    second.scale_inv.mul_(2)
    y = model.layers[1](x * 1)
    shared = model(x)[1]
    assert not torch.equal(shared, y)
    second.scale.copy_(first_scale)
    second.scale_inv.copy_(first.scale_inv)
    assert torch.equal(shared, model.layers[1](x * 1))
    model(x)
    assert first.amax == second.amax == x.abs().max() * 1
    update_scales(model)
    assert torch.equal(first.scale, second.scale)


def test_nothing_is_kept_alive():
    """What is remembered goes with x, with the next x, and with the call, and does not hold x."""
    first, second = fan(RECIPE, count=2).layers
    gone = []

    def body():
        x = batch()
        first(x)
        codes = weakref.ref(remembered().planes[Usage.ROWWISE].parts.data)
        gone.append(weakref.ref(x))
        del x
        assert gone[0]() is None
        assert codes() is None
        assert remembered() is None
        x = batch()
        first(x)
        codes = weakref.ref(remembered().planes[Usage.ROWWISE].parts.data)
        second(batch())
        assert codes() is None
        first(x)
        gone.append(weakref.ref(remembered().planes[Usage.ROWWISE].parts.data))

    with torch.no_grad():
        during_a_call(body)
    assert [ref() for ref in gone] == [None, None]


@pytest.mark.parametrize("name", ["CurrentScaling", "DelayedScaling", "NVFP4"])
def test_no_growth_over_60_steps(name):
    model = fan(RECIPES[name], count=2)
    gc.collect()
    gc.disable()  # Nothing may wait for it.
    try:
        with Held() as held:
            for step in range(60):
                gradients(model, model(batch(32, requires_grad=step % 2 == 0)), [])
                model.zero_grad()
                if step == 1:
                    after = held.now()
        assert held.now() <= after
    finally:
        gc.enable()


def test_threads_with_a_model_each():
    """Each remembers its own."""
    want, got = {}, {}
    models = {i: fan(RECIPE, count=4) for i in range(2)}

    def run(i, into):
        made = []
        for step in range(20):
            x = batch(8 + i, seed=step + 100 * i, requires_grad=True)
            models[i].zero_grad()
            made += [t.detach().clone() for t in gradients(models[i], models[i](x), [x])[:5]]
        into[i] = made

    for i in models:
        run(i, want)
    threads = [threading.Thread(target=run, args=(i, got)) for i in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # torch.manual_seed is of all threads: gradients of y are compared in y alone.
    for i in models:
        for a, b in itertools.islice(zip(got[i], want[i], strict=True), 0, None, 5):
            assert torch.equal(a, b)


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


@every_recipe
@pytest.mark.parametrize("source", SOURCES)
def test_what_autograd_keeps_anyway_is_not_kept_again(recipe, source):
    """And gives the bits that kept codes give."""
    made, sizes = [], []
    for hidden in (False, True):
        model, h = fan(recipe, count=2), batch(32, requires_grad=True)

        def made_within(h=h, model=model, hidden=hidden):
            x = SOURCES[source](h * 1)
            if hidden:  # From what keeps it.
                x = Hidden.apply(x)
            return model(x), x.grad_fn  # It keeps what it keeps without layers.

        with Held() as held:
            ys, graph = during_a_call(made_within)
            with_layers = held.now() - sum(y.untyped_storage().nbytes() for y in ys)
        made.append(gradients(model, [y.view(-1, WIDTH) for y in ys], [h]))
        h = batch(32, requires_grad=True)
        with Held() as held:
            x = SOURCES[source](h * 1)
            graph = (Hidden.apply(x) if hidden else x).grad_fn
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
    """Whoever goes backward is told, as without qshard."""
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
    """As that of nn.Linear. Its codes would be those of other values."""
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


@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", ["CurrentScaling", pytest.param("NVFP4", marks=pytest.mark.slow)])
def test_compilers_quantize_and_keep_x_once(name):
    """They merge equal ops, so what eager code remembers is of no use to them."""
    torch._dynamo.reset()
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    sizes = []
    for count in (1, 3):
        graphs.clear()
        run = torch.compile(fan(RECIPES[name], count=count), fullgraph=True, backend=backend)
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
    """It ends before the product of the last layer, whose operands alone are kept."""
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
