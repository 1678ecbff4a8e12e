"""A partition problem with little to try, exact: all cuts, all options of the blocks of a rank.

With the cuts given, ranks meet only in the sum of times, the longest rank and the longest sync. So
each rank's ways to run its own blocks are tried apart, the beaten ones dropped, and ranks joined
one by one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solvers.partition_counting import Counting
from solvers.partition_frontier import pareto
from solvers.partition_problem import PartitionProblem
from solvers.solution import CAPACITY_TOLERANCE

Array = NDArray[np.float64]

_MAX_TRIALS = 20_000


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Ways:
    """Ways to run some ranks: the sum of stage times, the longest rank as far as it counts, the
    longest sync, and the option of every block of theirs [way, block]."""

    time: Array
    top: Array
    sync: Array
    options: NDArray[np.intp]

    def kept(self, ways: NDArray[np.intp]) -> _Ways:
        return _Ways(
            time=self.time[ways],
            top=self.top[ways],
            sync=self.sync[ways],
            options=self.options[ways],
        )

    def unbeaten(self) -> _Ways:
        return self.kept(pareto(self.time, self.top, self.sync))

    def joined(self, other: _Ways) -> _Ways:
        """Every way of these ranks with every one of others."""
        first = np.repeat(np.arange(len(self.time)), len(other.time))
        second = np.tile(np.arange(len(other.time)), len(self.time))
        return _Ways(
            time=self.time[first] + other.time[second],
            top=np.maximum(self.top[first], other.top[second]),
            sync=np.maximum(self.sync[first], other.sync[second]),
            options=np.concatenate([self.options[first], other.options[second]], axis=1),
        )


def can_try_all(problem: PartitionProblem) -> bool:
    """Whether there are few enough cuts and options to try."""
    blocks, ranks = len(problem.blocks), problem.rank_stages()
    cuts = 1 if problem.fixed_cuts else math.comb(blocks - 1, problem.num_stages - 1)
    most = max(map(len, ranks)) + blocks - problem.num_stages
    widest = max(len(problem.classes[kind]) for kind in set(problem.blocks))
    return cuts * len(ranks) * widest**most <= _MAX_TRIALS


def best_of_all(problem: PartitionProblem) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Cuts and options of the least objective; None where no partition fits."""
    best, found = math.inf, None
    for cuts in _cut_sets(problem):
        ranks = [_ways(problem, cuts, stages)[0] for stages in problem.rank_stages()]
        joined = ranks[0]
        for ways in ranks[1:]:
            joined = joined.joined(ways).unbeaten()
        total = problem.sum_weight * joined.time + problem.bottleneck_weight * joined.top
        total += joined.sync
        if total.size and total.min() < best:
            best = float(total.min())
            found = cuts, _in_order(problem, cuts, joined.options[int(total.argmin())])
    return found


def least_lacking(problem: PartitionProblem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Cuts and options with which ranks lack the fewest bytes in total."""
    best, found = math.inf, None
    for cuts in _cut_sets(problem):
        lack, options = 0.0, []
        for stages in problem.rank_stages():
            _, used, offered = _ways(problem, cuts, stages)
            lack += max(0.0, float(used.min()) - problem.capacity_bytes[stages[0]])
            options.append(offered[int(used.argmin())])
        if lack < best:
            best, found = lack, (cuts, _in_order(problem, cuts, np.concatenate(options)))
    if found is None:
        raise ValueError("there are fewer blocks than stages need")
    return found


def _cut_sets(problem: PartitionProblem) -> Iterator[tuple[int, ...]]:
    if problem.fixed_cuts is not None:
        yield problem.fixed_cuts
        return
    blocks = len(problem.blocks)
    for cuts in itertools.combinations(range(1, blocks), problem.num_stages - 1):
        if min(len(stage) for stage in problem.stages(cuts)) >= problem.min_blocks:
            yield cuts


def _in_order(
    problem: PartitionProblem, cuts: tuple[int, ...], options: NDArray[np.intp]
) -> tuple[int, ...]:
    """Options of blocks that come rank by rank, in the order of the chain."""
    runs = problem.stages(cuts)
    blocks = [b for stages in problem.rank_stages() for k in stages for b in runs[k]]
    return tuple(int(options[blocks.index(b)]) for b in range(len(blocks)))


def _ways(
    problem: PartitionProblem, cuts: tuple[int, ...], stages: Sequence[int]
) -> tuple[_Ways, Array, NDArray[np.intp]]:
    """The unbeaten ways of one rank's stages that fit, and the bytes and options of all."""
    runs = [problem.stages(cuts)[k] for k in stages]
    classes = [problem.classes[problem.blocks[b]] for run in runs for b in run]
    devices = [problem.stage_device[k] for k, run in zip(stages, runs, strict=True) for _ in run]
    offered = [
        [i for i, option in enumerate(c) if option.device == device]
        for c, device in zip(classes, devices, strict=True)
    ]
    trials = np.indices([len(own) for own in offered]).reshape(len(classes), -1).T
    options = np.stack([np.array(own)[trials[:, i]] for i, own in enumerate(offered)], axis=1)
    value = {
        name: np.stack(
            [np.array([getattr(o, name) for o in c])[options[:, i]] for i, c in enumerate(classes)]
        )
        for name in ("time_s", "static_bytes", "saved_bytes", "sync_s", "transient_bytes")
    }
    works, cuts_s = [], []
    used = value["transient_bytes"].max(axis=0)
    start = 0
    hops = [
        scale * problem.boundary_s[c - 1] for c, scale in zip(cuts, problem.hop_scale, strict=True)
    ]
    for k, run in zip(stages, runs, strict=True):
        own = slice(start, start + len(run))
        start += len(run)
        work = problem.time_scale[k] * value["time_s"][own].sum(axis=0)
        works.append(work)
        cuts_s.append(sum(hops[max(k - 1, 0) : k + 1]))
        saved = problem.in_flight[k] * value["saved_bytes"][own].sum(axis=0)
        used += problem.stage_fixed_bytes[k] + value["static_bytes"][own].sum(axis=0) + saved
    capacity = problem.capacity_bytes[stages[0]]
    fitting = np.flatnonzero(used <= capacity + CAPACITY_TOLERANCE * abs(capacity))
    work_s, edges = np.stack(works, axis=-1), np.array(cuts_s)
    top, time = Counting.of(problem)(work_s, edges), (work_s + edges).sum(axis=-1)
    ways = _Ways(time=time, top=top, sync=value["sync_s"].sum(axis=0), options=options)
    return ways.kept(fitting).unbeaten(), used, options
