"""One option per node, node and edge costs, capacities over live sets: the sharding ILP.

`solve_choice` reduces the problem exactly (`choice_presolve`), which alone solves most graphs
without a binding capacity. Prices on the capacities then give a bound and a solution
(`choice_lagrangian`); where these do not meet the wanted gap, what is left goes to an engine in
flow form (`choice_ilp`), first its linear relaxation, which is taken where it is integral.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import numpy as np

from solvers.backends import Backend, get_backend
from solvers.choice_core import Core, Infeasible, build_core
from solvers.choice_ilp import ChoiceModel, build_model
from solvers.choice_lagrangian import Relaxed, relax_capacities
from solvers.choice_presolve import reduce_core
from solvers.choice_problem import Capacity, ChoiceProblem, ChoiceSolution, Edge
from solvers.solution import Conflict, Status, fits, label, relative_gap

__all__ = ["Capacity", "ChoiceProblem", "ChoiceSolution", "Edge", "solve_choice"]

_SHRINK = 1e-6
_PRESOLVE = "presolve"
_PRICES = "prices"
_PRICES_SHARE = 0.5
_WORTH_ANOTHER = 0.8


def solve_choice(
    problem: ChoiceProblem,
    *,
    backend: str = "highs",
    time_limit_s: float = 60.0,
    gap: float = 1e-6,
    core: Core | None = None,
) -> ChoiceSolution:
    """The cheapest choice within every capacity, proven to within the relative `gap`. `core` is
    what is left of the problem where it is reduced in part already; it is used up.

    Status: OPTIMAL (gap met), FEASIBLE (time was up; `gap` says how far), TIME_LIMIT (nothing
    found; `bound` still holds) or INFEASIBLE, with the constraints in conflict. Raises
    `BackendUnavailable`. The same problem gives the same answer, whatever the order of its edges
    and capacities.
    """
    run = _Run(problem=problem, engine=get_backend(backend), gap=gap, limit_s=time_limit_s)
    core = build_core(problem) if core is None else core
    try:
        reduce_core(core)
    except Infeasible:
        return _infeasible(run)
    known = _price_capacities(run, core)
    if not core.costs:
        choices = core.choices({}, len(problem.node_costs))
        bound = min(problem.objective(choices), known.objective)
        engine = _PRICES if known.status.has_solution else _PRESOLVE
        return run.best(known, choices, bound=bound, engine=engine, integral=True)
    if known.status is Status.OPTIMAL:
        return known
    return _solve_core(run, core, known)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Run:
    """One call of `solve_choice`: what it solves, with what, since when."""

    problem: ChoiceProblem
    engine: Backend
    gap: float
    limit_s: float
    started: float = field(default_factory=time.perf_counter)

    def elapsed_s(self) -> float:
        return time.perf_counter() - self.started

    def left_s(self) -> float:
        return self.limit_s - self.elapsed_s()

    def solution(
        self,
        *,
        choices: tuple[int, ...] | None,
        bound: float,
        engine: str | None = None,
        num_variables: int = 0,
        integral: bool = False,
        status: Status | None = None,
        conflict: Conflict = (),
    ) -> ChoiceSolution:
        objective = math.inf if choices is None else self.problem.objective(choices)
        bound = bound if choices is None else min(bound, objective)
        return ChoiceSolution(
            status=label(objective, bound, self.gap) if status is None else status,
            objective=objective,
            bound=bound,
            gap=relative_gap(objective, bound),
            engine=engine or self.engine.name,
            solve_s=self.elapsed_s(),
            conflict=conflict,
            choices=choices,
            num_variables=num_variables,
            integral_relaxation=integral,
        )

    def best(
        self,
        known: ChoiceSolution,
        choices: tuple[int, ...] | None,
        *,
        bound: float,
        engine: str | None = None,
        num_variables: int = 0,
        integral: bool = False,
    ) -> ChoiceSolution:
        """The better of the known solution and `choices`, with a bound; TIME_LIMIT if neither."""
        if choices is None or self.problem.objective(choices) > known.objective:
            choices = known.choices
        return self.solution(
            choices=choices,
            bound=bound,
            engine=engine,
            num_variables=num_variables,
            integral=integral,
            status=Status.TIME_LIMIT if choices is None else None,
        )

    def within_capacities(self, choices: tuple[int, ...]) -> bool:
        return not self.shortfalls(choices)

    def shortfalls(self, choices: tuple[int, ...]) -> Conflict:
        """Capacities that `choices` exceed, and by how much; sorted by name."""
        exceeded = []
        for capacity in self.problem.capacities:
            usage = self.problem.usage(capacity, choices)
            if not fits(usage, capacity.limit):
                exceeded.append((capacity.name, usage - capacity.limit))
        return tuple(sorted(exceeded))


def _price_capacities(run: _Run, core: Core) -> ChoiceSolution:
    """Bound, and maybe solve, by pricing the capacities; shrinks the core by what that rules out.

    Whatever beats the solution returned is still in the core.
    """

    def objective(choices: tuple[int, ...]) -> float:
        fitting = run.within_capacities(choices)
        return run.problem.objective(choices) if fitting else math.inf

    known = run.solution(choices=None, bound=-math.inf, status=Status.TIME_LIMIT)
    deadline = run.started + _PRICES_SHARE * run.limit_s
    count = len(run.problem.node_costs)
    size = core.size()
    while core.capacities and core.costs and time.perf_counter() < deadline:
        relaxed = relax_capacities(
            core, count, objective, run.engine, deadline=deadline, gap=run.gap
        )
        if relaxed is None:
            break
        bound = max(relaxed.bound, known.bound)
        known = run.best(known, relaxed.choices, bound=bound, engine=_PRICES, integral=True)
        if known.status is Status.OPTIMAL:
            break
        if not _keep_useful(core, relaxed):
            known = run.best(known, None, bound=known.objective, engine=_PRICES, integral=True)
            break
        size, before = core.size(), size
        if size > _WORTH_ANOTHER * before:
            break
    return known


def _keep_useful(core: Core, relaxed: Relaxed) -> bool:
    """Drop the options that no better solution uses; False if none is left at all."""
    try:
        for node, options in sorted(relaxed.useful.items()):
            core.keep(node, np.flatnonzero(np.isin(core.options[node], options)))
        reduce_core(core)
    except Infeasible:
        return False
    return True


def _solve_core(run: _Run, core: Core, known: ChoiceSolution) -> ChoiceSolution:
    """The ILP of the core; the better of its solution and the one known."""
    exact = _solve_ilp(run, core)
    if exact.status is Status.INFEASIBLE:
        # whatever beats the known solution would have been in the core
        return run.best(known, None, bound=known.objective) if known.choices else exact
    bound = max(known.bound, min(exact.bound, known.objective))
    return run.best(
        known,
        exact.choices,
        bound=bound,
        num_variables=exact.num_variables,
        integral=exact.integral_relaxation,
    )


def _solve_ilp(run: _Run, core: Core) -> ChoiceSolution:
    """Relaxation, then the ILP; once more with limits a hair tighter if rounding exceeded one."""
    model = build_model(core)
    count = len(model.lp.variables())
    bound, integral = -math.inf, False
    relaxed = run.engine.solve(model.lp, time_limit_s=run.left_s(), gap=0.0, relax=True)
    if relaxed.status is Status.INFEASIBLE:
        return _infeasible(run)
    bound = model.constant + model.scale * relaxed.bound
    choices = None
    if relaxed.status is Status.OPTIMAL and model.integral():
        choices, integral = _decode(run, core, model), True
    for shrink in (0.0, _SHRINK):
        if choices is not None and run.within_capacities(choices):
            break
        integral = False
        if shrink:
            model = build_model(core, shrink=shrink)
        result = run.engine.solve(
            model.lp,
            time_limit_s=run.left_s(),
            gap=run.gap / 2,
            gap_abs=max(run.gap / 2 * abs(bound) / model.scale, 1e-9) if bound > -math.inf else 0.0,
        )
        if result.status is Status.INFEASIBLE:
            return _infeasible(run)
        if not shrink:
            bound = max(bound, model.constant + model.scale * result.bound)
        choices = _decode(run, core, model) if result.status.has_solution else None
    if choices is None or not run.within_capacities(choices):
        return run.solution(
            choices=None, bound=bound, num_variables=count, status=Status.TIME_LIMIT
        )
    return run.solution(choices=choices, bound=bound, num_variables=count, integral=integral)


def _decode(run: _Run, core: Core, model: ChoiceModel) -> tuple[int, ...]:
    return core.choices(model.choices(), len(run.problem.node_costs))


def _infeasible(run: _Run) -> ChoiceSolution:
    """What conflicts: the fewest forbidden options and pairs, else the least lack of capacity."""
    conflict = _forbidden_conflict(run.problem)
    if not conflict:
        nearest = _least_excess(run)
        if nearest is None:
            conflict = _certain_excess(run.problem)
        elif run.within_capacities(nearest):
            # only the engine's tolerance stood against this one
            return run.solution(choices=nearest, bound=-math.inf)
        else:
            conflict = run.shortfalls(nearest)
    return run.solution(choices=None, bound=math.inf, status=Status.INFEASIBLE, conflict=conflict)


def _forbidden_conflict(problem: ChoiceProblem) -> Conflict:
    """The fewest forbidden options and pairs that must be allowed, each counted as 1."""
    penalties = ChoiceProblem(
        node_costs=tuple(np.isinf(cost).astype(float) for cost in problem.node_costs),
        edges=tuple(
            Edge(src=e.src, dst=e.dst, cost=np.isinf(e.cost).astype(float)) for e in problem.edges
        ),
    )
    solution = solve_choice(penalties)
    choices = solution.choices
    if choices is None:
        return ()
    needed = {f"node {n}" for n, c in enumerate(penalties.node_costs) if c[choices[n]]}
    needed |= {
        f"edge {min(e.src, e.dst)}-{max(e.src, e.dst)}"
        for e in penalties.edges
        if e.cost[choices[e.src], choices[e.dst]]
    }
    return tuple((name, 1.0) for name in sorted(needed))


def _least_excess(run: _Run) -> tuple[int, ...] | None:
    """A choice that exceeds the capacities by the least total, or None if time was up."""
    problem = run.problem
    soft = ChoiceProblem(
        node_costs=tuple(np.where(np.isinf(c), np.inf, 0.0) for c in problem.node_costs),
        edges=tuple(
            Edge(src=e.src, dst=e.dst, cost=np.where(np.isinf(e.cost), np.inf, 0.0))
            for e in problem.edges
        ),
        capacities=problem.capacities,
    )
    core = build_core(soft)
    reduce_core(core, soft=True)
    if not core.costs:
        return core.choices({}, len(problem.node_costs))
    model = build_model(core, elastic=True)
    result = run.engine.solve(model.lp, time_limit_s=max(run.left_s(), 1.0), gap=run.gap)
    return _decode(run, core, model) if result.status.has_solution else None


def _certain_excess(problem: ChoiceProblem) -> Conflict:
    """Per capacity, how far even the least usage of every member exceeds it; all if none does."""
    least = {
        c.name: sum(float(u.min()) for _, u in c.members) - c.limit for c in problem.capacities
    }
    certain = {name: value for name, value in least.items() if value > 0}
    return tuple(sorted((certain or dict.fromkeys(least, 0.0)).items()))
