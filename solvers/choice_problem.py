"""The choice problem: one option per node, costs on nodes and edges, capacities over node sets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from solvers.solution import Solution

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Edge:
    """Cost of every pair of options of two nodes, shape [options(src), options(dst)].

    `np.inf` forbids a pair. Several edges between the same nodes add up.
    """

    src: int
    dst: int
    cost: Array


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Capacity:
    """Usage of the chosen options, summed over `members` (node, usage per option), <= `limit`."""

    name: str
    limit: float
    members: tuple[tuple[int, Array], ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChoiceProblem:
    """Minimise node costs plus edge costs, within every capacity.

    `node_costs[n]` has one entry per option of node n; `np.inf` forbids an option. Raises
    ValueError naming the part whose shape or values are wrong.
    """

    node_costs: tuple[Array, ...]
    edges: tuple[Edge, ...] = ()
    capacities: tuple[Capacity, ...] = ()

    def __post_init__(self) -> None:
        for node, cost in enumerate(self.node_costs):
            _check_values(f"node {node}", cost, (len(cost),), inf_allowed=True)
        for edge in self.edges:
            shape = (self._options(edge.src), self._options(edge.dst))
            _check_values(f"edge {edge.src}-{edge.dst}", edge.cost, shape, inf_allowed=True)
        for capacity in self.capacities:
            for node, usage in capacity.members:
                where = f"capacity {capacity.name!r}, node {node}"
                _check_values(where, usage, (self._options(node),), inf_allowed=False)

    def _options(self, node: int) -> int:
        if not 0 <= node < len(self.node_costs):
            raise ValueError(f"node {node} is not one of the {len(self.node_costs)} nodes")
        return len(self.node_costs[node])

    def objective(self, choices: tuple[int, ...]) -> float:
        """Cost of one option per node; inf where an option or a pair is forbidden."""
        terms = [float(cost[choices[n]]) for n, cost in enumerate(self.node_costs)]
        terms += [float(e.cost[choices[e.src], choices[e.dst]]) for e in self.edges]
        return math.inf if math.inf in terms else math.fsum(terms)

    def usage(self, capacity: Capacity, choices: tuple[int, ...]) -> float:
        """What `choices` use of one capacity."""
        return math.fsum(float(usage[choices[n]]) for n, usage in capacity.members)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceSolution(Solution):
    """`choices` holds an option per node, or None without a solution.

    `num_variables` counts the variables left for the ILP: 0 where presolve solved the problem.
    `integral_relaxation`: the linear relaxation was already integral (or there was no ILP).
    """

    choices: tuple[int, ...] | None
    num_variables: int
    integral_relaxation: bool


def _check_values(where: str, values: Any, shape: tuple[int, ...], *, inf_allowed: bool) -> None:
    array = np.asarray(values)
    if array.shape != shape or 0 in shape:
        raise ValueError(f"{where}: expected shape {shape} of at least 1, found {array.shape}")
    bad = np.isnan(array) | (array == -np.inf)
    if not inf_allowed:
        bad |= array == np.inf
    if bad.any():
        raise ValueError(f"{where}: values must be numbers, found {array[bad][0]}")
