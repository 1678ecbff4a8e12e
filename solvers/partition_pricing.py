"""What a stage costs: the least time of a run of blocks within the memory of a kind of stage.

A price depends on how many blocks of each class a run has (its composition), not on where it lies,
so uniform chains have few prices. `lower_time` bounds all of them at once by the Lagrangian of the
memory constraint; `price` is exact: a knapsack solved by merging Pareto frontiers block by block,
each composition built from the one that has a block less.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solvers.partition_problem import BlockOption, PartitionProblem
from solvers.solution import CAPACITY_TOLERANCE

Array = NDArray[np.float64]

_MAX_MULTIPLIERS = 64
_ROUNDING = 1e-12
_PARETO_BLOCK = 256


class OutOfTime(Exception):
    """The time limit was reached."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageKind:
    """What makes stages alike: micro-batches in flight, bytes free for blocks, slowness."""

    in_flight: int
    free_bytes: float
    scale: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Frontier:
    """Pareto-optimal ways to run a composition, by time. `parent` points into the frontier of the
    composition with one block less, `option` is that block's."""

    time: Array
    used: Array
    sync: Array
    parent: NDArray[np.intp]
    option: NDArray[np.intp]


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """One way to run a stage: time (scaled), sync, and the option counts' place in a frontier."""

    time_s: float
    sync_s: float
    threshold: float
    index: int


class ClassTable:
    """The options of one block class as arrays."""

    def __init__(self, options: tuple[BlockOption, ...]) -> None:
        self.time = np.array([o.time_s for o in options])
        self.static = np.array([o.static_bytes for o in options])
        self.saved = np.array([o.saved_bytes for o in options])
        self.sync = np.array([o.sync_s for o in options])
        self.transient = np.array([o.transient_bytes for o in options])

    def used(self, in_flight: int) -> Array:
        """Bytes held by each option for the whole step."""
        return self.static + in_flight * self.saved


