"""A family of choice problems gives the answers of its members, each solved by itself."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from solvers import choice_family
from solvers.brute_force import best_choice
from solvers.choice import ChoiceProblem, solve_choice
from solvers.choice_family import ChoiceFamily
from solvers.random_problems import random_choice_problem
from solvers.solution import Status


def family(seed: int) -> tuple[ChoiceProblem, list[tuple[int, np.ndarray]], list[int]]:
    problem = dataclasses.replace(random_choice_problem(seed), capacities=())
    rng = np.random.default_rng(seed)
    count = len(problem.node_costs)
    rated = rng.choice(count, int(rng.integers(0, count + 1)), replace=False)
    fixed = [int(n) for n in range(count) if rng.random() < 0.3]
    rates = [(int(n), rng.integers(0, 4, len(problem.node_costs[n])).astype(float)) for n in rated]
    return problem, rates, fixed


@pytest.mark.parametrize("block", range(4))
def test_every_member_equals_brute_force(block):
    for seed in range(100 * block, 100 * (block + 1)):
        problem, rates, fixed = family(seed)
        members = ChoiceFamily(problem, rates, fixed)
        rng = np.random.default_rng(seed + 1)
        for scale in (0.0, 0.3, 1e4):
            prices = [scale * float(rng.random()) for _ in rates]
            more = {n: scale * rng.random(len(problem.node_costs[n])) for n in fixed}
            costs = list(problem.node_costs)
            for (node, used), price in zip(rates, prices, strict=True):
                costs[node] = costs[node] + price * used
            for node, added in more.items():
                costs[node] = costs[node] + added
            best = best_choice(dataclasses.replace(problem, node_costs=tuple(costs)))
            solution = members.solve(prices, more)
            if np.isinf(best):
                assert solution.status is Status.INFEASIBLE
                continue
            assert solution.status is Status.OPTIMAL
            assert solution.objective == pytest.approx(best, rel=1e-9, abs=1e-12)
            assert solution.bound == solution.objective


def test_tables_that_are_too_large_are_left_to_the_solver(monkeypatch):
    monkeypatch.setattr(choice_family, "elimination_order", lambda *args, **kwargs: [])
    for seed in range(100):
        problem, rates, fixed = family(seed)
        members = ChoiceFamily(problem, rates, fixed)
        for price in (1.0, 0.0, 3.0):  # each as if it were the only one
            costs = list(problem.node_costs)
            for node, used in rates:
                costs[node] = costs[node] + price * used
            for node in fixed:
                costs[node] = costs[node] + price
            more = {n: np.full(len(problem.node_costs[n]), price) for n in fixed}
            found = members.solve([price] * len(rates), more)
            alone = solve_choice(dataclasses.replace(problem, node_costs=tuple(costs)))
            assert found.status is alone.status
            assert found.objective == pytest.approx(alone.objective, rel=1e-9)


def test_a_price_below_zero_is_refused():
    problem, _, fixed = family(1)
    with pytest.raises(ValueError, match="numbers from 0"):
        ChoiceFamily(problem, [(0, np.zeros(len(problem.node_costs[0])))], fixed).solve([-1.0], {})
