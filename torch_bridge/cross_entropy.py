"""Cross entropy in one pass over logits forward and one backward; and of a linear layer, whose logits are never whole.

What a row comes down to is four numbers (`ffi/ops.def`), so ranks that have parts of the classes gather these. The
gradient of logits takes that of the loss, row by row, whatever the reduction.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from qshard.losses import WORD, LossRule, check_head, check_rows, rows_at_a_time, wrong_label
from qshard.names import shown
from qshard.torch_bridge.arguments import check_group, check_tensor
from qshard.torch_bridge.ops import call_into, dtype_name, ops
from qshard.torch_bridge.optim.slices import all_gather


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
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
      group: ranks that have parts of the classes, as many each, in order; labels, and the loss, are the same on all of
        them. They gather 16 bytes a row.

    Returns:
      float32, `[]`, or `[*rows]` with "none". The gradient of logits has their dtype; it is worked out in float32, and
      rounded once.

    Raises:
      TypeError, ValueError: these are not such arguments, or, on the CPU, a label is none of the classes. On a GPU such
        a row has loss NaN and gradients NaN.

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
    check_tensor("cross_entropy", "logits", logits)
    rule = _rule("cross_entropy", logits.shape[-1] if logits.ndim else 0, ignore_index, label_smoothing, z_loss, group)
    _check("cross_entropy", "logits", logits, labels, rule, reduction)
    losses: Tensor = _RowLosses.apply(logits, _as_words(labels), rule)
    return _reduced(losses, labels, reduction, ignore_index)


def linear_cross_entropy(
    x: Tensor,
    w: Tensor,
    labels: Tensor,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    group: dist.ProcessGroup | None = None,
    chunk: int | None = None,
) -> Tensor:
    """`cross_entropy(x @ w.T, labels)`, a chunk of rows at a time, whose gradient then takes the place of its logits.

    Args:
      x: float32, bfloat16 or float16, `[*rows, K]`.
      w: of the dtype of x, `[classes, K]`; with `group` a part of the classes.
      labels, reduction, ignore_index, label_smoothing, z_loss, group: as for `cross_entropy`. With `group` x is the
        same on all ranks, and so is its gradient, which they add up.
      chunk: rows at a time. By default as many as have 256 MiB of logits.

    Returns:
      As `cross_entropy`. Logits are rounded to the dtype of x. The gradient of w is summed over chunks in float32.

    Raises:
      TypeError, ValueError: as `cross_entropy` does, or x and w do not fit.

    With "mean" and "sum" gradients are made as the loss is, and multiplied by that of the loss, a number, in backward.
    In float16 a loss that was scaled up could not bring back what has been rounded to 0; so there, and with "none",
    logits are made again in backward. Under autocast x and w are cast to its dtype.

    >>> x, w = torch.ones(2, 3, requires_grad=True), torch.zeros(4, 3)
    >>> loss = linear_cross_entropy(x, w, torch.tensor([0, 3]))
    >>> loss.backward()
    >>> loss.detach(), x.grad.abs().max()
    (tensor(1.3863), tensor(0.))

    Source: Wijmans et al., arXiv:2411.09009.
    """
    check_tensor("linear_cross_entropy", "x", x)
    check_tensor("linear_cross_entropy", "w", w)
    if torch.is_autocast_enabled(x.device.type):
        x, w = (tensor.to(torch.get_autocast_dtype(x.device.type)) for tensor in (x, w))
    check_head("linear_cross_entropy", x.shape, dtype_name(x.dtype), w.shape, dtype_name(w.dtype), chunk)
    rule = _rule("linear_cross_entropy", w.shape[0], ignore_index, label_smoothing, z_loss, group)
    _check("linear_cross_entropy", "x", x, labels, rule, reduction)
    flat, words = x.reshape(-1, x.shape[-1]), _as_words(labels).reshape(-1)
    rows = rows_at_a_time(chunk, len(flat), w.shape[0], x.dtype.itemsize)
    if reduction == "none" or x.dtype == torch.float16 or not torch.is_grad_enabled():
        losses: Tensor = _LateLosses.apply(flat, w, words, rule, rows)
        return _reduced(losses.view(labels.shape), labels, reduction, ignore_index)
    count = _count(labels, ignore_index) if reduction == "mean" else torch.ones((), device=x.device)
    loss: Tensor = _EarlyLoss.apply(flat, w, words, count, rule, rows)
    return loss


class LinearCrossEntropy(nn.Linear):
    """The head of a model, which gives the loss of labels, by `linear_cross_entropy`, and without labels logits.

    As it is a module, FSDP2 and ZeRO gather its weight for it. Biases are not taken.

    Args:
      in_features, out_features, device, dtype: as for `nn.Linear`.
      loss: the options of `linear_cross_entropy`, such as `z_loss`.

    >>> head = LinearCrossEntropy(8, 16, z_loss=1e-4)
    >>> x = torch.ones(2, 3, 8)
    >>> head(x).shape, head(x, torch.zeros(2, 3, dtype=torch.int64)).shape
    (torch.Size([2, 3, 16]), torch.Size([]))
    """

    def __init__(self, in_features: int, out_features: int, *, device: Any = None, dtype: Any = None, **loss: Any):
        super().__init__(in_features, out_features, bias=False, device=device, dtype=dtype)
        self.loss = loss

    def forward(self, input: Tensor, labels: Tensor | None = None) -> Tensor:
        if labels is None:
            return super().forward(input)
        return linear_cross_entropy(input, self.weight.to(input.dtype), labels, **self.loss)


@dataclass(frozen=True)
class _Rule:
    """What the ops are told, and who has the other classes."""

    classes: int
    first: int
    of: LossRule
    group: dist.ProcessGroup | None

    def losses(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of each row, and its lse."""
        stats = ops.cross_entropy_stats(logits, labels, first=self.first, total=self.of.smoothing > 0)
        if self.group is None:
            parts = stats.unsqueeze(-2)
        else:
            world = dist.get_world_size(self.group)
            gathered = stats.new_empty(world * stats.numel())
            all_gather(gathered, stats.view(-1), group=self.group)
            parts = gathered.view(world, *stats.shape).movedim(0, -2).contiguous()
        loss, lse = ops.cross_entropy(parts, labels, classes=self.classes, **self.of.options)
        return loss, lse

    def gradient(self, logits: Tensor, labels: Tensor, lse: Tensor, grad: Tensor, *, in_place: bool) -> Tensor:
        """That of logits, of that of each loss."""
        options = {"classes": self.classes, "first": self.first, **self.of.options}
        if in_place:
            call_into("cross_entropy_grad", (logits, labels, lse, grad), (logits,), options)
            return logits
        d: Tensor = ops.cross_entropy_grad(logits, labels, lse, grad, **options)
        return d


