"""Shards of the classes of a loss over the ranks of a group, and agreement of these ranks on errors.

Every call begins with an all-gather of a few integers per rank. Nothing is cached: ranks could disagree about a cache
hit, and one rank would wait for a gather that another skips. If the host may read the integers, each rank learns the
widths of all shards and finds the errors of all ranks. The host may not read them under `torch.compile` and in a CUDA
graph, and need not on a GPU if `num_classes` implies the widths. Each rank then assumes a layout, and losses are NaN if
the gathered widths differ from it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from qshard._core.losses import count_classes, wrong_label
from qshard._core.placement import chunk_range
from qshard.torch_bridge._ops.collectives import all_gather
from qshard.torch_bridge._ops.eager import is_capturing, is_compiling


class ClassShard(NamedTuple):
    """The shard of the classes on this rank.

    Attributes:
      classes: number of classes on all ranks, without padding.
      first: index of the first class of this rank.
      columns: number of classes on this rank; later columns are padding.
      widest: columns of the widest shard, or an estimate; equal on all ranks.
      widths: columns of the shards of all ranks, known or assumed.
      is_right: float32 `[]`: 1 if the ranks have the assumed widths, else NaN. None: the widths are known.
    """

    classes: int
    first: int
    columns: int
    widest: int
    widths: tuple[int, ...]
    is_right: Tensor | None = None


def class_shard(
    op: str,
    name: str,
    columns: int,
    labels: Tensor,
    ignore_index: int,
    num_classes: int | None,
    group: dist.ProcessGroup | None,
    total: int | None = None,
) -> ClassShard:
    """Return the shard of this rank, of `columns` columns. Collective over `group`.

    Errors name the caller `op` and the tensor `name`. `total` is the number of columns on all ranks, if shards have the
    widths of `torch.chunk`, as in a DTensor. Other arguments as in `cross_entropy`.

    Raises:
      ValueError: a label on any rank is not a class, ranks have different numbers of rows, or there are 0 classes. If
        the host may read the integers, all ranks raise alike.
    """
    can_read = not is_compiling() and type(labels) is Tensor and not is_capturing(labels.device)
    on_host = can_read and labels.device.type == "cpu"
    if group is None:
        classes = count_classes(op, name, columns, num_classes)
        if on_host:
            wrong = labels[(labels != ignore_index) & ((labels < 0) | (labels >= classes))]
            if wrong.numel():
                raise wrong_label(op, int(wrong[0]), classes, ignore_index)
        return ClassShard(classes, 0, min(columns, classes), columns, (columns,))
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    if on_host:
        low, high = _range(labels, ignore_index)
        widths, rows, lows, highs = _gather_numbers([columns, labels.numel(), low, high], labels, group).t().tolist()
        shard = _shard_of(widths, rank, count_classes(op, name, sum(widths), num_classes))
        if len(set(rows)) > 1:
            raise ValueError(
                f"{op}: ranks of group have different numbers of labels ({', '.join(map(str, rows))}); pass the same "
                "rows on each rank, with a shard of the classes"
            )
        for label in (*lows, *highs):
            if not 0 <= label < shard.classes:
                raise wrong_label(op, label, shard.classes, ignore_index)
        return shard
    if total is not None:  # A DTensor: its widths are known.
        return _shard_of(_chunks(total, world), rank, count_classes(op, name, total, num_classes))
    there = _gather_numbers([columns], labels, group).view(-1)
    if can_read and num_classes is None:
        widths = there.tolist()
        return _shard_of(widths, rank, count_classes(op, name, sum(widths), None))
    return _assume_shard(op, name, columns, num_classes, there, rank)


def _shard_of(widths: list[int], rank: int, classes: int) -> ClassShard:
    first = sum(widths[:rank])
    columns = max(0, min(widths[rank], classes - first))
    return ClassShard(classes, min(first, classes), columns, max(widths), tuple(widths))


def _assume_shard(op: str, name: str, columns: int, num_classes: int | None, widths: Tensor, rank: int) -> ClassShard:
    """Assume equal widths or, with `num_classes`, the widths of `torch.chunk`; checked on the device."""
    world = len(widths)
    if num_classes is None:
        # A rank without columns must not raise alone: its assumption is wrong, so losses are NaN.
        classes, each = count_classes(op, name, max(columns * world, 1), None), columns
        right, assumed = (widths == columns).all(), [columns] * world
    else:
        classes = num_classes
        chunk = -(-classes // world)
        each = max(columns, chunk)
        firsts = widths.clamp(min=chunk) * torch.arange(world, device=widths.device)
        ends = widths.cumsum(0)
        right = (firsts.clamp(max=classes) == (ends - widths).clamp(max=classes)).all() & (ends[-1] >= classes)
        assumed = [columns] * world if columns > chunk else _chunks(classes, world)
    first = min(each * rank, classes)
    is_right = torch.where(right, 1.0, float("nan")).float()
    widest = columns if num_classes is None else -(-num_classes // world)
    return ClassShard(classes, first, max(0, min(columns, classes - first)), widest, tuple(assumed), is_right)


def _gather_numbers(numbers: list[int], like: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather the numbers of all ranks: int64 `[ranks, numbers]` on the device of `like`."""
    own = torch.empty(len(numbers), dtype=torch.int64, device=like.device)
    for i, number in enumerate(numbers):  # A copy from the host cannot be captured in a CUDA graph.
        own[i] = number
    there = own.new_empty(dist.get_world_size(group) * len(numbers))
    all_gather(there, own, group=group)
    return there.view(-1, len(numbers))


def _range(labels: Tensor, ignore_index: int) -> tuple[int, int]:
    """Return the smallest and the largest label that is not ignored; 0 and 0 without any."""
    counted = labels[labels != ignore_index]
    if not counted.numel():
        return 0, 0
    low, high = counted.aminmax()
    return int(low), int(high)


def _chunks(total: int, world: int) -> list[int]:
    """Return the shard widths of `torch.chunk`, 0 for ranks beyond its last chunk."""
    return [stop - start for start, stop in (chunk_range(total, world, rank) for rank in range(world))]
