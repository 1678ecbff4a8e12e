"""Where stages of a long chain start and end: even ones, and none longer than pays.

A chain of many blocks has as many places for a cut, of which a good partition uses few: with
stages of about the same time a stage is never much longer than the mean.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from itertools import accumulate

from solvers.partition_bound import least_cuts
from solvers.partition_problem import PartitionProblem

_ROUNDING = 1e-9

LONG = 128
"""Places for a cut from which on it pays to look at those of good partitions alone."""


def is_long(problem: PartitionProblem) -> bool:
    """Whether a chain that is not cut yet has many places for that."""
    return len(problem.blocks) >= LONG and problem.fixed_cuts is None


def _sums(problem: PartitionProblem) -> list[float]:
    """The least time of all blocks before each position."""
    least = [min(o.time_s for o in options) for options in problem.classes]
    return list(accumulate((least[kind] for kind in problem.blocks), initial=0.0))


def even_positions(problem: PartitionProblem) -> tuple[int, ...]:
    """Where stages of about equal least time start, and the end of the last."""
    sums, stages, least = _sums(problem), problem.num_stages, problem.min_blocks
    length, positions = len(problem.blocks), [0]
    for k in range(1, stages):
        wanted = sums[-1] * k / stages
        at = bisect_left(sums, wanted)
        if at > 0 and wanted - sums[at - 1] < sums[at] - wanted:
            at -= 1
        lowest, highest = positions[-1] + least, length - (stages - k) * least
        positions.append(min(max(at, lowest), highest))
    return (*positions, length)


def longest_stage(problem: PartitionProblem, objective: float) -> int:
    """The most blocks that a stage of a partition has whose objective is at most as given.

    All blocks take their least times at least, and so does the stage: what is left of the objective
    has the longest stage in it, as often as it counts. Times are those of `problem.scaled()`.
    """
    length, weight = len(problem.blocks), problem.bottleneck_weight
    scale, sums = min(problem.time_scale), _sums(problem)
    if weight <= 0 or scale <= 0:
        return length
    spared = objective * (1 + _ROUNDING) - scale * sums[-1] - least_cuts(problem)
    limit = spared / weight / scale
    if not math.isfinite(limit):
        return length
    reach = (bisect_right(sums, done + limit) - 1 - start for start, done in enumerate(sums))
    return min(length, max(1, *reach) + 1)
