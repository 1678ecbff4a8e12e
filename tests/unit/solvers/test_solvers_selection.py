"""Minimum-cut selections against every subset."""

from __future__ import annotations

from itertools import chain, combinations
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solvers.selection import SelectionProblem, solve_selection

COSTS = st.one_of(st.just(0.0), st.integers(0, 9).map(float), st.just(inf))


@st.composite
def problems(draw):
    count = draw(st.integers(0, 6))
    items = st.lists(COSTS, min_size=count, max_size=count).map(tuple)
    index = st.integers(0, max(count - 1, 0))
    pairs = draw(st.lists(st.tuples(index, index, COSTS), max_size=10)) if count else []
    return SelectionProblem(taken=draw(items), left=draw(items), pairs=tuple(pairs))


def subsets(count):
    return map(
        frozenset, chain.from_iterable(combinations(range(count), k) for k in range(count + 1))
    )


@settings(max_examples=400, deadline=None)
@given(problems())
def test_no_subset_is_cheaper_and_none_as_cheap_is_smaller(problem):
    costs = {subset: problem.objective(subset) for subset in subsets(len(problem.taken))}
    least = min(costs.values())
    found = solve_selection(problem)
    if least == inf:
        assert found is None
        return
    assert costs[found] == pytest.approx(least, rel=1e-12)
    assert all(found <= subset for subset, cost in costs.items() if cost == least)


def test_a_tie_stays_a_tie():
    """Costs of thirds of the largest, added up in two ways: leaving all costs as much."""
    problem = SelectionProblem(
        taken=(inf, 0.0, 0.0, 2.0),
        left=(0.0, 0.0, 0.0, 6.0),
        pairs=((1, 0, 2.0), (1, 0, 2.0), (3, 1, inf)),
    )
    assert solve_selection(problem) == frozenset()


def test_costs_far_apart_are_told_apart():
    problem = SelectionProblem(taken=(1e-9, 2e-9), left=(1e6, 1e-9), pairs=((0, 1, 0.5e-9),))
    assert solve_selection(problem) == {0}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"taken": (1.0,), "left": ()}, "left: expected 1 costs"),
        ({"taken": (-1.0,), "left": (0.0,)}, "expected numbers from 0, found -1.0"),
        ({"taken": (float("nan"),), "left": (0.0,)}, "found nan"),
        ({"taken": (0.0,), "left": (0.0,), "pairs": ((0, 0, -2.0),)}, "found -2.0"),
    ],
)
def test_bad_costs_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        SelectionProblem(**fields)
