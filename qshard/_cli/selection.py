"""Selection of the layers of a checkpoint, the same for every command."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from qshard._cli.checkpoint import FLOATS, Entry
from qshard._cli.errors import Misuse, counted, shown
from qshard._cli.scales import FP8, Names
from qshard._cli.sources import Checkpoint

LEAST_AXES = 2
"""A matrix has two; norms and biases have fewer."""
KEPT = "named by --keep"
NAMED = 3
"""The most names in a note."""


@dataclass(frozen=True)
class Selection:
    """The layers of a checkpoint.

    Attributes:
      layers: in the order of the checkpoint.
      left_out: name of each other tensor -> why.
      remarks: name of a layer -> a remark about it.
      notes: remarks about several layers.
    """

    layers: list[Entry]
    left_out: dict[str, str]
    remarks: dict[str, str]
    notes: list[str]


def select(
    checkpoint: Checkpoint, names: Collection[str], *, keep: Collection[str] = (), any_axes: bool = False, advice: str
) -> Selection:
    """Selects the layers among `names`.

    Args:
      names: names of tensors.
      keep: names of tensors to leave out, even if they hold codes.
      any_axes: True selects tensors of fewer than two axes, too.
      advice: for the error, an alternative to dequantizing the checkpoint.

    Raises:
      Misuse: a tensor of `names` holds codes, and its scales are in other tensors.
    """
    by_name = Names(checkpoint)
    never, doubtful = by_name.reasons(), by_name.doubts()
    found = Selection([], {}, {}, [])
    codes: set[str] = set()
    raw: list[str] = []
    for name, entry in checkpoint.entries.items():
        if name not in names:
            continue
        why = entry.refusal or never.get(name)
        if why is None and not any_axes and len(entry.shape) < LEAST_AXES:
            why = f"fewer than {LEAST_AXES} axes"
        doubt = doubtful.get(name)
        if name in keep:
            found.left_out[name] = KEPT
        elif doubt is not None and doubt.certain and (why is None or entry.dtype not in FLOATS):
            codes.add(name)
        elif why is not None:
            found.left_out[name] = why
        else:
            found.layers.append(entry)
            if doubt is not None:
                found.remarks[name] = f"{shown(name)} {doubt.why}"
            elif entry.dtype in FP8:
                raw.append(name)
    if codes:
        first = next(name for name in doubtful if name in codes)
        what = f"{len(codes)} of {counted(len(checkpoint.entries), 'tensor')}"
        why = f"{shown(first)} ({checkpoint.entries[first].dtype}) {doubtful[first].why}"
        raise Misuse(f"{shown(checkpoint.path)} is quantized already ({what}): {why}; dequantize it first, or {advice}")
    if raw:
        more = f" and {len(raw) - NAMED} more" if len(raw) > NAMED else ""
        some = ", ".join(map(shown, raw[:NAMED]))
        found.notes.append(f"FP8 without scales, taken as plain numbers: {some}{more}")
    return found
