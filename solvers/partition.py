"""A chain cut into stages, per-stage capacity, bottleneck plus sum: the pipeline ILP.

`solve_partition` bounds the price of every run of blocks at once, finds the best partition for
those bounds, makes the runs it uses exact, and repeats: the first best partition of exact runs is
optimal. After a few rounds it prices every run that a better partition might still use, and
searches once more. `method="ilp"` (or `certify`) then hands the runs left to an engine, which
proves the objective independently.

The ranks of a long chain are filled with its blocks before all that (`partition_filled`), which
will do where it comes close to what is known.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from solvers.backends import Backend, get_backend
from solvers.partition_bound import lower_bound
from solvers.partition_dp import ArcCosts, Path
from solvers.partition_even import is_long
from solvers.partition_filled import filled
from solvers.partition_graph import ArcGraph, chain_graph
from solvers.partition_ilp import solve_ilp
from solvers.partition_pricing import OutOfTime
from solvers.partition_problem import BlockOption, PartitionProblem, PartitionSolution
from solvers.partition_ranks import rank_graphs
from solvers.partition_shared import least_shortfall, parts, shared_bound
from solvers.partition_spread import spread
from solvers.partition_trials import best_of_all, can_try_all, least_lacking
from solvers.solution import Conflict, Status, label, relative_gap

__all__ = [
    "BlockOption",
    "PartitionProblem",
    "PartitionSolution",
    "lower_bound",
    "solve_partition",
]

Mask = NDArray[np.bool_]

METHODS = ("ilp", "dp")
_LAZY_ROUNDS = 4
_SPLIT_ROUNDS = 16
_SPLIT_CLOSE = 2e-3
"""Gap up to which ranks are priced whose longest stage counts, which never are priced exactly."""

_MANY = 256
"""Places for a cut from which on a partition that is `_CLOSE` to the best will do, for which more
rounds are made: there are as many that good as it takes long to tell which is the best."""
_MANY_ROUNDS = 24
_CLOSE = 3e-4
_FILLED_CLOSE = 0.1
"""The same of ranks that are filled, where it is known how close that is to what can be: a closer
look takes a thousand times as long and seldom finds better."""


def solve_partition(
    problem: PartitionProblem,
    *,
    method: str = "ilp",
    certify: bool = False,
    backend: str = "highs",
    time_limit_s: float = 60.0,
    gap: float = 1e-6,
    cutoff: float = math.inf,
    known: float = -math.inf,
) -> PartitionSolution:
    """The fastest partition that fits.

    Both methods are exact. "dp" is the dynamic program alone, for solving many problems fast;
    "ilp", or `certify`, has an engine prove its answer. Status: OPTIMAL (proven to within `gap`),
    FEASIBLE (time was up), TIME_LIMIT (nothing found; `bound` holds) or INFEASIBLE, with the
    bytes that stages lack at the least. Where stages share ranks both methods are the same, and
    exact unless the classes of the chain change so often that neither the ways to cut between them
    (`partition_ranks`) nor all partitions can be gone through: then FEASIBLE, or TIME_LIMIT, with a
    bound that is proven; and so where a rank's longest stage counts for itself, and in long chains,
    unless an engine is to prove the answer. A bound of `cutoff` or more ends their search; what is
    `known` is a bound that holds. Raises ValueError for an unknown method and `BackendUnavailable`.
    """
    if method not in METHODS:
        raise ValueError(f"method: expected one of {', '.join(METHODS)}, found {method!r}")
    deadline = time.perf_counter() + time_limit_s
    engine = get_backend(backend) if method == "ilp" or certify else None
    long = engine is None and is_long(problem)
    enough = cutoff if long or problem.shares_ranks else math.inf
    run = _Run(problem=problem, gap=gap, deadline=deadline, cutoff=enough)
    if len(problem.blocks) < problem.num_stages * problem.min_blocks:
        lacking = float(problem.num_stages * problem.min_blocks - len(problem.blocks))
        return run.infeasible(conflict=(("blocks", lacking),))
    if long and _fill(run, known):
        return run.solution(bound=run.relaxed_bound, engine="filling")
    graphs = rank_graphs(problem.scaled(), deadline) if long or problem.shares_ranks else []
    if graphs:
        solution = _by_rank(run, graphs)
        done = solution.status in (Status.OPTIMAL, Status.INFEASIBLE) or solution.bound >= cutoff
        return solution if done or not can_try_all(problem) else _tried(run)
    if problem.shares_ranks:
        return _tried(run) if can_try_all(problem) else _shared(run)
    run.cutoff = math.inf  # of stages of a chain the best is found, whatever it is
    graph = chain_graph(problem.scaled(), run.deadline)
    try:
        arcs = _dynamic_program(run, graph)
        if arcs is None:
            return _explain_infeasible(run, [graph])
        if engine is not None and not run.is_close(graph):
            return _certify(run, graph, arcs, engine)
    except OutOfTime:
        return run.solution(bound=run.relaxed_bound, engine="dp")
    solution = run.solution(bound=run.relaxed_bound, engine="dp")
    proven = solution.status is Status.OPTIMAL
    return solution if proven or not can_try_all(problem) else _tried(run)


@dataclass(kw_only=True, slots=True, eq=False)
class _Run:
    """One call of `solve_partition`: incumbent and bound so far."""

    problem: PartitionProblem
    gap: float
    deadline: float
    cutoff: float
    started: float = field(default_factory=time.perf_counter)
    relaxed_bound: float = -math.inf
    incumbent: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    objective: float = math.inf

    def offer(self, cuts: tuple[int, ...], options: tuple[int, ...]) -> None:
        """Keep a partition if it beats the incumbent."""
        objective = self.problem.objective(self.problem.use(cuts, options))
        if objective < self.objective:
            self.objective, self.incumbent = objective, (cuts, options)

    def even_out(self) -> None:
        """Spread the incumbent's blocks over the stages of their ranks, at the same objective."""
        if self.incumbent is None:
            return
        even = spread(self.problem, self.incumbent)
        objective = self.problem.objective(self.problem.use(*even))
        if label(objective, self.objective, 0.0) is Status.OPTIMAL:
            self.objective, self.incumbent = objective, even

    @property
    def bound_within_gap(self) -> float:
        """The objective from which the bound proves an answer."""
        return self.relaxed_bound * (1 + self.gap)

    def is_close(self, graph: ArcGraph) -> bool:
        """Whether the incumbent is as near the best as is asked for where cuts have many places, or
        the longest stages of ranks count."""
        many = graph.search.length >= _MANY
        close = _SPLIT_CLOSE if graph.table.counts else _CLOSE
        return (many or bool(graph.table.counts)) and self.objective <= self.relaxed_bound * (
            1 + close
        )

    @property
    def enough(self) -> float:
        """A bound from which no partition is looked for."""
        return min(self.objective, self.cutoff)

    @property
    def is_settled(self) -> bool:
        """Whether nothing that is looked for is left."""
        return self.relaxed_bound >= self.enough

    def left_s(self) -> float:
        return self.deadline - time.perf_counter()

    def solution(self, *, bound: float, engine: str) -> PartitionSolution:
        """The incumbent, labelled by the bound; TIME_LIMIT without one."""
        if self.incumbent is None:
            return self._result(Status.TIME_LIMIT, bound=bound, engine=engine)
        cuts, options = self.incumbent
        use = self.problem.use(cuts, options)
        bound = min(bound, self.objective)
        return self._result(
            label(self.objective, bound, self.gap),
            bound=bound,
            engine=engine,
            cuts=cuts,
            options=options,
            stage_time_s=use.time_s,
            stage_bytes=use.used_bytes,
        )

    def infeasible(
        self,
        conflict: Conflict,
        cuts: tuple[int, ...] = (),
        stage_bytes: tuple[float, ...] = (),
    ) -> PartitionSolution:
        """An infeasible result; `cuts` and `stage_bytes` of the partition that lacks least."""
        return self._result(
            Status.INFEASIBLE,
            bound=math.inf,
            engine="dp",
            conflict=conflict,
            cuts=cuts,
            stage_bytes=stage_bytes,
        )

    def _result(
        self,
        status: Status,
        *,
        bound: float,
        engine: str,
        conflict: Conflict = (),
        cuts: tuple[int, ...] = (),
        options: tuple[int, ...] = (),
        stage_time_s: tuple[float, ...] = (),
        stage_bytes: tuple[float, ...] = (),
    ) -> PartitionSolution:
        return PartitionSolution(
            status=status,
            objective=self.objective,
            bound=bound,
            gap=relative_gap(self.objective, bound),
            engine=engine,
            solve_s=time.perf_counter() - self.started,
            conflict=conflict,
            cuts=cuts,
            options=options,
            stage_time_s=stage_time_s,
            stage_bytes=stage_bytes,
        )


