"""A lower bound on a partition problem by how many blocks each rank runs.

With f_r(j) the least that rank r takes for j blocks of the commonest class in its own memory, and
c_r(j) the least that these count for, a step takes

    min over numbers j_r that sum to n of  sum_r f_r(j_r) + B max_r c_r(j_r), all else at its least.

Both are bounded by prices of a byte. With u_k what a block uses on stage k, T its transients, of
which the largest counts and so no less than their mean, and w_k what the stage's time is weighed
by, j blocks in R bytes take

    max over p >= 0 of  sum over blocks of min over options of w_k t + p (u_k + T / j),  - p R,

where a stage that has blocks of the class alone has one of them, and others are on any. A rank of V
stages counts for (1 - share) sum_k t_k + share V max_k t_k, no less than what its stages take
weighed by w_k = 1 - share + share V v_k, for v_k that sum to one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from solvers.hull import lower_hull
from solvers.partition_bound import least_bottleneck, least_cuts, lower_bound
from solvers.partition_longest import least_longest
from solvers.partition_problem import PartitionProblem
from solvers.solution import CAPACITY_TOLERANCE

Array = NDArray[np.float64]

_ROUNDING = 1e-12
_TILTS = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0)
"""How much more stages are weighed than others by how much less they hold."""
_CROWDED = 2
"""How many times its even share of blocks a rank may have; more are bounded alike."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Block:
    """What a block takes by its options on every stage of a rank, [stage, option]: seconds, bytes
    used, and infinity in place of 0 on other devices; [option] sums, as the mean rank counts them,
    and transients."""

    time_s: Array
    used_bytes: Array
    elsewhere: Array
    sync_s: Array
    transient_bytes: Array

    def least(self, weights: Array, prices: Array, sharing: Array, *, sync: bool) -> Array:
        """By stage, price and number of blocks that share their transients."""
        cost = weights[:, None] * self.time_s + sync * self.sync_s + self.elsewhere
        cost = cost[:, :, None] + self.used_bytes[:, :, None] * prices
        more = (self.transient_bytes[:, None] * prices)[:, :, None] / sharing
        return np.asarray((cost[..., None] + more).min(axis=1))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rank:
    """A kind of rank: the bytes that it has free, a block of the class on each of its stages, the
    stages that have one for certain, what cuts take there, and other blocks that are there for
    certain, with the stage."""

    free_bytes: float
    block: _Block
    sure: NDArray[np.bool_]
    cuts_s: Array
    others: tuple[tuple[int, _Block], ...]


