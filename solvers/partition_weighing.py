"""What the stages of a rank count for at the least, by weighing some of them more than others.

A rank counts for (1 - share) sum_p w_p + share * V max_p w_p where its V stages take w_p, and a
maximum is no less than any weighed mean: with weights u_p that sum to 1 it counts for

    sum_p (1 - share + share * V u_p) w_p

at the least, a sum over blocks at times weighed by their stage, bounded as any sum is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from solvers.partition_counting import Counting
from solvers.partition_frontier import ClassTable
from solvers.partition_pricing import Array, Pricer

_PARTS = (0.05, 0.1, 0.2, 0.5, 1.0)
"""How much more than others the longest stage is weighed."""
_TILTS = (0.0, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0)
"""How much more stages are weighed than others by how much less they hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """What a stage of a rank offers: the tables of its sure blocks, in their order, and for every
    run of blocks one, or None where the stage does not reach it."""

    sure: tuple[ClassTable, ...]
    runs: tuple[ClassTable | None, ...]
    cuts_s: float

    @property
    def offered(self) -> list[ClassTable]:
        """All tables."""
        return [*self.sure, *(table for table in self.runs if table is not None)]


class Weighing:
    """Bounds on what ranks count for. Offers of `even` are the sure blocks, then every run on each
    of the stages."""

    def __init__(
        self, *, even: Pricer, places: Mapping[int, Sequence[Place]], counting: Counting, sure: int
    ) -> None:
        self._even, self._places, self._counting, self._sure = even, places, counting, sure
        self._width = max(map(len, places.values()))
        self._tables: dict[tuple[int, tuple[float, ...]], list[ClassTable]] = {}

    def of_splits(self, kind: int, splits: NDArray[np.intp]) -> Array:
        """By splits: one of their stages is the longest."""
        least = np.zeros(len(splits))
        for longest in range(len(self._on(kind))):
            for shares in self._stressed(kind, longest):
                tables = self._weighed(kind, shares)
                least = np.maximum(least, self._count(kind, shares, tables, splits))
        return least

    def of_any(self, kind: int, compositions: NDArray[np.intp]) -> Array:
        """By the numbers of blocks, whatever the split. Stages are weighed more that hold less: or
        else all blocks would go there."""
        places = self._on(kind)
        held = np.array([max(float(t.used(0).max()) for t in place.offered) for place in places])
        lighter = 1 - held / held.mean() if held.all() else np.zeros(len(places))
        least = np.zeros(len(compositions))
        for tilt in _TILTS:
            shares = np.maximum(0.0, 1 + tilt * lighter)
            tables = self._anywhere(kind, shares)
            least = np.maximum(least, self._count(kind, shares, tables, compositions))
        return least

    def of_long(self, kind: int, counts: NDArray[np.intp], run: int, number: int) -> float:
        """Where some stage has so many blocks of a run at the least, wherever others are."""
        rows = np.concatenate([counts, [0]])[None, :]
        rows[0, self._sure + run] -= number
        rows[0, -1] = number
        most = np.inf
        for longest, place in enumerate(self._on(kind)):
            if place.runs[run] is None:
                continue
            own = 0.0
            for shares in self._stressed(kind, longest):
                there = self._weighed(kind, shares)[self._sure + run * self._width + longest]
                tables = [*self._anywhere(kind, shares), there]
                own = max(own, float(self._count(kind, shares, tables, rows)[0]))
            most = min(most, own)
        return most

    def _on(self, kind: int) -> Sequence[Place]:
        return self._places[self._even.kinds[kind].device]

    def _stressed(self, kind: int, longest: int) -> Iterator[Array]:
        stages = len(self._on(kind))
        for part in _PARTS:
            shares = np.full(stages, (1 - part) / stages)
            shares[longest] += part
            yield shares

    def _weights(self, shares: Array) -> Array:
        share = self._counting.share
        return np.asarray(1 - share + share * len(shares) * shares / shares.sum())

    def _count(
        self, kind: int, shares: Array, tables: list[ClassTable], counts: NDArray[np.intp]
    ) -> Array:
        even = self._even
        pricer = Pricer(
            kinds=even.kinds,
            kind_of_stage=even.kind_of_stage,
            classes={even.kinds[kind].device: tables},
            compositions=counts,
            weight=even.weight,
            deadline=even.deadline,
        )
        cuts_s = np.array([place.cuts_s for place in self._on(kind)])
        own_s = float(self._weights(shares) @ cuts_s) if self._counting.cuts_in_max else 0.0
        return pricer.relaxed_time(kind) + own_s

    def _anywhere(self, kind: int, shares: Array) -> list[ClassTable]:
        """Sure blocks, and those of runs on any stage, at times weighed by the stage."""
        weighed = self._weighed(kind, shares)
        runs = range(self._sure, len(weighed), self._width)
        joined = [ClassTable.joined(weighed[first : first + self._width]) for first in runs]
        return [*weighed[: self._sure], *joined]

    def _weighed(self, kind: int, shares: Array) -> list[ClassTable]:
        device, weights = self._even.kinds[kind].device, tuple(self._weights(shares).tolist())
        key = (device, weights)
        if key not in self._tables:
            self._tables[key] = [
                table.times(weights[self.place(device, offer)])
                for offer, table in enumerate(self._even.classes[device])
            ]
        return self._tables[key]

    def place(self, device: int, offer: int) -> int:
        """The stage that an offer of the even splits is on."""
        if offer >= self._sure:
            return (offer - self._sure) % self._width
        ends = accumulate(len(place.sure) for place in self._places[device])
        return bisect_right(list(ends), offer)
