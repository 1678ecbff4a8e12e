"""A lower bound on a partition problem by prices: one for the memory of all ranks together, and one
for the time of every rank in place of the longest.

For any price p >= 0 of a byte and any shares a_r >= 0 of the ranks that sum to one, with B the
weight of the longest rank,

    sum T + B max T + max Y >= sum over blocks of the least over stages k of ranks r and options of
        (1 + B a_r) T + Y / ranks + p * (static + in_flight_k * saved),  - p * free bytes,

as a maximum is at least any mean. The shares are such that no rank is cheaper than another, though
less is held on some or some are faster: or else all blocks would go there.

Of the transients of a rank's blocks the largest counts: no less than the least of every class, and
no less than the mean of the blocks of one class. A rank with more of these than some number, that
the mean may be of, takes too long.
"""

from __future__ import annotations

import math
from collections import Counter
from copy import copy
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from solvers.partition_bound import least_bottleneck, least_cuts, lower_bound, on_any_device
from solvers.partition_fill import least_fill
from solvers.partition_problem import PartitionProblem
from solvers.solution import CAPACITY_TOLERANCE

Array = NDArray[np.float64]

_ROUNDING = 1e-12
_PRICES = 16
_HALVINGS = 30
_AROUND = 1
_CROWDED = 1.3
"""What a rank that is too full makes of the cheapest bound at the least."""


class _Stages:
    """The distinct stages of a problem, and of which of the distinct ranks each is: ranks with the
    same kinds of stages count as one, of which there are `several`."""

    def __init__(self, problem: PartitionProblem) -> None:
        each = list(zip(problem.in_flight, problem.time_scale, problem.stage_device, strict=True))
        kinds = Counter(tuple(sorted({each[k] for k in held})) for held in problem.rank_stages())
        in_flight, scale, device = zip(*(stage for kind in kinds for stage in kind), strict=True)
        self.in_flight, self.scale = np.array(in_flight, dtype=float), np.array(scale)
        self.device = np.array(device)
        self.rank = np.repeat(np.arange(len(kinds)), [len(kind) for kind in kinds])
        self.several = np.array(list(kinds.values()), dtype=float)


class _Class:
    """The options of the blocks of one class, as arrays over [stage, option]: times are infinite
    where a stage is on another device than the option is for."""

    def __init__(self, problem: PartitionProblem, stages: _Stages, kind: int, count: int) -> None:
        options = problem.classes[kind]
        self.count = count
        self.seconds = np.array([o.time_s for o in options])
        self.device = np.array([o.device for o in options])
        here = stages.device[:, None] == self.device
        self.time = np.where(here, stages.scale[:, None] * self.seconds, np.inf)
        self.sync = np.array([o.sync_s for o in options])
        static = np.array([o.static_bytes for o in options])
        saved = np.array([o.saved_bytes for o in options])
        self.used = static + stages.in_flight[:, None] * saved
        self.transients = np.array([o.transient_bytes for o in options])

    def sharing(self, blocks: int) -> _Class:
        """The same where so many blocks share what the largest of them needs to run."""
        shared = copy(self)
        shared.used = self.used + self.transients / blocks
        return shared


def pooled_bound(problem: PartitionProblem) -> float:
    """A lower bound on the objective, never below `lower_bound`; inf where nothing fits."""
    problem = problem.scaled()
    cheap = lower_bound(problem)
    if math.isinf(cheap):
        return cheap
    stages = _Stages(problem)
    classes = [_Class(problem, stages, *item) for item in sorted(Counter(problem.blocks).items())]
    ranks = problem.rank_stages()
    free = sum(problem.capacity_bytes[held[0]] for held in ranks) * (1 + CAPACITY_TOLERANCE)
    free -= sum(problem.stage_fixed_bytes)
    alike = on_any_device(problem)
    longest = problem.bottleneck_weight * max(least_bottleneck(alike), least_fill(alike))
    most, full, crowded = _fullest(problem, classes, cheap)
    room = free - _least_transients(classes, len(ranks))
    if math.isinf(longest) or not (_fits(classes, room) and _fits(_running(classes, most), free)):
        return math.inf
    alone = _priced(problem, stages, classes, room, longest)
    together = _priced(problem, stages, _running(classes, full), free, longest)
    return max(cheap, alone, min(crowded, together))


