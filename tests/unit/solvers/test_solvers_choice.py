from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from solvers import choice as choice_module
from solvers.brute_force import best_choice
from solvers.choice import Capacity, ChoiceProblem, ChoiceSolution, Edge, solve_choice
from solvers.choice_core import build_core, drop_forbidden
from solvers.choice_presolve import reduce_core
from solvers.random_problems import random_choice_problem
from solvers.solution import Status, fits


def assert_right(problem: ChoiceProblem, solution: ChoiceSolution) -> None:
    best = best_choice(problem)
    if np.isinf(best):
        assert solution.status is Status.INFEASIBLE
        assert solution.choices is None
        assert solution.conflict
        assert all(shortfall > 0 for _, shortfall in solution.conflict)
        return
    assert solution.status is Status.OPTIMAL
    assert solution.objective == pytest.approx(best, rel=1e-6, abs=1e-12)
    assert solution.bound <= best * (1 + 1e-9) + 1e-12
    assert solution.objective == problem.objective(solution.choices)
    for capacity in problem.capacities:
        assert fits(problem.usage(capacity, solution.choices), capacity.limit)


@pytest.mark.parametrize("block", range(6))
def test_equals_brute_force(block):
    for seed in range(100 * block, 100 * (block + 1)):
        problem = random_choice_problem(seed)
        assert_right(problem, solve_choice(problem))


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_equals_brute_force_in_bulk(block):
    """5,000 problems."""
    for seed in range(1000 + 250 * block, 1000 + 250 * (block + 1)):
        problem = random_choice_problem(seed, max_nodes=8)
        assert_right(problem, solve_choice(problem))


def test_ilp_alone_equals_brute_force(monkeypatch):
    """Without presolve and prices the ILP has to give the same answers: each checks the other."""
    monkeypatch.setattr(choice_module, "relax_capacities", lambda *args, **kwargs: None)
    monkeypatch.setattr(choice_module, "reduce_core", lambda core, soft=False: drop_forbidden(core))
    engines = set()
    for seed in range(250):
        problem = random_choice_problem(seed)
        solution = solve_choice(problem)
        engines.add(solution.engine)
        assert_right(problem, solution)
    assert engines == {"highs"}


def test_random_problems_cover_all_outcomes():
    solutions = [solve_choice(random_choice_problem(seed)) for seed in range(400)]
    assert {s.status for s in solutions} == {Status.OPTIMAL, Status.INFEASIBLE}
    assert {s.engine for s in solutions if s.choices} == {"presolve", "prices", "highs"}
    assert any(s.engine == "highs" and s.choices and not s.integral_relaxation for s in solutions)


def chain(count: int, options: int, seed: int, skip: int = 0) -> ChoiceProblem:
    rng = np.random.default_rng(seed)
    switch = 1.0 - np.eye(options)
    edges = [
        Edge(src=i, dst=i + 1, cost=rng.random((options,) * 2) * switch) for i in range(count - 1)
    ]
    if skip:
        edges += [
            Edge(src=i, dst=i + skip, cost=rng.random((options,) * 2) * switch)
            for i in range(0, count - skip, skip)
        ]
    return ChoiceProblem(
        node_costs=tuple(rng.random(options) for _ in range(count)), edges=tuple(edges)
    )


def with_budget(problem: ChoiceProblem, share: float, seed: int = 0) -> ChoiceProblem:
    """A capacity over all nodes, at `share` of the way from the least usage to the free one."""
    rng = np.random.default_rng(seed)
    usage = [rng.random(len(cost)) * 1e9 for cost in problem.node_costs]
    free = solve_choice(problem).choices
    least = sum(u.min() for u in usage)
    most = sum(u[c] for u, c in zip(usage, free, strict=True))
    budget = Capacity(
        name="memory", limit=least + share * (most - least), members=tuple(enumerate(usage))
    )
    return dataclasses.replace(problem, capacities=(budget,))


