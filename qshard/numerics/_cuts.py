"""Which formats can be measured where an array is cut: what follows from shapes alone."""

from __future__ import annotations

from qshard.formats import Usage
from qshard.layout import PlaneLayout, matrix_shape
from qshard.numerics._arrays import Whole


def block_of(where: PlaneLayout) -> tuple[int, int] | None:
    """Rows and columns of `x` as a matrix, not as it is stored, that share a scale; None: all of it does."""
    block = where.block
    return block[::-1] if block is not None and where.transposed else block


def are_blocks_cut(where: PlaneLayout, x: Whole) -> bool:
    """Whether pieces of any process end within blocks."""
    block = block_of(where)
    if block is None:
        return False
    for box in x.boxes:
        for cut, length, end in zip(box, block, matrix_shape(x.shape), strict=True):
            if cut.start % length or (cut.stop % length and cut.stop != end):
                return True
    return False


def check_pieces(where: PlaneLayout, x: Whole, op: str) -> None:
    """Raises ValueError where blocks are cut whose scales depend on more than their amaxes."""
    fmt = where.format
    if not (fmt.scaling.four_over_six is not None or where.rotated) or not are_blocks_cut(where, x):
        return
    block = block_of(where)
    assert block is not None
    why = "is rotated" if where.rotated else "is tried at two scales"
    raise ValueError(
        f"{op}: x {x.shape} is cut within blocks of {block[0]}x{block[1]}, each of which {why} ({fmt}, "
        f"{Usage(where.usage).name}); cut it between them, or measure a plain array"
    )
