"""Parameters of tests in two parts: every pair of values, which `make test` runs, and the rest of the product, slow."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

Axis = Sequence[Any] | Mapping[str, Any]


def pairs(**axes: Axis) -> pytest.MarkDecorator:
    """Parametrizes a test over the product of axes, by argument name; cases that add no pair of values are slow.

    Args:
      axes: the values of each argument; those of a mapping have its keys as ids.
    """
    values = [
        list(axis.items()) if isinstance(axis, Mapping) else [(_id(x), x) for x in axis] for axis in axes.values()
    ]
    cover = covering([len(axis) for axis in values])
    cases = []
    for case in itertools.product(*map(range, map(len, values))):
        names, arguments = zip(*(axis[i] for axis, i in zip(values, case, strict=True)), strict=True)
        cases.append(pytest.param(*arguments, id="-".join(names), marks=() if case in cover else pytest.mark.slow))
    return pytest.mark.parametrize(list(axes), cases)


def covering(lengths: Sequence[int]) -> set[tuple[int, ...]]:
    """Cases of a product, as indices, that have every pair of values of two axes: the next has the most new pairs."""
    product = list(itertools.product(*map(range, lengths)))
    left = set(itertools.chain.from_iterable(map(_pairs_of, product)))
    cover = set()
    while left:
        case = max(product, key=lambda case: len(left.intersection(_pairs_of(case))))
        left.difference_update(_pairs_of(case))
        cover.add(case)
    return cover


def _pairs_of(case: tuple[int, ...]) -> Iterable[tuple[tuple[int, int], ...]]:
    """Two axes and their values; of a product of one axis, its value."""
    return itertools.combinations(enumerate(case), min(2, len(case)))


def _id(value: Any) -> str:
    return getattr(value, "__name__", None) or str(value)
