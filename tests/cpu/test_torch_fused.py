"""RMSNorm, SwiGLU and `convert(fuse=True)` in PyTorch, and the lifetime of cached amaxes."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import qshard.torch_bridge as qt
from qshard.recipes import NVFP4, BlockScaling, CurrentScaling, DelayedScaling
from qshard.torch_bridge._nn.module_calls import cache_amax, cached_amax, follow_calls

RECIPES = {"current": CurrentScaling(), "block": BlockScaling(), "delayed": DelayedScaling(), "nvfp4": NVFP4()}
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def test_they_are_what_torch_has_but_for_the_last_bits():
    torch.manual_seed(0)
    gate, up, x = (torch.randn(64, 200, dtype=torch.float64) for _ in range(3))
    weight = torch.randn(200, dtype=torch.float64)
    single = [t.float() for t in (gate, up, x, weight)]
    for got, want in (
        (qt.swiglu(*single[:2]), F.silu(gate) * up),
        (qt.rms_norm(*single[2:], 1e-6), F.rms_norm(x, (200,), weight, 1e-6)),
    ):
        torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=1e-7)  # A few units of fp32.


class Block(nn.Module):
    """A norm and a SwiGLU MLP. With `apart`, layers get copies that have no cached amax."""

    def __init__(self, recipe, apart=False):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.apart = qt.RMSNorm(64), apart
        self.gate, self.up = nn.Linear(64, 128, bias=False), nn.Linear(64, 128, bias=False)
        self.down = nn.Linear(128, 64, bias=False)
        self.bfloat16()
        qt.convert(self, recipe)
        for layer in (self.gate, self.up, self.down):
            if layer.seed is not None:
                layer.seed.zero_()

    def forward(self, x):
        h = self._seen(self.norm(x))
        return x + self.down(self._seen(qt.swiglu(self._seen(self.gate(h)), self._seen(self.up(h)))))

    def _seen(self, x):
        if self.apart:
            x = x.clone()
            x.register_hook(torch.clone)
        return x


class Called(nn.Module):
    """Runs a function as the `forward` of a converted module does."""

    def __init__(self):
        super().__init__()
        follow_calls(self)

    def forward(self, function):
        return function()


def gradients(model, x, **options):
    x = x.clone().requires_grad_()
    y = checkpoint(model, x, use_reentrant=False) if options.get("checkpointed") else model(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


@every_recipe
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_noted_amax_changes_no_bit(recipe, checkpointed):
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    mine = gradients(Block(recipe), x, checkpointed=checkpointed)
    for got, want in zip(mine, gradients(Block(recipe, apart=True), x, checkpointed=checkpointed), strict=True):
        assert torch.equal(got, want)


READS = [getattr(torch.ops.qshard, name).default for name in ("amax_tensor", "quantize_block", "quantize_square_both")]


class Amaxes(TorchDispatchMode):
    """Records the shapes of matrices that ops read for an amax: alone, or with the codes."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in READS:
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


def test_what_was_made_with_its_amax_is_not_read_for_it():
    """Amaxes are computed only for weights (forward and backward) and for the gradient of the output of `down`."""
    x = torch.randn(32, 64).bfloat16()
    with Amaxes() as seen:
        gradients(Block("CurrentScaling"), x)
    assert sorted(seen.shapes) == sorted([(128, 64)] * 4 + [(64, 128)] * 2 + [(32, 64)])
    with Amaxes() as seen:
        gradients(Block("CurrentScaling", apart=True), x)
    assert len(seen.shapes) == 7 + 4  # The norm's output, h, and the gradients of gate and up.


def test_the_layer_after_swiglu_keeps_no_codes():
    """SwiGLU saves gate and up for backward, and h is recomputed from them."""
    gate, up = (torch.randn(32, 128, requires_grad=True).bfloat16() for _ in range(2))
    layer = qt.convert(nn.Linear(128, 64, bias=False).bfloat16(), "CurrentScaling")
    y = Called()(lambda: layer(qt.swiglu(gate, up)))
    kept = {t.data_ptr() for t in y.grad_fn.saved_tensors if type(t) is torch.Tensor and t.numel() > 1}
    assert {gate.data_ptr(), up.data_ptr()} <= kept <= {gate.data_ptr(), up.data_ptr(), layer.weight.shard.data_ptr()}


