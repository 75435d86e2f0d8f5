"""Collectives of a compiled JAX program, parsed from its HLO: counts, bytes, and the GEMMs that overlap them.

Needs neither JAX nor pytest, because benchmarks use it too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_KINDS = "all-gather|all-reduce|reduce-scatter|ragged-all-to-all|all-to-all|collective-permute"
_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.-]+) .*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?(?P<name>[\w.-]+) = (?P<result>.*?) (?P<op>[\w-]+)\((?P<rest>.*)$")
_COLLECTIVE = re.compile(rf"(?P<kind>{_KINDS})(?P<start>-start)?$")
_ARRAY = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<dims>[\d,]*)\]")
_CALLED = re.compile(r"(?:calls|body|to_apply)=%?([\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
# GEMMs of libraries and of Triton. `_multiplies` finds GEMMs inside fusions.
_GEMM = re.compile(r'custom_call_target="(__cublas|__cudnn|qshard_gemm)|"kind":"__triton_gemm"')


@dataclass(frozen=True, order=True)
class Collective:
    """A collective of a program; XLA may have combined several into one.

    Attributes:
      kind: such as "all-gather".
      arrays: results, such as "u8[128,64]", without the operands that an asynchronous start also returns.
      bytes: bytes of the whole arrays that are gathered, reduced or scattered, on one device.
      times: number of runs, in loops with a trip count known to XLA.
      gemms: number of GEMMs between start and done; 0 if synchronous.
      op_name: the source operation, according to JAX.
    """

    kind: str
    arrays: tuple[str, ...]
    bytes: int
    times: int = 1
    gemms: int = 0
    op_name: str = ""

    @property
    def hidden(self) -> bool:
        """Return whether a GEMM overlaps the collective."""
        return self.gemms > 0

    @property
    def backward(self) -> bool:
        return "transpose(" in self.op_name

    @property
    def recomputed(self) -> bool:
        """Return whether the collective is part of a recomputation by `jax.checkpoint`."""
        return "rematted_computation" in self.op_name


def collectives(compiled: Any) -> list[tuple[str, tuple[str, ...]]]:
    """Return sorted (kind, results such as "u8[128,64]") of all collectives; a combined one counts once."""
    return sorted((each.kind, each.arrays) for each in traffic(compiled))


def kinds(compiled: Any) -> list[str]:
    """Return the sorted kinds of all collectives."""
    return [kind for kind, _ in collectives(compiled)]


def traffic(compiled: Any) -> list[Collective]:
    """Return all collectives of a compiled program, or of its HLO text, in starting order."""
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    computations, entry = _computations(text)
    return [each for name, times in _run(computations, entry) for each in _of(computations, name, times)]


def size(array: str) -> int:
    """Return the bytes of an array type such as "f32[8,4]".

    >>> size("f32[8,4]"), size("u8[]"), size("f8e4m3fn[4]"), size("s4[3]")
    (128, 1, 4, 2)
    """
    match = _ARRAY.match(array)
    assert match, array
    bits = 8 if match["dtype"] == "pred" else int(re.search(r"\d+", match["dtype"])[0])  # type: ignore[index]
    return -(-math.prod(int(n) for n in match["dims"].split(",") if n) * bits // 8)


def _computations(text: str) -> tuple[dict[str, list[re.Match[str]]], str]:
    """Return the instructions of each computation by name, and the name of the entry computation."""
    found: dict[str, list[re.Match[str]]] = {}
    entry = name = ""
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            name = head["name"]
            found[name], entry = [], name if head["entry"] else entry
        elif name and (instruction := _INSTRUCTION.match(line)):
            found[name].append(instruction)
    return found, entry


def _run(computations: Any, name: str, times: int = 1) -> Iterator[tuple[str, int]]:
    """Yield the computations that run, such as the entry and loop bodies, and the number of runs."""
    yield name, times
    for instruction in computations[name]:
        # XLA for GPUs puts some small all-reduces into fusions.
        if instruction["op"] in ("while", "call", "conditional") or (
            instruction["op"] == "fusion" and any(_COLLECTIVE.match(i["op"]) for i in _fused(computations, instruction))
        ):
            trips = _TRIPS.search(instruction["rest"])
            for called in _CALLED.findall(instruction["rest"]):
                yield from _run(computations, called, times * int(trips[1] if trips else 1))


def _of(computations: Any, name: str, times: int) -> list[Collective]:
    """Return the collectives of a computation, whose instructions are in execution order."""
    found: dict[str, list[Any]] = {}
    gemms = 0
    for instruction in computations[name]:
        op, rest = instruction["op"], instruction["rest"]
        # A fusion-start starts the collective inside the fusion.
        within = [i for i in _fused(computations, instruction) if op == "fusion-start" and _COLLECTIVE.match(i["op"])]
        if match := _COLLECTIVE.match(within[0]["op"] if within else op):
            arrays = _arrays((within[0] if within else instruction)["result"])
            # An asynchronous start returns (operands, results); that of an all-reduce, up to JAX 0.10, only results.
            given = arrays
            if match["start"] and (match["kind"] != "all-reduce" or instruction["result"].startswith("((")):
                arrays = arrays[len(arrays) // 2 :]
            elif match["kind"] == "reduce-scatter":
                given = _arrays(rest.split("), ")[0]) or arrays
            origin = re.search(r'op_name="([^"]*)"', rest)
            moved = max(sum(map(size, arrays)), sum(map(size, given[: len(given) - len(arrays)] or given)))
            found[instruction["name"]] = [match["kind"], arrays, moved, gemms, gemms, origin[1] if origin else ""]
        elif op.endswith("-done") and (started := re.match(r".*?%?([\w.-]+)\)", rest)) and started[1] in found:
            found[started[1]][4] = gemms
        elif _GEMM.search(rest) or _multiplies(computations, instruction):
            gemms += 1
    return [Collective(k, a, b, times, done - start, origin) for k, a, b, start, done, origin in found.values()]


def _fused(computations: Any, fusion: re.Match[str]) -> Any:
    called = _CALLED.search(fusion["rest"])
    return [] if called is None else computations.get(called[1], [])


def _arrays(text: str) -> tuple[str, ...]:
    return tuple(f"{a['dtype']}[{a['dims']}]" for a in _ARRAY.finditer(re.sub(r"\{[^}]*\}", "", text)))


def _multiplies(computations: Any, instruction: re.Match[str]) -> bool:
    if instruction["op"] == "fusion":
        return any(_multiplies(computations, each) for each in _fused(computations, instruction))
    return instruction["op"] in ("dot", "convolution")
