"""How long the longest rank of a partition takes at the least, as whole blocks fill ranks.

A rank that holds j blocks of a class has room for its j-th part on each of them. With t(b) the
least time of a block in b bytes, options mixed at will (a lower convex hull), they take it
j * t(room / j). A longest rank of time T has room for as many of them as have j * t(room / j) <= T
on each rank: of all these times the n-th shortest is the least that n blocks of the class take.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from solvers.hull import lower_hull
from solvers.partition_problem import PartitionProblem
from solvers.solution import CAPACITY_TOLERANCE

Array = NDArray[np.float64]

_ROUNDING = 1e-12


def least_fill(problem: PartitionProblem) -> float:
    """What the longest rank takes at the least, of devices that are all alike but for their scale;
    inf where not all blocks of a class have room."""
    ranks = Counter(
        (
            problem.capacity_bytes[held[0]] - sum(problem.stage_fixed_bytes[k] for k in held),
            min(problem.in_flight[k] for k in held),
            min(problem.time_scale[k] for k in held),
        )
        for held in problem.rank_stages()
    )
    longest = 0.0
    for kind, count in sorted(Counter(problem.blocks).items()):
        if count >= len(problem.rank_stages()):
            longest = max(longest, _of_class(problem, kind, count, ranks))
    return longest * (1 - _ROUNDING)


def _of_class(
    problem: PartitionProblem,
    kind: int,
    count: int,
    ranks: Counter[tuple[float, int, float]],
) -> float:
    options = problem.classes[kind]
    times = np.array([o.time_s for o in options])
    static = np.array([o.static_bytes for o in options])
    saved = np.array([o.saved_bytes for o in options])
    transient = min(o.transient_bytes for o in options)
    parts = np.arange(1, count + 1)
    taken, several = [], []
    for (free, in_flight, scale), alike in sorted(ranks.items()):
        room = (free * (1 + CAPACITY_TOLERANCE) - transient) / parts * (1 + _ROUNDING)
        taken.append(scale * parts * _least_times(times, static + in_flight * saved, room))
        several.append(np.full(count, alike))
    each, number = np.concatenate(taken), np.concatenate(several)
    order = np.argsort(each, kind="stable")
    at = int(np.searchsorted(np.cumsum(number[order]), count))
    return float(each[order[at]])


def _least_times(times: Array, used: Array, room: Array) -> Array:
    """The least time of a mix of options that uses no more than each `room` on average."""
    uses, least = np.array(lower_hull(zip(used.tolist(), times.tolist(), strict=True))).T
    least = np.minimum.accumulate(least)  # room may be left
    return np.asarray(np.where(room < uses[0], math.inf, np.interp(room, uses, least)))
