"""Heads without logits on a GPU: their gradients, under recipes too, what they hold, and in a captured graph."""

import functools

import numpy as np
import pytest

ROWS, K, CLASSES = 1024, 256, 4096
RULE = {"label_smoothing": 0.1, "z_loss": 1e-3}


def drawn(torch, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, K, generator=generator).to("cuda", dtype).requires_grad_()
    w = (torch.randn(CLASSES, K, generator=generator) / 16).to("cuda", dtype).requires_grad_()
    labels = torch.randint(CLASSES, (ROWS,), generator=generator).cuda()
    labels[::7] = -100
    return x, w, labels


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("recipe", ["CurrentScaling", "BlockScaling", "MXFP8", "NVFP4"])
def test_recipes_are_the_two_calls(recipe, reduction):
    """In one chunk; sums of products, and of scales of a half gradient, may be rounded to neighbours."""
    torch = pytest.importorskip("torch")
    import qshard.torch_bridge as qt

    x, w, labels = drawn(torch, torch.bfloat16)
    seed = 5 if recipe == "NVFP4" else None
    loss = qt.linear_cross_entropy(x, w, labels, recipe=recipe, seed=seed, chunk=ROWS, reduction=reduction, **RULE)
    other = qt.cross_entropy(qt.linear(x, w, None, recipe, seed=seed), labels, reduction=reduction, **RULE)
    torch.testing.assert_close(loss, other, rtol=1e-3, atol=1e-3)
    if recipe == "NVFP4":
        return  # Its gradients are rounded by numbers that fall elsewhere.
    grad = torch.full(loss.shape, 0.5, device="cuda")
    for mine, want in zip(*(torch.autograd.grad(each, (x, w), grad) for each in (loss, other)), strict=True):
        assert mine.dtype == want.dtype
        error = (mine.float() - want.float()).norm() / want.float().norm()
        assert error < 0.05, error


@pytest.mark.parametrize("columns", [32000, 32003, 129])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_one_op_is_the_three(dtype, columns):
    """Also in place, with rows that are ignored, that have no class, and that hold infinities and NaN."""
    torch = pytest.importorskip("torch")
    from qshard.torch_bridge._ops.bind import into, ops

    rows, generator = 600, torch.Generator().manual_seed(0)
    logits = (torch.randn(rows, columns, generator=generator) * 8).to("cuda", getattr(torch, dtype))
    labels = torch.randint(columns, (rows,), generator=generator, dtype=torch.int32).cuda()
    labels[::7], labels[5] = -100, columns
    logits[1, 3], logits[2, 4], logits[3], logits[4, 100] = torch.nan, torch.inf, -torch.inf, -torch.inf
    grad = torch.rand(rows, generator=generator).cuda()
    rule = {"classes": columns, "ignore_index": -100, "smoothing": 0.1, "z_loss": 1e-3}
    stats = ops.cross_entropy_stats(logits, labels, first=0, total=True)
    loss, lse = ops.cross_entropy(stats.unsqueeze(-2), labels, **rule)
    want = loss, ops.cross_entropy_grad(logits, labels, lse, grad, first=0, **rule)
    assert want[0].isnan().any()
    assert want[0].isfinite().sum() > rows / 2
    made = ops.cross_entropy_with_grad(logits, labels, grad, **rule)
    overwritten = torch.empty_like(loss), logits
    into(*overwritten).cross_entropy_with_grad(logits, labels, grad, **rule)
    for each in (made, overwritten):
        for mine, other in zip(each, want, strict=True):
            assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))


def test_torch_holds_a_chunk():
    torch = pytest.importorskip("torch")
    import qshard.torch_bridge as qt

    x, w, labels = drawn(torch, torch.bfloat16)
    times = 16  # So that logits are more than anything else.
    x, labels = x.detach().repeat(times, 1).requires_grad_(), labels.repeat(times)
    whole = times * ROWS * CLASSES * 2

    def peak(**options):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(qt.linear_cross_entropy(x, w, labels, **options), (x, w))
        return torch.cuda.max_memory_allocated() - before

    peak()
    many, one = peak(chunk=128), peak(chunk=times * ROWS)
    assert many < 0.5 * whole < whole < one


