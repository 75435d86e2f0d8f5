"""Second derivatives of PyTorch's nodes: an error that names the op, wherever one is taken, and nowhere else."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import qshard.torch_bridge as qt

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning"),  # Dynamo's own.
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),  # Of forward mode.
    pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning"),
]

WIDTH = 64
LABELS = torch.arange(8) % WIDTH


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def layer(**options):
    torch.manual_seed(0)
    return qt.Linear(WIDTH, WIDTH, recipe="CurrentScaling", **options)


def grouped():
    torch.manual_seed(0)
    experts = qt.GroupedLinear(2, WIDTH, WIDTH, recipe="CurrentScaling")
    return lambda x: experts(x, torch.tensor([3, 5]))


def checkpointed(call, **options):
    return lambda x: checkpoint(call, x, use_reentrant=False, **options)


def permutation():
    return qt.moe_permutation(torch.arange(16).view(8, 2) % 3, 3)


W = drawn(WIDTH, WIDTH, seed=1)
HEAD = {"reduction": "sum", "chunk": 4}
NODES = {
    "linear": lambda: layer(),
    "linear without bias": lambda: layer(bias=False),
    "linear of a stochastic recipe": lambda: qt.Linear(WIDTH, WIDTH, recipe="NVFP4"),
    "linear under checkpointing": lambda: checkpointed(layer()),
    "grouped_linear": lambda: grouped(),
    "moe_unpermute": lambda: lambda x: qt.moe_unpermute(torch.cat([x, x]), permutation(), x[:, :2]),
    "swiglu": lambda: lambda x: qt.swiglu(x, x + 1),
    "rms_norm": lambda: lambda x: qt.rms_norm(x, W[0], 1e-6),
    "cross_entropy": lambda: lambda x: qt.cross_entropy(x, LABELS),
    "cross_entropy without reduction": lambda: lambda x: qt.cross_entropy(x, LABELS, reduction="none"),
    "linear_cross_entropy": lambda: lambda x: qt.linear_cross_entropy(x, W, LABELS, **HEAD),
    "linear_cross_entropy without reduction": lambda: (
        lambda x: qt.linear_cross_entropy(x, W, LABELS, chunk=4, reduction="none")
    ),
    "linear_cross_entropy of codes": lambda: (
        lambda x: qt.linear_cross_entropy(x, W, LABELS, recipe="CurrentScaling", **HEAD)
    ),
}
every_node = pytest.mark.parametrize("name", NODES)


def raises(name):
    return pytest.raises(NotImplementedError, match=rf"^{name.split()[0]}: second derivatives .*; [a-z]")


@every_node
def test_a_gradient_penalty_raises(name):
    """The incoming gradient is ones and does not require grad, so it cannot reveal the second derivative."""
    x = drawn(8, WIDTH)
    (grad,) = torch.autograd.grad(NODES[name]()(x).sum(), x, create_graph=True)
    with raises(name):
        grad.square().sum().backward()


@every_node
def test_a_gradient_that_is_differentiated_with_respect_to_an_earlier_layer_raises(name):
    """`torch.autograd.grad` runs only nodes on a path to its inputs."""
    earlier, x = nn.Linear(WIDTH, WIDTH), drawn(8, WIDTH)
    (grad,) = torch.autograd.grad(NODES[name]()(torch.tanh(earlier(x))).sum(), x, create_graph=True)
    with raises(name):
        torch.autograd.grad(grad.square().sum(), earlier.weight)


@every_node
def test_create_graph_without_a_second_derivative_gives_the_gradients(name):
    """The gradients can be accumulated, used in a step, and detached."""
    grads = []
    for create_graph in (False, True):
        torch.manual_seed(0)
        node, x = NODES[name](), drawn(8, WIDTH)
        torch.manual_seed(0)
        node(x).sum().backward(create_graph=create_graph, inputs=[x])
        node(x).sum().backward(create_graph=create_graph, inputs=[x])
        grads.append(x.grad.detach())
        x.grad = None
    assert torch.equal(*grads)


def critic(convert):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    return (
        qt.convert(model, "CurrentScaling", filter=lambda layer, _: layer.out_features == WIDTH) if convert else model
    )


def penalty(model, x):
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (grad.norm(dim=1) - 1).square().mean()


def test_wgan_gp():
    """The critic of a WGAN with a gradient penalty; left out of `convert`, its layers are differentiated twice."""
    x = drawn(8, WIDTH)
    penalty(critic(convert=False), x).backward()
    assert x.grad.norm() > 0
    with raises("linear"):
        penalty(critic(convert=True), x).backward()


def test_gradients_of_what_does_not_depend_on_them_stay_constants():
    """As for `nn.Linear`: the weight's gradient depends on x, and the gradient of x on the weight."""
    for bias in (False, True):
        x, linear = drawn(8, WIDTH), layer(bias=bias)
        linear(x.detach()).sum().backward(create_graph=True)
        assert not linear.weight.grad.requires_grad
        linear.weight.grad = None
        linear.weight.requires_grad_(False)
        (grad,) = torch.autograd.grad(linear(x).sum(), x, create_graph=True)
        assert not grad.requires_grad
        (grad,) = torch.autograd.grad(linear(x).square().sum(), x, create_graph=True)
        with raises("linear"):
            grad.sum().backward()


