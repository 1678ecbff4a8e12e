"""Cut positions by dynamic programming, exact for the sum-and-bottleneck objective.

An arc (k, i, j) is stage k running blocks [i, j). For a fixed bottleneck limit the least sum of
times is a shortest path over K layers of cut positions. `search` walks the Pareto front of (sum,
max) from the loose end: each shortest path gives a solution and, as the limit only tightens, a
lower bound sum + (M - 1) * least possible max on all that follow. It stops when that bound meets
the incumbent, so the result is optimal for the arc costs it was given. The sync term is walked
the same way around it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from solvers.partition_arcs import Arcs, Box, Laid
from solvers.partition_pricing import Array, OutOfTime
from solvers.partition_problem import PartitionProblem

_SLACK = 1e-12

Costs = Sequence[Laid]
"""Per kind of stage, costs of arcs."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ArcCosts:
    """Time and sync of arcs, per kind of stage: arrays [ways, composition]; inf = no such way.

    `places` are the arcs of every kind, outside of which nothing is computed. Towards the
    bottleneck counts an arc's time, of which the cuts are a part or run beside the rest; or, where
    there are `counts`, what these say of every way.
    """

    time: list[Array]
    sync: list[Array]
    counts: list[Array] | None = None
    places: list[Arcs]
    boundary_in_max: bool = True

    def limited(self, sync_limit: float) -> Callable[[float], list[Laid]]:
        """The least times of the ways within a sync limit, by a limit of what counts towards the
        bottleneck."""
        if self.counts is not None:
            return partial(self.least_time, sync_limit)
        costs, tops = self.least_time(sync_limit), self.least_tops(sync_limit)

        def within(limit: float) -> list[Laid]:
            return [
                cost.like(np.where(top.own <= limit, cost.own, np.inf))
                for cost, top in zip(costs, tops, strict=True)
            ]

        return within

    def least_time(self, sync_limit: float = math.inf, limit: float = math.inf) -> list[Laid]:
        """Per kind, the least time of the ways within a sync limit, and where they have counts
        within a limit of these."""
        least: list[Laid] = []
        for kind, place in enumerate(self.places):
            some = self._within(kind, sync_limit, limit)
            own = np.where(some, self.time[kind], np.inf).min(axis=0)
            least.append(place.lay(own, place.cuts_s))
        return least

    def least_tops(self, sync_limit: float = math.inf) -> list[Laid]:
        """Per kind, the least that a way within a sync limit counts towards the bottleneck."""
        if self.counts is None:
            each = zip(self.least_time(sync_limit), self.places, strict=True)
            return [cost.like(self.top(cost.own, place.cuts_s)) for cost, place in each]
        least: list[Laid] = []
        for kind, place in enumerate(self.places):
            some = self._within(kind, sync_limit, math.inf)
            least.append(place.lay(np.where(some, self.counts[kind], np.inf).min(axis=0)))
        return least

    def _within(self, kind: int, sync_limit: float, limit: float) -> NDArray[np.bool_]:
        """The ways [way, composition] within limits, as far as these do not depend on an arc."""
        some = self.sync[kind] <= sync_limit
        if self.counts is not None:
            some &= self.counts[kind] <= limit
        return some

    def counted(self, kind: int, start: int, end: int, way: int) -> float:
        """What a way of an arc counts towards the bottleneck."""
        place = self.places[kind]
        composition = place.composition(start, end)
        if self.counts is not None:
            return float(self.counts[kind][way, composition])
        cuts_s = np.array(place.cut_s(start, end))
        return float(self.top(self.time[kind][way, composition] + cuts_s, cuts_s))

    def top(self, time_s: Array, cuts_s: Array) -> Array:
        """All of a time; where cuts take theirs beside the blocks, what is longer of both."""
        return time_s if self.boundary_in_max else np.maximum(time_s - cuts_s, cuts_s)

    def least_sync(self) -> list[Laid]:
        """Per kind, the least sync of any way."""
        each = zip(self.time, self.sync, self.places, strict=True)
        return [
            place.lay(np.where(np.isfinite(time_s), sync_s, np.inf).min(axis=0))
            for time_s, sync_s, place in each
        ]

    def fastest(self, kind: int, start: int, end: int, sync_limit: float, limit: float) -> int:
        """The fastest way of an arc within limits."""
        composition = self.places[kind].composition(start, end)
        some = self._within(kind, sync_limit, limit)[:, composition]
        return int(np.where(some, self.time[kind][:, composition], np.inf).argmin())


