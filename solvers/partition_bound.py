"""A cheap lower bound on a partition problem, to discard problems without solving them."""

from __future__ import annotations

import dataclasses
import functools
import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from solvers.partition_problem import PartitionProblem
from solvers.solution import CAPACITY_TOLERANCE

_ROUNDING = 1e-12
_HALVINGS = 40
_MULTIPLIERS = 256
_EXACT = 1e-11


def lower_bound(problem: PartitionProblem) -> float:
    """A lower bound on the objective; inf where the memory of all stages together is too little.

    Blocks may be split at will and all stages' memory is pooled, at the fewest micro-batches in
    flight of any stage; the memory constraint is priced by its Lagrangian. With W the least total
    work, sum T >= W * min scale + the cheapest cuts, and max T >= W / sum(1 / scale) over ranks,
    which is what perfectly balanced ones take. Whole blocks cannot be balanced so well: max T is
    also what the best way to deal them out at their least times leaves, to ranks and their stages.
    """
    problem = on_any_device(problem.scaled())
    counts = np.bincount(problem.blocks, minlength=len(problem.classes)).astype(float)
    stages = problem.num_stages
    ranks = problem.rank_stages()
    capacities = [problem.capacity_bytes[held[0]] for held in ranks]
    free = sum(c + CAPACITY_TOLERANCE * abs(c) for c in capacities)
    free -= sum(problem.stage_fixed_bytes)
    work = _least_work(problem, counts, free)
    if math.isinf(work) or len(problem.blocks) < stages * problem.min_blocks:
        return math.inf
    scales = problem.time_scale
    present = [options for options, n in zip(problem.classes, counts, strict=True) if n]
    boundary = least_cuts(problem)
    total = work * min(scales) + boundary
    spread = total if problem.boundary_in_max else work * min(scales)
    bottleneck = max(spread / len(ranks), least_bottleneck(problem))
    if min(scales) > 0:
        fastest = sum(1 / min(scales[k] for k in held) for held in ranks)
        bottleneck = max(bottleneck, work / fastest)
    least_sync = np.array([min(o.sync_s for o in options) for options in problem.classes])
    longest_sync = max(min(o.sync_s for o in options) for options in present)
    sync = max(float(counts @ least_sync) / len(ranks), longest_sync)
    bound = total + problem.bottleneck_weight * bottleneck + sync
    return bound * (1 - _ROUNDING)


def on_any_device(problem: PartitionProblem) -> PartitionProblem:
    """A relaxation with options that any stage may use: what a kind of device takes longer for
    every class than the fastest for it is in the stage's scale, and no longer in its options."""
    if len(set(problem.stage_device)) == 1:
        return problem
    present = [problem.classes[kind] for kind in sorted(set(problem.blocks))]
    slower = {}
    for device in sorted(set(problem.stage_device)):
        ratios = []
        for options in present:
            fastest = min(o.time_s for o in options)
            own = min(o.time_s for o in options if o.device == device)
            ratios.append(own / fastest if fastest else 1.0)
        slower[device] = min(ratios)
    classes = tuple(
        tuple(
            dataclasses.replace(o, time_s=o.time_s / slower[o.device], device=0)
            for o in options
            if o.device in slower
        )
        for options in problem.classes
    )
    scales = zip(problem.time_scale, problem.stage_device, strict=True)
    return dataclasses.replace(
        problem,
        classes=tuple(new or old for new, old in zip(classes, problem.classes, strict=True)),
        time_scale=tuple(scale * slower[device] for scale, device in scales),
        stage_device=(),
    )


def _least_work(problem: PartitionProblem, counts: np.ndarray, free: float) -> float:
    """The least sum of block times with `free` bytes for all, relaxed; inf if even that fails."""
    in_flight = min(problem.in_flight)
    times = [np.array([o.time_s for o in options]) for options in problem.classes]
    used = [
        np.array([o.static_bytes + in_flight * o.saved_bytes for o in options])
        for options in problem.classes
    ]
    if counts @ np.array([u.min() for u in used]) > free * (1 + _ROUNDING):
        return math.inf
    multipliers = {0.0}
    for time, use in zip(times, used, strict=True):
        i, j = np.nonzero((use[:, None] > use) & (time[:, None] < time))
        multipliers.update(((time[j] - time[i]) / (use[i] - use[j])).tolist())
    prices = np.array(sorted(multipliers)[:_MULTIPLIERS])
    each = zip(times, used, strict=True)
    least = [(t[:, None] + u[:, None] * prices).min(axis=0) for t, u in each]
    total = counts @ np.array(least)
    bounds = total - prices * free - _ROUNDING * (total + prices * abs(free))
    return max(0.0, float(bounds.max()))


