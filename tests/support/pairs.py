"""Parameters of tests in two parts: a cover, which `make test` runs, and the rest of the product, which is slow.

The marker `each_value` does the same to the cases of a test with any parametrizations (see `mark_repeated`).
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pytest

Axis = Iterable[Any] | Mapping[str, Any]


def pairs(**axes: Axis) -> pytest.MarkDecorator:
    """Parametrizes a test over the product of axes; cases that add no pair of values are slow.

    Args:
      axes: the values of each argument; those of a mapping have its keys as ids.
    """
    values = [_values(axis) for axis in axes.values()]
    return _parametrize(axes, values, covering([len(axis) for axis in values]))


def each_value(**axes: Axis) -> pytest.MarkDecorator:
    """Parametrizes a test over the product of axes; cases that repeat values of every axis are slow.

    Args:
      axes: as of `pairs`.
    """
    values = [_values(axis) for axis in axes.values()]
    product = list(itertools.product(*(range(len(axis)) for axis in values)))
    cover = covering_values([dict(enumerate(case)) for case in product])
    return _parametrize(axes, values, {product[i] for i in cover})


def turns(each: int, full: Collection[Any] = (), /, **axes: Axis) -> pytest.MarkDecorator:
    """Parametrizes a test over the product of two axes, of the second `each` values in turn; the others are slow.

    Args:
      each: number of values of the second axis for a value of the first.
      full: values of the first axis that meet all of the second.
      axes: as of `pairs`.
    """
    first, second = (_values(axis) for axis in axes.values())
    count = len(second)
    cover = {
        (i, j)
        for i, (_, value) in enumerate(first)
        for j in range(count)
        if value in full or (j - i * each) % count < each
    }
    return _parametrize(axes, [first, second], cover)


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


def mark_repeated(items: Iterable[pytest.Item]) -> None:
    """Mark cases of tests with `each_value` as slow if other cases have each of their arguments' values.

    Each front end has every value.
    """
    tests = defaultdict(list)
    for item in items:
        if item.get_closest_marker("each_value") and not item.get_closest_marker("slow"):
            arguments = {name: repr(value) for name, value in item.callspec.params.items()}  # type: ignore[attr-defined]
            tests[item.nodeid.partition("[")[0], arguments.get("front")].append((item, arguments))
    for cases in tests.values():
        cover = covering_values([arguments for _, arguments in cases])
        for i, (item, _) in enumerate(cases):
            if i not in cover:
                item.add_marker(pytest.mark.slow)


def covering_values(cases: Sequence[Mapping[Any, Any]]) -> set[int]:
    """Indices of cases that have every value of every argument.

    The next has the most new values; among equals, its values are the ones that the cover has least often, and then it
    has the most new pairs of values.
    """
    left = {value for case in cases for value in case.items()}
    times: Counter[tuple[Any, Any]] = Counter()
    met: set[tuple[Any, ...]] = set()
    cover = set()

    def rank(case: Mapping[Any, Any]) -> tuple[int, ...]:
        pairs = set(itertools.combinations(case.items(), 2))
        return -len(left & case.items()), sum(times[value] for value in case.items()), -len(pairs - met)

    while left:
        first = min(range(len(cases)), key=lambda i: rank(cases[i]))
        left -= cases[first].items()
        times.update(cases[first].items())
        met.update(itertools.combinations(cases[first].items(), 2))
        cover.add(first)
    return cover


def _pairs_of(case: tuple[int, ...]) -> Iterable[tuple[tuple[int, int], ...]]:
    return itertools.combinations(enumerate(case), 2)


def _values(axis: Axis) -> list[tuple[str, Any]]:
    """The id of each value, and the value."""
    return list(axis.items()) if isinstance(axis, Mapping) else [(getattr(x, "__name__", str(x)), x) for x in axis]


def _parametrize(
    names: Iterable[str], values: Sequence[Sequence[tuple[str, Any]]], cover: Collection[tuple[int, ...]]
) -> pytest.MarkDecorator:
    cases = []
    for case in itertools.product(*(range(len(axis)) for axis in values)):
        ids, arguments = zip(*(axis[i] for axis, i in zip(values, case, strict=True)), strict=True)
        marks = [] if case in cover else [pytest.mark.slow]
        cases.append(pytest.param(*arguments, id="-".join(ids), marks=marks))
    return pytest.mark.parametrize(list(names), cases)