def test_other_paths_are_differentiated_twice():
    """A penalty on the gradient of a tensor outside the layer does not raise."""
    x, y, linear = drawn(8, WIDTH), drawn(8, WIDTH, seed=2), layer()
    loss = linear(x).sum() + y.pow(3).sum()
    of_x, of_y = torch.autograd.grad(loss, [x, y], create_graph=True)
    (second,) = torch.autograd.grad(of_y.sum(), y)
    torch.testing.assert_close(second, 6 * y.detach())
    assert of_x.requires_grad


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_does_not_raise(use_reentrant):
    """It runs forward with grad enabled, in a backward pass."""
    grads = []
    for recompute in (False, True):
        x, linear = drawn(8, WIDTH), layer()
        y = checkpoint(linear, x, use_reentrant=use_reentrant) if recompute else linear(x)
        y.square().sum().backward()
        grads.append([x.grad, linear.weight.grad])
    for got, want in zip(*grads, strict=True):
        assert torch.equal(got, want)


@every_node
def test_nothing_waits_for_the_garbage_collector(name):
    """A node with a reference to its own result would be a cycle and leak its saved tensors."""
    node, leaf = NODES[name](), drawn(8, WIDTH)
    gc.collect()
    gc.disable()
    try:
        x = leaf * 1
        y = node(x)
        x.register_hook(held := Held())
        gone = weakref.ref(held)
        del x, held
        assert gone() is not None
        del y
        assert gone() is None
    finally:
        gc.enable()


class Held:
    """A hook, which lives as long as the node that it is on."""

    def __call__(self, grad):
        return grad


def hessian_of(model, x):
    return torch.autograd.functional.hessian(lambda x: model(x).sum(), x)


TRANSFORMS = {
    "grad": lambda model, x: torch.func.grad(lambda x: model(x).sum())(x),
    "hessian": lambda model, x: torch.func.hessian(lambda x: model(x).sum())(x),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x,)),
    "vmap": lambda model, x: torch.func.vmap(model)(x[None]),
}
FALLS_BACK = {"swiglu", "rms_norm"}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", [name for name in NODES if " " not in name])
def test_transforms_of_torch_func(name, transform):
    """`swiglu` and `rms_norm` fall back to PyTorch's ops; all other nodes raise."""
    x = drawn(8, WIDTH).detach()
    if name in FALLS_BACK:
        TRANSFORMS[transform](NODES[name](), x)
    elif name.startswith("grouped") and transform == "vmap":
        pytest.skip("rows of experts have two axes")
    else:
        with pytest.raises(
            NotImplementedError, match=rf"^{name}: transforms of torch.func .*; use torch.autograd.grad"
        ):
            TRANSFORMS[transform](NODES[name](), x)


