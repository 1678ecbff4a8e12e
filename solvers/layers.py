"""The best of many problems of equal layers, exact: see `LayersProblem`.

A stage that runs n layers costs a pair (S, R), its times without and with gradient sync. With D_k
the time of the stages up to k and of the sync that they do not hide, the tail unfolds to

    D_k = max(D_(k-1) + S_k, R_k),    D before the first stage = 0,

which only grows with D_(k-1): the least D under a limit on S is a shortest path over the numbers of
layers, and walking the limit down gives the least of D + (M - 1) * max S (`_least`).

First a pair is bounded from below, by the convex hull of time over bytes. The problem of the lowest
bound has the stages on its best path priced exactly (`stage_ways`), and is bounded again. The first
problem whose best path is exact and whose bound is the lowest of all is the answer: best first
search, so that most problems are never opened.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solvers.layers_problem import Counts, LayersProblem, LayersSolution
from solvers.layers_ways import OutOfTime, Way, hull, stage_ways
from solvers.solution import CAPACITY_TOLERANCE, Status, label, relative_gap

Array = NDArray[np.float64]

_ROUNDING = 1e-12
_PROVEN = 1e-9


def solve_layers(
    problems: Sequence[LayersProblem], *, time_limit_s: float = 60.0
) -> LayersSolution:
    """The least objective of all problems, the first of equals.

    OPTIMAL is proven over all of them; FEASIBLE and TIME_LIMIT (nothing found) come with a bound
    where time was up; INFEASIBLE where none has a solution. Raises ValueError without problems.
    """
    if not problems:
        raise ValueError("problems: expected at least one, found none")
    started = time.perf_counter()
    deadline = started + time_limit_s
    open_problems = [(pooled_bound(problem), i) for i, problem in enumerate(problems)]
    heapq.heapify(open_problems)
    searches: dict[int, _Search] = {}
    best, best_index, best_counts = math.inf, -1, Counts()
    while math.isfinite(open_problems[0][0]) and open_problems[0][0] < best * (1 - _PROVEN):
        bound, index = open_problems[0]
        if index not in searches:
            searches[index] = _Search(problems[index], deadline)
        search = searches[index]
        try:
            bound = max(bound, search.refine())
        except OutOfTime:
            break
        counts = search.counts()
        value = math.inf if counts is None else problems[index].objective(counts)
        if counts is not None and value < best:
            best, best_index, best_counts = value, index, counts
        heapq.heapreplace(open_problems, (value if search.exact else bound, index))
    bound = min(open_problems[0][0], best)
    solved = label(best, bound, _PROVEN) if best_counts else Status.TIME_LIMIT
    return LayersSolution(
        status=Status.INFEASIBLE if math.isinf(bound) else solved,
        objective=best,
        bound=bound,
        gap=relative_gap(best, bound),
        engine="layers",
        solve_s=time.perf_counter() - started,
        problem=best_index,
        counts=best_counts,
    )


def pooled_bound(problem: LayersProblem) -> float:
    """A lower bound in a few array operations: all stages' bytes are one, and all take as long."""
    used, free = np.array(problem.option_bytes), _allowed(problem)
    times = np.array(problem.time_s)
    least = used.min(axis=1)
    most = np.full(len(free), np.inf)
    np.divide(free * (1 + _ROUNDING), least, out=most, where=least > 0)
    enough = np.floor(most).sum() >= problem.num_layers >= problem.num_stages
    if (least > free).any() or not enough:
        return math.inf
    prices = {0.0}
    for row in {problem.option_bytes[0], problem.option_bytes[-1]}:
        nbytes, seconds = hull(np.array(row), times)
        prices |= set((-np.diff(seconds) / np.diff(nbytes)).tolist())
    price = np.array(sorted(prices))
    layer = (times + price[:, None, None] * used).min(axis=(1, 2))
    work = float((problem.num_layers * layer - price * free.sum()).max())
    total = max(0.0, work) + math.fsum(problem.end_s)
    weight = 1 + (problem.num_micro_batches - 1) / problem.num_stages
    return total * weight * (1 - _ROUNDING)


def _allowed(problem: LayersProblem) -> Array:
    free = np.array(problem.free_bytes)
    return free + CAPACITY_TOLERANCE * np.abs(free)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Path:
    """The number of layers of every stage, the way it runs them, and the objective."""

    layers: tuple[int, ...]
    ways: tuple[int, ...]
    objective: float


