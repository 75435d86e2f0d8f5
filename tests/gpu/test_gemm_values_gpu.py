"""GEMMs of values on a GPU: every order of operands and pair of dtypes, on shapes that no tile fits; against fp64."""

import pytest

torch = pytest.importorskip("torch")

from qshard.torch_bridge._ops.bind import ops  # noqa: E402
from support.cuda_graphs import capture  # noqa: E402
from support.gemm_bounds import assert_is_product_of_values  # noqa: E402

LETTERS = ("nt", "nn", "tn", "tt")
KINDS = [
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float16, torch.float32),
    (torch.float32, torch.float32),
]
ODD_SHAPES = [
    *((1, 1, 1), (1, 256, 512), (256, 1, 512), (256, 256, 1), (7, 33, 257), (128, 256, 8), (64, 48, 40000)),
    *((272, 400, 2064), (0, 5, 7), (5, 0, 7), (3, 9, 0)),
]


def stored(a, b, letters):
    """`[M, K]` and `[N, K]` as an op takes them."""
    return (a.T if letters[0] == "t" else a).contiguous(), (b if letters[1] == "t" else b.T).contiguous()


def of_values(a, b, letters, dtype):
    return getattr(ops, f"gemm_values_{letters}")(*stored(a, b, letters), dtype=dtype, workspace=2**25)[0]


@pytest.fixture
def tf32():
    """PyTorch may use TF32. Not by monkeypatch, whose undoing deletes what a module's `__getattr__` gave."""
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, True
    yield
    matmul.allow_tf32 = before


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("letters", LETTERS)
@pytest.mark.parametrize(("dtype", "result"), KINDS, ids=str)
def test_values(dtype, result, letters):
    """On shapes that no tile fits, too; two calls have the same bits. TF32 is PyTorch's to use, not ours."""
    for m, n, k in ODD_SHAPES:
        generator = torch.Generator().manual_seed(k)
        a, b = (torch.randn(rows, k, generator=generator).to("cuda", dtype) for rows in (m, n))
        if dtype == torch.float16:
            a /= 8
        got = of_values(a, b, letters, result)
        assert (got.dtype, got.shape) == (result, (m, n))
        assert_is_product_of_values(got, a, b)
        assert torch.equal(got, of_values(a, b, letters, result))


def test_sums_of_values_are_not_put_together_in_bfloat16():
    """Long sums of few results, which the library splits: rounding each part would show beside that of the result."""
    a, b = (torch.rand(16, 2**16, device="cuda").bfloat16() for _ in range(2))
    exact = a.double() @ b.double().T
    error = (of_values(a, b, "nt", torch.bfloat16).double() - exact).abs() / exact
    assert float(error.max()) <= 1.25 * 2.0**-8  # Half a unit of bfloat16, which is 2^-7, and some.


def test_values_that_are_not_finite():
    a, b = (torch.randn(32, 64, device="cuda").bfloat16() for _ in range(2))
    a[3, 5], a[7, 9], b[11, 20] = float("inf"), float("nan"), float("nan")
    got, want = of_values(a, b, "nt", torch.float32), a.float() @ b.float().T
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isinf(), want.isinf())


def test_values_in_dtypes_that_the_library_does_not_make():
    a = torch.ones(16, 16, device="cuda")
    for dtype, result in ((torch.bfloat16, torch.float16), (torch.float32, torch.bfloat16)):
        with pytest.raises(ValueError, match=f"a result of {str(result)[6:]} is not supported by cuBLASLt"):
            of_values(a.to(dtype), a.to(dtype), "nt", result)


@pytest.mark.parametrize("letters", LETTERS)
def test_a_captured_product_of_values(letters):
    a, b = (torch.randn(rows, 1040, device="cuda").bfloat16() for rows in (184, 216))
    x, y = stored(a, b, letters)
    op = getattr(ops, f"gemm_values_{letters}")
    graph, (out, _) = capture(lambda: op(x, y, dtype=torch.bfloat16, workspace=2**25))
    for _ in range(2):
        a, b = torch.randn_like(a), torch.randn_like(b)
        for old, new in zip((x, y), stored(a, b, letters), strict=True):
            old.copy_(new)
        graph.replay()
        assert torch.equal(out, of_values(a, b, letters, torch.bfloat16))
    assert_is_product_of_values(out, a, b)
