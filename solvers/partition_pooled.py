"""A lower bound on a partition problem by prices: one for the memory of all ranks together, and one
for the time of every rank in place of the longest.

For any price p >= 0 of a byte and any shares a_r >= 0 of the ranks that sum to one, with B the
weight of the longest rank,

    sum T + B max T + max Y >= sum over blocks of the least over stages k of ranks r and options of
        (1 + B a_r) T + Y / ranks + p * (static + in_flight_k * saved),  - p * free bytes,

as a maximum is at least any mean. The shares are such that no rank is cheaper than another, though
less is held on some: or else all blocks would go there.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from solvers.partition_bound import least_bottleneck, least_cuts, lower_bound, on_any_device
from solvers.partition_problem import PartitionProblem
from solvers.solution import CAPACITY_TOLERANCE

Array = NDArray[np.float64]

_ROUNDING = 1e-12
_PRICES = 16
_HALVINGS = 30


class _Class:
    """The options of the blocks of one class, as arrays."""

    def __init__(self, problem: PartitionProblem, kind: int, count: int) -> None:
        options = problem.classes[kind]
        self.count = count
        self.time = np.array([o.time_s for o in options])
        self.sync = np.array([o.sync_s for o in options])
        self.static = np.array([o.static_bytes for o in options])
        self.saved = np.array([o.saved_bytes for o in options])
        self.transient = min(o.transient_bytes for o in options)

    def used(self, in_flight: Array) -> Array:
        """Bytes held [stage, option]."""
        return self.static + in_flight[:, None] * self.saved


def pooled_bound(problem: PartitionProblem) -> float:
    """A lower bound on the objective, never below `lower_bound`; inf where nothing fits."""
    cheap = lower_bound(problem)
    if math.isinf(cheap):
        return cheap
    problem = on_any_device(problem.scaled())
    classes = [_Class(problem, *item) for item in sorted(Counter(problem.blocks).items())]
    stages = list(zip(problem.in_flight, problem.time_scale, strict=True))
    ranks = problem.rank_stages()
    kinds = Counter(tuple(sorted({stages[k] for k in held})) for held in ranks)
    in_flight, scale = np.array([stage for kind in kinds for stage in kind], dtype=float).T
    rank = np.repeat(np.arange(len(kinds)), [len(kind) for kind in kinds])
    several = np.array(list(kinds.values()), dtype=float)
    free = sum(problem.capacity_bytes[held[0]] for held in ranks) * (1 + CAPACITY_TOLERANCE)
    free -= sum(problem.stage_fixed_bytes) + len(ranks) * min(c.transient for c in classes)
    if sum(c.count * float(c.used(in_flight).min()) for c in classes) > free * (1 + _ROUNDING):
        return math.inf
    weight, cuts = problem.bottleneck_weight, least_cuts(problem)
    longest = weight * least_bottleneck(problem)
    even = np.full(len(kinds), 1.0 / len(ranks))
    best = cheap
    for price in _prices(classes, float(np.mean(problem.in_flight))):
        # the longest rank by itself, or by the mean of all
        alone = _least(classes, in_flight, scale.min() + 0.0 * scale, price, len(ranks))
        best = max(best, _surely(alone + longest + cuts, price * free))
        dear = price * (1.0 + weight / len(ranks))
        for shares in (even, _shares(classes, in_flight, scale, rank, several, weight, dear)):
            times = scale * (1.0 + weight * shares[rank])
            total = _least(classes, in_flight, times, dear, len(ranks))
            best = max(best, _surely(total + cuts, dear * free))
    return best


def _surely(total: float, spent: float) -> float:
    return float(total - spent - _ROUNDING * (abs(total) + abs(spent)))


def _least(
    classes: list[_Class], in_flight: Array, times: Array, price: float, ranks: int
) -> float:
    """What all blocks cost at the least, each on the stage and by the option that suits it best."""
    costs = [np.outer(times, c.time) + c.sync / ranks + price * c.used(in_flight) for c in classes]
    return sum(c.count * float(cost.min()) for c, cost in zip(classes, costs, strict=True))


def _prices(classes: list[_Class], in_flight: float) -> list[float]:
    """Seconds per byte at which a block would change its option, a few of them, and none."""
    rates = {0.0}
    for c in classes:
        used = c.static + in_flight * c.saved
        for i, j in np.argwhere((used[:, None] > used) & (c.time[:, None] < c.time)):
            rates.add(float((c.time[j] - c.time[i]) / (used[i] - used[j])))
    ordered = sorted(rates)
    return ordered[:: -(-len(ordered) // _PRICES)]


def _shares(
    classes: list[_Class],
    in_flight: Array,
    scale: Array,
    rank: NDArray[np.intp],
    several: Array,
    weight: float,
    price: float,
) -> Array:
    """Shares by which the blocks that take longest cost the same on every rank that has any: the
    greatest such cost for which they do not sum to more than one. Stage k is of a rank of kind
    `rank[k]`, of which there are `several`."""
    most = max(classes, key=lambda c: c.count * float(c.time.min()))
    time_s = scale[:, None] * most.time
    even = np.full(len(several), 1.0 / several.sum())
    first = np.flatnonzero(np.diff(rank, prepend=-1))
    if not weight or not time_s.min() > 0:
        return even
    alone = time_s + price * most.used(in_flight)

    def shares(cost: float) -> Array:
        needed = np.maximum(0.0, (cost - alone) / (weight * time_s)).max(axis=1)
        return np.asarray(np.maximum.reduceat(needed, first))

    low = float(alone.min())
    high = float((alone + weight * time_s).max())
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if several @ shares(middle) <= 1.0:
            low = middle
        else:
            high = middle
    found = shares(low)
    total = float(several @ found)
    return found / total if total else even
