"""Cross entropy in one pass over logits forward and one backward.

What a row comes down to is four numbers (`ffi/ops.def`), so ranks that have parts of the classes gather these. The
gradient of logits takes that of the loss, row by row, whatever the reduction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qshard._core.losses import WORD, LossRule, check_num_classes, check_rows
from qshard._core.validation import quote
from qshard.torch_bridge._losses.class_shards import ClassShard, class_shard
from qshard.torch_bridge._ops.autograd_node import Node, apply_node
from qshard.torch_bridge._ops.bind import call_into, dtype_name, ops
from qshard.torch_bridge._ops.collectives import all_gather
from qshard.torch_bridge._quantized.validation import check_group, check_tensor


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    num_classes: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """`lse - logits[label] + z_loss * lse^2` for each row, with `lse = log(sum(exp(logits)))`.

    With smoothing s, `(1 - s) * logits[label] + s * mean(logits)` takes the place of the logit of the label.

    Args:
      logits: float32, bfloat16 or float16, `[*rows, classes]`: classes are the last axis.
      labels: int64 or int32, `[*rows]`.
      reduction: "mean" over the rows that are not ignored, "sum", or "none".
      ignore_index: a row with this label has loss 0 and gradients 0.
      label_smoothing: from 0 to 1.
      z_loss: what keeps lse near 0, 0 or more.
      num_classes: how many classes there are, over all ranks. Columns from it on are padding: they add nothing to the
        loss, and their gradient is 0. None: every column is a class.
      group: ranks that have shards of the classes, in order, of any widths, also none; labels, and the loss, are the
        same on all of them. They gather 16 bytes a row, and first, in each call, their widths. On a GPU the host waits
        for the widths, unless `num_classes` is passed. Then shards must have the widths of `torch.chunk`, or equal
        ones; without it, in graphs of `torch.compile` and of CUDA, equal ones. Other widths give loss NaN there.

    Returns:
      float32, `[]`, or `[*rows]` with "none". The gradient of logits has their dtype; it is worked out in float32, and
      rounded once.

    Raises:
      TypeError, ValueError: these are not such arguments, or, on the CPU, a label is none of the classes: on every rank
        of `group`, whichever has the label. On a GPU such a row has loss NaN and gradients NaN.

    Each loss is within 4 units in the last place of lse of what fp64 gives. A second derivative raises. Sharded rows
    are rows by themselves: average losses by the number of their labels.

    >>> logits = torch.tensor([[0.0, 0.0], [0.0, 1.0986123]], requires_grad=True)
    >>> loss = cross_entropy(logits, torch.tensor([0, 1]))
    >>> loss.backward()
    >>> loss.detach(), logits.grad
    (tensor(0.4904), tensor([[-0.2500,  0.2500],
            [ 0.1250, -0.1250]]))

    Sources: Szegedy et al., arXiv:1512.00567 (smoothing); Chowdhery et al., arXiv:2204.02311 (z-loss).
    """
    op, name = "cross_entropy", "logits"
    check_tensor(op, name, logits, sharded=f"pass {name}.to_local(), and group= of its mesh if classes are sharded")
    columns = logits.shape[-1] if logits.ndim else 0
    rule = LossRule.of(op, ignore_index, label_smoothing, z_loss)
    of = loss_of_rows(op, name, logits, columns, labels, reduction, rule, group, num_classes)
    losses: Tensor = apply_node(_RowLosses, logits, as_words(labels), of)
    return reduce_losses(losses, labels, reduction, ignore_index)


@dataclass(frozen=True)
class LossOfRows:
    """The rule of a loss, and the shard of the classes on this rank."""

    shard: ClassShard
    of: LossRule
    group: dist.ProcessGroup | None

    def losses(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of each row, and its lse."""
        shard, logits = self.shard, self._unpadded(logits)
        stats = ops.cross_entropy_stats(logits, labels, first=shard.first, total=self.of.smoothing > 0)
        if self.group is None:
            parts = stats.unsqueeze(-2)
        else:
            world = dist.get_world_size(self.group)
            gathered = stats.new_empty(world * stats.numel())
            all_gather(gathered, stats.view(-1), group=self.group)
            parts = gathered.view(world, *stats.shape).movedim(0, -2).contiguous()
        loss, lse = ops.cross_entropy(parts, labels, classes=shard.classes, **self.of.options)
        return (loss, lse) if shard.is_right is None else (loss * shard.is_right, lse * shard.is_right)

    def gradient(self, logits: Tensor, labels: Tensor, lse: Tensor, grad: Tensor, *, in_place: bool) -> Tensor:
        """That of logits, of that of each loss."""
        options = {"classes": self.shard.classes, "first": self.shard.first, **self.of.options}
        padding = logits.shape[-1] - self.shard.columns
        logits = self._unpadded(logits)
        if in_place:
            call_into("cross_entropy_grad", (logits, labels, lse, grad), (logits,), options)
            d = logits
        else:
            d = ops.cross_entropy_grad(logits, labels, lse, grad, **options)
        return torch.nn.functional.pad(d, (0, padding)) if padding else d

    def _unpadded(self, logits: Tensor) -> Tensor:
        """The logits of classes; `logits` itself if that is all."""
        columns = self.shard.columns
        return logits if columns == logits.shape[-1] else logits[..., :columns].contiguous()


class _RowLosses(Node):
    op, instead = "cross_entropy", "use torch.nn.functional.cross_entropy"

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, rule: LossOfRows) -> tuple[Tensor, tuple[Tensor, ...]]:
        logits = logits.contiguous()
        loss, lse = rule.losses(logits, labels)
        ctx.rule = rule
        return loss, (logits, labels, lse)

    @staticmethod
    def gradients(ctx: Any, saved: list[Tensor], grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, lse = saved
        return ctx.rule.gradient(logits, labels, lse, grad.contiguous(), in_place=False), None, None


def count_of(labels: Tensor, ignore_index: int) -> Tensor:
    """How many labels count, as float32."""
    return (labels != ignore_index).sum().to(torch.float32)


def reduce_losses(losses: Tensor, labels: Tensor, reduction: str, ignore_index: int) -> Tensor:
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / count_of(labels, ignore_index)


def as_words(labels: Tensor) -> Tensor:
    """As int32; what that cannot hold is no class either way."""
    if labels.dtype == torch.int32:
        return labels.contiguous()
    return labels.clamp(*WORD).to(torch.int32).contiguous()


def loss_of_rows(
    op: str,
    name: str,
    x: Tensor,
    columns: int,
    labels: Any,
    reduction: str,
    rule: LossRule,
    group: dist.ProcessGroup | None,
    num_classes: int | None,
    total: int | None = None,
) -> LossOfRows:
    """Checks the arguments of `op`, and gives the loss of rows of `x`. Collective over `group`.

    Args:
      name: of `x`, for errors.
      columns, total: as for `class_shard`.
    """
    check_group(op, group)
    check_num_classes(op, num_classes)
    if not isinstance(labels, Tensor):
        raise TypeError(f"{op}: labels ({quote(labels)}) is not a torch.Tensor; pass torch.tensor(labels)")
    shapes, where = (x.shape, labels.shape), (x.device, labels.device)
    check_rows(op, name, *shapes, dtype_name(labels.dtype), reduction, where=where)
    shard = class_shard(op, name, columns, labels, rule.ignore_index, num_classes, group, total)
    return LossOfRows(shard, rule, group)
