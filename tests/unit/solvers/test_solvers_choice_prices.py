from __future__ import annotations

import dataclasses
import math
import time

import numpy as np
import pytest

from solvers import choice as choice_module
from solvers.backends import get_backend
from solvers.brute_force import best_choice
from solvers.choice import Capacity, ChoiceProblem, Edge, solve_choice
from solvers.choice_core import Core, Infeasible, build_core, drop_forbidden
from solvers.choice_elimination import eliminate_components, eliminate_pairwise
from solvers.choice_lagrangian import improve, relax_capacities
from solvers.choice_marginals import min_marginals
from solvers.choice_presolve import reduce_core
from solvers.random_problems import random_choice_problem
from solvers.solution import Status, fits


def eliminated(problem: ChoiceProblem) -> Core | None:
    core = build_core(problem)
    try:
        drop_forbidden(core)
        eliminate_pairwise(core, set())
        eliminate_components(core, set())
    except Infeasible:
        return None
    assert not core.costs
    return core


def only(problem: ChoiceProblem, node: int, option: int) -> ChoiceProblem:
    costs = list(problem.node_costs)
    costs[node] = np.where(np.arange(len(costs[node])) == option, costs[node], np.inf)
    return dataclasses.replace(problem, node_costs=tuple(costs))


def test_min_marginals_are_the_least_cost_with_each_option():
    checked = 0
    for seed in range(150):
        problem = dataclasses.replace(random_choice_problem(seed), capacities=())
        core = eliminated(problem)
        if core is None:
            continue
        for node, (options, least) in min_marginals(core.eliminated, core.constant).items():
            found = dict(zip(options.tolist(), least.tolist(), strict=True))
            for option in range(len(problem.node_costs[node])):
                best = best_choice(only(problem, node, option))
                assert found.get(option, math.inf) == pytest.approx(best, rel=1e-9, abs=1e-12)
                checked += 1
    assert checked > 800


def budgeted(seed: int, nodes: int = 8, budget: float = 2.6) -> ChoiceProblem:
    rng = np.random.default_rng(seed)
    return ChoiceProblem(
        node_costs=tuple(rng.random(3) for _ in range(nodes)),
        edges=tuple(
            Edge(src=i, dst=(i + 1) % nodes, cost=rng.random((3, 3))) for i in range(nodes)
        ),
        capacities=tuple(
            Capacity(
                name=f"live{i}",
                limit=budget,
                members=tuple((n, rng.random(3)) for n in range(i, nodes)),
            )
            for i in range(2)
        ),
    )


def test_prices_bound_from_below_and_keep_what_the_optimum_uses():
    """Options dropped by their own bound are in no choice that beats the one found."""
    found = dropped = 0
    for seed in range(80):
        problem = budgeted(seed)
        best = best_choice(problem)
        if math.isinf(best):
            continue
        core = build_core(problem)
        reduce_core(core)

        def cost(choices: tuple[int, ...], problem: ChoiceProblem = problem) -> float:
            held = all(fits(problem.usage(c, choices), c.limit) for c in problem.capacities)
            return problem.objective(choices) if held else math.inf

        if not core.costs:
            continue
        relaxed = relax_capacities(
            core, 8, cost, get_backend("highs"), deadline=time.perf_counter() + 60, gap=1e-9
        )
        assert relaxed.bound <= best + 1e-9
        if relaxed.choices is None:
            continue
        found += 1
        value = cost(relaxed.choices)
        assert value >= best - 1e-9
        for node, kept in relaxed.useful.items():
            for option in set(range(3)) - set(kept.tolist()):
                dropped += 1
                assert best_choice(only(problem, node, option)) > value - 1e-9
    assert found > 25
    assert dropped > 50


def test_improve_keeps_within_capacities_and_never_costs_more():
    better = 0
    for seed in range(40):
        problem = budgeted(seed, budget=4.0)
        core = build_core(problem)
        rng = np.random.default_rng(seed)
        choices = tuple(int(c) for c in rng.integers(0, 3, 8))
        improved = improve(core, choices)
        if all(fits(problem.usage(c, choices), c.limit) for c in problem.capacities):
            assert all(fits(problem.usage(c, improved), c.limit) for c in problem.capacities)
            assert problem.objective(improved) <= problem.objective(choices)
            better += problem.objective(improved) < problem.objective(choices)
        else:
            assert improved == choices
    assert better > 3


def test_interrupted_ilp_falls_back_on_the_priced_solution(monkeypatch):
    def out_of_time(run, core):
        return run.solution(choices=None, bound=-math.inf, status=Status.TIME_LIMIT)

    monkeypatch.setattr(choice_module, "_solve_ilp", out_of_time)
    feasible = 0
    for seed in range(40):
        problem = budgeted(seed)
        best, solution = best_choice(problem), solve_choice(problem)
        assert solution.bound <= best + 1e-9
        if solution.status is Status.FEASIBLE:
            feasible += 1
            assert solution.objective >= best - 1e-9
            assert solution.gap > 1e-6
            for capacity in problem.capacities:
                assert fits(problem.usage(capacity, solution.choices), capacity.limit)
        elif solution.status is Status.OPTIMAL:
            assert solution.objective == pytest.approx(best, rel=1e-6)
    assert feasible > 5
