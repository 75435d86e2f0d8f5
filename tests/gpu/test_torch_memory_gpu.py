"""GPU memory of a Llama in bf16 and with each recipe; cached codes and amaxes with streams and CUDA graphs."""

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch._functorch import config as functorch  # noqa: E402
from torch._inductor import config as inductor  # noqa: E402

from qshard.recipes import CurrentScaling  # noqa: E402
from qshard.torch_bridge import convert, rms_norm, swiglu  # noqa: E402
from qshard.torch_bridge._nn.module_calls import cached_amax  # noqa: E402
from support.cuda_graphs import capture  # noqa: E402
from support.formats import RECIPES  # noqa: E402
from support.llama import Held, Llama, turns_of  # noqa: E402
from support.torch_fan import casts  # noqa: E402


def most(recipe, recompute, width=2048, length=4096, sequences=8):
    """The largest number of bytes that a step holds beyond what it begins with, for each element of x."""
    torch.manual_seed(0)
    model = Llama(width, 2).to("cuda", torch.bfloat16)
    model = model if recipe is None else convert(model, recipe)
    shape = (sequences, length, width)
    x = torch.randn(shape, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    turns = turns_of(length, width, "cuda")
    for step in range(2):  # The first allocates workspaces.
        model.zero_grad()
        x.grad = None
        if step:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        model(x, turns, recompute).sum().backward()
    return (torch.cuda.max_memory_allocated() - before) / x.numel()


_BF16: dict[bool, float] = {}


@pytest.fixture
def bf16(much_memory):
    for recompute in (False, True):
        if recompute not in _BF16:
            _BF16[recompute] = most(None, recompute)
    return _BF16


@pytest.mark.parametrize("recompute", [False, True], ids=["all kept", "checkpointing"])
@pytest.mark.parametrize("name", RECIPES)
def test_the_peak_of_a_llama_is_lower_than_that_of_bf16(name, recompute, bf16):
    peak = most(RECIPES[name], recompute)
    print(f"{name}, recompute={recompute}: {peak:.1f} bytes a token and width; bf16: {bf16[recompute]:.1f}")
    assert peak < bf16[recompute]


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = (nn.Linear(width, 4 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def step_within(budget, recipe):
    """Peak bytes of a compiled step for each element of x, beyond what it begins with, and all gradients."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    width, rows = 512, 16384
    model = nn.Sequential(*(Block(width) for _ in range(8))).to("cuda", torch.bfloat16)
    compiled = torch.compile(convert(model, recipe))
    x = torch.randn(rows, width, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    # Compiled code may round otherwise where it computes an activation again.
    with functorch.patch(activation_memory_budget=budget), inductor.patch(emulate_precision_casts=True):
        for _ in range(2):  # The first compiles.
            model.zero_grad()
            x.grad = None
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            compiled(x).sum().backward()
    peak = torch.cuda.max_memory_allocated() - before
    return peak / x.numel(), [x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.parametrize("name", ["CurrentScaling", pytest.param("BlockScaling", marks=pytest.mark.slow)])
def test_a_memory_budget_lowers_the_peak_and_keeps_the_bits(name, much_memory):
    (whole, want), (less, got) = (step_within(budget, RECIPES[name]) for budget in (1.0, 0.9))
    print(f"{name}: {whole:.1f} and {less:.1f} bytes a token and width")
    # Each of 8 blocks saves no codes of its SwiGLU, 4 bytes. The backward pass of the last block computes it again.
    assert less <= whole - 8
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def fan():
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(64, 64, bias=False, device="cuda") for _ in range(2))
    return convert(layers, CurrentScaling())


def batch(seed):
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)).cuda()


def test_a_captured_graph_quantizes_its_x_itself():
    """The graph does not use codes cached before the capture, and its codes are not used outside."""
    first, second = fan()
    x = batch(0)
    with torch.no_grad():
        second(x), first(x)
        graph, y = capture(lambda: second(x))
        assert torch.equal(first(x), first(batch(0)))
        for seed in (1, 2):
            x.copy_(batch(seed))
            graph.replay()
            assert torch.equal(y, second(batch(seed)))


def test_another_stream_quantizes_x_again():
    """The second stream does not wait for codes of the first."""
    first, second = fan()
    x, side = batch(0), torch.cuda.Stream()
    with torch.no_grad(), Held() as held:
        first(x)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            second(x)
    side.synchronize()
    assert casts(held.ops) == 4  # x and the weight, in each stream.


@pytest.mark.parametrize("name", RECIPES)
def test_shared_and_kept_codes_give_the_same_bits(name):
    """Layers apart make and keep codes of their own."""
    made = []
    torch.manual_seed(0)
    model = convert(Llama(256, 1).cuda(), RECIPES[name])
    turns, dy = turns_of(64, 256, "cuda"), torch.randn(2, 64, 256, device="cuda")
    for apart in (False, True):
        own = copy.deepcopy(model)
        if apart:
            for layer in own.modules():
                if hasattr(layer, "recipe"):
                    layer.register_forward_pre_hook(lambda _, args: (args[0] + 0,))
        x = torch.randn(2, 64, 256, generator=torch.Generator().manual_seed(1)).cuda().requires_grad_()
        y = own(x, turns)
        y.backward(dy)
        made.append([y, x.grad, *(p.grad for p in own.parameters())])
    for a, b in zip(*made, strict=True):
        assert torch.equal(a, b)


class Body(nn.Module):
    """A module around a converted layer, in whose calls amaxes are valid."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64, bias=False, device="cuda")
        convert(self, "CurrentScaling")

    def forward(self, run):
        return run(self.layer)


def test_a_captured_graph_takes_no_amax_from_outside():
    """h was made before the capture; what is written to it between replays has another amax."""

    def run(layer):
        h = swiglu(torch.ones(32, 64, device="cuda"), torch.ones(32, 64, device="cuda"))
        assert cached_amax(h) is not None
        layer(h.clone())
        graph, y = capture(lambda: layer(h))
        h.mul_(100)
        graph.replay()
        assert torch.equal(y, layer(h.clone()))

    with torch.no_grad():
        Body()(run)


def test_another_stream_takes_the_amax_again():
    def run(layer):
        h = swiglu(torch.ones(32, 64, device="cuda"), torch.ones(32, 64, device="cuda"))
        assert cached_amax(h) is not None
        with torch.cuda.stream(torch.cuda.Stream()):
            assert cached_amax(h) is None

    Body()(run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_and_norms_have_the_bits_of_a_cpu(dtype):
    """Forward and backward, of widths that threads hold in registers and of others."""
    for shape in [(64, 4096), (33, 200), (17, 9000), (5, 1001)]:
        results = []
        for device in ("cpu", "cuda"):
            torch.manual_seed(0)
            x, gate, up, grad = (torch.randn(shape, dtype=dtype).to(device).requires_grad_() for _ in range(4))
            weight = torch.randn(shape[-1:], dtype=dtype).to(device).requires_grad_()
            h, y = swiglu(gate, up), rms_norm(x, weight, 1e-5)
            got = torch.autograd.grad([h, y], [gate, up, x, weight], [grad.detach(), grad.detach()])
            results.append([t.detach().cpu() for t in (h, y, *got)])
        for mine, theirs in zip(*results, strict=True):
            assert torch.equal(mine, theirs), shape