def _fill(run: _Run, known: float) -> bool:
    """Offer ranks of a long chain that are filled one block after the other; whether that is as
    near to what is known as is asked for."""
    found = filled(run.problem)
    if found is None:
        return False
    run.offer(*found)
    run.relaxed_bound = max(run.relaxed_bound, known)
    close = _FILLED_CLOSE if len(run.problem.blocks) >= _MANY else _SPLIT_CLOSE
    return run.objective <= known * (1 + close)


def _dynamic_program(run: _Run, graph: ArcGraph) -> ArcCosts | None:
    """Solve exactly, into `run`, and return the arcs as they are priced then; None where there is
    no partition, or none that beats the incumbent. Raises OutOfTime, with `run` up to date."""
    table, search = graph.table, graph.search
    _narrow(run, graph)
    arcs = table.arcs()
    path = search.search(arcs)
    for _ in range(_rounds(graph)):
        if path is None:
            run.relaxed_bound = math.inf
            return None
        run.relaxed_bound = path.objective
        if run.is_settled or run.is_close(graph):
            return arcs
        changed = table.price(table.arcs_of(path))
        if not changed and table.is_real(path):
            _offer(run, graph, path)
            return arcs
        _offer(run, graph, _first_ways(path))
        if not changed:
            _offer_real(run, graph)
        if run.is_close(graph):
            return arcs
        if not changed:
            break
        arcs = table.arcs()
        path = search.search(arcs)
    if table.counts:
        run.relaxed_bound = math.inf if path is None else path.objective
        _offer_real(run, graph)
        return arcs
    arcs = _price_survivors(run, graph, arcs)
    path = search.search(arcs)
    if path is None:
        run.relaxed_bound = run.enough
        return None
    run.relaxed_bound = path.objective
    if table.is_real(path):
        _offer(run, graph, path)
    else:
        _offer_real(run, graph, [place.allowed for place in arcs.places])
    return arcs