@dataclass(frozen=True, kw_only=True, slots=True)
class Path:
    """Cut positions 0 = p_0 < ... < p_K = L, the way each stage runs, and the objective."""

    positions: tuple[int, ...]
    ways: tuple[int, ...]
    objective: float


class ChainSearch:
    """Shortest paths over the cut positions of one problem: where stage k starts is from `first[k]`
    to `last[k]`."""

    def __init__(
        self,
        *,
        kind_of_stage: Sequence[int],
        weight: float,
        deadline: float,
        first: Sequence[int],
        last: Sequence[int],
    ) -> None:
        self.kind_of_stage = list(kind_of_stage)
        self.weight = weight
        self.deadline = deadline
        self.first, self.last = list(first), list(last)
        self.length = self.last[-1]
        self.longest = sys.maxsize

    @classmethod
    def of(
        cls, problem: PartitionProblem, kind_of_stage: Sequence[int], deadline: float
    ) -> ChainSearch:
        """Positions are the blocks of a chain."""
        length, stages, least = len(problem.blocks), problem.num_stages, problem.min_blocks
        if problem.fixed_cuts is not None:
            first = [0, *problem.fixed_cuts, length]
            last = first
        else:
            first = [k * least for k in range(stages)] + [length]
            last = [0] + [length - (stages - k) * least for k in range(1, stages + 1)]
        return cls(
            kind_of_stage=kind_of_stage,
            weight=problem.bottleneck_weight,
            deadline=deadline,
            first=first,
            last=last,
        )

    def narrow(self, longest: int) -> bool:
        """Leave out stages of more than `longest` blocks, as far as that tells where stages may
        start and end; False, and nothing, where no path would be left."""
        stages, length = len(self.kind_of_stage), self.length
        first = [max(f, length - (stages - k) * longest) for k, f in enumerate(self.first)]
        last = [min(f, k * longest) for k, f in enumerate(self.last)]
        some = all(low <= high for low, high in zip(first, last, strict=True))
        if some:
            self.first, self.last, self.longest = first, last, longest
        return some

    def boxes(self) -> list[Box]:
        """Per kind of stage, where one may start and end."""
        at: dict[int, list[int]] = {}
        for stage, kind in enumerate(self.kind_of_stage):
            at.setdefault(kind, []).append(stage)

        def side(stages: Sequence[int]) -> slice:
            return slice(min(self.first[k] for k in stages), max(self.last[k] for k in stages) + 1)

        return [(side(at[kind]), side([k + 1 for k in at[kind]])) for kind in sorted(at)]

    def window(self, stage: int) -> Box:
        """Where a stage may start and end."""
        return (
            slice(self.first[stage], self.last[stage] + 1),
            slice(self.first[stage + 1], self.last[stage + 1] + 1),
        )

    def forward(self, costs: Costs, *, bottleneck: bool = False) -> list[Array]:
        """Least sum (or max) of costs [start, end] to each position after each stage."""
        return self._forward(costs, bottleneck=bottleneck)[0]

    def backward(self, costs: Costs) -> list[Array]:
        """Least sum of costs from each position before each stage to the end."""
        reach = np.full(self.length + 1, np.inf)
        reach[self.length] = 0.0
        reaches = [reach]
        for stage in reversed(range(len(self.kind_of_stage))):
            window = self.window(stage)
            before = np.full(self.length + 1, np.inf)
            before[window[0]] = costs[self.kind_of_stage[stage]].backward(reaches[-1], window)
            reaches.append(before)
        return reaches[::-1]

    def _forward(
        self, costs: Costs, *, bottleneck: bool
    ) -> tuple[list[Array], list[NDArray[np.intp]]]:
        if time.perf_counter() > self.deadline:
            raise OutOfTime
        reach = np.full(self.length + 1, np.inf)
        reach[0] = 0.0
        reaches, origins = [reach], list[NDArray[np.intp]]()
        join = np.maximum if bottleneck else np.add
        for stage, kind in enumerate(self.kind_of_stage):
            window = self.window(stage)
            after = np.full(self.length + 1, np.inf)
            after[window[1]], origin = costs[kind].onward(reaches[-1], window, join)
            reaches.append(after)
            origins.append(origin)
        return reaches, origins

    def shortest(self, costs: Costs) -> tuple[float, tuple[int, ...]] | None:
        """The least sum of costs, and its positions; None if no path."""
        reaches, origins = self._forward(costs, bottleneck=False)
        total = float(reaches[-1][self.length])
        if math.isinf(total):
            return None
        positions = [self.length]
        for stage in reversed(range(len(origins))):
            origin = origins[stage][positions[-1] - self.first[stage + 1]]
            positions.append(int(origin))
        return total, tuple(reversed(positions))

    def least_bottleneck(self, costs: Costs) -> float:
        """The least possible maximum of costs; inf if no path."""
        return float(self.forward(costs, bottleneck=True)[-1][self.length])

    def search(self, arcs: ArcCosts, cutoff: float = math.inf) -> Path | None:
        """The path of least sum + weight * max time + max sync; None if none is below `cutoff`."""
        sync_floor = self.least_bottleneck(arcs.least_sync())
        best: Path | None = None
        limit = math.inf
        while limit >= sync_floor and math.isfinite(sync_floor):
            target = cutoff if best is None else min(cutoff, best.objective)
            found = self._sum_and_max(arcs, limit, target - sync_floor)
            if found is None:
                break
            path, value = found
            sync = max(
                float(arcs.sync[kind][way, composition])
                for kind, way, composition in self._steps(arcs, path)
            )
            if value + sync < target:
                best = dataclasses.replace(path, objective=value + sync)
            limit = math.nextafter(sync, -math.inf)
            if best is not None and value + sync_floor >= best.objective * (1 - _SLACK):
                break
        return best

    def _steps(self, arcs: ArcCosts, path: Path) -> Iterator[tuple[int, int, int]]:
        """(kind, way, composition) of every arc of a path."""
        each = zip(self.kind_of_stage, path.ways, itertools.pairwise(path.positions), strict=True)
        for kind, way, (start, end) in each:
            yield kind, way, arcs.places[kind].composition(start, end)

    def _sum_and_max(
        self, arcs: ArcCosts, sync_limit: float, cutoff: float
    ) -> tuple[Path, float] | None:
        """The path of least sum + weight * max below `cutoff`, with its value."""
        floor = self.least_bottleneck(arcs.least_tops(sync_limit))
        if math.isinf(floor):
            return None
        within = arcs.limited(sync_limit)
        best: Path | None = None
        value = cutoff
        limits = [floor, math.inf]  # the tightest limit first: it often gives the optimum
        while limits:
            limit = limits.pop(0)
            found = self.shortest(within(limit))
            if found is None:
                continue
            total, positions = found
            path = self._path(arcs, positions, sync_limit, limit)
            largest = max(
                arcs.counted(kind, start, end, way)
                for kind, way, (start, end) in zip(
                    self.kind_of_stage, path.ways, itertools.pairwise(positions), strict=True
                )
            )
            if total + self.weight * largest < value:
                best, value = path, total + self.weight * largest
            if limit == floor or total + self.weight * floor >= value * (1 - _SLACK):
                continue
            limit = math.nextafter(largest, -math.inf)
            if self.weight:
                limit = min(limit, (value - total) / self.weight)
            if limit > floor:
                limits.append(limit)
        return None if best is None else (best, value)

    def _path(
        self, arcs: ArcCosts, positions: tuple[int, ...], sync_limit: float, limit: float
    ) -> Path:
        """The fastest ways between positions within limits."""
        each = zip(self.kind_of_stage, itertools.pairwise(positions), strict=True)
        ways = tuple(arcs.fastest(kind, *ends, sync_limit, limit) for kind, ends in each)
        return Path(positions=positions, ways=ways, objective=math.inf)
