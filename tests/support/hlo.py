"""What a compiled JAX program moves between devices, read off its HLO."""

from __future__ import annotations

import re
from typing import Any

_OP = re.compile(
    r" = (?P<result>.*?) (?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)"
    r"(?P<start>-start)?\("
)
_ARRAY = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<dims>[\d,]*)\]")


def collectives(compiled: Any) -> list[tuple[str, tuple[str, ...]]]:
    """(kind, results such as "u8[128,64]") of every collective, sorted.

    A collective that XLA has combined from several counts once and lists all its results. What an asynchronous one
    also carries, its operands, is left out.
    """
    found = []
    for line in compiled.as_text().splitlines():
        if match := _OP.search(line):
            arrays = [f"{a['dtype']}[{a['dims']}]" for a in _ARRAY.finditer(re.sub(r"\{[^}]*\}", "", match["result"]))]
            # The start of an asynchronous gather or scatter gives (operands, results), of a reduction its results.
            if match["start"] and match["kind"] != "all-reduce":
                arrays = arrays[len(arrays) // 2 :]
            found.append((match["kind"], tuple(arrays)))
    return sorted(found)


def kinds(compiled: Any) -> list[str]:
    """The kind of every collective, sorted."""
    return [kind for kind, _ in collectives(compiled)]
