"""The pipeline ILP: one unit of flow through the cut positions, with a bottleneck.

x[k, i, j, p] says that stage k runs blocks [i, j) in its way p, at a price that already minds
memory; b is the bottleneck, y the longest sync. Costs are divided by the incumbent's objective.

    minimise    sum T x + weight b + y
    subject to  x into position (k, i) = x out of it             (`_add_flow`)
                sum over the arcs of stage k of T x <= b         every k   (`_add_maxima`)
                sum over the arcs of stage k of Y x <= y         every k   (`_add_maxima`)

Only arcs that a solution as good as the incumbent may use are in the model, which is proved arc
by arc (`PriceTable.survivors`), so its optimum is that of the whole problem.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import pulp
from numpy.typing import NDArray

from solvers.backends import Backend
from solvers.partition_dp import ArcCosts, ChainSearch, Path
from solvers.solution import Status

_Terms = dict[pulp.LpVariable, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class IlpResult:
    """The path found, if any, and a lower bound that holds for the whole problem."""

    status: Status
    path: Path | None
    bound: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Arc:
    stage: int
    start: int
    end: int
    way: int
    time: float
    top: float
    sync: float
    used: pulp.LpVariable


def solve_ilp(
    search: ChainSearch,
    arcs: ArcCosts,
    kept: list[NDArray[np.bool_]],
    incumbent: float,
    engine: Backend,
    *,
    time_limit_s: float,
    gap: float,
) -> IlpResult:
    """Minimise over the kept arcs of every stage."""
    lp = pulp.LpProblem("partition", pulp.LpMinimize)
    scale = incumbent or 1.0
    variables = _add_arcs(lp, search, arcs, kept, scale)
    _add_flow(lp, variables, search)
    floor = search.least_bottleneck(arcs.least_tops())
    bottleneck = lp.add_variable("bottleneck", floor / scale)
    sync = lp.add_variable("sync", 0)
    _add_maxima(lp, variables, bottleneck, sync)
    objective: _Terms = {arc.used: arc.time for arc in variables}
    objective[bottleneck] = float(search.weight)
    objective[sync] = 1.0
    lp.setObjective(pulp.LpAffineExpression(objective))
    result = engine.solve(lp, time_limit_s=time_limit_s, gap=gap)
    path = _read(variables, search) if result.status.has_solution else None
    return IlpResult(status=result.status, path=path, bound=min(result.bound * scale, incumbent))


def _add_arcs(
    lp: pulp.LpProblem,
    search: ChainSearch,
    arcs: ArcCosts,
    kept: list[NDArray[np.bool_]],
    scale: float,
) -> list[_Arc]:
    variables = []
    for stage, kind in enumerate(search.kind_of_stage):
        for start, end in np.argwhere(kept[stage]):
            composition = arcs.places[kind].composition(start, end)
            cuts = np.array(arcs.places[kind].cut_s(start, end))
            prices = arcs.time[kind][:, composition] + cuts
            for way in np.flatnonzero(np.isfinite(prices)):
                name = f"x_{stage}_{start}_{end}_{way}"
                variables.append(
                    _Arc(
                        stage=stage,
                        start=int(start),
                        end=int(end),
                        way=int(way),
                        time=float(prices[way]) / scale,
                        top=float(arcs.top(prices[way], cuts)) / scale,
                        sync=float(arcs.sync[kind][way, composition]) / scale,
                        used=lp.add_variable(name, 0, 1, cat=pulp.LpInteger),
                    )
                )
    return variables


def _add_flow(lp: pulp.LpProblem, variables: list[_Arc], search: ChainSearch) -> None:
    balance: dict[tuple[int, int], _Terms] = defaultdict(dict)
    for arc in variables:
        balance[arc.stage, arc.start][arc.used] = 1.0
        balance[arc.stage + 1, arc.end][arc.used] = -1.0
    last = len(search.kind_of_stage)
    for (stage, position), terms in sorted(balance.items()):
        supply = {0: 1.0, last: -1.0}.get(stage, 0.0)
        _add_row(lp, f"flow_{stage}_{position}", terms, pulp.LpConstraintEQ, supply)


def _add_maxima(
    lp: pulp.LpProblem, variables: list[_Arc], bottleneck: pulp.LpVariable, sync: pulp.LpVariable
) -> None:
    times: dict[int, _Terms] = defaultdict(lambda: {bottleneck: -1.0})
    syncs: dict[int, _Terms] = defaultdict(lambda: {sync: -1.0})
    for arc in variables:
        times[arc.stage][arc.used] = arc.top
        syncs[arc.stage][arc.used] = arc.sync
    for stage in sorted(times):
        _add_row(lp, f"time_{stage}", times[stage], pulp.LpConstraintLE, 0.0)
        _add_row(lp, f"sync_{stage}", syncs[stage], pulp.LpConstraintLE, 0.0)


def _add_row(lp: pulp.LpProblem, name: str, terms: _Terms, sense: int, rhs: float) -> None:
    lp.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(terms), sense, name, rhs))


def _read(variables: list[_Arc], search: ChainSearch) -> Path:
    used = sorted((a for a in variables if a.used.varValue > 0.5), key=lambda a: a.stage)
    value = sum(a.time for a in used) + search.weight * max(a.top for a in used)
    return Path(
        positions=(0, *(a.end for a in used)),
        ways=tuple(a.way for a in used),
        objective=value + max(a.sync for a in used),
    )
