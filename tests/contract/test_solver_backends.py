"""What every backend must do: one suite, run for each entry of BACKENDS."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pulp
import pytest

from solvers import backends
from solvers.backends import BACKENDS, BackendUnavailable, get_backend
from solvers.brute_force import best_choice, best_partition
from solvers.choice import Capacity, ChoiceProblem, Edge, solve_choice
from solvers.partition import solve_partition
from solvers.random_problems import random_choice_problem, random_partition_problem
from solvers.solution import Status

pytestmark = pytest.mark.parametrize("name", sorted(BACKENDS))


def covering(size: int, rows: int, seed: int, constant: float = 0.0) -> pulp.LpProblem:
    rng = np.random.default_rng(seed)
    lp = pulp.LpProblem("covering", pulp.LpMinimize)
    x = [lp.add_variable(f"x{i}", 0, 1, cat=pulp.LpInteger) for i in range(size)]
    cost = dict(zip(x, rng.random(size).tolist(), strict=True))
    lp.setObjective(pulp.LpAffineExpression(cost, constant=constant))
    for row in range(rows):
        terms = dict(zip(x, rng.random(size).tolist(), strict=True))
        expression = pulp.LpAffineExpression(terms)
        lp.addConstraint(pulp.LpConstraint(expression, pulp.LpConstraintGE, f"row{row}", size / 6))
    return lp


def covering_optimum(lp: pulp.LpProblem) -> float:
    x = lp.variables()
    best = math.inf
    for values in itertools.product((0, 1), repeat=len(x)):
        for variable, value in zip(x, values, strict=True):
            variable.varValue = value
        if all(row.valid(1e-9) for row in lp.constraints()):
            best = min(best, pulp.value(lp.objective))
    return best


@pytest.mark.parametrize("constant", [0.0, 100.5])
def test_proves_the_optimum(name, constant):
    best = covering_optimum(covering(10, 4, seed=1, constant=constant))
    lp = covering(10, 4, seed=1, constant=constant)
    result = get_backend(name).solve(lp, time_limit_s=30, gap=0.0)
    assert result.status is Status.OPTIMAL
    assert result.objective == pytest.approx(best, rel=1e-9)
    assert result.bound == pytest.approx(best, rel=1e-6)
    assert result.bound <= result.objective
    assert pulp.value(lp.objective) == result.objective
    assert {v.varValue for v in lp.variables()} <= {0.0, 1.0}


@pytest.mark.parametrize("gap", [0.3, 0.05])
def test_gap_is_kept_and_the_bound_holds(name, gap):
    best = get_backend(name).solve(covering(40, 20, 2), time_limit_s=60, gap=0.0).objective
    result = get_backend(name).solve(covering(40, 20, 2), time_limit_s=60, gap=gap)
    assert result.status is Status.OPTIMAL
    assert result.bound <= best * (1 + 1e-9)
    assert best * (1 - 1e-9) <= result.objective <= best * (1 + 1.01 * gap / (1 - gap))


def test_relaxation_bounds_from_below(name):
    lp = covering(20, 8, 3)
    relaxed = get_backend(name).solve(lp, time_limit_s=30, gap=0.0, relax=True)
    assert relaxed.status is Status.OPTIMAL
    assert relaxed.bound == pytest.approx(relaxed.objective)
    assert any(0.01 < v.varValue < 0.99 for v in lp.variables())
    best = get_backend(name).solve(covering(20, 8, 3), time_limit_s=30, gap=0.0)
    assert relaxed.bound < best.objective


def test_infeasible_is_a_status(name):
    lp = covering(6, 2, 4)
    total = pulp.LpAffineExpression(dict.fromkeys(lp.variables(), 1.0))
    lp.addConstraint(pulp.LpConstraint(total, pulp.LpConstraintGE, "too many", 7.0))
    result = get_backend(name).solve(lp, time_limit_s=30, gap=0.0)
    assert (result.status, result.objective, result.bound) == (
        Status.INFEASIBLE,
        math.inf,
        math.inf,
    )


@pytest.mark.parametrize("time_limit_s", [0.0, 0.05, 0.2])
def test_time_limit_is_never_taken_for_proof(name, time_limit_s):
    """PuLP says Optimal on a time-limit stop; CBC may claim infeasible when out of time."""
    result = get_backend(name).solve(covering(500, 250, 5), time_limit_s=time_limit_s, gap=0.0)
    assert result.status in (Status.TIME_LIMIT, Status.FEASIBLE)
    if result.status is Status.TIME_LIMIT:
        assert result.objective == math.inf
    else:
        assert result.bound < result.objective < math.inf


def test_stays_silent(name, capfd):
    get_backend(name).solve(covering(20, 8, 3), time_limit_s=30, gap=0.0)
    assert tuple(capfd.readouterr()) == ("", "")


def test_maximising_is_refused(name):
    lp = pulp.LpProblem("upwards", pulp.LpMaximize)
    with pytest.raises(ValueError, match="'upwards' maximises"):
        get_backend(name).solve(lp, time_limit_s=1, gap=0.0)


def test_missing_engine_is_a_clear_error(name, monkeypatch):
    monkeypatch.setattr(BACKENDS[name], "available", lambda self: False)
    with pytest.raises(BackendUnavailable, match=f"{name!r} is not installed.*installed here"):
        get_backend(name)
    with pytest.raises(BackendUnavailable, match="no solver backend 'abacus'; known: highs, cbc"):
        get_backend("abacus")


def test_interrupted_engine_that_leaves_a_bad_point_found_nothing(name):
    lp = covering(6, 2, 4)
    for variable in lp.variables():
        variable.varValue = 0.0  # violates every row
    found = backends._found(lp, -1.0, proven=False, gap=0.0)
    assert (found.status, found.objective, found.bound) == (Status.TIME_LIMIT, math.inf, -1.0)
    assert name in BACKENDS


def test_choice_equals_brute_force(name):
    for seed in range(120):
        problem = random_choice_problem(seed)
        solution, best = solve_choice(problem, backend=name), best_choice(problem)
        assert solution.status is (Status.INFEASIBLE if np.isinf(best) else Status.OPTIMAL)
        assert solution.objective == pytest.approx(best, rel=1e-6, abs=1e-12)


def test_choice_with_binding_capacities_equals_brute_force(name):
    """Every node in two capacities and a cycle of edges: nothing is left to presolve alone."""
    for seed in range(25):
        rng = np.random.default_rng(seed)
        nodes = tuple(rng.random(3) for _ in range(7))
        edges = tuple(Edge(src=i, dst=(i + 1) % 7, cost=rng.random((3, 3))) for i in range(7))
        usages = [tuple((n, rng.random(3)) for n in range(7)) for _ in range(2)]
        capacities = tuple(
            Capacity(name=f"live{i}", limit=2.2, members=members)
            for i, members in enumerate(usages)
        )
        problem = ChoiceProblem(node_costs=nodes, edges=edges, capacities=capacities)
        solution, best = solve_choice(problem, backend=name), best_choice(problem)
        assert solution.objective == pytest.approx(best, rel=1e-6)
        assert solution.conflict == () or np.isinf(best)


def test_partition_ilp_equals_brute_force(name):
    for seed in range(80):
        problem = random_partition_problem(seed)
        solution, best = solve_partition(problem, backend=name), best_partition(problem)
        assert solution.status is (Status.INFEASIBLE if math.isinf(best) else Status.OPTIMAL)
        assert solution.objective == pytest.approx(best, rel=1e-6, abs=1e-12)
        assert solution.engine == ("dp" if math.isinf(best) else name)


def test_same_problem_same_answer(name):
    for seed in range(30):
        problem = random_choice_problem(seed)
        first, second = (solve_choice(problem, backend=name) for _ in range(2))
        assert dataclasses.asdict(first) | {"solve_s": 0} == dataclasses.asdict(second) | {
            "solve_s": 0
        }
