"""Adam on a GPU: the bits of the CPU in both frameworks, and steps in a captured graph."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from qshard.torch_bridge import Adam  # noqa: E402
from support.awkward import assert_bits_equal  # noqa: E402
from support.cuda_graphs import capture  # noqa: E402

SETTINGS = {
    "exp_avg_dtype": torch.float8_e4m3fn,
    "exp_avg_sq_dtype": torch.float8_e5m2,
    "master_weights": "remainder",
    "weight_decay": 0.1,
    "decoupled_weight_decay": True,
}


def parameters(device):
    """More than one launch takes, of sizes that begin blocks of threads anywhere, unaligned ones among them."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1 + i % 5, 1 + (i * 37) % 400) for i in range(300)] + [(999, 1001), (512, 4096), (70000,)]
    flat = torch.randn(sum(int(np.prod(s)) for s in shapes), generator=generator).bfloat16().to(device)
    made, begin = [], 0
    for shape in shapes:
        size = int(np.prod(shape))
        made.append(nn.Parameter(flat[begin : begin + size].view(shape)))
        begin += size
    return made


def set_grads(params, step):
    generator = torch.Generator().manual_seed(step)
    for p in params:
        grad = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
        if p.grad is None:
            p.grad = grad
        else:
            p.grad.copy_(grad)


def as_bytes(tensor):
    return tensor.detach().cpu().reshape(-1).view(torch.uint8)


def assert_same(a, b):
    for p, q in zip(a.param_groups[0]["params"], b.param_groups[0]["params"], strict=True):
        assert torch.equal(as_bytes(p), as_bytes(q))
        for key in a.state[p]:
            assert torch.equal(as_bytes(a.state[p][key]), as_bytes(b.state[q][key])), key


@pytest.mark.parametrize("settings", [{}, SETTINGS], ids=["plain", "fp8"])
def test_the_gpu_has_the_bits_of_the_cpu(settings):
    optimizers = [Adam(parameters(device), lr=1e-2, **settings) for device in ("cpu", "cuda")]
    for step in range(3):
        for optimizer in optimizers:
            set_grads(optimizer.param_groups[0]["params"], step)
            optimizer.step()
    assert_same(*optimizers)


def test_a_captured_step_counts_and_follows_lr():
    lr = torch.tensor(1e-2, device="cuda")
    params = parameters("cuda")
    set_grads(params, 0)
    captured = Adam(params, lr=lr, **SETTINGS)
    captured.step()  # States and settings get their memory.
    eager = copy.deepcopy(captured)
    for p, q in zip(params, eager.param_groups[0]["params"], strict=True):
        q.grad = p.grad.clone()
    graph, _ = capture(captured.step)
    for step in range(1, 4):
        for optimizer in (captured, eager):
            set_grads(optimizer.param_groups[0]["params"], step)
            optimizer.param_groups[0]["lr"].fill_(1e-2 / step)
        graph.replay()
        eager.step()
    torch.cuda.synchronize()
    assert_same(captured, eager)


def test_launches_do_not_grow_with_tensors():
    from torch.profiler import ProfilerActivity, profile

    counts = []
    for count in (2, 200):
        params = [nn.Parameter(torch.ones(3, 130, device="cuda")) for _ in range(count)]
        optimizer = Adam(params)
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
            optimizer.step()
            torch.cuda.synchronize()
        counts.append(sum("Adam" in event.key for event in trace.events()))
    assert counts[0] == counts[1] == 2


def test_jax_has_the_same_bits():
    jax = pytest.importorskip("jax")
    try:
        jax.devices("cuda")
    except RuntimeError:
        pytest.skip("jax finds no cuda device")
    from qshard.jax import adamw

    rng = np.random.default_rng(0)
    params = {"w": rng.standard_normal((64, 1000)).astype(np.float32), "b": rng.standard_normal(77).astype(np.float32)}
    transformation = adamw(1e-2, weight_decay=0.1, mu_dtype="float8_e4m3fn", nu_dtype="float16")
    made = []
    for platform in ("cpu", "cuda"):
        device = jax.devices(platform)[0]
        weights = jax.device_put(params, device)
        state = jax.device_put(transformation.init(weights), device)
        step = jax.jit(transformation.update)
        for _ in range(2):
            updates, state = step(weights, state, weights)
        made.append((updates, state))
    for a, b in zip(*map(jax.tree.leaves, made), strict=True):
        assert_bits_equal(np.asarray(b), np.asarray(a))
