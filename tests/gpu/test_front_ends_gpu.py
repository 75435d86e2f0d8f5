"""Both front ends on a GPU: FP8 matrix products and command buffers. Bits are in the tests that take `front`."""

import numpy as np
import pytest

from qshard import reference
from qshard.formats import FP8_E4M3, Usage
from qshard.recipes import CurrentScaling
from support.awkward import assert_bits_equal


def relative_error(got, want):
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def test_torch_linear_runs_fp8_gemms_that_agree_with_the_cpu():
    """The FP8 GEMM sums the same products of the same codes, in another order, and rounds to bf16 once: 2^-8."""
    torch = pytest.importorskip("torch")
    from qshard.torch_bridge import Linear

    torch.manual_seed(0)
    x, w = torch.randn(64, 256).bfloat16(), torch.randn(128, 256).bfloat16()
    seed = torch.randn(64, 128).bfloat16()
    results = {}
    for device in ("cpu", "cuda"):
        layer = Linear(256, 128, bias=False, recipe=CurrentScaling(), device=device, dtype=torch.bfloat16)
        with torch.no_grad():
            layer.weight.copy_(w)
        a = x.clone().to(device).detach().requires_grad_()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as trace:
            y = layer(a)
            y.backward(seed.to(device))
        calls = {event.key: event.count for event in trace.key_averages()}
        assert (calls.get("qshard::gemm", 0) == 3) == (device == "cuda")
        results[device] = [t.detach().float().cpu().numpy() for t in (y, a.grad, layer.weight.grad)]
    for got, want in zip(results["cuda"], results["cpu"], strict=True):
        assert relative_error(got, want) < 2**-8


def test_jax_linear_runs_fp8_gemms_that_agree_with_the_cpu():
    """Like the torch test. The compiled program must call cuBLASLt's FP8 GEMM, not multiply dequantized values."""
    jax = pytest.importorskip("jax")
    import jax.numpy as jnp

    import qshard.jax

    rng = np.random.default_rng(0)
    x, w, seed = (rng.standard_normal(shape, np.float32) for shape in [(256, 512), (384, 512), (256, 384)])

    @jax.jit
    def step(x, w, seed):
        y, pull = jax.vjp(lambda x, w: qshard.jax.linear(x, w, CurrentScaling()), x, w)
        return (y, *pull(seed))

    results = {}
    for name in ("cpu", "cuda"):
        device = jax.devices(name)[0]
        operands = [jax.device_put(jnp.asarray(t, jnp.bfloat16), device) for t in (x, w, seed)]
        results[name] = [np.asarray(t.astype(jnp.float32)) for t in step(*operands)]
        if name == "cuda":
            assert "__cublas$lt$matmul$f8" in step.lower(*operands).compile().as_text()
    for got, want in zip(results["cuda"], results["cpu"], strict=True):
        assert relative_error(got, want) < 2**-8


def test_jax_runs_in_a_command_buffer():
    """XLA records the handlers into a CUDA graph and replays it: the same bits, call after call."""
    jax = pytest.importorskip("jax")
    import jax.numpy as jnp

    import qshard.jax

    device = jax.devices("cuda")[0]

    def quantize(x):
        q = qshard.jax.quantize(x, FP8_E4M3, usage=Usage.BOTH)
        return q.rowwise.data, q.columnwise.data

    options = {"xla_gpu_enable_command_buffer": "CUSTOM_CALL", "xla_gpu_graph_min_graph_size": 1}
    x = jax.device_put(jnp.zeros((256, 512), jnp.bfloat16), device)
    compiled = jax.jit(quantize).lower(x).compile(compiler_options=options)
    for seed in range(3):
        x = np.random.default_rng(seed).standard_normal((256, 512), np.float32).astype(jnp.bfloat16)
        want = reference.quantize(x, FP8_E4M3, Usage.BOTH)
        data, data_t = compiled(jax.device_put(x, device))
        assert_bits_equal(np.asarray(data).view(np.uint8), want.rowwise.data)
        assert_bits_equal(np.asarray(data_t).view(np.uint8), want.columnwise.data)