class _Search:
    """One problem: what is known of the pairs (S, R), and the best path for them."""

    def __init__(self, problem: LayersProblem, deadline: float) -> None:
        self.problem, self.deadline = problem, deadline
        self.free = _allowed(problem)
        self.times, self.synced = np.array(problem.time_s), np.array(problem.synced_s)
        self.used = [np.array(row) for row in problem.option_bytes]
        self.priced: dict[tuple[int, int], list[Way]] = {}
        self.path: _Path | None = None
        most = problem.num_layers
        position, taken = np.arange(most + 1)[:, None], np.arange(most + 1)
        self.before = np.where(position >= taken, position - taken, most + 1)
        bounds = [self._bounds(stage) for stage in range(problem.num_stages)]
        self.stage_s = [own[None, :] for own, _ in bounds]
        self.synced_s = [own[None, :] for _, own in bounds]

    @property
    def exact(self) -> bool:
        """Whether the best path, if there is one, runs every stage in a way that exists."""
        return self.path is None or all(key in self.priced for key in enumerate(self.path.layers))

    def refine(self) -> float:
        """Price what the best path uses, find the best path again: a lower bound; inf if none."""
        for stage, layers in enumerate(self.path.layers if self.path else ()):
            if (stage, layers) not in self.priced:
                self._price(stage, layers)
        self.path = self._least()
        return math.inf if self.path is None else self.path.objective * (1 - _ROUNDING)

    def counts(self) -> Counts | None:
        """How the best path runs its layers; None where that is not known."""
        if self.path is None or not self.exact:
            return None
        pairs = zip(enumerate(self.path.layers), self.path.ways, strict=True)
        return tuple(self.priced[key][way].counts for key, way in pairs)

    def _bounds(self, stage: int) -> tuple[Array, Array]:
        """Lower bounds on S and R of a stage by its number of layers; inf where none fit."""
        layers = np.arange(self.problem.num_layers + 1)
        fits = (layers > 0) & (layers * self.used[stage].min() <= self.free[stage])
        share = self.free[stage] / np.maximum(layers, 1)
        work, synced = (
            layers * np.interp(share, *hull(self.used[stage], seconds)) * (1 - _ROUNDING)
            for seconds in (self.times, self.synced)
        )
        end = self.problem.end_s[stage]
        return np.where(fits, work + end, np.inf), np.where(fits, synced, np.inf)

    def _price(self, stage: int, layers: int) -> None:
        """Make the pairs of a stage with so many layers exact."""
        ways = stage_ways(
            self.times,
            self.synced,
            self.used[stage],
            layers,
            self.free[stage],
            deadline=self.deadline,
        )
        self.priced[stage, layers] = ways
        more = len(ways) - len(self.stage_s[stage])
        for table in (self.stage_s, self.synced_s):
            if more > 0:
                table[stage] = np.pad(table[stage], ((0, more), (0, 0)), constant_values=np.inf)
            table[stage] = table[stage].copy()
            table[stage][:, layers] = np.inf
        end = self.problem.end_s[stage]
        for index, way in enumerate(ways):
            self.stage_s[stage][index, layers] = way.time_s + end
            self.synced_s[stage][index, layers] = way.synced_s

    def _least(self) -> _Path | None:
        """The path of least D + (M - 1) * max S, for the pairs as they are known."""
        weight = self.problem.num_micro_batches - 1
        floor = self._least_longest()
        best: _Path | None = None
        value = limit = math.inf
        while limit >= floor and math.isfinite(floor):
            if time.perf_counter() > self.deadline:
                raise OutOfTime
            found = self._shortest(limit)
            if found is None:
                break
            total, path = found
            pairs = enumerate(zip(path.layers, path.ways, strict=True))
            longest = max(float(self.stage_s[k][way, layers]) for k, (layers, way) in pairs)
            if total + weight * longest < value:
                value = total + weight * longest
                best = _Path(layers=path.layers, ways=path.ways, objective=value)
            if not weight or total + weight * floor >= value:
                break
            limit = min(math.nextafter(longest, -math.inf), (value - total) / weight)
        return best

    def _least_longest(self) -> float:
        """The least possible longest S; inf if no path."""
        reach = np.full(self.problem.num_layers + 2, np.inf)
        reach[0] = 0.0
        for own in self.stage_s:
            longest = np.maximum(reach[self.before], own.min(axis=0))
            reach[:-1] = longest.min(axis=1)
        return float(reach[-2])

    def _shortest(self, limit: float) -> tuple[float, _Path] | None:
        """The least D of paths with no S above a limit."""
        reach = np.full(self.problem.num_layers + 2, np.inf)  # the last is before the first layer
        reach[0] = 0.0
        trail = []
        for stage_s, synced_s in zip(self.stage_s, self.synced_s, strict=True):
            own = np.where(stage_s <= limit, stage_s, np.inf)[:, None, :]
            through = np.maximum(reach[self.before] + own, synced_s[:, None, :])
            flat = through.transpose(1, 0, 2).reshape(len(self.before), -1)
            chosen = flat.argmin(axis=1)
            reach[:-1] = np.take_along_axis(flat, chosen[:, None], axis=1)[:, 0]
            trail.append(chosen)
        if math.isinf(reach[-2]):
            return None
        position, layers, ways = self.problem.num_layers, [], []
        for chosen in reversed(trail):
            way, taken = divmod(int(chosen[position]), len(self.before))
            layers.append(taken)
            ways.append(way)
            position -= taken
        total = float(reach[-2])
        return total, _Path(layers=tuple(layers[::-1]), ways=tuple(ways[::-1]), objective=total)