def test_an_amax_is_void_once_its_tensor_is_written():
    def body():
        h = qt.swiglu(torch.ones(4, 16), torch.ones(4, 16))
        assert cached_amax(h) == h.max()
        assert cached_amax(h[:2]) is None
        h.mul_(3)
        assert cached_amax(h) is None
        layer = qt.convert(nn.Linear(16, 16, bias=False), "CurrentScaling")
        assert torch.equal(layer(h), layer(h.clone()))
        with torch.inference_mode():
            x = torch.ones(2)
            cache_amax(x, torch.tensor(9.0))
            assert cached_amax(x) is None

    Called()(body)


MAKERS = {
    "swiglu": lambda: qt.swiglu(torch.ones(4, 16), torch.ones(4, 16)),
    "rms_norm": lambda: qt.rms_norm(torch.ones(4, 16), torch.ones(16), 1e-6),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_an_amax_is_void_once_the_call_that_made_its_tensor_ends(make):
    """Version counters miss writes through NumPy or `.data`, so a cached amax must not outlive the call."""
    h = Called()(make)
    assert cached_amax(h) is None
    assert cached_amax(make()) is None
    h.numpy()[:] = 1000
    layer = qt.Linear(16, 16, bias=False, recipe="CurrentScaling")
    assert torch.equal(layer(h), layer(torch.full((4, 16), 1000.0)))
    assert torch.equal(Called()(lambda: layer(h)), layer(h))


def test_an_amax_of_a_gradient_is_void_once_its_backward_pass_ends():
    gate, up = (torch.ones(4, 16, requires_grad=True) for _ in range(2))
    seen = []
    gate.register_hook(lambda grad: seen.append(cached_amax(grad)))
    grad, _ = torch.autograd.grad(qt.swiglu(gate, up).sum(), [gate, up])
    assert seen == [grad.abs().max()]
    assert cached_amax(grad) is None
    layer, gradients = qt.Linear(16, 16, bias=False, recipe="CurrentScaling"), []
    grad.data.mul_(1000)
    for given in (grad, grad.clone()):
        layer.zero_grad()
        layer(torch.ones(4, 16)).backward(given)
        gradients.append(layer.weight.grad)
    assert torch.equal(*gradients)


def test_gradients_that_meet_another_are_read_again():
    """`gate` has two consumers: autograd sums their gradients, in place or not, so the cached amax is void."""
    torch.manual_seed(0)
    x, w = torch.randn(32, 64), torch.randn(48, 64)
    results = []
    for apart in (False, True):
        layer = qt.Linear(64, 48, bias=False, recipe="CurrentScaling")
        layer.weight.data.copy_(w)
        gate = layer(x)
        up = torch.ones_like(gate) * 1000
        h = qt.swiglu(gate.clone() if apart else gate, up)
        (h.sum() + (gate * 77).sum()).backward()
        results.append(layer.weight.grad)
    assert torch.equal(*results)


def test_what_is_not_plain_takes_torchs_own():
    gate, up = torch.randn(3, 8), torch.randn(3, 8)
    layer = qt.RMSNorm(8, eps=1e-5)
    assert torch.equal(torch.func.vmap(qt.swiglu)(gate, up), F.silu(gate) * up)
    torch.testing.assert_close(torch.func.grad(lambda g: qt.swiglu(g, up).sum())(gate), _slope(gate, up))
    assert qt.swiglu(gate.to("meta"), up.to("meta")).shape == (3, 8)
    assert torch.equal(torch.func.vmap(layer)(gate), F.rms_norm(gate, (8,), layer.weight, 1e-5))
    compiled = torch.compile(lambda g, u: layer(qt.swiglu(g, u)), backend="eager", fullgraph=True)
    assert torch.equal(compiled(gate, up), F.rms_norm(F.silu(gate) * up, (8,), layer.weight, 1e-5))


def _slope(gate, up):
    s = torch.sigmoid(gate)
    return up * s * (1 + gate * (1 - s))


def test_the_module_is_nn_rmsnorm():
    """`RMSNorm` matches `nn.RMSNorm`: state, copies, pickles, normalized axes, dtypes, no weight, wrong shapes."""
    x = torch.randn(5, 2, 8, dtype=torch.bfloat16)
    for options in ({}, {"eps": 1e-3}, {"elementwise_affine": False}):
        for shape in (8, (2, 8)):
            mine = qt.RMSNorm(shape, **options, dtype=torch.bfloat16)
            theirs = nn.RMSNorm(shape, **options, dtype=torch.bfloat16)
            theirs.load_state_dict(mine.state_dict())
            for each in (mine, copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))):
                assert isinstance(each, nn.RMSNorm)
                torch.testing.assert_close(each(x), theirs(x), rtol=2**-7, atol=0)  # A unit of bfloat16.
    assert qt.RMSNorm(8, dtype=torch.float64)(x.double()).dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        assert qt.RMSNorm(8)(x.float()).dtype == nn.RMSNorm(8)(x.float()).dtype
    with pytest.raises(RuntimeError, match="normalized_shape"):
        qt.RMSNorm(4)(x)