def least_bottleneck(problem: PartitionProblem) -> float:
    """The least time of the longest rank as it counts, blocks at their least times, cuts anywhere
    or as fixed; where cuts take their time beside the blocks, no less than their mean."""
    longest_s = _least_longest(problem) * min(problem.time_scale)
    if problem.boundary_in_max:
        return longest_s
    return max(longest_s, least_cuts(problem) / len(problem.rank_stages()) * (1 - _ROUNDING))


def _least_longest(problem: PartitionProblem) -> float:
    """The least time of the longest rank's blocks.

    A limit under which too few runs of blocks cover the chain is raised by halving; the limit
    returned is one that no cuts keep. Where ranks hold several stages any blocks may share one.
    """
    least = [min(o.time_s for o in options) for options in problem.classes]
    sums = list(accumulate((least[kind] for kind in problem.blocks), initial=0.0))
    if problem.fixed_cuts is not None:
        runs = problem.stages(problem.fixed_cuts)
        times = [sums[run.stop] - sums[run.start] for run in runs]
        return max(problem.counted([times[k] for k in held]) for held in problem.rank_stages())
    if problem.shares_ranks:
        return _least_load(problem, [least[kind] for kind in problem.blocks])
    return _longest_run(
        tuple(sums), max(least[kind] for kind in set(problem.blocks)), problem.num_stages
    )


@functools.lru_cache(maxsize=64)
def _longest_run(sums: tuple[float, ...], largest: float, stages: int) -> float:
    """The time of the longest of so many runs of blocks, by the sums of their times from the first
    on. One problem is asked about more than once."""
    low = max(sums[-1] / stages, largest) * (1 - _ROUNDING)
    # Filled one after the other, no stage passes the mean by more than its last block.
    high = min(sums[-1], (sums[-1] / stages + largest) * (1 + _ROUNDING))
    if _covers(sums, low * (1 + _ROUNDING), stages):
        return low
    for _ in range(_HALVINGS):
        if high - low <= _EXACT * high:
            break
        middle = (low + high) / 2
        if _covers(sums, middle, stages):
            high = middle
        else:
            low = middle
    return low


def _least_load(problem: PartitionProblem, times: list[float]) -> float:
    """What the fullest rank counts for at the least: the mean, and, as of j * ranks + 1 blocks some
    rank has j + 1, the shortest that these can be, of which some stage has its share."""
    held, share = problem.rank_stages(), problem.stage_share
    ranks, stages = len(held), max(map(len, held))
    fewest = min(map(len, held))
    ordered = sorted(times, reverse=True)
    sums = list(accumulate(ordered, initial=0.0))
    load = sums[-1] / ranks
    for last in range(0, len(ordered), ranks):
        blocks = last // ranks + 1
        own = sums[last + 1] - sums[last + 1 - blocks]
        longest = sums[last + 1] - sums[last + 1 - -(-blocks // stages)]
        load = max(load, own, (1 - share) * own + share * fewest * longest)
    return load * (1 - _ROUNDING)


def _covers(sums: Sequence[float], limit: float, stages: int) -> bool:
    """Whether so many stages of at most `limit` each can hold all blocks."""
    done, last = 0, len(sums) - 1
    for _ in range(stages):
        done = bisect_right(sums, sums[done] + limit) - 1
        if done == last:
            return True
    return False


def least_cuts(problem: PartitionProblem) -> float:
    """What the cuts add to the sum of stage times at least: each counts for both its stages."""
    if problem.fixed_cuts is not None:
        cuts = [problem.boundary_s[cut - 1] for cut in problem.fixed_cuts]
        hops = list(problem.hop_scale)
    else:
        cuts = sorted(problem.boundary_s)[: problem.num_stages - 1]
        hops = sorted(problem.hop_scale, reverse=True)
    return 2.0 * math.fsum(cost * scale for cost, scale in zip(cuts, hops, strict=True))