def test_delayed_scaling_in_a_vmap():
    layer = qt.Linear(32, 32, recipe="DelayedScaling")
    with pytest.raises(NotImplementedError, match=r"DelayedScaling: torch.func.vmap .*; use a recipe without a state"):
        torch.func.vmap(layer)(torch.randn(2, 32, 32))


@every_node
def test_batches_of_gradients(name):
    x = drawn(8, WIDTH)
    y = NODES[name]()(x)
    with pytest.raises(
        NotImplementedError, match=rf"^{name.split()[0]}: batches of gradients .*; compute one gradient at"
    ):
        torch.autograd.grad(y, x, torch.stack([torch.ones_like(y)] * 2), is_grads_batched=True)


@every_node
def test_forward_mode(name):
    """Dual tensors raise, as inputs and as incoming gradients."""
    x = drawn(8, WIDTH)
    y = NODES[name]()(x)
    match = rf"^{name.split()[0]}: forward-mode differentiation \(dual tensors\) is not supported; use"
    with forward_ad.dual_level():
        if "checkpointing" not in name:  # PyTorch's own node raises.
            with pytest.raises(NotImplementedError, match=match):
                NODES[name]()(forward_ad.make_dual(x, torch.ones_like(x)))
            with torch.no_grad(), pytest.raises(NotImplementedError, match=match):
                NODES[name]()(forward_ad.make_dual(x.detach(), torch.ones_like(x)))
        grad = forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y))
        with pytest.raises(NotImplementedError, match=match):
            torch.autograd.grad(y, x, grad)


def test_forward_mode_of_frozen_weights():
    """No gradient is needed, so `linear` has no node that could raise: the Jacobian was zeros."""
    frozen, x = layer().requires_grad_(False), drawn(2, WIDTH).detach()
    with pytest.raises(NotImplementedError, match=r"^linear: forward-mode differentiation"):
        torch.func.jacfwd(frozen)(x)
    vector = torch.func.jvp(lambda x: x * frozen(torch.ones(2, WIDTH)), (x,), (torch.ones_like(x),))[1]
    assert torch.equal(vector, frozen(torch.ones(2, WIDTH)))


def test_autograd_functional():
    x = drawn(2, WIDTH)
    with raises("linear"):
        hessian_of(critic(convert=True), x)
    with raises("linear"):
        torch.autograd.functional.jvp(critic(convert=True), x, x)  # Which differentiates a gradient.
    jacobian = torch.autograd.functional.jacobian(lambda x: critic(convert=True)(x).sum(), x)
    assert torch.equal(jacobian, torch.autograd.grad(critic(convert=True)(x).sum(), x)[0])


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True])
def test_compiled(frozen):
    """AOTAutograd raises for all that it has compiled. Torch 2.11 has nothing to differentiate with frozen weights."""
    model, x = critic(convert=True), drawn(8, WIDTH)
    model.requires_grad_(not frozen)
    with pytest.raises(RuntimeError, match=r"double backward|does not require grad|create_graph=False"):
        penalty(torch.compile(model, backend="aot_eager", fullgraph=True), x).backward()


def test_tracing_adds_no_result():
    """While Dynamo traces, a node has one result and saves what it needs alone."""
    counter = CompileCounter()
    compiled = torch.compile(layer(), backend=counter, fullgraph=True)
    assert compiled(drawn(8, WIDTH)).shape == (8, WIDTH)
    assert counter.frame_count == 1


def test_right_where_the_layer_is_left_out():
    x = drawn(8, WIDTH)
    (grad,) = torch.autograd.grad(F.cross_entropy(x, LABELS), x, create_graph=True)
    grad.square().sum().backward()
    assert x.grad.abs().max() > 0