def _rounds(graph: ArcGraph) -> int:
    """How often the best path is searched and its arcs priced."""
    if graph.table.counts:
        return _SPLIT_ROUNDS
    return _MANY_ROUNDS if graph.search.length >= _MANY else _LAZY_ROUNDS


def _narrow(run: _Run, graph: ArcGraph) -> None:
    """In a long chain, offer arcs of about equal time, and leave out those that are too long for
    any partition as good."""
    if graph.even:
        path = Path(positions=graph.even, ways=(0,) * (len(graph.even) - 1), objective=math.inf)
        graph.table.price(graph.table.arcs_of(path))
        _offer(run, graph, path)
        if run.incumbent is not None:
            graph.search.narrow(graph.longest(run.objective))


def _is_cut_off(run: _Run, graph: ArcGraph) -> bool:
    """Whether only partitions below the cutoff are looked at: where cuts have many places that is
    quicker than to find one first."""
    return graph.search.length >= _MANY and math.isfinite(run.cutoff)


def _narrowed(run: _Run, graph: ArcGraph) -> bool:
    """The same before the first search; False where no partition is below the cutoff."""
    if _is_cut_off(run, graph):
        return graph.search.narrow(graph.longest(run.cutoff))
    _narrow(run, graph)
    return True


def _tried(run: _Run) -> PartitionSolution:
    """The least of all partitions, of which there are few."""
    found = best_of_all(run.problem)
    if found is None:
        cuts, options = least_lacking(run.problem)
        use = run.problem.use(cuts, options)
        lacking = tuple((f"stage {k}", short) for k, short in run.problem.lacking(use))
        return run.infeasible(lacking, cuts, use.used_bytes)
    run.offer(*found)
    return run.solution(bound=run.objective, engine="trials")


def _by_rank(run: _Run, graphs: list[ArcGraph]) -> PartitionSolution:
    """Stages that share ranks, rank by rank: the best of all ways to lay the cuts out."""
    left = run.cutoff if _is_cut_off(run, graphs[0]) else math.inf
    try:
        some = [graph for graph in graphs if _narrowed(run, graph)]
        paths = [graph.search.search(graph.table.arcs()) for graph in some]
    except OutOfTime:
        return run.solution(bound=run.relaxed_bound, engine="dp")
    bounds = [(path.objective, i) for i, path in enumerate(paths) if path is not None]
    for bound, index in sorted(bounds):
        own = dataclasses.replace(run, relaxed_bound=bound)
        if not own.is_settled:
            with contextlib.suppress(OutOfTime):  # what is left then is bounded all the same
                _dynamic_program(own, some[index])
        run.objective, run.incumbent = own.objective, own.incumbent
        left = min(left, own.relaxed_bound)
    if run.incumbent is None and math.isinf(left):
        return _explain_infeasible(run, graphs)
    if run.objective < run.cutoff:
        run.even_out()
    return run.solution(bound=left, engine="dp")


