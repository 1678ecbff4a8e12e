"""A bound and a solution for capacities by pricing them (Lagrangian relaxation).

With a price per unit of each capacity moved into the node costs, what is left has no capacities
and is minimised exactly by elimination, in milliseconds where tables stay small. Any prices give a
lower bound; the best are found by Kelley's cutting planes (J. SIAM 8, 1960), and the choices met
on the way that fit are solutions. Where bound and solution meet the wanted gap, no ILP is needed;
else an option whose own bound (`choice_marginals`) exceeds the solution's cost is in no better one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pulp
from numpy.typing import NDArray

from solvers.backends import Backend
from solvers.choice_core import Core
from solvers.choice_elimination import eliminate_components, eliminate_pairwise
from solvers.choice_marginals import min_marginals
from solvers.choice_problem import Array
from solvers.solution import Status, relative_gap

_MAX_ROUNDS = 60
_LARGEST_PRICE = 1e3
_CONVERGED = 1e-9
_MAX_SWEEPS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Relaxed:
    """A proven lower bound, and the best choices (of all nodes) found that fit, if any.

    `useful` holds, per node of the core, the original options that a better solution may use.
    """

    bound: float
    choices: tuple[int, ...] | None
    useful: dict[int, NDArray[np.intp]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Cut:
    """A minimiser: its cost without prices, and how far it exceeds each capacity (scaled)."""

    cost: float
    excess: Array


def relax_capacities(
    core: Core,
    count: int,
    objective: Callable[[tuple[int, ...]], float],
    engine: Backend,
    *,
    deadline: float,
    gap: float,
) -> Relaxed | None:
    """Bound the core's optimum and look for solutions until the gap is met or time is up.

    `objective` gives the cost of choices of all `count` nodes, inf where they do not fit. None
    where elimination leaves nodes over.
    """
    units = np.array([c.scale or 1.0 for c in core.capacities])
    limits = np.array([c.limit for c in core.capacities]) / units
    prices = np.zeros(len(units))
    bound, choices, value = -math.inf, None, math.inf
    tightest: tuple[Core, float] | None = None
    cuts: list[_Cut] = []
    for _ in range(_MAX_ROUNDS):
        priced = _eliminate_priced(core, prices / units)
        if priced is None:
            return None
        paid = float(prices @ limits)
        if priced.constant - paid > bound or tightest is None:
            bound, tightest = priced.constant - paid, (priced, paid)
        minimiser = priced.choices({}, count)
        improved = improve(core, minimiser)
        if objective(improved) < value:
            choices, value = improved, objective(improved)
        usage = _usage(core, minimiser) / units
        cuts.append(_Cut(cost=priced.constant - float(prices @ usage), excess=usage - limits))
        if relative_gap(value, bound) <= gap or time.perf_counter() > deadline:
            break
        master = _best_prices(cuts, engine)
        if master is None or master[0] <= bound + _CONVERGED * abs(bound):
            break
        prices = master[1]
    useful = _useful(core, tightest, value) if tightest and choices else {}
    return Relaxed(bound=bound, choices=choices, useful=useful)


def _useful(core: Core, tightest: tuple[Core, float], value: float) -> dict[int, NDArray[np.intp]]:
    """Per node of the core, the options whose own lower bound does not exceed `value`."""
    priced, paid = tightest
    steps = [step for step in priced.eliminated if step.node in core.costs]
    marginals = min_marginals(steps, priced.constant)
    if marginals is None:
        return {}
    allowed = value + paid + _CONVERGED * (abs(value) + abs(paid))
    return {node: options[least <= allowed] for node, (options, least) in marginals.items()}


def improve(core: Core, choices: tuple[int, ...]) -> tuple[int, ...]:
    """Change one node of the core at a time to what costs less and fits, until nothing helps."""
    local = {n: int(np.searchsorted(o, choices[n])) for n, o in core.options.items()}
    left = [c.limit - sum(float(u[local[n]]) for n, u in c.usage.items()) for c in core.capacities]
    if min(left) < 0:
        return choices
    for _ in range(_MAX_SWEEPS):
        moved = [_improve_node(core, node, local, left) for node in sorted(core.options)]
        if not any(moved):
            break
    return core.choices(local, len(choices))


def _improve_node(core: Core, node: int, local: dict[int, int], left: list[float]) -> bool:
    cost = core.costs[node]
    for other, matrix in core.edges[node].items():
        cost = cost + matrix[:, local[other]]
    now = local[node]
    better = cost < cost[now] * (1 - _CONVERGED)
    using = [(i, c.usage[node]) for i, c in enumerate(core.capacities) if node in c.usage]
    for index, usage in using:
        better &= usage - usage[now] <= left[index]
    if not better.any():
        return False
    local[node] = int(np.where(better, cost, np.inf).argmin())
    for index, usage in using:
        left[index] -= float(usage[local[node]] - usage[now])
    return True


def _eliminate_priced(core: Core, prices: Array) -> Core | None:
    """The core with prices in its costs and no capacities, eliminated; None if nodes are left."""
    costs = dict(core.costs)
    for price, capacity in zip(prices, core.capacities, strict=True):
        for node, usage in capacity.usage.items():
            costs[node] = costs[node] + price * usage
    priced = Core(
        costs=costs,
        options=dict(core.options),
        edges={node: dict(around) for node, around in core.edges.items()},
        capacities=[],
        constant=core.constant,
        eliminated=list(core.eliminated),
    )
    eliminate_pairwise(priced, set())
    eliminate_components(priced, set())
    return None if priced.costs else priced


def _usage(core: Core, choices: tuple[int, ...]) -> Array:
    local = {n: int(np.searchsorted(core.options[n], choices[n])) for n in core.limited()}
    return np.array([sum(float(u[local[n]]) for n, u in c.usage.items()) for c in core.capacities])


def _best_prices(cuts: list[_Cut], engine: Backend) -> tuple[float, Array] | None:
    """Prices that maximise the least of all cuts, and that value."""
    scale = max(1e-300, *(abs(cut.cost) for cut in cuts))
    lp = pulp.LpProblem("prices", pulp.LpMinimize)
    value = lp.add_variable("value")
    prices = [lp.add_variable(f"price_{i}", 0, _LARGEST_PRICE) for i in range(len(cuts[0].excess))]
    lp.setObjective(pulp.LpAffineExpression({value: -1.0}))
    for index, cut in enumerate(cuts):
        terms = {value: 1.0} | {
            price: -float(excess) for price, excess in zip(prices, cut.excess, strict=True)
        }
        expression = pulp.LpAffineExpression(terms)
        row = pulp.LpConstraint(expression, pulp.LpConstraintLE, f"cut_{index}", cut.cost / scale)
        lp.addConstraint(row)
    result = engine.solve(lp, time_limit_s=1.0, gap=0.0, relax=True)
    if result.status is not Status.OPTIMAL:
        return None
    return -result.objective * scale, scale * np.array([price.varValue for price in prices])
