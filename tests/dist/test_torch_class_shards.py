"""Cross entropy over class shards of any width: losses and gradients of fp64, and the same errors on all ranks."""

from __future__ import annotations

import copy
import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

import qshard.torch_bridge as qt
from qshard.torch_bridge import tensor_parallel
from support import torch_ranks
from support.torch_ranks import on_ranks

RULE = {"label_smoothing": 0.1, "z_loss": 1e-2}


VOCABULARIES = {"chunks": None, "equal": (3, 3, 3, 3), "an empty one": (0, 5, 1, 2), "all on one": (0, 0, 7, 0)}
"""Shard widths of four ranks; fewer ranks merge the last ones. None: the widths of `torch.chunk`."""


def shards_of(vocabulary, classes):
    """Return the slice of the classes of each rank."""
    world = dist.get_world_size()
    if vocabulary is None:
        each = -(-classes // world)
        widths = [max(0, min(each, classes - rank * each)) for rank in range(world)]
    else:
        widths = [*vocabulary[: world - 1], sum(vocabulary[world - 1 :])]
    starts = [sum(widths[:rank]) for rank in range(world)]
    return [slice(start, start + width) for start, width in zip(starts, widths, strict=True)]


def in_fp64(x, w, labels, reduction, **options):
    """Return PyTorch's loss in fp64 and the gradients of half of it."""
    leaves = [x.double().requires_grad_(), w.double().requires_grad_()]
    logits = torch.nn.functional.linear(*leaves)
    smoothing, z_loss = options.get("label_smoothing", 0.0), options.get("z_loss", 0.0)
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    counted = labels != -100
    losses = losses + z_loss * torch.where(counted, logits.logsumexp(-1) ** 2, 0.0)
    made = losses if reduction == "none" else losses.sum() / (counted.sum() if reduction == "mean" else 1)
    made.backward(torch.full_like(made, 0.5))
    return made.detach(), *(leaf.grad for leaf in leaves)


# fp32 against fp64: sums of some 10 terms of about 1.
NEAR = {"rtol": 1e-5, "atol": 1e-6, "check_dtype": False}


@on_ranks(1, 2, 3, 4)
def test_shards_of_any_width():
    """Losses and gradients of x and w against fp64, for uneven and empty shards and more ranks than classes."""
    for kind, vocabulary in VOCABULARIES.items():
        for classes in (3, 10) if vocabulary is None else (sum(vocabulary),):
            torch.manual_seed(0)
            own = shards_of(vocabulary, classes)[dist.get_rank()]
            x, w = torch.randn(7, 16), torch.randn(classes, 16)
            labels = torch.randint(classes, (7,))
            labels[2], labels[3], labels[4] = -100, classes - 1, 0
            for reduction in ("mean", "sum", "none"):
                for rule in ({}, RULE):
                    want, of_x, of_w = in_fp64(x, w, labels, reduction, **rule)
                    given = {"reduction": reduction, "group": dist.group.WORLD, **rule}
                    leaves = [x.clone().requires_grad_(), w[own].clone().requires_grad_()]
                    loss = qt.linear_cross_entropy(*leaves, labels, chunk=3, **given)
                    loss.backward(torch.full_like(loss, 0.5))
                    for mine, other in zip(
                        (loss, *(leaf.grad for leaf in leaves)), (want, of_x, of_w[own]), strict=True
                    ):
                        torch.testing.assert_close(mine.detach(), other, **NEAR, msg=kind)
                    logits = torch.nn.functional.linear(x, w)[:, own].requires_grad_()
                    loss = qt.cross_entropy(logits, labels, **given)
                    loss.backward(torch.full_like(loss, 0.5))
                    torch.testing.assert_close(loss.detach(), want, **NEAR)
                    torch.testing.assert_close(logits.grad.t() @ x, of_w[own], **NEAR)


@on_ranks(2, 3)
def test_shards_of_torch_loss_parallel():
    """Loss and gradient are those of PyTorch's `loss_parallel` on uneven shards, up to rounding."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    logits, labels = torch.randn(6, 11), torch.randint(11, (6,))
    own = shards_of(None, 11)[dist.get_rank()]
    theirs = DTensor.from_local(logits[:, own].clone(), mesh, [Shard(1)], shape=(6, 11), stride=(11, 1))
    theirs.requires_grad_()
    with loss_parallel():
        want = torch.nn.functional.cross_entropy(theirs, labels)
        want.backward()
    mine = logits[:, own].clone().requires_grad_()
    loss = qt.cross_entropy(mine, labels, group=mesh.get_group())
    loss.backward()
    torch.testing.assert_close(loss.detach(), want.to_local().detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(mine.grad, theirs.grad.to_local(), rtol=1e-5, atol=1e-7)


@on_ranks(2, 4)
def test_ranks_agree_on_errors():
    """Every rank raises the same text, whichever rank has the wrong label, also a rank without classes."""
    rank, world = dist.get_rank(), dist.get_world_size()
    own = shards_of(None, 3)[rank]
    x, w, labels = torch.randn(4, 8), torch.randn(3, 8)[own], torch.tensor([0, 1, 2, -100])
    calls = (
        lambda labels: qt.cross_entropy(torch.nn.functional.linear(x, w), labels, group=dist.group.WORLD),
        lambda labels: qt.linear_cross_entropy(x, w, labels, group=dist.group.WORLD, chunk=2),
    )
    for call in calls:
        for wrong in range(world):
            for label in (3, -1):
                given = labels.clone()
                given[1] = label if rank == wrong else 1
                with pytest.raises(ValueError, match=rf"labels contain {label}, which is neither a class .0 to 2. nor"):
                    call(given)
        with pytest.raises(ValueError, match=r"ranks of group have different numbers of labels"):
            qt.cross_entropy(
                torch.randn(4 + rank, len(w)), torch.zeros(4 + rank, dtype=torch.int64), group=dist.group.WORLD
            )
        assert call(labels).isfinite()
    none = torch.zeros(4, 0)
    with pytest.raises(ValueError, match="logits has no classes"):
        qt.cross_entropy(none, labels, group=dist.group.WORLD)
    rows = 32 if rank else 33
    with pytest.raises(ValueError, match=r"w \(33, 32\) is not a whole number of 32x32 blocks"):
        qt.linear_cross_entropy(
            torch.zeros(4, 32), torch.zeros(rows, 32), labels, group=dist.group.WORLD, recipe="MXFP8"
        )


@on_ranks(2)
def test_heads_that_differ_on_one_rank_alone():
    """Rank 0 has the same width for both heads and rank 1 has not, so ranks must not cache widths."""
    rank, labels = dist.get_rank(), torch.tensor([0, 1, 2])
    for classes in (3, 4, 3, 4):
        logits = torch.randn(3, classes, generator=torch.Generator().manual_seed(classes))
        loss = qt.cross_entropy(logits[:, shards_of(None, classes)[rank]].contiguous(), labels, group=dist.group.WORLD)
        torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, labels), rtol=1e-6, atol=1e-6)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_padding_is_no_class(reduction):
    """A vocabulary of 10 padded to 12: the loss of 10 classes, and zero gradients for the padding."""
    torch.manual_seed(0)
    x, w, labels = torch.randn(5, 8), torch.randn(12, 8), torch.tensor([9, 0, -100, 4, 5])
    own = shards_of(None, 12)[dist.get_rank()]
    want, of_x, of_w = in_fp64(x, w[:10], labels, reduction, **RULE)
    of_w = torch.cat([of_w, torch.zeros(2, 8)])
    given = {"reduction": reduction, "group": dist.group.WORLD, "num_classes": 10, **RULE}
    leaves = [x.clone().requires_grad_(), w[own].clone().requires_grad_()]
    loss = qt.linear_cross_entropy(*leaves, labels, chunk=2, **given)
    loss.backward(torch.full_like(loss, 0.5))
    for mine, other in zip((loss, *(leaf.grad for leaf in leaves)), (want, of_x, of_w[own]), strict=True):
        torch.testing.assert_close(mine.detach(), other, **NEAR)
    logits = torch.nn.functional.linear(x, w)[:, own].requires_grad_()
    loss = qt.cross_entropy(logits, labels, **given)
    loss.backward(torch.full_like(loss, 0.5))
    torch.testing.assert_close(logits.grad.t() @ x, of_w[own], **NEAR)
    with pytest.raises(ValueError, match=r"labels contain 10, which is neither a class .0 to 9. nor"):
        qt.cross_entropy(logits, labels.where(labels != 9, torch.tensor(10)), **given)
    with pytest.raises(ValueError, match=r"num_classes .13. is more than the 12 columns of logits"):
        qt.cross_entropy(logits, labels, **given | {"num_classes": 13})


@pytest.mark.slow
@on_ranks(2)
def test_compiled_shards_are_what_num_classes_says():
    """A graph cannot read the widths: without `num_classes` they are equal, and other widths give NaN."""
    warnings.filterwarnings("ignore", ".* should not be instantiated", DeprecationWarning)  # From dynamo itself.
    torch._dynamo.reset()  # Earlier cases compiled graphs with their groups.
    torch.manual_seed(0)
    logits, labels = torch.randn(3, 11), torch.tensor([0, 10, 5])

    def gradients(own, **options):
        call = functools.partial(qt.cross_entropy, group=dist.group.WORLD, **options)
        leaf = logits[:, own].clone().requires_grad_()
        loss = torch.compile(call, backend="aot_eager", fullgraph=True)(leaf, labels)
        loss.backward()
        return loss.detach(), leaf.grad

    rank = dist.get_rank()
    loss, grad = gradients(shards_of(None, 11)[rank], num_classes=11)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, labels), rtol=1e-6, atol=1e-6)
    assert grad.isfinite().all()
    padded = slice(6 * rank, 6 * rank + 6)  # Equal shards; with num_classes the last one is padded.
    logits = torch.nn.functional.pad(logits, (0, 7))
    torch.testing.assert_close(gradients(padded, num_classes=11)[0], loss, rtol=1e-6, atol=1e-6)
    for widths, options in (((5, 6, 0, 0), {}), ((5, 6, 0, 0), {"num_classes": 11})):
        for made in gradients(shards_of(widths, 11)[rank], **options):
            assert made.isnan().any()


@pytest.mark.each_value
@on_ranks(2, 3)
@pytest.mark.parametrize("style", ["torch", "ours"])
@pytest.mark.parametrize("recipe", [None, "CurrentScaling"])
def test_a_head_that_parallelize_module_shards(recipe, style):
    """The loss is that of one rank, for every layout of x and the logits and for labels by position or keyword."""
    mesh = init_device_mesh("cpu", (world := dist.get_world_size(),))
    kind = ColwiseParallel if style == "torch" else tensor_parallel.ColwiseParallel
    classes = 11 if recipe is None else 16 * world
    torch.manual_seed(0)
    alone, x = qt.LinearCrossEntropy(16, classes, **RULE), torch.randn(2, 2 * world, 16)
    labels = torch.randint(classes, (2, 2 * world))
    if recipe is not None:
        qt.convert(alone, recipe)
    for layout, options in (
        (Replicate(), {}),
        (Shard(1), {"output_layouts": Shard(-1), "use_local_output": False}),
        (Shard(1), {"output_layouts": Replicate()}),
    ):
        head = copy.deepcopy(alone)
        parallelize_module(head, mesh, kind(input_layouts=layout, **options))
        part = x if layout == Replicate() else x.chunk(world, 1)[dist.get_rank()]
        mine, other = part.clone().requires_grad_(), x.clone().requires_grad_()
        alone.weight.grad = None
        want = alone(other, labels)
        want.backward()
        for loss in (head(mine, labels=labels), head(mine, labels)):
            assert type(loss) is torch.Tensor
            # An FP8 gradient has one scale for each rank's classes: half a unit of E5M2 on either side, for each term.
            close = {"rtol": 1e-5, "atol": 1e-6} if recipe is None else {"rtol": 0.13, "atol": 0.05}
            torch.testing.assert_close(loss, want, rtol=1e-2 if recipe else 1e-6, atol=1e-6)
            mine.grad = head.weight.grad = None
            loss.backward()
            of_x = other.grad if layout == Replicate() else other.grad.chunk(world, 1)[dist.get_rank()]
            torch.testing.assert_close(mine.grad, of_x, **close)
            torch.testing.assert_close(head.weight.grad.full_tensor(), alone.weight.grad, **close)
        logits = head(part)
        assert isinstance(logits, DTensor) != options.get("use_local_output", True)
        with pytest.raises(ValueError, match=f"labels contain {classes + labels.min()}, which is neither a class"):
            head(part, labels + classes * dist.get_rank())


@on_ranks(2)
def test_a_head_that_is_sharded_along_k_raises():
    mesh = init_device_mesh("cpu", (2,))
    head = parallelize_module(qt.LinearCrossEntropy(8, 4), mesh, RowwiseParallel(input_layouts=Replicate()))
    with pytest.raises(ValueError, match=r"linear_cross_entropy: w \(4, 8\) has placements .*; shard it by classes"):
        head(torch.ones(2, 8), torch.zeros(2, dtype=torch.int64))
    head = parallelize_module(qt.LinearCrossEntropy(8, 4, group=mesh.get_group()), mesh, ColwiseParallel())
    with pytest.raises(ValueError, match="w is a DTensor; leave group out"):
        head(torch.ones(2, 8), torch.zeros(2, dtype=torch.int64))


@on_ranks((2, 2))
@pytest.mark.parametrize("recipe", [None, "CurrentScaling"])
def test_a_head_under_both_fsdp2_and_tensor_parallelism(recipe):
    """FSDP2 gathers the shard of each rank's classes; all ranks have one batch, so the gradient is that of one rank."""
    mesh = init_device_mesh(torch_ranks.device, (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    with torch.device(torch_ranks.device):
        head, x, labels = qt.LinearCrossEntropy(32, 64, **RULE), torch.randn(8, 32), torch.randint(64, (8,))
    if recipe is not None:
        qt.convert(head, recipe)
    alone = copy.deepcopy(head)
    parallelize_module(head, mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
    fully_shard(head, mesh=mesh["dp"])
    loss, want = head(x, labels), alone(x, labels)
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-6)
    loss.backward()
    want.backward()
    # An FP8 gradient has one scale for each rank's classes: half a unit of E5M2 on either side, for each term.
    close = {"rtol": 1e-5, "atol": 1e-6} if recipe is None else {"rtol": 0.13, "atol": 0.05}
    torch.testing.assert_close(head.weight.grad.full_tensor(), alone.weight.grad, **close)