def _fullest(
    problem: PartitionProblem, classes: list[_Class], cheap: float
) -> tuple[int, int, float]:
    """The most blocks that a rank can have, a number that takes too long to pass, and what it takes
    then."""
    ranks, weight = len(problem.rank_stages()), problem.bottleneck_weight
    most = len(problem.blocks) - (ranks - 1) * problem.min_blocks
    times = sorted(t for c in classes for t in [float(c.time.min())] * c.count)
    total, taken = sum(times) + least_cuts(problem), list(accumulate(times))
    for full in range(-(-len(times) // ranks), most):
        crowded = (total + weight * taken[full]) * (1 - _ROUNDING)
        if crowded >= _CROWDED * cheap:
            return most, full, crowded
    return most, most, math.inf


def _running(classes: list[_Class], most: int) -> list[_Class]:
    """The classes where ranks hold `most` blocks, and have room for the mean of what those of the
    commonest class need to run."""
    common = max(classes, key=lambda c: c.count)
    return [c.sharing(min(most, c.count)) if c is common else c for c in classes]


def _fits(classes: list[_Class], free: float) -> bool:
    return sum(c.count * _least_bytes(c) for c in classes) <= free * (1 + _ROUNDING)


def _priced(
    problem: PartitionProblem,
    stages: _Stages,
    classes: list[_Class],
    free: float,
    longest: float,
) -> float:
    """The bound by prices, for classes that use what they do of the `free` bytes."""
    ranks, weight, cuts = len(problem.rank_stages()), problem.bottleneck_weight, least_cuts(problem)
    once = np.ones(len(stages.rank))
    even = np.full(len(stages.several), 1.0 / ranks)
    prices = np.array(_prices(classes, stages))
    # the longest rank by itself, or by the mean of all
    alone = _least(classes, once, prices, ranks)
    dear = prices * (1.0 + weight / ranks)
    total = _least(classes, 1.0 + weight * even[stages.rank], dear, ranks)
    found = _surely(total + cuts, dear * free)
    best = max(0.0, float(_surely(alone + longest + cuts, prices * free).max()), float(found.max()))
    if len(stages.several) == 1:  # all shares are even
        return best
    # what is least in a price has one peak: other shares are worth their time about there
    peak = int(found.argmax())
    for price in dear[max(0, peak - _AROUND) : peak + _AROUND + 1]:
        shares = _shares(classes, stages, weight, float(price))
        total = _least(classes, 1.0 + weight * shares[stages.rank], price[None], ranks)
        best = max(best, float(_surely(total + cuts, price * free).max()))
    return best


def _least_transients(classes: list[_Class], ranks: int) -> float:
    """The largest transients of all ranks together at the least: one of them has the largest of
    all, and each of the others some other block."""
    least = ((float(c.transients.min()), c.count) for c in classes)
    ordered = sorted((each for each, count in least for _ in range(count)), reverse=True)
    return ordered[0] + sum(ordered[len(ordered) - ranks + 1 :])


def _least_bytes(c: _Class) -> float:
    return float(np.where(np.isfinite(c.time), c.used, np.inf).min())


def _surely(total: Array, spent: Array) -> Array:
    return np.asarray(total - spent - _ROUNDING * (np.abs(total) + np.abs(spent)))


def _least(classes: list[_Class], factor: Array, prices: Array, ranks: int) -> Array:
    """What all blocks cost at the least for every price, each on the stage and by the option that
    suits it best, where times count `factor` times on a stage."""
    total, price = np.zeros(len(prices)), prices[:, None, None]
    for c in classes:
        cost = factor[:, None] * c.time + c.sync / ranks + price * c.used
        total += c.count * cost.min(axis=(1, 2))
    return total


def _prices(classes: list[_Class], stages: _Stages) -> list[float]:
    """Seconds per byte at which a block would change its option, a few of them, and none."""
    rates = {0.0}
    for c in classes:
        time, used = c.seconds, c.used.mean(axis=0)
        alike = c.device[:, None] == c.device
        i, j = np.nonzero(alike & (used[:, None] > used) & (time[:, None] < time))
        rates.update(((time[j] - time[i]) / (used[i] - used[j])).tolist())
    ordered = sorted(rates)
    return ordered[:: -(-len(ordered) // _PRICES)]


def _shares(classes: list[_Class], stages: _Stages, weight: float, price: float) -> Array:
    """Shares by which the blocks that take longest cost the same on every rank that has any: the
    greatest such cost for which they do not sum to more than one."""
    most = max(classes, key=lambda c: c.count * float(c.time.min()))
    several, runs = stages.several, np.isfinite(most.time)
    even = np.full(len(several), 1.0 / several.sum())
    if not weight or not most.time.min() > 0:
        return even
    first = np.flatnonzero(np.diff(stages.rank, prepend=-1))
    weighed = weight * np.where(runs, most.time, 1.0)
    alone = np.where(runs, most.time + price * most.used, np.inf)

    def shares(cost: float) -> Array:
        needed = np.maximum(0.0, (cost - alone) / weighed).max(axis=1)
        return np.asarray(np.maximum.reduceat(needed, first))

    low, high = float(alone.min()), float((alone + weighed)[runs].max())
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if several @ shares(middle) <= 1.0:
            low = middle
        else:
            high = middle
    found = shares(low)
    total = float(several @ found)
    return found / total if total else even