def test_series_parallel_graph_needs_no_ilp():
    """Residual connections leave treewidth two: eliminated exactly."""
    solution = solve_choice(chain(200, 8, seed=1, skip=4))
    assert solution.engine == "presolve"
    assert solution.num_variables == 0
    assert solution.integral_relaxation
    assert solution.bound == solution.objective


def test_chain_equals_viterbi():
    problem = chain(60, 7, seed=3)
    reach = problem.node_costs[0]
    for edge, cost in zip(problem.edges, problem.node_costs[1:], strict=True):
        reach = (reach[:, None] + edge.cost).min(axis=0) + cost
    assert solve_choice(problem).objective == pytest.approx(reach.min(), rel=1e-12)


def test_clique_is_eliminated_through_larger_tables():
    rng = np.random.default_rng(0)
    problem = ChoiceProblem(
        node_costs=tuple(rng.random(4) for _ in range(6)),
        edges=tuple(
            Edge(src=i, dst=j, cost=rng.random((4, 4))) for i in range(6) for j in range(i)
        ),
    )
    solution = solve_choice(problem)
    assert solution.engine == "presolve"
    assert solution.objective == pytest.approx(best_choice(problem), rel=1e-12)


def test_ties_go_to_the_lowest_option():
    zero = np.zeros(3)
    problem = ChoiceProblem(
        node_costs=(zero, zero, zero),
        edges=(
            Edge(src=0, dst=1, cost=np.zeros((3, 3))),
            Edge(src=2, dst=1, cost=np.zeros((3, 3))),
        ),
    )
    assert solve_choice(problem).choices == (0, 0, 0)


def test_capacity_that_always_holds_changes_nothing():
    problem = chain(30, 4, seed=5)
    ample = Capacity(name="ample", limit=1e9, members=tuple((n, np.ones(4)) for n in range(30)))
    limited = solve_choice(dataclasses.replace(problem, capacities=(ample,)))
    assert limited.engine == "presolve"
    assert limited.choices == solve_choice(problem).choices


def test_presolve_drops_implied_capacity_and_dominated_option():
    usage = np.array([0.0, 1.0, 5.0])
    problem = ChoiceProblem(
        node_costs=(np.array([5.0, 3.0, 1.0]), np.array([5.0, 6.0, 1.0])),
        capacities=(
            Capacity(name="all", limit=5.0, members=((0, usage), (1, usage))),
            Capacity(name="part", limit=5.0, members=((0, usage),)),
        ),
    )
    core = build_core(problem)
    reduce_core(core)
    assert [c.name for c in core.capacities] == ["all"]
    assert core.options[1].tolist() == [0, 2]  # option 1 costs and uses more than option 0


def test_objective_keeps_its_scale():
    """Costs in microseconds, usage in bytes: the engine's absolute tolerances must not matter."""
    base = with_budget(chain(20, 4, seed=9), 0.3)
    small = dataclasses.replace(
        base,
        node_costs=tuple(c * 1e-7 for c in base.node_costs),
        edges=tuple(Edge(src=e.src, dst=e.dst, cost=e.cost * 1e-7) for e in base.edges),
    )
    assert solve_choice(small).objective == pytest.approx(
        1e-7 * solve_choice(base).objective, rel=2e-6
    )


def test_more_capacity_is_never_worse():
    problem = chain(24, 5, seed=11, skip=3)
    objectives = [
        solve_choice(with_budget(problem, share)).objective for share in np.linspace(0, 1, 9)
    ]
    for tighter, looser in itertools.pairwise(objectives):
        assert looser <= tighter * (1 + 2e-6)
    assert objectives[-1] < objectives[0]


