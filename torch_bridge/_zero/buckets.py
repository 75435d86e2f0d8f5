"""Which units a step updates at a time: the mean gradients of few exist at once, beside the sums that stay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from qshard.torch_bridge._zero.flat_buffers import Flat
from qshard.torch_bridge._zero.weight import Weight


class Bucket(NamedTuple):
    """What is updated together.

    Attributes:
      number: which bucket it is.
      flats: units.
      of_groups: their weights, by parameter group.
    """

    number: int
    flats: list[Flat]
    of_groups: list[list[Weight]]


def buckets_of(flats: Sequence[Flat], of_groups: Sequence[Sequence[Weight]]) -> list[Bucket]:
    """Units, in order, as many at a time as have no more elements of this rank than the largest one."""
    most = max(flat.masters.numel() for flat in flats)
    buckets: list[Bucket] = []
    size = most + 1
    for flat in flats:
        size += flat.masters.numel()
        if size > most:
            size = flat.masters.numel()
            buckets.append(Bucket(len(buckets), [], [[] for _ in of_groups]))
        buckets[-1].flats.append(flat)
    bucket_of = {id(weight): bucket for bucket in buckets for flat in bucket.flats for weight in flat.weights}
    for index, of_group in enumerate(of_groups):
        for weight in of_group:
            bucket_of[id(weight)].of_groups[index].append(weight)
    return buckets
