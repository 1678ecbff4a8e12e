"""The core of a choice problem as a (mixed) integer program, in flow form.

Per node n and option i a binary x[n, i]; per edge a continuous e[i, j] for every allowed pair:

    minimise    sum x[n, i] c[n, i] + sum e[i, j] M[i, j]
    subject to  sum_i x[n, i] = 1                            every node      (`_add_nodes`)
                sum_j e[i, j] = x[src, i]                    every edge, i   (`_add_edge`)
                sum_i e[i, j] = x[dst, j]                    every edge, j   (`_add_edge`)
                sum x[n, i] u[n, i] (- slack) <= limit       every capacity  (`_add_capacities`)

With x binary the marginals fix e, so e needs no integrality; this relaxation is much tighter than
e[i, j] >= x[i] + x[j] - 1. Costs are divided by their largest, usages by the capacity's limit, so
that the engines' absolute tolerances mean the same for seconds, microseconds and bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pulp

from solvers.choice_core import Core
from solvers.choice_problem import Array

_INTEGRAL = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChoiceModel:
    """A PuLP model; its objective times `scale` plus `constant` is the problem's.

    `slacks` (elastic form only) holds what each capacity lacks, in units of `units`.
    """

    lp: pulp.LpProblem
    nodes: dict[int, list[pulp.LpVariable]]
    slacks: list[pulp.LpVariable]
    units: list[float]
    scale: float
    constant: float

    def choices(self) -> dict[int, int]:
        """Local option per node, from the variables' values."""
        return {
            node: int(np.argmax([variable.varValue for variable in variables]))
            for node, variables in self.nodes.items()
        }

    def integral(self) -> bool:
        """Whether the values of the node variables are 0 or 1."""
        values = np.array([v.varValue for variables in self.nodes.values() for v in variables])
        return bool((np.abs(values - np.round(values)) <= _INTEGRAL).all())


def build_model(core: Core, *, shrink: float = 0.0, elastic: bool = False) -> ChoiceModel:
    """The model of `core`, with limits less `shrink` of themselves.

    `elastic` minimises what capacities lack instead of the costs.
    """
    lp = pulp.LpProblem("choice", pulp.LpMinimize)
    objective: dict[pulp.LpVariable, float] = {}
    nodes = _add_nodes(lp, core)
    scale, constant = _scale(core), core.constant
    for node in sorted(core.costs):
        least = float(core.costs[node].min())
        constant += least
        for variable, cost in zip(nodes[node], core.costs[node] - least, strict=True):
            objective[variable] = cost / scale
    for node in sorted(core.edges):
        for other in sorted(core.edges[node]):
            if node < other:
                matrix = core.edges[node][other]
                least = float(matrix.min())
                constant += least
                shifted = (matrix - least) / scale
                objective |= _add_edge(lp, f"{node}_{other}", nodes[node], nodes[other], shifted)
    slacks, units = _add_capacities(lp, core, nodes, shrink=shrink, elastic=elastic)
    if elastic:
        largest = max(units, default=1.0)
        objective = {
            slack: unit / largest for slack, unit in zip(slacks, units, strict=True) if unit > 0
        }
        scale, constant = largest, 0.0
    lp.setObjective(pulp.LpAffineExpression(objective))
    return ChoiceModel(
        lp=lp, nodes=nodes, slacks=slacks, units=units, scale=scale, constant=constant
    )


def _scale(core: Core) -> float:
    """The largest finite spread of any node's or edge's costs."""
    arrays = [*core.costs.values()]
    arrays += [m for around in core.edges.values() for m in around.values()]
    spreads = [float(np.max(a, where=np.isfinite(a), initial=-np.inf) - a.min()) for a in arrays]
    return max([s for s in spreads if s > 0], default=1.0)


def _add_nodes(lp: pulp.LpProblem, core: Core) -> dict[int, list[pulp.LpVariable]]:
    nodes = {}
    for node in sorted(core.costs):
        nodes[node] = [
            lp.add_variable(f"x_{node}_{option}", 0, 1, cat=pulp.LpInteger)
            for option in core.options[node]
        ]
        _add_row(lp, f"one_{node}", dict.fromkeys(nodes[node], 1.0), pulp.LpConstraintEQ, 1.0)
    return nodes


def _add_edge(
    lp: pulp.LpProblem,
    name: str,
    sources: list[pulp.LpVariable],
    sinks: list[pulp.LpVariable],
    cost: Array,
) -> dict[pulp.LpVariable, float]:
    """Add the flow of one edge; returns its cost per variable."""
    costs: dict[pulp.LpVariable, float] = {}
    rows: list[dict[pulp.LpVariable, float]] = [{x: -1.0} for x in sources]
    columns: list[dict[pulp.LpVariable, float]] = [{x: -1.0} for x in sinks]
    for i, j in np.argwhere(np.isfinite(cost)):
        flow = lp.add_variable(f"e_{name}_{i}_{j}", 0)
        costs[flow] = float(cost[i, j])
        rows[i][flow] = 1.0
        columns[j][flow] = 1.0
    for side, sums in (("r", rows), ("c", columns)):
        for index, terms in enumerate(sums):
            _add_row(lp, f"{side}_{name}_{index}", terms, pulp.LpConstraintEQ, 0.0)
    return costs


def _add_capacities(
    lp: pulp.LpProblem,
    core: Core,
    nodes: dict[int, list[pulp.LpVariable]],
    *,
    shrink: float,
    elastic: bool,
) -> tuple[list[pulp.LpVariable], list[float]]:
    slacks: list[pulp.LpVariable] = []
    units: list[float] = []
    for index, capacity in enumerate(core.capacities):
        unit = max([capacity.scale, *(float(u.max()) for u in capacity.usage.values())]) or 1.0
        terms = {
            variable: float(used) / unit
            for node, usage in capacity.usage.items()
            for variable, used in zip(nodes[node], usage, strict=True)
            if used != 0.0
        }
        if elastic:
            slacks.append(lp.add_variable(f"s_{index}", 0))
            units.append(unit)
            terms[slacks[-1]] = -1.0
        limit = (capacity.limit - shrink * capacity.scale) / unit
        _add_row(lp, f"cap_{index}", terms, pulp.LpConstraintLE, limit)
    return slacks, units


def _add_row(
    lp: pulp.LpProblem, name: str, terms: dict[pulp.LpVariable, float], sense: int, rhs: float
) -> None:
    lp.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(terms), sense, name, rhs))
