"""Which items to take, where taking one may oblige others: an exact minimum cut.

Every item is taken or left. Costs are of single items and of ordered pairs (the first is taken, the
second is left), so that the problem is submodular and its optimum a minimum s-t cut (Picard and
Queyranne 1982), found by Dinic's algorithm on whole numbers.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

_BITS = 60
"""Binary digits that the largest finite cost is counted in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectionProblem:
    """Minimise what the taken, the left, and the torn pairs cost.

    `taken[i]` is paid where item i is taken (inf forbids it), `left[i]` where it is left (inf
    obliges it). `pairs` are (i, j, cost), paid where i is taken and j is left; inf says that taking
    i obliges j. Raises ValueError for a cost below zero or no number.
    """

    taken: tuple[float, ...]
    left: tuple[float, ...]
    pairs: tuple[tuple[int, int, float], ...] = ()

    def __post_init__(self) -> None:
        if len(self.taken) != len(self.left):
            raise ValueError(
                f"left: expected {len(self.taken)} costs, one per item, found {len(self.left)}"
            )
        for cost in (*self.taken, *self.left, *(cost for _, _, cost in self.pairs)):
            if math.isnan(cost) or cost < 0:
                raise ValueError(f"costs: expected numbers from 0, found {cost}")

    def objective(self, chosen: frozenset[int]) -> float:
        """Cost of taking the items in `chosen`; inf where that is forbidden."""
        terms = [self.taken[i] if i in chosen else self.left[i] for i in range(len(self.taken))]
        terms += [cost for i, j, cost in self.pairs if i in chosen and j not in chosen]
        return math.inf if math.inf in terms else math.fsum(terms)


def solve_selection(problem: SelectionProblem) -> frozenset[int] | None:
    """The items to take at the least cost; of several optima the smallest. None if infeasible.

    Exact up to the rounding of costs to 60 binary digits of the largest finite one.
    """
    costs = (*problem.taken, *problem.left, *(cost for _, _, cost in problem.pairs))
    largest = max((cost for cost in costs if cost != math.inf), default=0.0)
    # A power of two keeps sums exact: ties stay ties.
    shift = _BITS - math.frexp(largest)[1]
    units = [0 if cost == math.inf else round(math.ldexp(cost, shift)) for cost in costs]
    unbounded = sum(units) + 1
    whole = [unbounded if cost == math.inf else n for cost, n in zip(costs, units, strict=True)]
    count = len(problem.taken)
    network = _Network(count + 2)
    source, sink = count, count + 1
    flow = 0
    for item, (taken, left) in enumerate(zip(whole[:count], whole[count : 2 * count], strict=True)):
        through = min(taken, left)  # flows straight through the item
        flow += through
        network.add(item, sink, taken - through)
        network.add(source, item, left - through)
    for (first, second, _), cost in zip(problem.pairs, whole[2 * count :], strict=True):
        network.add(first, second, cost)
    if flow + network.maximum_flow(source, sink) >= unbounded:
        return None
    return frozenset(network.reachable(source) - {source})


class _Network:
    """Arcs with residual capacities; arc `a` and its reverse `a ^ 1` lie side by side."""

    def __init__(self, size: int) -> None:
        self.arcs: list[list[int]] = [[] for _ in range(size)]
        self.ends: list[int] = []
        self.left: list[int] = []

    def add(self, start: int, end: int, capacity: int) -> None:
        if capacity and start != end:
            self.arcs[start].append(len(self.ends))
            self.arcs[end].append(len(self.ends) + 1)
            self.ends += [end, start]
            self.left += [capacity, 0]

    def levels(self, source: int) -> list[int]:
        """Distance of every node from the source over arcs with capacity left; -1 beyond reach."""
        level = [-1] * len(self.arcs)
        level[source] = 0
        queue = deque([source])
        while queue:
            node = queue.popleft()
            for arc in self.arcs[node]:
                end = self.ends[arc]
                if self.left[arc] and level[end] < 0:
                    level[end] = level[node] + 1
                    queue.append(end)
        return level

    def reachable(self, source: int) -> set[int]:
        return {node for node, level in enumerate(self.levels(source)) if level >= 0}

    def maximum_flow(self, source: int, sink: int) -> int:
        flow = 0
        while (level := self.levels(source))[sink] >= 0:
            position = [0] * len(self.arcs)
            while pushed := self._push(source, sink, level, position):
                flow += pushed
        return flow

    def _push(self, source: int, sink: int, level: list[int], position: list[int]) -> int:
        """Push flow along one path of the level graph; 0 if there is none left."""
        path: list[int] = []
        node = source
        while node != sink:
            if position[node] < len(self.arcs[node]):
                arc = self.arcs[node][position[node]]
                end = self.ends[arc]
                if self.left[arc] and level[end] == level[node] + 1:
                    path.append(arc)
                    node = end
                else:
                    position[node] += 1
            elif path:
                node = self.ends[path.pop() ^ 1]
                position[node] += 1
            else:
                return 0
        amount = min(self.left[arc] for arc in path)
        for arc in path:
            self.left[arc] -= amount
            self.left[arc ^ 1] += amount
        return amount
