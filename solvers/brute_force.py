"""The exhaustive answers, for tests: every choice and every partition of a small problem."""

from __future__ import annotations

import itertools
import math

import numpy as np

from solvers.choice_problem import ChoiceProblem
from solvers.solution import CAPACITY_TOLERANCE

_MAX_CASES = 2_000_000


def best_choice(problem: ChoiceProblem) -> float:
    """The least objective of a choice problem; inf if infeasible."""
    sizes = [len(cost) for cost in problem.node_costs]
    if math.prod(sizes) > _MAX_CASES:
        raise ValueError(f"{math.prod(sizes)} choices are too many to try; limit {_MAX_CASES}")
    grid = np.indices(sizes).reshape(len(sizes), -1)
    total = np.zeros(grid.shape[1])
    for node, cost in enumerate(problem.node_costs):
        total += np.asarray(cost)[grid[node]]
    for edge in problem.edges:
        total += np.asarray(edge.cost)[grid[edge.src], grid[edge.dst]]
    for capacity in problem.capacities:
        usage = np.zeros(grid.shape[1])
        for node, values in capacity.members:
            usage += np.asarray(values)[grid[node]]
        total[usage > capacity.limit + CAPACITY_TOLERANCE * abs(capacity.limit)] = np.inf
    return float(total.min())