class Pricer:
    """Prices of all runs of blocks of a problem, computed on demand and kept."""

    def __init__(self, problem: PartitionProblem, deadline: float) -> None:
        self.deadline = deadline
        self.kinds, self.kind_of_stage = _stage_kinds(problem)
        self.classes = [ClassTable(options) for options in problem.classes]
        self.run, self.compositions = _compositions(problem)
        self.weight = _time_weight(problem)
        self.thresholds = sorted({float(t) for c in self.classes for t in c.transient})
        self._frontiers: dict[tuple[int, float, tuple[int, ...]], Frontier] = {}
        self._prices: dict[tuple[int, int], tuple[Price, ...]] = {}
        self._largest = {
            f: max(k.free_bytes for k in self.kinds if k.in_flight == f)
            for f in {k.in_flight for k in self.kinds}
        }

    def least_bytes(self, kind: int) -> Array:
        """The least bytes (static, saved, transient) each composition can run in."""
        in_flight = self.kinds[kind].in_flight
        needs = [
            self._total(lambda c: c.used(in_flight), threshold) + threshold
            for threshold in self.thresholds
        ]
        return np.min(needs, axis=0)

    def least_sync(self) -> Array:
        """A lower bound on the sync time of each composition."""
        return self._total(lambda c: c.sync, np.inf)

    def lower_time(self, kind: int) -> Array:
        """A lower bound on the time of each composition; inf where, exactly, none fits."""
        stage = self.kinds[kind]
        multipliers = self._multipliers(stage.in_flight)
        best = np.full(len(self.compositions), np.inf)
        for threshold in self.thresholds:
            free = stage.free_bytes - threshold
            bound = np.zeros(len(best))
            for multiplier in multipliers:

                def relaxed(c: ClassTable, m: float = multiplier) -> Array:
                    return c.time + m * c.used(stage.in_flight)

                total = self._total(relaxed, threshold)
                magnitude = np.where(np.isinf(total), 0.0, total) + abs(multiplier * free)
                bound = np.maximum(bound, total - multiplier * free - _ROUNDING * magnitude)
            misfit = self._total(lambda c: c.used(stage.in_flight), threshold) > free
            best = np.minimum(best, np.where(misfit, np.inf, bound))
        return best * stage.scale

    def _total(self, value: Callable[[ClassTable], Array], threshold: float) -> Array:
        """Per composition, the sum of each block's least `value` with transient <= threshold."""
        least = np.zeros(len(self.classes))
        missing = np.zeros(len(self.classes), dtype=bool)
        for index, table in enumerate(self.classes):
            allowed = table.transient <= threshold
            missing[index] = not allowed.any()
            least[index] = 0.0 if missing[index] else value(table)[allowed].min()
        total = self.compositions @ least
        return np.where(self.compositions[:, missing].any(axis=1), np.inf, total)

    def _multipliers(self, in_flight: int) -> list[float]:
        """Seconds per byte at which a block would change its option: where the bound is tight."""
        values = {0.0}
        for table in self.classes:
            used = table.used(in_flight)
            for i, j in np.argwhere((used[:, None] > used) & (table.time[:, None] < table.time)):
                values.add(float((table.time[j] - table.time[i]) / (used[i] - used[j])))
        ordered = sorted(values)
        step = -(-len(ordered) // _MAX_MULTIPLIERS)
        return ordered[::step]

    def price(self, kind: int, composition: int) -> tuple[Price, ...]:
        """Pareto-optimal (time, sync) of a composition on a kind of stage, exact, by time."""
        key = (kind, composition)
        if key not in self._prices:
            self._prices[key] = self._price(self.kinds[kind], composition)
        return self._prices[key]

    def _price(self, stage: StageKind, composition: int) -> tuple[Price, ...]:
        counts = tuple(int(c) for c in self.compositions[composition])
        found: list[Price] = []
        for threshold in self._own_thresholds(counts):
            frontier = self._frontier(stage.in_flight, threshold, counts)
            fitting = np.flatnonzero(frontier.used <= stage.free_bytes - threshold)
            sync = frontier.sync[fitting]
            before = np.concatenate([[np.inf], np.minimum.accumulate(sync)[:-1]])
            for index in fitting[sync < before[: len(sync)]]:
                found.append(
                    Price(
                        time_s=stage.scale * float(frontier.time[index]),
                        sync_s=float(frontier.sync[index]),
                        threshold=threshold,
                        index=int(index),
                    )
                )
        found.sort(key=lambda p: (p.time_s, p.sync_s, p.threshold))
        kept: list[Price] = []
        for price in found:
            if not kept or price.sync_s < kept[-1].sync_s:
                kept.append(price)
        return tuple(kept)

    def _own_thresholds(self, counts: tuple[int, ...]) -> list[float]:
        present = [self.classes[c].transient for c, count in enumerate(counts) if count]
        floor = max(float(t.min()) for t in present)
        return sorted({float(t) for ts in present for t in ts if t >= floor})

    def _frontier(self, in_flight: int, threshold: float, counts: tuple[int, ...]) -> Frontier:
        missing = []
        while (in_flight, threshold, counts) not in self._frontiers and any(counts):
            missing.append(counts)
            counts = _one_less(counts)
        if not any(counts):
            zero, none = np.zeros(1), np.zeros(1, dtype=np.intp)
            current = Frontier(time=zero, used=zero, sync=zero, parent=none, option=none)
        else:
            current = self._frontiers[in_flight, threshold, counts]
        largest = self._largest[in_flight] - threshold
        for counts in reversed(missing):
            if time.perf_counter() > self.deadline:
                raise OutOfTime
            table = self.classes[_last(counts)]
            current = _extend(current, table, in_flight, threshold, largest, self.weight)
            self._frontiers[in_flight, threshold, counts] = current
        return current

    def options(self, kind: int, composition: int, price: Price) -> list[list[int]]:
        """Option of every block of a priced composition, per class, ascending."""
        in_flight = self.kinds[kind].in_flight
        counts = tuple(int(c) for c in self.compositions[composition])
        chosen: list[list[int]] = [[] for _ in self.classes]
        index = price.index
        while any(counts):
            frontier = self._frontiers[in_flight, price.threshold, counts]
            chosen[_last(counts)].append(int(frontier.option[index]))
            index = int(frontier.parent[index])
            counts = _one_less(counts)
        return [sorted(options) for options in chosen]


def _stage_kinds(problem: PartitionProblem) -> tuple[list[StageKind], list[int]]:
    kinds: dict[StageKind, int] = {}
    kind_of_stage = []
    for k in range(problem.num_stages):
        capacity = problem.capacity_bytes[k]
        allowed = capacity + CAPACITY_TOLERANCE * abs(capacity)
        kind = StageKind(
            in_flight=problem.in_flight[k],
            free_bytes=allowed - problem.stage_fixed_bytes[k],
            scale=problem.time_scale[k],
        )
        kind_of_stage.append(kinds.setdefault(kind, len(kinds)))
    return list(kinds), kind_of_stage


def _compositions(problem: PartitionProblem) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Composition index of every run [start, end), and the block counts of every composition."""
    length = len(problem.blocks)
    prefix = np.zeros((length + 1, len(problem.classes)), dtype=np.intp)
    prefix[np.arange(1, length + 1), list(problem.blocks)] = 1
    prefix = prefix.cumsum(axis=0)
    starts, ends = np.triu_indices(length + 1, k=1)
    compositions, index = np.unique(prefix[ends] - prefix[starts], axis=0, return_inverse=True)
    run = np.zeros((length + 1, length + 1), dtype=np.intp)
    run[starts, ends] = index.reshape(-1)
    return run, compositions


def _time_weight(problem: PartitionProblem) -> float:
    """What a second of a stage's own block time costs at least, in seconds of objective."""
    uses = problem.num_micro_batches if problem.num_stages == 1 else 1
    return uses * min(problem.time_scale)


def _last(counts: tuple[int, ...]) -> int:
    return max(index for index, count in enumerate(counts) if count)


def _one_less(counts: tuple[int, ...]) -> tuple[int, ...]:
    last = _last(counts)
    return (*counts[:last], counts[last] - 1, *counts[last + 1 :])


def _extend(
    frontier: Frontier,
    table: ClassTable,
    in_flight: int,
    threshold: float,
    largest: float,
    weight: float,
) -> Frontier:
    """The frontier with one block more, of what fits into `largest` bytes."""
    allowed = np.flatnonzero(table.transient <= threshold)
    points, choices = np.meshgrid(np.arange(len(frontier.time)), allowed, indexing="ij")
    points, choices = points.reshape(-1), choices.reshape(-1)
    used = frontier.used[points] + table.used(in_flight)[choices]
    fitting = np.flatnonzero(used <= largest)
    points, choices, used = points[fitting], choices[fitting], used[fitting]
    times = frontier.time[points] + table.time[choices]
    sync = frontier.sync[points] + table.sync[choices]
    kept = pareto(times, used, sync + weight * times)
    return Frontier(
        time=times[kept],
        used=used[kept],
        sync=sync[kept],
        parent=points[kept],
        option=choices[kept],
    )


def pareto(first: Array, second: Array, third: Array) -> NDArray[np.intp]:
    """Indices of the points that no other matches or beats in all three, ascending by `first`."""
    order = np.lexsort((third, second, first))
    if len(order) == 0:
        return order
    ordered = second[order]
    before = np.concatenate([[np.inf], np.minimum.accumulate(ordered)[:-1]])
    front = ordered < before  # beaten by none in the first two
    rival = order[np.maximum.accumulate(np.where(front, np.arange(len(order)), 0))]
    order = order[front | (third[order] < third[rival])]
    if len(order) == front.sum():
        return order
    kept = order[:0]
    for start in range(0, len(order), _PARETO_BLOCK):
        block = order[start : start + _PARETO_BLOCK]
        block = block[~_beats(kept, block, second, third).any(axis=1)]
        earlier = np.tri(len(block), k=-1, dtype=bool)  # sorted: only those before can beat
        beaten = (_beats(block, block, second, third) & earlier).any(axis=1)
        kept = np.concatenate([kept, block[~beaten]])
    return kept


def _beats(
    rivals: NDArray[np.intp], points: NDArray[np.intp], second: Array, third: Array
) -> NDArray[np.bool_]:
    """[point, rival]: whether the rival needs no more of either."""
    no_more = second[rivals] <= second[points][:, None]
    return np.asarray(no_more & (third[rivals] <= third[points][:, None]))