class _RowLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, rule: _Rule) -> Tensor:
        logits = logits.contiguous()
        loss, lse = rule.losses(logits, labels)
        ctx.save_for_backward(logits, labels, lse)
        ctx.rule = rule
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, lse = ctx.saved_tensors
        return ctx.rule.gradient(logits, labels, lse, grad.contiguous(), in_place=False), None, None


class _Gradients:
    """Those of x and w, chunk by chunk, as far as they are needed."""

    def __init__(self, x: Tensor, w: Tensor, needed: tuple[bool, bool], chunks: int):
        self._x, self._w = x, w
        self.dx = torch.empty_like(x) if needed[0] else None
        # Of one chunk the product is the gradient.
        dtype = torch.float32 if chunks > 1 else w.dtype
        self.dw = torch.empty(w.shape, dtype=dtype, device=w.device) if needed[1] else None
        self._begun = False

    def add(self, rows: slice, d: Tensor) -> None:
        x = self._x[rows]
        if self.dx is not None:
            torch.mm(d, self._w, out=self.dx[rows])
        if self.dw is None:
            return
        if self.dw.dtype == d.dtype:
            torch.addmm(self.dw, d.t(), x, beta=float(self._begun), out=self.dw)
        elif d.is_cuda and self._begun:
            torch.addmm(self.dw, d.t(), x, out_dtype=torch.float32, out=self.dw)
        elif d.is_cuda:
            torch.mm(d.t(), x, out_dtype=torch.float32, out=self.dw)
        else:
            made = torch.mm(d.t(), x)
            self.dw.add_(made) if self._begun else self.dw.copy_(made)
        self._begun = True

    def reduced(self, group: dist.ProcessGroup | None) -> tuple[Tensor | None, Tensor | None]:
        for made in (self.dx, self.dw):
            if made is not None and not self._begun:
                made.zero_()
        if group is not None and self.dx is not None:
            dist.all_reduce(self.dx, group=group)
        return self.dx, self.dw


