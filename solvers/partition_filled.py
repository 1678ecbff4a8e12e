"""A quick partition of a long chain of equal blocks: ranks filled up to a limit on their stages.

Where a stage may take so long, n blocks hold the least on it if some run by an option that holds
little and as few as there must be by a faster one: the numbers of both follow from the limit. A
rank with room for its stages takes the blocks that hold the least more, one after the other, until
it is full. The least limit under which all ranks together have room for the chain is found by
halving, and what room is left then goes to the faster options. Nothing here grows with the chain
but the numbers that a stage may have.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solvers.partition_frontier import pareto
from solvers.partition_graph import Partition, in_order
from solvers.partition_problem import PartitionProblem
from solvers.solution import CAPACITY_TOLERANCE

Array = NDArray[np.float64]
Numbers = NDArray[np.intp]

_HALVINGS = 14
_DOUBLINGS = 8
_MOST_WAYS = 128
"""Ways to run the other blocks of a stage that are gone through at the most."""
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """The longest run of equal blocks of a chain: `before` and `after` are the others, and a cut
    within takes `cut_s` of the time that counts."""

    kind: int
    length: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    cut_s: float

    @staticmethod
    def of(problem: PartitionProblem) -> _Run:
        ends = [0]
        for _, own in itertools.groupby(problem.blocks):
            ends.append(ends[-1] + len(list(own)))
        start, end = max(itertools.pairwise(ends), key=lambda run: run[1] - run[0])
        return _Run(
            kind=problem.blocks[start],
            length=end - start,
            before=problem.blocks[:start],
            after=problem.blocks[end:],
            cut_s=problem.boundary_s[start] if end - start > 1 and problem.boundary_in_max else 0.0,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Ways:
    """Ways [way] to run the blocks of stages that are not of the run: on a stage without any there
    is one, of nothing."""

    stage: Numbers
    time_s: Array
    used: Array
    transient: Array
    options: list[tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Full:
    """Ranks filled under a limit: the transient peak of each, its blocks by stage, and what is left
    of its room."""

    limit_s: float
    threshold: Array
    numbers: Numbers
    spare: Array

    @property
    def total(self) -> int:
        """Blocks of all ranks."""
        return int(self.numbers.sum())


def filled(problem: PartitionProblem) -> Partition | None:
    """Cuts and options; None where blocks that are not of the longest run are many, some of it take
    no time, or all of them were not found to fit."""
    run = _Run.of(problem)
    alike = len({len(stages) for stages in problem.rank_stages()}) == 1
    if problem.fixed_cuts is not None or problem.min_blocks > 1 or not alike:
        return None
    fastest_s = min(o.time_s for o in problem.classes[run.kind]) * min(problem.time_scale)
    if run.length < problem.num_stages or fastest_s <= 0:
        return None
    ways = _other_ways(problem, run)
    if ways is None:
        return None
    filler = _Filler(problem, run, ways)
    full = filler.least()
    return None if full is None else filler.partition(full)


def _other_ways(problem: PartitionProblem, run: _Run) -> _Ways | None:
    """Blocks before the run are on the first stage, those after it on the last."""
    rows: list[_Way] = []
    last = problem.num_stages - 1
    for stage in range(problem.num_stages):
        kinds = (*(run.before if stage == 0 else ()), *(run.after if stage == last else ()))
        device = problem.stage_device[stage]
        offered = [
            [i for i, o in enumerate(problem.classes[kind]) if o.device == device] for kind in kinds
        ]
        if math.prod(map(len, offered)) > _MOST_WAYS:
            return None
        own = [_way(problem, stage, kinds, chosen) for chosen in itertools.product(*offered)]
        numbers = np.array([(time_s, used, transient) for _, time_s, used, transient, _ in own])
        rows += [own[i] for i in pareto(*numbers.T).tolist()]
    stages, times, used, transients, found = zip(*rows, strict=True)
    return _Ways(
        stage=np.array(stages),
        time_s=np.array(times),
        used=np.array(used),
        transient=np.array(transients),
        options=list(found),
    )


_Way = tuple[int, float, float, float, tuple[int, ...]]
"""A stage, with the seconds, bytes, transient bytes and options of its other blocks."""


def _way(
    problem: PartitionProblem, stage: int, kinds: Sequence[int], chosen: tuple[int, ...]
) -> _Way:
    options = [problem.classes[kind][o] for kind, o in zip(kinds, chosen, strict=True)]
    return (
        stage,
        problem.time_scale[stage] * sum(o.time_s for o in options),
        sum(o.held_bytes(problem.in_flight[stage]) for o in options),
        max((o.transient_bytes for o in options), default=0.0),
        chosen,
    )


class _Filler:
    """Fills the ranks of one problem. A mix is an option that holds little and a faster one."""

    def __init__(self, problem: PartitionProblem, run: _Run, ways: _Ways) -> None:
        self.problem, self.run, self.ways = problem, run, ways
        self.ranks = np.array(problem.rank_stages())
        options = problem.classes[run.kind]
        scale, device = np.array(problem.time_scale), np.array(problem.stage_device)
        self.time_s = scale[:, None] * np.array([o.time_s for o in options])
        self.used = np.array(
            [[o.held_bytes(count) for o in options] for count in problem.in_flight]
        )
        here = device[:, None] == np.array([o.device for o in options])
        small, fast = np.meshgrid(np.arange(len(options)), np.arange(len(options)))
        slower = self.time_s[0][small] > self.time_s[0][fast]
        some = slower | (small == fast)
        self.small, self.fast = small[some], fast[some]
        self.here = here[:, self.small] & here[:, self.fast]
        transient = np.array([o.transient_bytes for o in options])
        self.transient = np.maximum(transient[self.small], transient[self.fast])
        capacity = np.array([problem.capacity_bytes[stages[0]] for stages in self.ranks])
        fixed = np.array(problem.stage_fixed_bytes)[self.ranks].sum(axis=1)
        self.free = capacity * (1 + CAPACITY_TOLERANCE) - fixed
        self.cuts_s = np.full(problem.num_stages, 2 * run.cut_s)
        self.cuts_s[0] -= run.cut_s
        self.cuts_s[-1] -= run.cut_s
        others = np.zeros(problem.num_stages, dtype=bool)
        others[ways.stage[[bool(own) for own in ways.options]]] = True
        self.fewest = np.where(others, 0, 1)

    def least(self) -> _Full | None:
        """All ranks under about the least limit under which they have room for all blocks."""
        fastest_s = float(self.time_s.min(axis=1).mean())
        low = high = fastest_s * self.run.length / self.problem.num_stages
        full = None
        for _ in range(_DOUBLINGS):
            full = self._filled(high)
            if full is not None:
                break
            low, high = high, 2 * high
        for _ in range(_HALVINGS if full is not None else 0):
            middle = (low + high) / 2
            found = self._filled(middle)
            if found is None:
                low = middle
            else:
                high, full = middle, found
        return full

    def _filled(self, limit_s: float) -> _Full | None:
        """Ranks as full as they get under a limit; None where they lack room for some block."""
        most = min(self.run.length, int(limit_s / self.time_s.min()) + 1)
        held = self._held(limit_s, np.arange(most + 1))[0]
        best: _Full | None = None
        for threshold in sorted({*self.transient.tolist(), *self.ways.transient.tolist()}):
            found = self._filled_below(limit_s, held, threshold)
            if best is None:
                best = found
            more = found.numbers.sum(axis=1), best.numbers.sum(axis=1)
            better = (more[0] > more[1]) | ((more[0] == more[1]) & (found.spare > best.spare))
            best = _Full(
                limit_s=limit_s,
                threshold=np.where(better, found.threshold, best.threshold),
                numbers=np.where(better[:, None], found.numbers, best.numbers),
                spare=np.where(better, found.spare, best.spare),
            )
        full = best is not None and np.isfinite(best.spare).all()
        return best if full and best is not None and best.total >= self.run.length else None

    def _held(self, limit_s: float, numbers: Numbers) -> tuple[Array, Numbers]:
        """The least bytes [way, mix, number] of so many blocks and others of a stage within a
        limit, and how many of them run by the option that holds little."""
        stage = self.ways.stage
        left_s = (limit_s - self.cuts_s[stage] - self.ways.time_s)[:, None, None]
        fast_s = self.time_s[stage][:, self.fast, None]
        more_s = self.time_s[stage][:, self.small, None] - fast_s
        spare_s = left_s * (1 + _ROUNDING) - numbers * fast_s
        with np.errstate(divide="ignore", invalid="ignore"):
            small = np.floor(np.where(more_s > 0, spare_s / more_s, numbers))
        small = np.clip(small, 0, numbers)
        some = self.here[stage][:, :, None] & (spare_s >= 0)
        used = self.used[stage]
        held = small * used[:, self.small, None] + (numbers - small) * used[:, self.fast, None]
        held = np.where(some, held, np.inf)
        return held + self.ways.used[:, None, None], small.astype(np.intp)

    def _filled_below(self, limit_s: float, held: Array, threshold: float) -> _Full:
        """Ranks with no transient beyond a threshold; without blocks where they lack room."""
        least = np.full((self.problem.num_stages, held.shape[2]), np.inf)
        allowed = self.transient <= threshold
        if allowed.any():
            by_way = held[:, allowed].min(axis=1)
            by_way[self.ways.transient > threshold] = np.inf
            np.minimum.at(least, self.ways.stage, by_way)
        base = least[np.arange(len(least)), np.minimum(self.fewest, held.shape[2] - 1)]
        room = self.free - threshold - base[self.ranks].sum(axis=1)
        with np.errstate(invalid="ignore"):
            more = np.diff(least, axis=1)
        more[np.isnan(more)] = np.inf
        more[np.arange(more.shape[1]) < self.fewest[:, None]] = -np.inf  # in the base
        more = np.maximum.accumulate(more, axis=1)
        more[np.arange(more.shape[1]) < self.fewest[:, None]] = 0.0
        flat = more[self.ranks].reshape(len(self.ranks), -1)
        order = np.argsort(flat, axis=1, kind="stable")
        spent = np.cumsum(np.take_along_axis(flat, order, axis=1), axis=1)
        fits = np.isfinite(room) & (room >= 0)
        taken = np.zeros(flat.shape, dtype=bool)
        np.put_along_axis(taken, order, (spent <= room[:, None]) & fits[:, None], axis=1)
        numbers = taken.reshape(len(self.ranks), self.ranks.shape[1], -1).sum(axis=2)
        last = np.where(np.take_along_axis(taken, order, axis=1), spent, 0.0).max(axis=1)
        return _Full(
            limit_s=limit_s,
            threshold=np.full(len(self.ranks), threshold),
            numbers=np.where(fits[:, None], numbers, 0),
            spare=np.where(fits, room - last, -np.inf),
        )

    def partition(self, full: _Full) -> Partition:
        """The blocks of the run dealt out, no more of them than there are."""
        numbers = full.numbers.copy()
        for _ in range(full.total - self.run.length):
            spare = numbers - self.fewest[self.ranks]
            rank = int(np.where(spare.any(axis=1), numbers.sum(axis=1), -1).argmax())
            numbers[rank, spare[rank].argmax()] -= 1
        held: list[list[tuple[int, int]]] = [[] for _ in range(self.problem.num_stages)]
        for rank, stages in enumerate(self.ranks):
            chosen = self._chosen(rank, numbers[rank], full)
            for stage, own in zip(stages.tolist(), chosen, strict=True):
                held[stage] = own
        cuts = tuple(itertools.accumulate(len(own) for own in held[:-1]))
        return cuts, in_order(self.problem, cuts, held)

    def _chosen(self, rank: int, numbers: Numbers, full: _Full) -> list[list[tuple[int, int]]]:
        """(class, option) of the blocks of a rank's stages: those that hold the least within the
        limit, and as many faster ones as there is room for."""
        threshold, kind = full.threshold[rank], self.run.kind
        allowed = self.transient <= threshold
        held, small = self._held(full.limit_s, np.unique(numbers))
        held[:, ~allowed] = np.inf
        held[self.ways.transient > threshold] = np.inf
        room = self.free[rank] - threshold
        mixes = []
        for stage, number in zip(self.ranks[rank].tolist(), numbers.tolist(), strict=True):
            at = int(np.searchsorted(np.unique(numbers), number))
            own = np.where((self.ways.stage == stage)[:, None], held[:, :, at], np.inf)
            way, mix = divmod(int(own.argmin()), own.shape[1])
            room -= own[way, mix]
            mixes.append((stage, number, way, mix, int(small[way, mix, at])))
        found = []
        for stage, number, way, mix, slow in mixes:
            few, fast = int(self.small[mix]), int(self.fast[mix])
            more = self.used[stage, fast] - self.used[stage, few]
            faster = min(slow, int(room / more)) if more > 0 and room > 0 else 0
            room -= faster * max(more, 0.0)
            others = zip(self._others(stage), self.ways.options[way], strict=True)
            found.append(
                [*others]
                + [(kind, few)] * (slow - faster)
                + [(kind, fast)] * (number - slow + faster)
            )
        return found

    def _others(self, stage: int) -> tuple[int, ...]:
        """The classes of the other blocks of a stage."""
        before = self.run.before if stage == 0 else ()
        return (*before, *(self.run.after if stage == self.problem.num_stages - 1 else ()))
