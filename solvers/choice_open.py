"""Choice problems that share all but the costs of some open nodes, and of edges between those.

What they share is reduced, and every other node minimised out (bucket elimination), once for all.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from solvers.choice import solve_choice
from solvers.choice_core import Eliminated, Factor, Infeasible, build_core, decoded, decoded_by_node
from solvers.choice_elimination import eliminate_factors, factors_of, greedy_order
from solvers.choice_presolve import reduce_open
from solvers.choice_problem import Array, ChoiceProblem, Edge


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Rest:
    """Factors over the open nodes, whose `options` are the original indices, after `steps` that
    settled `constant`."""

    steps: tuple[Eliminated, ...]
    factors: tuple[Factor, ...]
    options: Mapping[int, NDArray[np.intp]]
    constant: float

    def added(self, costs: Mapping[int, Array], edges: Sequence[Edge]) -> _Rest:
        """The same with more costs and edges."""
        options = self.options
        factors: list[Factor] = [((node,), cost[options[node]]) for node, cost in costs.items()]
        for edge in edges:
            table = np.asarray(edge.cost)[np.ix_(options[edge.src], options[edge.dst])]
            factors.append(((edge.src, edge.dst), table))
        return replace(self, factors=(*self.factors, *factors))

    def order(self, last: Collection[int] = ()) -> list[int]:
        """The nodes as they are best minimised out, those in `last` after all others, as far as
        tables stay small."""
        links: dict[int, set[int]] = {node: set() for node in self.options}
        for nodes, _ in self.factors:
            for node in nodes:
                links[node] |= set(nodes) - {node}
        sizes = {node: len(options) for node, options in self.options.items()}
        return greedy_order(sizes, links, last)

    def without(self, order: Sequence[int]) -> _Rest:
        """The same with the nodes in `order` minimised out. Raises Infeasible."""
        steps, factors, constant = eliminate_factors(self.factors, order, self.options)
        gone = set(order)
        return _Rest(
            steps=(*self.steps, *steps),
            factors=tuple(factors),
            options={node: of for node, of in self.options.items() if node not in gone},
            constant=self.constant + constant,
        )

    def narrowed(self, last: Collection[int]) -> _Rest:
        """The same without all nodes but those in `last`, and those whose tables would be too
        large. Raises Infeasible."""
        return self.without([node for node in self.order(last) if node not in last])


_More = tuple[Mapping[int, Array], Sequence[Edge]]
"""Costs of nodes, and edges, that a problem has more."""


class OpenProblems:
    """The problems that a problem without capacities becomes with more costs on its `open` nodes,
    and with more edges between two of those."""

    def __init__(self, problem: ChoiceProblem, open_nodes: Collection[int]) -> None:
        if problem.capacities:
            raise ValueError("capacities: expected none in open choice problems")
        self._problem, self._open = problem, frozenset(open_nodes)
        self._more: tuple[_More, ...] = ()
        self._rest = self._reduced()

    @property
    def open_nodes(self) -> frozenset[int]:
        """The nodes that may have more costs, and more edges between them."""
        return self._open

    def _reduced(self) -> _Rest | None:
        """None where nothing is possible."""
        core = build_core(self._problem)
        try:
            reduce_open(core, self._open)
            return _Rest(
                steps=tuple(core.eliminated),
                factors=tuple(factors_of(core, list(core.costs))),
                options=core.options,
                constant=core.constant,
            ).narrowed(self._open)
        except Infeasible:
            return None

    def narrowed(
        self, costs: Mapping[int, Array], edges: Sequence[Edge], open_nodes: Collection[int]
    ) -> OpenProblems:
        """The problems that have these costs and edges, with some of the nodes open."""
        found = copy(self)
        found._more = (*self._more, (costs, edges))
        found._open = frozenset(open_nodes)
        try:
            found._rest = self._rest and self._rest.added(costs, edges).narrowed(found._open)
        except Infeasible:
            found._rest = None
        return found

    def _with(self, costs: Mapping[int, Array], edges: Sequence[Edge]) -> ChoiceProblem:
        node_costs, every = list(self._problem.node_costs), list(self._problem.edges)
        for more, between in (*self._more, (costs, edges)):
            for node, cost in more.items():
                node_costs[node] = node_costs[node] + cost
            every += between
        return ChoiceProblem(node_costs=tuple(node_costs), edges=tuple(every))

    def solve(
        self,
        costs: Mapping[int, Array],
        edges: Sequence[Edge] = (),
        *,
        backend: str = "highs",
        time_limit_s: float = 60.0,
    ) -> tuple[float, float, tuple[int, ...]] | None:
        """The cheapest choice with more `costs` of open nodes and more `edges` between them: what
        it costs, a bound, and an option for every node. None where there is none."""
        found = None if self._rest is None else self._eliminated(self._rest, costs, edges)
        if found is not None:
            if math.isinf(found.constant):
                return None
            choices = decoded(found.steps, {}, len(self._problem.node_costs))
            return found.constant, found.constant, choices
        return self._solved(costs, edges, backend, time_limit_s)

    def least(
        self, costs: Mapping[int, Array], *, backend: str = "highs", time_limit_s: float = 60.0
    ) -> tuple[float, Mapping[int, int]] | None:
        """What the cheapest choice with more `costs` of open nodes costs at the least, and the
        options of these: that takes less than to tell those of all nodes."""
        found = None if self._rest is None else self._eliminated(self._rest, costs, ())
        if self._rest is not None and found is not None:
            if math.isinf(found.constant):
                return None
            return found.constant, decoded_by_node(found.steps[len(self._rest.steps) :], {})
        solved = self._solved(costs, (), backend, time_limit_s)
        return None if solved is None else (solved[1], dict(enumerate(solved[2])))

    def _solved(
        self,
        costs: Mapping[int, Array],
        edges: Sequence[Edge],
        backend: str,
        time_limit_s: float,
    ) -> tuple[float, float, tuple[int, ...]] | None:
        solution = solve_choice(
            self._with(costs, edges), backend=backend, time_limit_s=time_limit_s
        )
        if solution.choices is None:
            return None
        return solution.objective, solution.bound, solution.choices

    def _eliminated(
        self, rest: _Rest, costs: Mapping[int, Array], edges: Sequence[Edge]
    ) -> _Rest | None:
        """Nothing left, with what the cheapest choice costs (inf: none is possible); None where
        tables would be too large."""
        rest = rest.added(costs, edges)
        order = rest.order()
        if len(order) < len(rest.options):
            return None
        try:
            return rest.without(order)
        except Infeasible:
            return replace(rest, constant=math.inf)
