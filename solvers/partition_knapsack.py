"""A multiple-choice knapsack, exact: the least cost of one option per block within a capacity.

The multiplier that maximises the Lagrangian gives a lower bound and, per option, a reduced cost
r >= 0 such that any solution costs bound + sum r + multiplier * unused capacity. Two options of one
group, its line, have none. With as many of its blocks as fit on the one that uses more, a solution
is at most one block's choice above the bound: the optimum lies within that window, and only what
other blocks may choose within it is looked at. The idea is that of a core (Pisinger, European
Journal of Operational Research 83, 1995).

Blocks of a group are equal, so that only how many take an option counts: what many of them may
choose is made by doubling their number, and how many are at which end of the line follows from
what the rest leaves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Numbers = NDArray[np.intp]

_ROUNDING = 1e-12
_MAX_POINTS = 20_000
_FIRST_WINDOW = 0.125


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Group:
    """`count` blocks with the same options."""

    count: int
    cost: Array
    used: Array


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """An option per block, in the order of the groups, and a proven lower bound on its cost.

    `bound` equals `cost` unless there were too many partial solutions to keep.
    """

    cost: float
    bound: float
    options: tuple[int, ...]


class _TooMany(Exception):
    """More partial solutions than are kept."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Ways:
    """Ways to run some blocks: what each costs, uses and is above the bound, and how many blocks
    take every option of all groups [way, option]."""

    cost: Array
    used: Array
    excess: Array
    counts: Numbers

    def within(self, window: float) -> _Ways:
        """Those of at most so much excess that no other matches or beats in cost and usage."""
        kept = np.flatnonzero(self.excess <= window)
        kept = kept[_front(self.cost[kept], self.used[kept])]
        return _Ways(
            cost=self.cost[kept],
            used=self.used[kept],
            excess=self.excess[kept],
            counts=self.counts[kept],
        )

    def joined(self, other: _Ways, window: float) -> _Ways:
        """Every way of these blocks with every one of others, within a window. Raises _TooMany."""
        if len(self.cost) * len(other.cost) > _MAX_POINTS:
            raise _TooMany
        first = np.repeat(np.arange(len(self.cost)), len(other.cost))
        second = np.tile(np.arange(len(other.cost)), len(self.cost))
        return _Ways(
            cost=self.cost[first] + other.cost[second],
            used=self.used[first] + other.used[second],
            excess=self.excess[first] + other.excess[second],
            counts=self.counts[first] + other.counts[second],
        ).within(window)

    def repeated(self, count: int, window: float) -> _Ways:
        """The ways of `count` blocks, from those of one. Raises _TooMany."""
        if count == 1:
            return self
        half = self.repeated(count // 2, window)
        whole = half.joined(half, window)
        return whole.joined(self, window) if count % 2 else whole


def pack(groups: Sequence[Group], free: float, cutoff: float = math.inf) -> Packing | None:
    """The cheapest packing into `free`, if it costs less than `cutoff`.

    None where none does, or where even the least usage exceeds `free`.
    """
    if sum(g.count * float(g.used.min()) for g in groups) > free:
        return None
    multiplier, bound = best_multiplier(groups, free)
    if bound >= cutoff:
        return None
    core = _Core(groups, multiplier, free)
    start = core.start()
    cost = _cost(groups, start)
    tolerance = _ROUNDING * (abs(bound) + abs(multiplier * free) + cost)
    proven = bound
    for share in (_FIRST_WINDOW, 1.0):
        window = share * (min(cost, cutoff) - bound) + tolerance
        try:
            options = core.best(window)
        except _TooMany:
            return Packing(cost=cost, bound=min(cost, proven), options=start)
        best = math.inf if options is None else _cost(groups, options)
        if options is not None and best <= bound + window:
            return Packing(cost=best, bound=best, options=options)
        proven = bound + window - tolerance
    return None if cutoff < cost else Packing(cost=cost, bound=cost, options=start)


def best_multiplier(groups: Sequence[Group], free: float) -> tuple[float, float]:
    """The multiplier (cost per unit of usage) with the greatest Lagrangian bound, and the bound."""
    found = [np.zeros(1)]
    for g in groups:
        saved, more = g.used[:, None] - g.used, g.cost - g.cost[:, None]
        trades = (saved > 0) & (more > 0)
        found.append(more[trades] / saved[trades])
    values = np.unique(np.concatenate(found))
    total = -values * free
    for g in groups:
        total += g.count * (g.cost + values[:, None] * g.used).min(axis=1)
    best = int(total.argmax())
    return float(values[best]), float(total[best])


class _Core:
    """Solutions near the Lagrangian bound at a multiplier. Of the group `line`, blocks that choose
    `small` or `large` are counted last."""

    def __init__(self, groups: Sequence[Group], multiplier: float, free: float) -> None:
        self.groups, self.free = groups, free
        values = [g.cost + multiplier * g.used for g in groups]
        self._excess = [value - value.min() for value in values]
        self._first = [0, *itertools.accumulate(len(g.cost) for g in groups)]
        ties = [np.flatnonzero(v <= v.min() * (1 + _ROUNDING)) for v in values]
        self._least = [int(t[g.used[t].argmin()]) for g, t in zip(groups, ties, strict=True)]
        most = [int(t[g.used[t].argmax()]) for g, t in zip(groups, ties, strict=True)]
        spans = [
            g.count * float(g.used[high] - g.used[low])
            for g, low, high in zip(groups, self._least, most, strict=True)
        ]
        self._line = int(np.argmax(spans))
        self._small, self._large = self._least[self._line], most[self._line]

    def start(self) -> tuple[int, ...]:
        """What fits where blocks take options of no excess, those off the line the smallest of
        these; else what uses least."""
        beside = self._beside([[option] for option in self._least], math.inf)
        found = self._filled(beside, self.groups[self._line].count)
        least = tuple(int(g.used.argmin()) for g in self.groups for _ in range(g.count))
        return least if found is None else found[1]

    def best(self, window: float) -> tuple[int, ...] | None:
        """The best packing of those within a window, where one fits. Raises _TooMany."""
        allowed = [np.flatnonzero(excess <= window).tolist() for excess in self._excess]
        ways = self._beside(allowed, window)
        off = [o for o in allowed[self._line] if o not in (self._small, self._large)]
        best: tuple[float, tuple[int, ...]] | None = None
        for left in range(self.groups[self._line].count, -1, -1):
            found = self._filled(ways, left)
            if found is not None and (best is None or found[0] < best[0]):
                best = found
            if not off or not len(ways.cost):
                break
            ways = ways.joined(self._one(self._line, off), window)
        return None if best is None else best[1]

    def _beside(self, allowed: Sequence[Sequence[int]], window: float) -> _Ways:
        """The ways of all blocks but those of the line's group."""
        settled = np.zeros((1, self._first[-1]), dtype=np.intp)
        cost, used, several = np.zeros(1), np.zeros(1), []
        for index, (group, options) in enumerate(zip(self.groups, allowed, strict=True)):
            if index == self._line:
                continue
            if len(options) > 1:
                several.append(index)
                continue
            settled[0, self._first[index] + options[0]] = group.count
            cost += group.count * group.cost[options[0]]
            used += group.count * group.used[options[0]]
        ways = _Ways(cost=cost, used=used, excess=np.zeros(1), counts=settled)
        for index in several:
            one = self._one(index, allowed[index])
            ways = ways.joined(one.repeated(self.groups[index].count, window), window)
        return ways

    def _one(self, index: int, options: Sequence[int]) -> _Ways:
        """The ways of one block of a group, by some of its options."""
        group, some = self.groups[index], np.array(options, dtype=np.intp)
        counts = np.zeros((len(some), self._first[-1]), dtype=np.intp)
        counts[np.arange(len(some)), self._first[index] + some] = 1
        return _Ways(
            cost=group.cost[some],
            used=group.used[some],
            excess=self._excess[index][some],
            counts=counts,
        ).within(math.inf)

    def _filled(self, ways: _Ways, left: int) -> tuple[float, tuple[int, ...]] | None:
        """The cheapest of some ways with the `left` last blocks on the line, where one fits."""
        group = self.groups[self._line]
        small, large = group.used[self._small], group.used[self._large]
        room = self.free - ways.used - left * small
        more = np.full(len(room), left)
        if large > small:
            more = np.minimum(left, np.floor(room / (large - small) * (1 + _ROUNDING)).astype(int))
            more -= ways.used + (left - more) * small + more * large > self.free
        cost = ways.cost + (left - more) * group.cost[self._small] + more * group.cost[self._large]
        cost = np.where((more >= 0) & (room >= 0), cost, np.inf)
        at = int(cost.argmin()) if len(cost) else 0
        if not len(cost) or math.isinf(cost[at]):
            return None
        counts = ways.counts[at].copy()
        counts[self._first[self._line] + self._small] += left - more[at]
        counts[self._first[self._line] + self._large] += more[at]
        own = (range(len(g.cost)) for g in self.groups)
        options = np.repeat(np.fromiter(itertools.chain.from_iterable(own), np.intp), counts)
        return float(cost[at]), tuple(options.tolist())


def _cost(groups: Sequence[Group], options: tuple[int, ...]) -> float:
    cost, position = 0.0, 0
    for g in groups:
        cost += float(g.cost[list(options[position : position + g.count])].sum())
        position += g.count
    return cost


def _front(cost: Array, used: Array) -> Numbers:
    """Indices of the points that no other matches or beats in both."""
    order = np.lexsort((used, cost))
    ordered = used[order]
    before = np.concatenate([[np.inf], np.minimum.accumulate(ordered)[:-1]])
    return order[ordered < before[: len(order)]]