def test_convert_fuses_norms_if_asked():
    def model():
        torch.manual_seed(0)
        norms = nn.RMSNorm(64), nn.RMSNorm(64, elementwise_affine=False), nn.LayerNorm(64)
        return nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 64), *norms)

    left, fused = (qt.convert(model(), "CurrentScaling", fuse=fuse) for fuse in (False, True))
    assert [type(layer) for layer in left][0::2] == [nn.RMSNorm, nn.RMSNorm, nn.LayerNorm]
    assert [type(layer) for layer in fused] == [qt.RMSNorm, qt.Linear, qt.RMSNorm, nn.RMSNorm, nn.LayerNorm]
    assert list(fused.state_dict()) == list(left.state_dict())
    x = torch.randn(4, 64)
    torch.testing.assert_close(fused(x), left(x), rtol=0.1, atol=0.1)  # Codes on either side of a tie.


class Norm(nn.RMSNorm):
    """A user's subclass, which `convert` must leave unchanged."""


class OtherNorm(nn.RMSNorm):
    def forward(self, x):
        return super().forward(x) + 1


def test_convert_fuses_norms_of_other_classes_that_keep_what_they_do():
    model = nn.Sequential(Norm(64), nn.Linear(64, 64), OtherNorm(64))
    model = qt.convert(model, "CurrentScaling", fuse=True)
    assert isinstance(model[0], qt.RMSNorm)
    assert isinstance(model[0], Norm)
    assert type(model[2]) is OtherNorm
    x = torch.randn(4, 64)
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), qt.convert(model, "MXFP8", fuse=True)):
        assert type(each[0]) is type(model[0])
        assert torch.equal(each[0](x), model[0](x))


class LlamaRMSNorm(nn.Module):
    """The RMSNorm of Llama in transformers, with its ways to be another function."""

    def __init__(self, weight=torch.add, kind=torch.float32, eps=1e-3):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(64))
        self.offset, self.kind, self.variance_epsilon = weight, kind, eps

    def forward(self, hidden_states):
        x = hidden_states.to(self.kind)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.offset(self.weight, 0) * x.to(hidden_states.dtype)


class SiLUActivation(nn.Module):
    def forward(self, x):
        return F.silu(x)


class LlamaMLP(nn.Module):
    def __init__(self, act=None, names=("gate_proj", "up_proj", "down_proj"), dropout=0.0):
        super().__init__()
        self.names, self.act_fn, self.p = names, act or SiLUActivation(), dropout
        for name, shape in zip(names, ((64, 128), (64, 128), (128, 64)), strict=True):
            self.add_module(name, nn.Linear(*shape))

    def forward(self, x):
        gate, up, down = (getattr(self, name) for name in self.names)
        return down(F.dropout(self.act_fn(gate(x)) * up(x), self.p, self.training))


