"""Open choice problems give the answers of the problems that they become, narrowed or not."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from solvers import choice_elimination, choice_open
from solvers.brute_force import best_choice
from solvers.choice import ChoiceProblem
from solvers.choice_open import OpenProblems
from solvers.choice_problem import Edge
from solvers.random_problems import random_choice_problem


def priced(problem, costs, edges=()):
    """The problem with more costs and edges."""
    node_costs = [np.asarray(cost, dtype=float) for cost in problem.node_costs]
    for node, more in costs.items():
        node_costs[node] = node_costs[node] + more
    return dataclasses.replace(
        problem, node_costs=tuple(node_costs), edges=(*problem.edges, *edges)
    )


def opened(seed: int):
    """A problem, its open nodes, those that stay open, and what a mesh adds."""
    problem = dataclasses.replace(random_choice_problem(seed), capacities=())
    rng = np.random.default_rng(seed)
    sizes = [len(cost) for cost in problem.node_costs]
    nodes = [int(n) for n in rng.permutation(len(sizes))[: rng.integers(1, len(sizes) + 1)]]
    edges = [
        Edge(src=a, dst=b, cost=rng.random((sizes[a], sizes[b])))
        for a, b in zip(nodes[::2], nodes[1::2], strict=False)
    ]
    own = {node: rng.random(sizes[node]) for node in nodes if rng.random() < 0.7}
    return problem, nodes, nodes[: int(rng.integers(0, len(nodes) + 1))], own, edges


def check(problem: ChoiceProblem, found) -> None:
    best = best_choice(problem)
    if np.isinf(best):
        assert found is None
        return
    objective, bound, choices = found
    assert objective == pytest.approx(best, rel=1e-9, abs=1e-12)
    assert bound <= objective * (1 + 1e-9) + 1e-12
    alone = [
        np.where(np.arange(len(c)) == o, 0.0, np.inf)
        for c, o in zip(problem.node_costs, choices, strict=True)
    ]
    assert best_choice(priced(problem, dict(enumerate(alone)))) == pytest.approx(best, rel=1e-9)


def check_least(found, least, stay) -> None:
    """What is told of open nodes alone is a part of the whole answer."""
    if found is None:
        assert least is None
        return
    assert least[0] == found[1]
    assert {node: least[1][node] for node in stay} == {node: found[2][node] for node in stay}


@pytest.mark.parametrize("too_large", [False, True])
@pytest.mark.parametrize("block", range(3))
def test_every_problem_equals_brute_force(monkeypatch, block, too_large):
    for seed in range(60 * block, 60 * (block + 1)):
        problem, nodes, stay, own, edges = opened(seed)
        problems = OpenProblems(problem, nodes)
        if too_large:
            monkeypatch.setattr(choice_open, "greedy_order", lambda *args: [])
        check(priced(problem, own, edges), problems.solve(own, edges))
        narrowed = problems.narrowed(own, edges, stay)
        assert narrowed.open_nodes == set(stay)
        rng = np.random.default_rng(seed + 1)
        for _ in range(3):
            more = {node: rng.random(len(problem.node_costs[node])) for node in stay}
            whole, found = priced(priced(problem, own, edges), more), narrowed.solve(more)
            check(whole, found)
            check_least(found, narrowed.least(more), stay)


def test_a_node_whose_table_is_too_large_waits_for_the_costs(monkeypatch):
    """One that all open nodes have costs with: minimised out first it leaves a table over them."""
    monkeypatch.setattr(choice_elimination, "_MAX_TABLE", 64)
    monkeypatch.setattr(choice_open, "solve_choice", None)
    rng = np.random.default_rng(0)
    leaves = range(1, 5)
    problem = ChoiceProblem(
        node_costs=tuple(rng.random(4) for _ in range(5)),
        edges=tuple(Edge(src=0, dst=leaf, cost=rng.random((4, 4))) for leaf in leaves),
    )
    problems = OpenProblems(problem, leaves)
    for _ in range(5):
        costs = {leaf: rng.random(4) for leaf in leaves}
        check(priced(problem, costs), problems.solve(costs))
        check(priced(problem, costs), problems.narrowed(costs, [], [1, 2]).solve({}))