class _EarlyLoss(torch.autograd.Function):
    """The sum of losses over `count`, with gradients made at once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, labels: Tensor, count: Tensor, rule: _Rule, rows: int) -> Tensor:
        x, w = x.contiguous(), w.contiguous()
        needed = ctx.needs_input_grad[:2]
        gradients = _Gradients(x, w, needed, -(-len(x) // rows))
        share = count.reciprocal().expand(min(rows, len(x))).contiguous()
        losses = torch.empty(len(x), dtype=torch.float32, device=x.device)
        for chunk in _chunks(len(x), rows):
            logits = torch.mm(x[chunk], w.t())
            losses[chunk], lse = rule.losses(logits, labels[chunk])
            if any(needed):
                grad = share[: len(logits)]
                gradients.add(chunk, rule.gradient(logits, labels[chunk], lse, grad, in_place=True))
        ctx.save_for_backward(*gradients.reduced(rule.group))
        ctx.dtype = w.dtype
        return losses.sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = ctx.saved_tensors
        of_x = None if dx is None else dx * grad
        return of_x, None if dw is None else (dw * grad).to(ctx.dtype), None, None, None, None


class _LateLosses(torch.autograd.Function):
    """The loss of each row; logits are made again for gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, labels: Tensor, rule: _Rule, rows: int) -> Tensor:
        x, w = x.contiguous(), w.contiguous()
        losses, lses = (torch.empty(len(x), dtype=torch.float32, device=x.device) for _ in range(2))
        for chunk in _chunks(len(x), rows):
            losses[chunk], lses[chunk] = rule.losses(torch.mm(x[chunk], w.t()), labels[chunk])
        ctx.save_for_backward(x, w, labels, lses)
        ctx.rest = rule, rows
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w, labels, lses = ctx.saved_tensors
        rule, rows = ctx.rest
        gradients, grad = _Gradients(x, w, ctx.needs_input_grad[:2], -(-len(x) // rows)), grad.contiguous()
        for chunk in _chunks(len(x), rows):
            logits = torch.mm(x[chunk], w.t())
            d = rule.gradient(logits, labels[chunk], lses[chunk], grad[chunk], in_place=True)
            gradients.add(chunk, d)
        dx, dw = gradients.reduced(rule.group)
        return dx, None if dw is None else dw.to(w.dtype), None, None, None


def _chunks(count: int, rows: int) -> Iterator[slice]:
    return (slice(at, min(at + rows, count)) for at in range(0, count, rows))


def _count(labels: Tensor, ignore_index: int) -> Tensor:
    """How many labels count, as float32."""
    return (labels != ignore_index).sum().to(torch.float32)


def _reduced(losses: Tensor, labels: Tensor, reduction: str, ignore_index: int) -> Tensor:
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / _count(labels, ignore_index)


def _as_words(labels: Tensor) -> Tensor:
    """As int32; what that cannot hold is no class either way."""
    if labels.dtype == torch.int32:
        return labels.contiguous()
    return labels.clamp(*WORD).to(torch.int32).contiguous()


def _rule(
    op: str, columns: int, ignore_index: int, smoothing: float, z_loss: float, group: dist.ProcessGroup | None
) -> _Rule:
    rule = LossRule.of(op, ignore_index, smoothing, z_loss)
    check_group(op, group)
    world, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    return _Rule(columns * world, columns * rank, rule, group)


def _check(op: str, name: str, x: Tensor, labels: Any, rule: _Rule, reduction: str) -> None:
    if not isinstance(labels, Tensor):
        raise TypeError(f"{op}: labels ({shown(labels)}) is not a torch.Tensor; pass torch.tensor(labels)")
    shapes, where = (x.shape, labels.shape), (x.device, labels.device)
    check_rows(op, name, *shapes, dtype_name(labels.dtype), rule.classes, reduction, where=where)
    if labels.device.type == "cpu" and not torch.compiler.is_compiling() and type(labels) is Tensor:
        ignored = rule.of.ignore_index
        wrong = labels[(labels != ignored) & ((labels < 0) | (labels >= rule.classes))]
        if wrong.numel():
            raise wrong_label(op, int(wrong[0]), rule.classes, ignored)