def test_same_problem_same_answer_whatever_the_order():
    for seed in range(60):
        problem = random_choice_problem(seed)
        shuffled = dataclasses.replace(
            problem,
            edges=problem.edges[::-1],
            capacities=tuple(
                dataclasses.replace(c, members=c.members[::-1]) for c in problem.capacities[::-1]
            ),
        )
        first, again, other = (solve_choice(p) for p in (problem, problem, shuffled))
        assert first == again
        assert (other.choices, other.conflict) == (first.choices, first.conflict)


def test_conflict_names_capacity_and_least_shortfall():
    usage = (np.array([4.0, 6.0]), np.array([5.0, 3.0]))
    problem = ChoiceProblem(
        node_costs=(np.zeros(2), np.zeros(2)),
        edges=(Edge(src=0, dst=1, cost=np.array([[0.0, np.inf], [0.0, 0.0]])),),
        capacities=(
            Capacity(name="roomy", limit=100.0, members=((0, usage[0]),)),
            Capacity(name="tight", limit=7.5, members=((0, usage[0]), (1, usage[1]))),
        ),
    )
    solution = solve_choice(problem)
    assert solution.status is Status.INFEASIBLE
    assert solution.conflict == (("tight", 1.5),)
    assert solution.bound == np.inf


def test_removing_the_pin_makes_it_feasible_again():
    """A weight pinned to replicated under a sharding-sized budget (autoparallel PR 475)."""
    usage = np.array([8.0, 2.0])
    members = tuple((n, usage) for n in range(4))
    budget = Capacity(name="budget", limit=9.0, members=members)
    free = tuple(np.array([1.0, 2.0]) for _ in range(4))
    pinned = (np.array([1.0, np.inf]), *free[1:])
    solution = solve_choice(ChoiceProblem(node_costs=pinned, capacities=(budget,)))
    assert solution.conflict == (("budget", 5.0),)
    assert (
        solve_choice(ChoiceProblem(node_costs=free, capacities=(budget,))).status is Status.OPTIMAL
    )


def test_conflict_of_forbidden_pairs_is_the_fewest_to_allow():
    equal, other = np.where(np.eye(2) > 0, 0.0, np.inf), np.where(np.eye(2) > 0, np.inf, 0.0)
    problem = ChoiceProblem(
        node_costs=(np.zeros(2), np.zeros(2), np.array([np.inf, np.inf])),
        edges=(Edge(src=0, dst=1, cost=equal), Edge(src=1, dst=0, cost=other)),
    )
    assert solve_choice(problem).conflict == (("edge 0-1", 1.0), ("node 2", 1.0))


def test_time_limit_is_labelled():
    """No time at all: nothing found, or found with an honest bound; never unlabelled."""
    problem = with_budget(chain(60, 8, seed=2), 0.4)
    hurried = solve_choice(problem, time_limit_s=0.0)
    best = solve_choice(problem)
    assert best.status is Status.OPTIMAL
    assert hurried.status in (Status.TIME_LIMIT, Status.FEASIBLE)
    assert hurried.bound <= best.objective * (1 + 1e-6)
    if hurried.status is Status.FEASIBLE:
        assert hurried.objective >= best.bound
        assert hurried.gap > 1e-6
    else:
        assert hurried.choices is None
        assert hurried.gap == np.inf


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"edges": (Edge(src=0, dst=1, cost=np.zeros((2, 3))),)}, "edge 0-1: expected shape"),
        ({"edges": (Edge(src=0, dst=7, cost=np.zeros((2, 2))),)}, "node 7 is not one of"),
        ({"node_costs": (np.zeros(2), np.array([np.nan, 0.0]))}, "node 1: values must be numbers"),
        (
            {"capacities": (Capacity(name="m", limit=1.0, members=((0, np.array([np.inf, 0])),)),)},
            "capacity 'm', node 0",
        ),
    ],
)
def test_malformed_problems_are_refused(change, message):
    good = {"node_costs": (np.zeros(2), np.zeros(2))}
    with pytest.raises(ValueError, match=message):
        ChoiceProblem(**(good | change))
