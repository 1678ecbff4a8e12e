"""Arc costs of a partition problem: bounds first, exact prices where they are asked for."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from solvers.partition_dp import ArcCosts, ChainSearch, Path
from solvers.partition_pricing import Price, Pricer
from solvers.partition_problem import PartitionProblem

_KEEP_SLACK = 1e-9


class PriceTable:
    """Per kind of stage and composition: a lower bound on time and sync, or the exact prices."""

    def __init__(self, problem: PartitionProblem, pricer: Pricer) -> None:
        self.pricer = pricer
        kinds, least_sync = range(len(pricer.kinds)), pricer.least_sync()
        self.time = [pricer.lower_time(kind)[None, :] for kind in kinds]
        self.sync = [np.where(np.isfinite(t), least_sync, np.inf) for t in self.time]
        self.priced = [np.zeros(len(least_sync), dtype=bool) for _ in kinds]
        length = len(problem.blocks)
        cut = np.concatenate([[0.0], problem.boundary_s, [0.0]])
        self._boundary = cut[:, None] + cut[None, :]
        position = np.arange(length + 1)
        self._is_run = position[None, :] - position[:, None] >= problem.min_blocks

    def arcs(self, allowed: list[NDArray[np.bool_]] | None = None) -> ArcCosts:
        """The costs known so far, of the arcs `allowed` per kind."""
        return ArcCosts(
            time=[t.copy() for t in self.time],
            sync=[s.copy() for s in self.sync],
            run=self.pricer.run,
            boundary_s=self._boundary,
            allowed=allowed or [self._is_run] * len(self.time),
        )

    def arcs_of(self, path: Path) -> list[tuple[int, int]]:
        """(kind, composition) of every stage of a path."""
        pairs = zip(path.positions, path.positions[1:], strict=False)
        kinds = self.pricer.kind_of_stage
        return [(kind, int(self.pricer.run[i, j])) for kind, (i, j) in zip(kinds, pairs, strict=True)]

    def price(self, arcs: Iterable[tuple[int, int]]) -> bool:
        """Make arcs exact; returns whether any was not."""
        changed = False
        for kind, composition in arcs:
            if not self.priced[kind][composition]:
                self._set(kind, composition, self.pricer.price(kind, composition))
                changed = True
        return changed

    def _set(self, kind: int, composition: int, prices: tuple[Price, ...]) -> None:
        ways = len(self.time[kind])
        if len(prices) > ways:
            more = np.full((len(prices) - ways, self.time[kind].shape[1]), np.inf)
            self.time[kind] = np.concatenate([self.time[kind], more])
            self.sync[kind] = np.concatenate([self.sync[kind], more])
        for table in (self.time[kind], self.sync[kind]):
            table[:, composition] = np.inf
        for way, price in enumerate(prices):
            self.time[kind][way, composition] = price.time_s
            self.sync[kind][way, composition] = price.sync_s
        self.priced[kind][composition] = True

    def survivors(
        self, search: ChainSearch, arcs: ArcCosts, objective: float
    ) -> list[NDArray[np.bool_]]:
        """Per stage, the arcs [start, end] that a solution as good as `objective` may use.

        A solution through an arc costs at least the shortest way to it and from it, its own time,
        and the bottleneck and sync that it, or any solution, has at least.
        """
        least, least_sync = arcs.least_time(), arcs.least_sync()
        floor, sync_floor = search.least_bottleneck(least), search.least_bottleneck(least_sync)
        before, after = search.forward(least), search.backward(least)
        kept = []
        for stage, kind in enumerate(self.pricer.kind_of_stage):
            own, sync = least[kind], least_sync[kind]
            longest = np.maximum(np.where(np.isfinite(own), own, 0.0), floor)
            bound = before[stage][:, None] + own + after[stage + 1][None, :]
            bound = bound + search.weight * longest + np.maximum(sync, sync_floor)
            kept.append(np.isfinite(bound) & (bound <= objective * (1 + _KEEP_SLACK)))
        return kept

    def options(self, problem: PartitionProblem, path: Path) -> tuple[int, ...]:
        """The option of every block on a priced path."""
        chosen = []
        for stage, (kind, composition) in enumerate(self.arcs_of(path)):
            price = self.pricer.price(kind, composition)[path.ways[stage]]
            queues = [iter(o) for o in self.pricer.options(kind, composition, price)]
            blocks = problem.blocks[path.positions[stage] : path.positions[stage + 1]]
            chosen += [next(queues[block]) for block in blocks]
        return tuple(chosen)
