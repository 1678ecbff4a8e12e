"""Choice problems that differ in the costs of a few nodes alone: reduced once, solved many times.

What holds for all of them is done once: reductions, and the elimination of every node whose costs
are the same in all (bucket elimination, see `choice_elimination`). Each problem then only
eliminates the rest.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from solvers.choice import solve_choice
from solvers.choice_core import (
    Core,
    CoreCapacity,
    Eliminated,
    Factor,
    Infeasible,
    build_core,
    decoded,
)
from solvers.choice_elimination import eliminate_factors, elimination_order, factors_of
from solvers.choice_presolve import reduce_open
from solvers.choice_problem import Array, ChoiceProblem, ChoiceSolution
from solvers.solution import Status

Rate = tuple[int, Array]
"""A node, and what each of its options takes of something that has a price."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Rest:
    """What is left of a problem: factors over the nodes in `order`, whose `options` are the
    original indices; `steps` led there."""

    steps: tuple[Eliminated, ...]
    factors: tuple[Factor, ...]
    order: tuple[int, ...]
    options: Mapping[int, NDArray[np.intp]]


class ChoiceFamily:
    """The problems that a problem without capacities becomes with more costs on some nodes.

    Nodes in `fixed` may be given any costs more; others as much as the prices of the `rates` say.
    """

    def __init__(
        self, problem: ChoiceProblem, rates: Sequence[Rate] = (), fixed: Collection[int] = ()
    ) -> None:
        if problem.capacities:
            raise ValueError("capacities: expected none in a family of choice problems")
        self._problem, self._rates = problem, tuple(rates)
        self._core = _reduced(problem, self._rates, fixed)
        kept = {node for node, _ in self._rates} | set(fixed)
        self._rest = None if self._core is None else _without_others(self._core, kept)

    def solve(
        self,
        prices: Sequence[float],
        more: Mapping[int, Array],
        *,
        backend: str = "highs",
        time_limit_s: float = 60.0,
    ) -> ChoiceSolution:
        """The cheapest choice with `prices` from 0, one for each rate, and `more` costs of fixed
        nodes: as `solve_choice` has it, which is asked where tables would be too large."""
        started = time.perf_counter()
        added = self._added(prices, more)
        costs = [
            cost + added[node] if node in added else cost
            for node, cost in enumerate(self._problem.node_costs)
        ]
        problem = replace(self._problem, node_costs=tuple(costs))
        choices = None if self._rest is None else _solve(self._rest, added, len(costs))
        if choices is None:
            core = None if self._core is None else _with_costs(self._core, added)
            return solve_choice(problem, backend=backend, time_limit_s=time_limit_s, core=core)
        objective = problem.objective(choices)
        return ChoiceSolution(
            status=Status.OPTIMAL,
            objective=objective,
            bound=objective,
            gap=0.0,
            engine="presolve",
            solve_s=time.perf_counter() - started,
            conflict=(),
            choices=choices,
            num_variables=0,
            integral_relaxation=True,
        )

    def _added(self, prices: Sequence[float], more: Mapping[int, Array]) -> dict[int, Array]:
        added = {node: np.asarray(costs, dtype=float) for node, costs in more.items()}
        for (node, used), price in zip(self._rates, prices, strict=True):
            if price < 0 or not math.isfinite(price):
                raise ValueError(f"prices: expected numbers from 0, found {price}")
            added[node] = added.get(node, 0.0) + price * used
        return added


def _reduced(problem: ChoiceProblem, rates: Sequence[Rate], fixed: Collection[int]) -> Core | None:
    """What is left for all problems of a family; None where nothing is possible."""
    core = build_core(problem)
    core.capacities = [
        CoreCapacity(name=str(index), limit=math.inf, scale=1.0, usage={node: np.asarray(used)})
        for index, (node, used) in enumerate(rates)
    ]
    try:
        reduce_open(core, fixed)
    except Infeasible:
        return None
    return core


def _without_others(core: Core, kept: set[int]) -> _Rest | None:
    """The same with all but the `kept` nodes minimised out; None where some tables would be too
    large, or nothing is possible."""
    order = elimination_order(core, core.costs, last=kept)
    if len(order) < len(core.costs):
        return None
    first = [node for node in order if node not in kept]
    try:
        steps, factors, _ = eliminate_factors(factors_of(core, order), first, core.options)
    except Infeasible:
        return None
    return _Rest(
        steps=(*core.eliminated, *steps),
        factors=tuple(factors),
        order=tuple(order[len(first) :]),
        options=core.options,
    )


def _with_costs(core: Core, added: Mapping[int, Array]) -> Core:
    """What is left of one problem of a family, of which `core` is what is left of all."""
    return Core(
        costs={
            node: cost + added[node][core.options[node]] if node in added else cost
            for node, cost in core.costs.items()
        },
        options=dict(core.options),
        edges={node: dict(around) for node, around in core.edges.items()},
        capacities=[],
        constant=core.constant,
        eliminated=list(core.eliminated),
    )


def _solve(rest: _Rest, added: Mapping[int, Array], count: int) -> tuple[int, ...] | None:
    more: list[Factor] = [
        ((node,), added[node][rest.options[node]]) for node in rest.order if node in added
    ]
    try:
        steps, _, _ = eliminate_factors([*rest.factors, *more], rest.order, rest.options)
    except Infeasible:
        return None
    return decoded((*rest.steps, *steps), {}, count)
