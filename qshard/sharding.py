"""Which rows of a weight a rank holds, and what must travel so that every rank can hold the whole quantized weight.

A weight `[N, K]` is cut along its first axis. Whether a rank can quantize its rows alone depends on the blocks that
share a scale: whole ones are its own business, cut ones need the largest amax of all their pieces first.

| scales of the format | reduced first | gathered | replicated by then |
| --- | --- | --- | --- |
| one for the tensor | amax | data | scale_inv |
| blocks inside the rank's rows | - | data, scale_inv | - |
| blocks cut by ranks | amax of each block | data | scale_inv |
| blocks under a global scale | global amax, and as above | as above | global_scale_inv, and as above |

The law that makes this worth stating: `gather(quantize(shards)) == quantize(whole)`, bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from qshard.formats import ELEMENTS, Format, Usage
from qshard.layout import Shape, plane

__all__ = ["GatherPlan", "ShardSlice", "plan_gather", "shard_rows"]


@dataclass(frozen=True)
class ShardSlice:
    """The rows `[start, stop)` that one rank holds, of `padded` that every rank's buffer has room for.

    Ranks past the end hold no row and still take part in every collective.
    """

    start: int
    stop: int
    padded: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


def shard_rows(rows: int, world_size: int, rank: int) -> ShardSlice:
    """The rows of one rank when ranks in order take `ceil(rows / world_size)` each, as FSDP2 and `torch.chunk` cut.

    Raises:
      ValueError: `rank` is not one of the ranks.

    >>> shard_rows(5, 4, 2), shard_rows(5, 4, 3)
    (ShardSlice(start=4, stop=5, padded=2), ShardSlice(start=5, stop=5, padded=2))
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"shard_rows: rank ({rank}) is not in [0, {world_size}); give the rank in its own group")
    padded = -(-rows // world_size)
    return ShardSlice(min(rows, rank * padded), min(rows, (rank + 1) * padded), padded)


@dataclass(frozen=True)
class GatherPlan:
    """What one weight costs to gather: the parts that travel, the amaxes to max-reduce first, what every rank then has.

    Attributes:
      gathered: parts of the plane that are gathered: "data", and "scale_inv" where ranks make their own.
      reduced: shape of the amaxes that are max-reduced before the cast; None if there are none to reduce.
      replicated: parts that every rank works out from the reduced amaxes.
      bytes: of the gathered parts of the whole weight.
    """

    gathered: tuple[str, ...]
    reduced: Shape | None
    replicated: tuple[str, ...]
    bytes: int


def plan_gather(fmt: Format, shape: Shape, usage: Usage, world_size: int) -> GatherPlan:
    """What must travel to gather the plane of a weight `[N, K]`, cut by `shard_rows` over `world_size` ranks.

    Raises:
      ValueError: the format cannot hold `shape`.

    The same on every rank: it depends on the shape of the whole weight alone.

    >>> from qshard.formats import FP8_E4M3, MXFP8_E4M3, MXFP8_32x32
    >>> plan_gather(FP8_E4M3, (128, 64), Usage.ROWWISE, 4)
    GatherPlan(gathered=('data',), reduced=(), replicated=('scale_inv',), bytes=8192)
    >>> plan_gather(MXFP8_E4M3, (128, 64), Usage.ROWWISE, 4)
    GatherPlan(gathered=('data', 'scale_inv'), reduced=None, replicated=(), bytes=8448)
    >>> plan_gather(MXFP8_32x32, (128, 64), Usage.ROWWISE, 8)  # 16 rows a rank cut the 32x32 blocks
    GatherPlan(gathered=('data',), reduced=(4, 2), replicated=('scale_inv',), bytes=8192)
    """
    layout = plane(fmt, shape, usage, op="plan_gather")
    block = fmt.block_of(usage)
    data_bytes = math.prod(layout.data_shape)
    scale = ELEMENTS.get(fmt.scale_dtype)
    scale_bytes = math.prod(layout.scale_shape) * (scale.bits // 8 if scale else 4)
    padded = shard_rows(shape[0], world_size, 0).padded
    global_part = () if fmt.global_scale is None else ("global_scale_inv",)
    if block is not None and (block[0] == 1 or padded % block[0] == 0 or world_size == 1):
        reduced = () if fmt.global_scale == "tensor" else None
        return GatherPlan(("data", "scale_inv"), reduced, global_part, data_bytes + scale_bytes)
    return GatherPlan(("data",), layout.scale_shape, ("scale_inv", *global_part), data_bytes)
