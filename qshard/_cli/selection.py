"""Selection of the layers of a checkpoint."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from qshard._cli.errors import Misuse
from qshard._files.checkpoint import FLOATS, Checkpoint, Entry
from qshard._files.names import count_of, quote
from qshard._files.unknown_codes import FP8, Names

LEAST_AXES = 2  # Minimum axes of a layer. Norms and biases have fewer.
KEPT = "named by --keep"
NAMED = 3  # maximum number of names in a note


@dataclass(frozen=True)
class Selection:
    """The layers of a checkpoint.

    Attributes:
      layers: layers in the order of the checkpoint.
      left_out: name of each other tensor -> reason.
      remarks: name of a layer -> remark.
      notes: remarks about several layers.
    """

    layers: list[Entry]
    left_out: dict[str, str]
    remarks: dict[str, str]
    notes: list[str]


def select(
    checkpoint: Checkpoint, names: Collection[str], *, keep: Collection[str] = (), any_axes: bool = False, advice: str
) -> Selection:
    """Select the layers among `names`.

    - `keep`: names of tensors to leave out, even if they have codes.
    - `any_axes`: also select tensors with fewer than two axes.
    - `advice`: alternative to dequantizing the checkpoint, for the error.

    Raises Misuse if a tensor of `names` has codes, and its scales are in other tensors.
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
                found.remarks[name] = f"{quote(name)} {doubt.why}"
            elif entry.dtype in FP8:
                raw.append(name)
    if codes:
        first = next(name for name in doubtful if name in codes)
        what = f"{len(codes)} of {count_of(len(checkpoint.entries), 'tensor')}"
        why = f"{quote(first)} ({checkpoint.entries[first].dtype}) {doubtful[first].why}"
        raise Misuse(f"{quote(checkpoint.path)} is already quantized ({what}): {why}; dequantize it first, or {advice}")
    if raw:
        more = f" and {len(raw) - NAMED} more" if len(raw) > NAMED else ""
        some = ", ".join(map(quote, raw[:NAMED]))
        found.notes.append(f"FP8 without scales, treated as plain numbers: {some}{more}")
    return found
