"""A multiple-choice knapsack, exact: the least cost of one option per block within a capacity.

The multiplier that maximises the Lagrangian gives a lower bound and, per option, a reduced cost
r >= 0 such that any solution costs bound + sum r + multiplier * unused capacity. The minimiser
that uses least is feasible, so the optimum lies within a known window of the bound, and only
partial solutions within that window are kept while options are merged block by block. The idea is
that of a core (Pisinger, European Journal of Operational Research 83, 1995).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

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


def pack(groups: Sequence[Group], free: float, cutoff: float = math.inf) -> Packing | None:
    """The cheapest packing into `free`, if it costs less than `cutoff`.

    None where none does, or where even the least usage exceeds `free`.
    """
    if sum(g.count * float(g.used.min()) for g in groups) > free:
        return None
    multiplier, bound = best_multiplier(groups, free)
    if bound >= cutoff:
        return None
    start = _least_usage(groups, multiplier)
    cost, used = _totals(groups, start)
    if used > free:  # rounding at a tie: fall back to what surely fits
        start = tuple(int(g.used.argmin()) for g in groups for _ in range(g.count))
        cost, used = _totals(groups, start)
    tolerance = _ROUNDING * (abs(bound) + abs(multiplier * free) + cost)
    proven = bound
    for share in (_FIRST_WINDOW, 1.0):
        window = share * (min(cost, cutoff) - bound) + tolerance
        try:
            options = _within_window(groups, free, multiplier, bound, window)
        except _TooMany:
            return Packing(cost=cost, bound=min(cost, proven), options=start)
        if options is not None:
            best = _totals(groups, options)[0]
            return Packing(cost=best, bound=best, options=options)
        proven = bound + window - tolerance
    return None if cutoff < cost else Packing(cost=cost, bound=cost, options=start)


def best_multiplier(groups: Sequence[Group], free: float) -> tuple[float, float]:
    """The multiplier (cost per unit of usage) with the greatest Lagrangian bound, and the bound."""
    multipliers = {0.0}
    for g in groups:
        for i, j in np.argwhere((g.used[:, None] > g.used) & (g.cost[:, None] < g.cost)):
            multipliers.add(float((g.cost[j] - g.cost[i]) / (g.used[i] - g.used[j])))
    values = np.array(sorted(multipliers))
    total = -values * free
    for g in groups:
        total += g.count * (g.cost + values[:, None] * g.used).min(axis=1)
    best = int(total.argmax())
    return float(values[best]), float(total[best])


def _least_usage(groups: Sequence[Group], multiplier: float) -> tuple[int, ...]:
    """The minimiser of the Lagrangian that uses least."""
    chosen = []
    for g in groups:
        value = g.cost + multiplier * g.used
        ties = np.flatnonzero(value <= value.min() * (1 + _ROUNDING))
        chosen += [int(ties[g.used[ties].argmin()])] * g.count
    return tuple(chosen)


def _totals(groups: Sequence[Group], options: tuple[int, ...]) -> tuple[float, float]:
    cost = used = 0.0
    position = 0
    for g in groups:
        chosen = list(options[position : position + g.count])
        cost += float(g.cost[chosen].sum())
        used += float(g.used[chosen].sum())
        position += g.count
    return cost, used


def _within_window(
    groups: Sequence[Group], free: float, multiplier: float, bound: float, window: float
) -> tuple[int, ...] | None:
    """The best packing that costs at most bound + window, or None. Raises _TooMany."""
    blocks = [g for g in groups for _ in range(g.count)]
    choices = [
        np.flatnonzero(g.cost + multiplier * g.used <= _base(g, multiplier) + window)
        for g in blocks
    ]
    least = _suffix([float(g.used[c].min()) for g, c in zip(blocks, choices, strict=True)])
    most = _suffix([float(g.used[c].max()) for g, c in zip(blocks, choices, strict=True)])
    cost, used, base = np.zeros(1), np.zeros(1), 0.0
    trail: list[tuple[NDArray[np.intp], NDArray[np.intp]]] = []
    for index, (g, allowed) in enumerate(zip(blocks, choices, strict=True)):
        base += _base(g, multiplier)
        width = len(allowed)
        new_cost = (cost[:, None] + g.cost[allowed]).reshape(-1)
        new_used = (used[:, None] + g.used[allowed]).reshape(-1)
        unused = np.maximum(0.0, free - new_used - most[index + 1])
        excess = new_cost + multiplier * new_used - base + multiplier * unused
        fitting = (new_used <= free - least[index + 1]) & (excess <= window)
        kept = np.flatnonzero(fitting)
        kept = kept[_front(new_cost[kept], new_used[kept])]
        if len(kept) > _MAX_POINTS:
            raise _TooMany
        cost, used = new_cost[kept], new_used[kept]
        trail.append((kept // width, allowed[kept % width]))
    if len(cost) == 0:
        return None
    at, options = int(cost.argmin()), []
    for parent, option in reversed(trail):
        options.append(int(option[at]))
        at = int(parent[at])
    return tuple(reversed(options))


def _base(group: Group, multiplier: float) -> float:
    return float((group.cost + multiplier * group.used).min())


def _suffix(values: list[float]) -> Array:
    """Sums from each index to the end, and 0."""
    return np.concatenate([np.cumsum(values[::-1])[::-1], [0.0]])


def _front(cost: Array, used: Array) -> NDArray[np.intp]:
    """Indices of the points that no other matches or beats in both."""
    order = np.lexsort((used, cost))
    ordered = used[order]
    before = np.concatenate([[np.inf], np.minimum.accumulate(ordered)[:-1]])
    return order[ordered < before[: len(order)]]