def _shared(run: _Run) -> PartitionSolution:
    """Stages that share ranks: partitions that fit, and a bound on all; see `partition_shared`."""
    problem, bounded = run.problem, False
    for part in parts(problem):
        if run.left_s() <= 0 or (run.incumbent and run.objective <= run.bound_within_gap):
            break
        if not part.relaxes and not bounded:
            run.relaxed_bound, bounded = max(run.relaxed_bound, shared_bound(problem)), True
        if run.relaxed_bound >= run.cutoff:
            return run.solution(bound=run.relaxed_bound, engine="dp")
        found = solve_partition(part.problem, method="dp", time_limit_s=max(run.left_s(), 0.01))
        if part.relaxes and found.status is Status.INFEASIBLE:
            return run.infeasible(found.conflict, found.cuts, found.stage_bytes)
        if part.relaxes:
            run.relaxed_bound = max(run.relaxed_bound, found.bound)
        if found.status.has_solution:
            run.offer(found.cuts, part.options(found.options))
    if run.incumbent is None:
        return _lacking(run)
    run.even_out()
    return run.solution(bound=run.relaxed_bound, engine="dp")


def _lacking(run: _Run) -> PartitionSolution:
    """Infeasible where the least that is needed is too much; else nothing was found."""
    short = least_shortfall(run.problem)
    if short.conflict:
        return run.infeasible(short.conflict, short.cuts, short.stage_bytes)
    return run.solution(bound=run.relaxed_bound, engine="dp")


def _first_ways(path: Path) -> Path:
    return Path(positions=path.positions, ways=(0,) * len(path.ways), objective=path.objective)


def _offer(run: _Run, graph: ArcGraph, path: Path) -> None:
    """Keep the partition of a path if its stages have real ways and it beats the incumbent."""
    if graph.table.is_real(path):
        run.offer(*graph.partition(path.positions, graph.table.ways(path)))


def _offer_real(run: _Run, graph: ArcGraph, allowed: list[Mask] | None = None) -> None:
    """Keep the best partition by ways that are known to exist, if it beats the incumbent."""
    path = graph.search.search(graph.table.arcs(allowed, real=True))
    if path is not None:
        _offer(run, graph, path)


def _price_survivors(run: _Run, graph: ArcGraph, arcs: ArcCosts) -> ArcCosts:
    """Make exact whatever may beat the incumbent, and drop the rest."""
    table, search = graph.table, graph.search
    kept = table.survivors(search, arcs, run.enough)
    used = [np.zeros_like(place.allowed) for place in table.places]
    for stage, kind in enumerate(search.kind_of_stage):
        used[kind] |= kept[stage]
    for kind, (place, mask) in enumerate(zip(table.places, used, strict=True)):
        table.price((kind, composition) for composition in place.only(mask).compositions().tolist())
    return table.arcs(used)


def _certify(run: _Run, graph: ArcGraph, arcs: ArcCosts, engine: Backend) -> PartitionSolution:
    """Prove the incumbent by the ILP over the arcs that may still matter."""
    arcs = _price_survivors(run, graph, arcs)
    kept = graph.table.survivors(graph.search, arcs, run.objective)
    result = solve_ilp(
        graph.search, arcs, kept, run.objective, engine, time_limit_s=run.left_s(), gap=run.gap / 2
    )
    if result.path is not None:
        _offer(run, graph, result.path)
    proven = result.status is not Status.INFEASIBLE
    bound = max(run.relaxed_bound, result.bound if proven else -math.inf)
    return run.solution(bound=bound, engine=engine.name)


def _explain_infeasible(run: _Run, graphs: list[ArcGraph]) -> PartitionSolution:
    """The partition whose ranks lack the fewest bytes in total, at the least bytes of each."""
    cuts, options = min((graph.least_lacking() for graph in graphs), key=lambda f: f[0])[1]
    use = run.problem.use(cuts, options)
    conflict = tuple((f"stage {k}", short) for k, short in run.problem.lacking(use))
    return run.infeasible(conflict, cuts, use.used_bytes)