def loaded_bound(problem: PartitionProblem) -> float:
    """A lower bound on the objective, never below `lower_bound`; inf where nothing fits."""
    problem = problem.scaled()
    cheap = lower_bound(problem)
    if math.isinf(cheap):
        return cheap
    kind, count = Counter(problem.blocks).most_common(1)[0]
    ranks = _ranks(problem, kind)
    several = np.array([alike for _, alike in ranks])
    width = max(len(rank.sure) for rank, _ in ranks)
    most = min(count, max(width, _CROWDED * -(-count // int(several.sum()))))
    loads = [_loads(rank, problem, most + 1) for rank, _ in ranks]
    work_s, counts_s = (np.array(each) for each in zip(*loads, strict=True))
    weight, cuts_s = problem.bottleneck_weight, least_cuts(problem)
    longest_s = max(least_bottleneck(problem), least_longest(problem))
    dealt_s = _dealt(work_s[:, :-1], counts_s[:, :-1], several, count, weight, longest_s)
    inner = Counter(problem.blocks[1:-1])
    del inner[kind]
    found = dealt_s + _alone_s(problem, inner) + cuts_s
    if most < count:  # or else some rank has more
        crowded_s = weight * max(longest_s, float(counts_s[:, -1].min()))
        found = min(found, crowded_s + _alone_s(problem, Counter(problem.blocks)) + cuts_s)
    return max(cheap, found * (1 - _ROUNDING))


def _alone_s(problem: PartitionProblem, blocks: Counter[int]) -> float:
    """What so many blocks of classes take at the least, wherever they are, memory for free."""
    scale, ranks = min(problem.time_scale), len(problem.rank_stages())
    least = {
        c: min(scale * o.time_s + o.sync_s / ranks for o in problem.classes[c]) for c in blocks
    }
    return sum(least[c] * n for c, n in blocks.items())


def _ranks(problem: PartitionProblem, kind: int) -> list[tuple[_Rank, int]]:
    """The kinds of ranks, and how many there are of each."""
    found: dict[object, list[tuple[int, ...]]] = {}
    surely = _sure_stages(problem, kind)
    for held in problem.rank_stages():
        ends = tuple(k in (0, problem.num_stages - 1) for k in held)
        stages = tuple((problem.in_flight[k], *_at(problem, k)) for k in held)
        sure = tuple(k in surely for k in held)
        fixed = sum(problem.stage_fixed_bytes[k] for k in held)
        alike = (problem.capacity_bytes[held[0]], fixed, stages, sure)
        found.setdefault((alike, held[0] if any(ends) else None), []).append(held)
    return [(_rank(problem, kind, held[0], surely), len(held)) for held in found.values()]


def _at(problem: PartitionProblem, stage: int) -> tuple[float, int, float]:
    """The speed and the device of a stage, and how much longer cuts take there."""
    hops = [0.0, *problem.hop_scale, 0.0][stage : stage + 2]
    return problem.time_scale[stage], problem.stage_device[stage], sum(hops)


def _sure_stages(problem: PartitionProblem, kind: int) -> range:
    """The stages that have blocks of the class whatever the cuts: where all of the class follow
    each other, those that are too far from the ends of the chain for others."""
    blocks = problem.blocks
    first, count = blocks.index(kind), blocks.count(kind)
    behind = len(blocks) - first - count
    together = all(block == kind for block in blocks[first : first + count])
    return range(first, problem.num_stages - behind) if together else range(0)


def _rank(
    problem: PartitionProblem, kind: int, held: Sequence[int], surely: Container[int]
) -> _Rank:
    capacity = problem.capacity_bytes[held[0]]
    ends = [(0, problem.blocks[0]), (problem.num_stages - 1, problem.blocks[-1])]
    if len(problem.blocks) == 1:
        ends = ends[:1]
    least_cut_s = min(problem.boundary_s, default=0.0) * problem.boundary_in_max
    return _Rank(
        free_bytes=capacity
        + CAPACITY_TOLERANCE * abs(capacity)
        - sum(problem.stage_fixed_bytes[k] for k in held),
        block=_block(problem, kind, held),
        sure=np.array([k in surely for k in held]),
        cuts_s=np.array([_at(problem, k)[2] * least_cut_s for k in held]),
        others=tuple(
            (held.index(stage), _block(problem, own, held))
            for stage, own in ends
            if stage in held and own != kind
        ),
    )


def _block(problem: PartitionProblem, kind: int, held: Sequence[int]) -> _Block:
    options, ranks = problem.classes[kind], len(problem.rank_stages())
    time_s, static, saved, sync_s, transient, device = np.array([o.numbers for o in options]).T
    scale, at, _ = np.array([_at(problem, k) for k in held]).T
    in_flight = np.array([problem.in_flight[k] for k in held], dtype=float)
    return _Block(
        time_s=scale[:, None] * time_s,
        used_bytes=static + in_flight[:, None] * saved,
        elsewhere=np.where(device == at[:, None], 0.0, np.inf),
        sync_s=sync_s / ranks,
        transient_bytes=transient,
    )


def _loads(rank: _Rank, problem: PartitionProblem, most: int) -> tuple[Array, Array]:
    """What 0 to `most` blocks of the class take a rank at the least, with sums, and count for;
    infinite where that many have no room or are too few."""
    numbers = np.arange(most + 1)
    prices = _prices(rank, most)
    stages, share = len(rank.sure), problem.stage_share
    even = np.ones(stages)
    work_s = _least(rank, even, prices, numbers, sync=True)
    counts_s = np.zeros(most + 1)
    for weights in _weights(rank, share):
        own_s = _least(rank, weights, prices, numbers, sync=False)
        counts_s = np.maximum(counts_s, own_s + float(weights @ rank.cuts_s))
    return work_s, counts_s


def _weights(rank: _Rank, share: float) -> Iterator[Array]:
    """What times of stages are weighed by: more where less is held, or all blocks go there."""
    stages = len(rank.sure)
    held = rank.block.used_bytes.max(axis=1)
    lighter = 1 - held / held.mean() if held.any() else np.zeros(stages)
    for tilt in _TILTS if share and np.ptp(held) else _TILTS[:1]:
        shares = np.maximum(0.0, 1 + tilt * lighter)
        yield 1 - share + share * stages * shares / shares.sum()


def _least(
    rank: _Rank, weights: Array, prices: Array, numbers: NDArray[np.intp], *, sync: bool
) -> Array:
    """What so many blocks of the class take at the least, and the others of the rank."""
    sharing = np.maximum(numbers, 1)
    each = rank.block.least(weights, prices, sharing, sync=sync)  # [stage, price, number]
    sure = int(rank.sure.sum())
    total = each[rank.sure].sum(axis=0) + (numbers - sure) * each.min(axis=0)
    alone = np.array([np.inf])
    used = rank.block.used_bytes + rank.block.elsewhere
    least = (used[:, :, None] + rank.block.transient_bytes[:, None] / sharing).min(axis=1)
    needed = least[rank.sure].sum(axis=0) + (numbers - sure) * least.min(axis=0)
    for stage, block in rank.others:
        there = block.least(weights, prices, alone, sync=sync)[stage]
        total = total + there
        needed = needed + (block.used_bytes + block.elsewhere)[stage].min()
    found = (total - rank.free_bytes * prices[:, None]).max(axis=0)
    spent = _ROUNDING * (np.abs(total).max(axis=0) + prices.max() * abs(rank.free_bytes))
    fits = (numbers >= sure) & (needed <= rank.free_bytes * (1 + _ROUNDING))
    return np.where(fits, np.maximum(0.0, found - spent), np.inf)


def _prices(rank: _Rank, most: int) -> Array:
    """Seconds per byte at which blocks would change their option, on any of the stages."""
    found = {0.0}
    for stage, time_s in enumerate(rank.block.time_s + rank.block.elsewhere):
        used = rank.block.used_bytes[stage] + rank.block.transient_bytes / max(most // 2, 1)
        found.update(_slopes(used, time_s))
    return np.array(sorted(found))


def _slopes(used: Array, time_s: Array) -> Iterator[float]:
    """Falls of the lower hull of time over bytes."""
    points = zip(used.tolist(), time_s.tolist(), strict=True)
    hull = lower_hull([point for point in points if math.isfinite(point[1])])
    for (less, before), (more, after) in pairwise(hull):
        if after < before:
            yield (before - after) / (more - less)


def _dealt(
    work_s: Array,
    counts_s: Array,
    several: NDArray[np.intp],
    count: int,
    weight: float,
    longest_s: float,
) -> float:
    """The least sum of the ranks' work and `weight` times what the longest of them counts for, over
    ways to deal out so many blocks; both [rank, number]."""
    counts_s = np.maximum.accumulate(np.where(np.isinf(work_s), 0.0, counts_s), axis=1)
    first = np.isfinite(work_s).argmax(axis=1)
    if np.isinf(work_s.min(axis=1)).any():
        return math.inf
    start_s = float(several @ np.take_along_axis(work_s, first[:, None], axis=1)[:, 0])
    left = count - int(several @ first)
    steps = sorted(
        (step_s, float(counts_s[rank, number]), int(several[rank]))
        for rank, row in enumerate(work_s)
        for number, step_s in _steps(row)
    )
    start_count = max(longest_s, float(np.take_along_axis(counts_s, first[:, None], axis=1).max()))
    limits = sorted({start_count, *(c for _, c, _ in steps if c > start_count)})
    best = math.inf
    least_s = _cheapest(steps, left, math.inf)
    for limit in limits:
        if start_s + least_s + weight * limit >= best:
            break
        best = min(best, start_s + _cheapest(steps, left, limit) + weight * limit)
    return best


def _steps(work_s: Array) -> Iterator[tuple[int, float]]:
    """What one block more takes, by the lower hull over numbers."""
    numbers = np.flatnonzero(np.isfinite(work_s))
    hull = lower_hull(list(zip(numbers.tolist(), work_s[numbers].tolist(), strict=True)))
    for (first, before), (last, after) in pairwise(hull):
        for number in range(int(first) + 1, int(last) + 1):
            yield number, (after - before) / (last - first)


def _cheapest(steps: list[tuple[float, float, int]], left: int, limit: float) -> float:
    """The sum of so many of the cheapest steps that count for no more than the limit."""
    total = 0.0
    for step_s, counts_s, several in steps:
        if left <= 0:
            break
        if counts_s <= limit:
            taken = min(left, several)
            total += taken * step_s
            left -= taken
    return total if left <= 0 else math.inf
