"""Cross entropy, with one pass over the logits forward and one backward.

Each row is reduced to four numbers (`ffi/ops.def`), which ranks with shards of the classes gather. The gradient of the
logits is computed from the gradient of the loss row by row, for every reduction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qshard._core.losses import INT32_RANGE, LossRule, check_num_classes, check_rows
from qshard._core.validation import quote
from qshard.torch_bridge._losses.class_shards import ClassShard, class_shard
from qshard.torch_bridge._ops.autograd_node import Node, apply_node
from qshard.torch_bridge._ops.bind import dtype_name, into, ops
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
    """Compute `lse - logits[label] + z_loss * lse^2` for each row, with `lse = log(sum(exp(logits)))`.

    With smoothing s, `(1 - s) * logits[label] + s * mean(logits)` replaces `logits[label]`.

    Args:
      logits: float32, bfloat16 or float16, `[*rows, classes]`.
      labels: int64 or int32, `[*rows]`.
      reduction: "mean" over the rows that are not ignored, "sum", or "none".
      ignore_index: a row with this label has loss 0 and gradients 0.
      label_smoothing: from 0 to 1.
      z_loss: weight of the penalty that keeps lse near 0, 0 or more.
      num_classes: number of classes over all ranks. Later columns are padding: they add nothing to the loss, and their
        gradient is 0. None: every column is a class.
      group: ranks with shards of the classes, in order, of any widths, also 0. Labels and the loss are the same on all
        ranks. Each call gathers the widths and then 16 bytes a row. On a GPU the host waits for the widths, unless
        `num_classes` is passed: then shards must have the widths of `torch.chunk`, or equal widths. Without
        `num_classes`, graphs of `torch.compile` and CUDA graphs need equal widths. Other widths give loss NaN there.

    Returns:
      float32, `[]`, or `[*rows]` with "none". The gradient of logits has their dtype; it is computed in float32 and
      rounded once.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: shapes do not fit, an option is out of range, or, on the CPU, a label is not a class. All ranks of
        `group` raise, whichever has the label. On a GPU such a row has loss NaN and gradients NaN instead.

    The error of each loss is at most 1e-6 and 4 units in the last place of lse, compared with fp64. A GPU
    uses an instruction for exponentials, so its bits differ from a CPU's. Second derivatives raise.
    With rows sharded over ranks, each rank computes the loss of its rows: to average the losses, weight them by the
    number of labels.

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
    of = row_loss(op, name, logits, columns, labels, reduction, rule, group, num_classes)
    losses: Tensor = apply_node(_RowLosses, logits, as_int32(labels), of)
    return reduce_losses(losses, labels, reduction, ignore_index)


@dataclass(frozen=True)
class RowLoss:
    """Loss function of rows of logits. Classes are sharded over `group`; None: this rank has all classes."""

    shard: ClassShard
    rule: LossRule
    group: dist.ProcessGroup | None

    def losses(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the loss and the lse of each row. Collective over `group`."""
        shard, logits = self.shard, self._unpadded(logits)
        stats = ops.cross_entropy_stats(logits, labels, first=shard.first, total=self.rule.smoothing > 0)
        if self.group is None:
            parts = stats.unsqueeze(-2)
        else:
            world = dist.get_world_size(self.group)
            gathered = stats.new_empty(world * stats.numel())
            all_gather(gathered, stats.view(-1), group=self.group)
            parts = gathered.view(world, *stats.shape).movedim(0, -2).contiguous()
        loss, lse = ops.cross_entropy(parts, labels, classes=shard.classes, **self.rule.options)
        return (loss, lse) if shard.is_right is None else (loss * shard.is_right, lse * shard.is_right)

    def losses_and_gradient(self, logits: Tensor, labels: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the loss of each row and, for the gradient `grad` of it, the gradient of the local logits.

        The gradient overwrites the logits unless they have padding columns. Collective over `group`.
        """
        if self.group is not None:
            losses, lse = self.losses(logits, labels)
            return losses, self.gradient(logits, labels, lse, grad, in_place=True)
        loss, padding = torch.empty_like(grad), logits.shape[-1] - self.shard.columns
        logits = self._unpadded(logits)
        options = {"classes": self.shard.classes, **self.rule.options}
        into(loss, logits).cross_entropy_with_grad(logits, labels, grad, **options)
        return loss, torch.nn.functional.pad(logits, (0, padding)) if padding else logits

    def gradient(self, logits: Tensor, labels: Tensor, lse: Tensor, grad: Tensor, *, in_place: bool) -> Tensor:
        """Compute the gradient of the local logits; `in_place` overwrites them unless they have padding columns."""
        options = {"classes": self.shard.classes, "first": self.shard.first, **self.rule.options}
        padding = logits.shape[-1] - self.shard.columns
        logits = self._unpadded(logits)
        if in_place:
            d = into(logits).cross_entropy_grad(logits, labels, lse, grad, **options)
        else:
            d = ops.cross_entropy_grad(logits, labels, lse, grad, **options)
        return torch.nn.functional.pad(d, (0, padding)) if padding else d

    def _unpadded(self, logits: Tensor) -> Tensor:
        columns = self.shard.columns
        return logits if columns == logits.shape[-1] else logits[..., :columns].contiguous()


class _RowLosses(Node):
    op, instead = "cross_entropy", "use torch.nn.functional.cross_entropy"

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, rule: RowLoss) -> tuple[Tensor, tuple[Tensor, ...]]:
        logits = logits.contiguous()
        loss, lse = rule.losses(logits, labels)
        ctx.rule = rule
        return loss, (logits, labels, lse)

    @staticmethod
    def gradients(ctx: Any, saved: list[Tensor], grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, lse = saved
        return ctx.rule.gradient(logits, labels, lse, grad.contiguous(), in_place=False), None, None


def count_labels(labels: Tensor, ignore_index: int) -> Tensor:
    return (labels != ignore_index).sum().to(torch.float32)


def reduce_losses(losses: Tensor, labels: Tensor, reduction: str, ignore_index: int) -> Tensor:
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / count_labels(labels, ignore_index)


def as_int32(labels: Tensor) -> Tensor:
    """Convert labels to int32. Labels out of its range are clamped: they are not classes either way."""
    if labels.dtype == torch.int32:
        return labels.contiguous()
    return labels.clamp(*INT32_RANGE).to(torch.int32).contiguous()


def row_loss(
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
) -> RowLoss:
    """Check the arguments of `op`, and return the loss function of rows of `x`. Collective over `group`.

    `x` are the logits, or the input of the head. `columns` and `total` are as for `class_shard`.
    """
    check_group(op, group)
    check_num_classes(op, num_classes)
    if not isinstance(labels, Tensor):
        raise TypeError(f"{op}: labels ({quote(labels)}) is not a torch.Tensor; pass torch.tensor(labels)")
    devices = x.device, labels.device
    check_rows(op, name, x.shape, labels.shape, dtype_name(labels.dtype), reduction, devices=devices)
    shard = class_shard(op, name, columns, labels, rule.ignore_index, num_classes, group, total)
    return RowLoss(shard, rule, group)