NORMS_AND_MLPS = {
    "the norm of Llama": (LlamaRMSNorm, True),
    "1 + weight, as Gemma": (lambda: LlamaRMSNorm(lambda weight, _: 1 + weight), False),
    "weight squared": (lambda: LlamaRMSNorm(lambda weight, _: weight * weight), False),
    "computed in bfloat16": (lambda: LlamaRMSNorm(kind=torch.bfloat16), False),
    "the MLP of Llama": (LlamaMLP, True),
    "the MLP of torchtitan": (lambda: LlamaMLP(names=("w1", "w3", "w2")), True),
    "gelu": (lambda: LlamaMLP(nn.GELU()), False),
    "gate and up exchanged": (lambda: LlamaMLP(names=("w3", "w1", "w2")), False),
    "dropout": (lambda: LlamaMLP(dropout=0.1), False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("make", "fuses"), NORMS_AND_MLPS.values(), ids=NORMS_AND_MLPS)
def test_convert_fuses_modules_of_other_libraries_by_what_they_compute(make, fuses, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(make(), nn.Linear(64, 64)).to(dtype)
    plain, fused = (qt.convert(copy.deepcopy(model), "MXFP8", fuse=fuse) for fuse in (False, True))
    assert type(fused[0]).__name__ == ("Fused" if fuses else "") + type(model[0]).__name__
    assert isinstance(fused[0], type(model[0]))
    assert fused.state_dict().keys() == model.state_dict().keys()
    x = torch.randn(2, 8, 64, dtype=dtype, requires_grad=True)
    grad = torch.randn(2, 8, 64, dtype=dtype)
    results = []
    for each in (plain, fused, copy.deepcopy(fused)):
        torch.manual_seed(0)
        y = each(x)
        results.append((y, *torch.autograd.grad(y, (x, *each.parameters()), grad)))
    for each in results[1:]:
        for got, want in zip(each, results[0], strict=True):  # Codes on either side of a tie.
            assert (got - want).float().norm() <= 0.05 * want.float().norm()
    assert all(torch.equal(a, b) for other in results[2:] for a, b in zip(other, results[1], strict=True))


def test_a_fused_module_of_another_library_keeps_its_own_forward_where_kernels_do_not_apply():
    """With a weight of another dtype, under autocast, in double precision and by keyword, bits are those of before."""
    torch.manual_seed(0)
    norm, mlp = LlamaRMSNorm(), LlamaMLP()
    model = nn.ModuleList([norm, mlp, nn.Linear(64, 64)])
    x = torch.randn(4, 64)
    before = norm(x.bfloat16()), norm(hidden_states=x), norm(x.double())
    qt.convert(model, "MXFP8", lambda layer, name: name == "2", fuse=True)
    assert type(norm).__name__ == "FusedLlamaRMSNorm"
    for got, want in zip((norm(x.bfloat16()), norm(hidden_states=x), norm(x.double())), before, strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)
    with torch.autocast("cpu", torch.bfloat16):
        assert mlp(x).dtype == torch.bfloat16
        assert torch.equal(mlp(x), LlamaMLP.forward(mlp, x))
    calls = []
    with mlp.act_fn.register_forward_hook(lambda *_: calls.append(1)):
        mlp(x)
    assert calls == [1]  # A hook on the activation runs, so the MLP is not fused then.


def test_a_fused_mlp_saves_less():
    """Autograd saves gate and up; PyTorch's expression also saves `silu(gate)`."""
    saved = []
    for fuse in (False, True):
        model = nn.Sequential(LlamaMLP())
        qt.convert(model, "CurrentScaling", fuse=fuse)
        sizes = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, sizes=sizes: sizes.setdefault(x.data_ptr(), (x.nbytes, x))[1], lambda x: x
        ):
            model(torch.randn(256, 64))
        saved.append(sum(nbytes for nbytes, _ in sizes.values()))
    assert saved[0] - saved[1] >= 256 * 128 * 4
