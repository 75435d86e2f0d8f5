"""Which rows of a weight a rank holds, where a weight `[N, K]` is cut along its first axis.

What ranks that cut blocks must agree on, and what travels so that every rank can hold the whole quantized weight, is in
`qshard.master`. The law of it all: `gather(quantize(shards)) == quantize(whole)`, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ShardSlice", "shard_rows"]


@dataclass(frozen=True)
class ShardSlice:
    """The rows `[start, stop)` that one rank holds, of `padded` that every rank's buffer has room for.

    Ranks past the end hold no row and still take part in every collective.
    """

    start: int
    stop: int
    padded: int


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
