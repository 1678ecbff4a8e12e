"""Arc costs of a partition problem: bounds first, exact prices where they are asked for."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from solvers.partition_arcs import Arcs, ChainArcs
from solvers.partition_dp import ArcCosts, ChainSearch, Path
from solvers.partition_joint import JointPricer
from solvers.partition_pricing import Price, Pricer, StageKind
from solvers.partition_problem import PartitionProblem

_KEEP_SLACK = 1e-9


def chain_arcs(
    problem: PartitionProblem, kinds: Sequence[StageKind], run: NDArray[np.intp]
) -> list[Arcs]:
    """Per kind of stage, the runs of blocks of a chain, with what the cuts at both ends cost it."""
    cut = np.concatenate([[0.0], problem.boundary_s, [0.0]])
    hops = [kind.hops for kind in kinds]
    cuts_s = {h: h[0] * cut[:, None] + h[1] * cut[None, :] for h in dict.fromkeys(hops)}
    position = np.arange(len(problem.blocks) + 1)
    allowed = position[None, :] - position[:, None] >= problem.min_blocks
    return [ChainArcs.of(run, allowed, cuts_s[h]) for h in hops]


class PriceTable:
    """Per kind of stage and composition: a lower bound on time and sync, or the exact prices."""

    def __init__(
        self,
        pricer: Pricer | JointPricer,
        search: ChainSearch,
        *,
        places: list[Arcs],
        boundary_in_max: bool,
    ) -> None:
        self.pricer, self.search = pricer, search
        kinds = range(len(pricer.kinds))
        bounds = [pricer.bounds(kind) for kind in kinds]
        self.time = [time_s for time_s, _ in bounds]
        self.sync = [
            np.where(np.isfinite(t), pricer.least_sync(kind), np.inf)
            for kind, t in enumerate(self.time)
        ]
        self.counts = [counts for _, counts in bounds if counts is not None]
        self.real = [np.zeros(t.shape, dtype=bool) for t in self.time]
        self.priced = [np.zeros(t.shape[-1], dtype=bool) for t in self.time]
        self.places = places
        self.boundary_in_max = boundary_in_max

    def arcs(
        self, allowed: list[NDArray[np.bool_]] | None = None, *, real: bool = False
    ) -> ArcCosts:
        """The costs known so far, of the arcs `allowed` per kind; `real`: of exact ways only."""
        pairs = zip(self.time, self.real, strict=True)
        places = [
            place.narrowed(box, self.search.longest)
            for place, box in zip(self.places, self.search.boxes(), strict=True)
        ]
        if allowed is not None:
            places = [place.only(some) for place, some in zip(places, allowed, strict=True)]
        return ArcCosts(
            time=[np.where(r, t, np.inf) if real else t.copy() for t, r in pairs],
            sync=[s.copy() for s in self.sync],
            counts=[c.copy() for c in self.counts] or None,
            places=places,
            boundary_in_max=self.boundary_in_max,
        )

    def arcs_of(self, path: Path) -> list[tuple[int, int]]:
        """(kind, composition) of every stage of a path."""
        pairs = itertools.pairwise(path.positions)
        kinds = self.pricer.kind_of_stage
        return [
            (kind, self.places[kind].composition(i, j))
            for kind, (i, j) in zip(kinds, pairs, strict=True)
        ]

    def price(self, arcs: Iterable[tuple[int, int]]) -> bool:
        """Make arcs exact; returns whether any was not."""
        changed = False
        for kind, composition in arcs:
            if not self.priced[kind][composition]:
                self._set(kind, composition, self.pricer.price(kind, composition))
                changed = True
        return changed

    def is_real(self, path: Path) -> bool:
        """Whether every stage of a path runs in a way that exists, at its exact price."""
        pairs = zip(self.arcs_of(path), path.ways, strict=True)
        return all(self.real[kind][way, composition] for (kind, composition), way in pairs)

    def _set(self, kind: int, composition: int, prices: tuple[Price, ...]) -> None:
        ways, width = self.time[kind].shape
        values = [self.time, self.sync, *([self.counts] if self.counts else [])]
        if len(prices) > ways:
            more = np.full((len(prices) - ways, width), np.inf)
            for value in values:
                value[kind] = np.concatenate([value[kind], more])
            self.real[kind] = np.concatenate([self.real[kind], np.zeros(more.shape, dtype=bool)])
        for value in values:
            value[kind][:, composition] = np.inf
        for way, price in enumerate(prices):
            self.time[kind][way, composition] = price.time_s
            self.sync[kind][way, composition] = price.sync_s
            self.real[kind][way, composition] = price.options is not None
            if self.counts:
                self.counts[kind][way, composition] = price.count_s
        self.priced[kind][composition] = True

    def survivors(
        self, search: ChainSearch, arcs: ArcCosts, objective: float
    ) -> list[NDArray[np.bool_]]:
        """Per stage, the arcs that a solution as good as `objective` may use.

        A solution through an arc costs at least the shortest way to it and from it, its own time,
        and the bottleneck and sync that it, or any solution, has at least.
        """
        least, least_sync, tops = arcs.least_time(), arcs.least_sync(), arcs.least_tops()
        floor, sync_floor = search.least_bottleneck(tops), search.least_bottleneck(least_sync)
        before, after = search.forward(least), search.backward(least)
        kept = []
        for stage, kind in enumerate(self.pricer.kind_of_stage):
            window = search.window(stage)
            own, sync = least[kind].within(window), least_sync[kind].within(window)
            top = np.where(np.isfinite(own), tops[kind].within(window), 0.0)
            bound = own + least[kind].around(before[stage], after[stage + 1], window)
            bound = bound + search.weight * np.maximum(top, floor) + np.maximum(sync, sync_floor)
            some = np.isfinite(bound) & (bound <= objective * (1 + _KEEP_SLACK))
            kept.append(arcs.places[kind].mask(window, some))
        return kept

    def ways(self, path: Path) -> list[list[tuple[int, int]]]:
        """Per stage of a path that `is_real`, (class, option) of its blocks."""
        found = []
        for stage, (kind, composition) in enumerate(self.arcs_of(path)):
            way = self.pricer.price(kind, composition)[path.ways[stage]]
            if way.options is None:
                raise ValueError("the path uses a bound, not a way to run a stage")
            found.append(way.options())
        return found
