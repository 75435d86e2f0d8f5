"""`cross_entropy` and `linear_cross_entropy` in PyTorch, against fp64, in every reduction and under every gradient."""

import pytest
import torch
import torch.nn.functional as F

import qshard.torch_bridge as qt
from support.torch_models import Wire

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
REDUCTIONS = ["mean", "sum", "none"]
SHAPES = [((5,), 7), ((2, 3), 1000), ((3,), 4099), ((0,), 5), ((4,), 9000), ((1,), 1)]
RULES = {
    "plain": {},
    "smooth": {"label_smoothing": 0.1},
    "z": {"z_loss": 1e-2},
    "both": {"label_smoothing": 0.3, "z_loss": 0.1},
}


def drawn(rows, classes, dtype, device, *, ignored=True):
    generator = torch.Generator().manual_seed(classes)
    logits = (3 * torch.randn(*rows, classes, generator=generator)).to(dtype)
    labels = torch.randint(classes, rows, generator=generator)
    if ignored and labels.numel() > 2:
        labels.view(-1)[1] = -100
    return logits.to(device).requires_grad_(), labels.to(device)


def expected(logits, labels, reduction, *, label_smoothing=0.0, z_loss=0.0):
    """By PyTorch, in fp64."""
    logits = logits.detach().double().requires_grad_()
    flat = logits.flatten(0, -2)
    losses = F.cross_entropy(flat, labels.flatten(), reduction="none", label_smoothing=label_smoothing)
    losses = losses + z_loss * torch.where(labels.flatten() == -100, 0.0, flat.logsumexp(-1) ** 2)
    made = losses.view(labels.shape)
    if reduction != "none":
        made = losses.sum() / ((labels != -100).sum() if reduction == "mean" else 1)
    return logits, made


def assert_near(actual, wanted, dtype):
    """Rounded once: half a unit of 8, 11 or 24 bits, and what fp32 has lost before."""
    bits = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 19}[dtype]
    scale = wanted.nan_to_num().abs().max().item() if wanted.numel() else 0.0
    torch.testing.assert_close(actual.double(), wanted, rtol=2.0**-bits, atol=scale * 2.0**-22 + 1e-9, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_is_that_of_fp64(dtype, reduction, rule, device):
    for rows, classes in SHAPES:
        logits, labels = drawn(rows, classes, dtype, device)
        loss = qt.cross_entropy(logits, labels, reduction=reduction, **rule)
        wide, want = expected(logits, labels, reduction, **rule)
        assert loss.dtype == torch.float32
        assert_near(loss.detach(), want.detach(), torch.float32)
        grad = torch.randn(want.shape, generator=torch.Generator().manual_seed(1)).to(device)
        loss.backward(grad)
        want.backward(grad.double())
        assert logits.grad.dtype == dtype
        assert_near(logits.grad, wide.grad, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("below", [9.5, 11.0, 12.2, 16.0])
def test_many_small_terms(device, below):
    """The errors of equal terms add up: 200,000 classes that are together as likely as the largest."""
    logits = torch.full((1, 200_000), -below, device=device)
    logits[0, 7] = 0
    loss = qt.cross_entropy(logits, torch.tensor([7], device=device))
    assert abs(loss.item() - logits.double().logsumexp(-1).item()) < 1e-6


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradients_take_that_of_the_loss(reduction):
    """Twice, and each time by itself: nothing is scaled in place."""
    logits, labels = drawn((6,), 50, torch.float32, "cpu")
    w = torch.randn(50, 16, requires_grad=True)
    x = torch.randn(6, 16, requires_grad=True)
    for loss, leaves in (
        (qt.cross_entropy(logits, labels, reduction=reduction).sum(), (logits,)),
        (qt.linear_cross_entropy(x, w, labels, reduction=reduction, chunk=4).sum(), (x, w)),
    ):
        first = torch.autograd.grad(loss, leaves, torch.tensor(3.0), retain_graph=True)
        again = torch.autograd.grad(loss, leaves, torch.tensor(3.0), retain_graph=True)
        once = torch.autograd.grad(loss, leaves, torch.tensor(1.0))
        for a, b, c in zip(first, again, once, strict=True):
            assert torch.equal(a, b)
            torch.testing.assert_close(a, 3 * c, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("needs", "products"), [((), 1), (("x",), 2), (("w",), 2), (("x", "w"), 3)])
def test_gradients_that_are_not_needed_are_not_computed(needs, products):
    """Of the products of logits and of both gradients."""
    x, w = torch.randn(4, 8, requires_grad="x" in needs), torch.randn(9, 8, requires_grad="w" in needs)
    with Wire() as wire:
        qt.linear_cross_entropy(x, w, torch.tensor([0, 1, 2, 3]))
    assert sum("mm" in name for name in wire.launches) == products
    with torch.no_grad(), Wire() as wire:
        qt.linear_cross_entropy(x, w, torch.tensor([0, 1, 2, 3]))
    assert sum("mm" in name for name in wire.launches) == 1


@pytest.mark.parametrize("device", DEVICES)
def test_no_numbers(device):
    """Infinite logits of classes that are left out are fine; rows of nothing else, or with NaN, have NaN."""
    inf = float("inf")
    rows = [[-inf, 1.0, 2.0], [-inf, -inf, -inf], [float("nan"), 1.0, 2.0], [inf, 1.0, 2.0], [0.0, 0.0, 0.0]]
    logits = torch.tensor(rows, device=device, requires_grad=True)
    labels = torch.tensor([2, 0, 1, 1, -100], device=device)
    losses = qt.cross_entropy(logits, labels, reduction="none")
    assert losses.isnan().tolist() == [False, True, True, True, False]
    assert losses[0].item() == pytest.approx(0.3132617)
    losses.sum().backward()
    torch.testing.assert_close(logits.grad[0].cpu(), torch.tensor([0.0, 0.2689414, -0.2689414]))
    assert not logits.grad[4].any()


@pytest.mark.gpu
def test_labels_that_are_no_classes_are_nan_on_a_gpu():
    logits = torch.zeros(3, 4, device="cuda", requires_grad=True)
    losses = qt.cross_entropy(logits, torch.tensor([4, -1, 2**40], device="cuda"), reduction="none")
    losses.sum().backward()
    assert losses.isnan().all()
    assert logits.grad.isnan().all()


def test_module_gives_logits_or_the_loss():
    head = qt.LinearCrossEntropy(8, 16, z_loss=1e-3)
    x, labels = torch.randn(2, 3, 8), torch.randint(16, (2, 3))
    torch.testing.assert_close(head(x, labels), qt.cross_entropy(head(x), labels, z_loss=1e-3))
    assert list(head.state_dict()) == ["weight"]
    with torch.autocast("cpu", torch.bfloat16):
        assert head(x, labels).dtype == torch.float32


@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo's own.
@pytest.mark.parametrize("call", ["cross_entropy", "linear_cross_entropy"])
def test_compiled_it_is_the_same(call):
    logits, labels = drawn((6,), 40, torch.float32, "cpu")
    w = torch.randn(40, 40)
    function = qt.cross_entropy if call == "cross_entropy" else lambda x, labels: qt.linear_cross_entropy(x, w, labels)
    want = torch.autograd.grad(function(logits, labels), logits)
    actual = torch.autograd.grad(torch.compile(function, backend="aot_eager")(logits, labels), logits)
    assert torch.equal(actual[0], want[0])
