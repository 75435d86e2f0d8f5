"""Which cases of a product are ordinary tests (support/pairs.py)."""

import itertools

from support.pairs import covering, covering_values

AXES = {"a": "01", "b": "012", "c": "01234"}
PRODUCT = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]


def test_a_cover_has_each_value_and_few_cases():
    """Five cases have the five values of `c`, those of the others as evenly as they can, and many pairs."""
    cover = [PRODUCT[i] for i in covering_values(PRODUCT)]
    assert len(cover) == len(AXES["c"])
    for name, values in AXES.items():
        times = [sum(case[name] == value for case in cover) for value in values]
        assert max(times) - min(times) <= 1, name
        assert min(times) >= 1, name
    assert len({(case["a"], case["b"]) for case in cover}) == 5


def test_values_that_meet_in_one_case_alone():
    """A list of cases need not be a product."""
    assert covering_values([{"a": "0", "b": "0"}, {"a": "0", "b": "1"}, {"a": "1", "b": "1"}]) == {0, 2}
    assert covering_values([]) == set()


def test_a_cover_of_pairs_has_each_pair():
    found = {pair for case in covering([2, 3, 4]) for pair in itertools.combinations(enumerate(case), 2)}
    assert len(found) == 2 * 3 + 2 * 4 + 3 * 4