@pytest.mark.parametrize("recipe", [None, "CurrentScaling"])
def test_larger_chunks_take_no_more_memory(recipe):
    """The default is all rows here, whose logits are larger than 256 MiB; then chunks sum gradients in float32."""
    torch = pytest.importorskip("torch")
    import qshard.torch_bridge as qt
    from qshard._core.losses import CHUNK_BYTES, rows_at_a_time

    rows, k, classes = 8192, 4096, 32768
    x, w = (torch.randn(n, k, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (rows, classes))
    labels = torch.randint(classes, (rows,), device="cuda")
    assert 2 * rows * classes > CHUNK_BYTES
    assert rows_at_a_time(None, x.shape, classes, 2) == rows

    def peak(**options):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(qt.linear_cross_entropy(x, w, labels, recipe=recipe, **options), (x, w))
        return torch.cuda.max_memory_allocated() - before

    peak()
    # 2 %: tensors of one number per row, and what the allocator rounds up.
    assert peak() <= 1.02 * peak(chunk=CHUNK_BYTES // (2 * classes))


def test_torch_captures_it():
    torch = pytest.importorskip("torch")
    import qshard.torch_bridge as qt
    from support.cuda_graphs import capture

    x, w, labels = drawn(torch, torch.bfloat16)

    def run():
        loss = qt.linear_cross_entropy(x, w, labels, chunk=256, **RULE)
        return loss.detach(), *torch.autograd.grad(loss, (x, w))

    torch.cuda.synchronize()  # The other stream reads what this one has copied.
    with torch.cuda.stream(torch.cuda.Stream()):
        want = run()
    torch.cuda.synchronize()
    graph, made = capture(run)
    graph.replay()
    torch.cuda.synchronize()
    for mine, other in zip(made, want, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_jax_is_that_of_the_cpu(dtype, reduction):
    jax = pytest.importorskip("jax")
    import jax.numpy as jnp

    import qshard.jax as qj

    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(ROWS, K)), rng.normal(size=(CLASSES, K)) / 16
    labels = rng.integers(0, CLASSES, ROWS).astype(np.int32)
    given = [np.asarray(jnp.asarray(a, dtype)) for a in (x, w)]

    @jax.jit
    def step(x, w, labels):
        loss = functools.partial(qj.linear_cross_entropy, labels=labels, reduction=reduction, chunk=384, **RULE)
        made, back = jax.vjp(loss, x, w)
        return made, *back(jnp.full_like(made, 0.5))

    made = []
    with jax.default_matmul_precision("highest"):
        for platform in ("cpu", "cuda"):
            there = [jax.device_put(a, jax.devices(platform)[0]) for a in (*given, labels)]
            made.append([np.asarray(a, np.float32) for a in step(*there)])
            if platform == "cuda":
                compiled = step.lower(*there).compile()
                assert f"[{ROWS},{CLASSES}]" not in compiled.as_text()
    for mine, want in zip(*made, strict=True):
        # bfloat16 logits may be rounded to neighbours.
        rtol = 2e-2 if dtype == "bfloat16" else 1e-3
        np.testing.assert_allclose(mine, want, rtol=rtol, atol=rtol * np.abs(want).max())


def test_a_head_under_both_fsdp2_and_tensor_parallelism():
    """Classes over two GPUs, each shard over two more."""
    pytest.importorskip("torch")
    from support.torch_ranks import run

    case = "dist/test_torch_class_shards.py::test_a_head_under_both_fsdp2_and_tensor_parallelism"
    run((2, 2), case, on="cuda", recipe=None)
