"""What a stage costs: the least time of a run of blocks within the memory of a kind of stage.

A price depends on how many blocks of each class a run has (its composition), not on where it lies,
so uniform chains have few prices. `lower_time` bounds all of them at once by the Lagrangian of the
memory constraint; `price` is exact. It takes Pareto frontiers, each composition's grown from the
one with a block less and shared by all stages, while these stay small; else a knapsack each
(`partition_knapsack`), which leaves open only how far sync may be traded for time, within a bound.
The transient peak is a maximum over blocks: each of its possible values is tried as a limit on the
options, with that much less memory for the rest.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solvers.partition_frontier import ClassTable, Frontier, empty_frontier, extend
from solvers.partition_frontier import last_class as _last
from solvers.partition_frontier import one_less as _one_less
from solvers.partition_knapsack import Group, Packing, best_multiplier, pack
from solvers.partition_problem import PartitionProblem
from solvers.solution import CAPACITY_TOLERANCE

Array = NDArray[np.float64]

_MAX_MULTIPLIERS = 64
_MAX_STEPS = 8
_MAX_POINTS = 1000
_MAX_GROWN = 256
"""Blocks of a run up to which frontiers are grown, one by one."""

_ROUNDING = 1e-12


class OutOfTime(Exception):
    """The time limit was reached."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageKind:
    """What makes stages alike: micro-batches in flight, bytes free for blocks, slowness, kind of
    device, and how dear the cuts at both their ends are."""

    in_flight: int
    free_bytes: float
    scale: float
    device: int = 0
    hops: tuple[float, float] = (1.0, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """Time (scaled) and sync of one way to run a stage.

    `options` gives (class, option) of its blocks; None for a bound that no way may attain.
    `count_s` is what it counts towards the bottleneck, where that is not its time and its cuts'.
    """

    time_s: float
    sync_s: float
    options: Callable[[], list[tuple[int, int]]] | None
    count_s: float = 0.0


class Pricer:
    """Prices of all runs of blocks of a problem, computed on demand and kept.

    `classes` are the options of every class by the kind of device that stages are on, and rows of
    `compositions` how many blocks of each a run has. A second of a stage's time costs `weight`
    seconds of objective at the least.
    """

    def __init__(
        self,
        *,
        kinds: Sequence[StageKind],
        kind_of_stage: Sequence[int],
        classes: Mapping[int, Sequence[ClassTable]],
        compositions: NDArray[np.intp],
        weight: float,
        deadline: float,
    ) -> None:
        self.deadline = deadline
        self.kinds, self.kind_of_stage = list(kinds), list(kind_of_stage)
        self.classes = classes
        self.compositions = compositions
        self._counts = self.compositions.astype(float)
        self._grows = self._counts.sum(axis=1).max() <= _MAX_GROWN
        self.weight = weight
        every = [table for tables in classes.values() for table in tables]
        self.thresholds = sorted({float(t) for table in every for t in table.transient})
        self._frontiers: dict[tuple[int, int, float, tuple[int, ...]], Frontier | None] = {}
        self._prices: dict[tuple[int, int], tuple[Price, ...]] = {}
        self._least_syncs: dict[int, Array] = {}
        self._largest = {
            f: max(k.free_bytes for k in self.kinds if k.in_flight == f)
            for f in {k.in_flight for k in self.kinds}
        }

    @classmethod
    def of(
        cls, problem: PartitionProblem, compositions: NDArray[np.intp], deadline: float
    ) -> Pricer:
        """Prices of the runs of a chain."""
        kinds, kind_of_stage = _stage_kinds(problem)
        tables = [ClassTable(options) for options in problem.classes]
        return cls(
            kinds=kinds,
            kind_of_stage=kind_of_stage,
            classes=dict.fromkeys(sorted(set(problem.stage_device)), tables),
            compositions=compositions,
            weight=_time_weight(problem),
            deadline=deadline,
        )

    def least_bytes(self, kind: int) -> Array:
        """The least bytes (static, saved, transient) each composition can run in."""
        stage, limits = self.kinds[kind], np.array(self.thresholds)
        used = [table.used(stage.in_flight)[:, None] for table in self.classes[stage.device]]
        least = self._least(used, stage.device, limits)[:, :, 0]
        # A limit that lets nothing less be used is no better than the one below.
        differ = np.flatnonzero((least[:, 1:] != least[:, :-1]).any(axis=0)) + 1
        useful = [0, *differ.tolist()]
        return np.asarray((self._sums(least[:, useful]) + limits[useful]).min(axis=1))

    def least_options(self, kind: int, composition: int) -> list[tuple[int, int]]:
        """(class, option) of the blocks of a composition in the least bytes."""
        stage = self.kinds[kind]
        counts = tuple(int(count) for count in self.compositions[composition])
        least, best = math.inf, list[tuple[int, int]]()
        for threshold in self.own_thresholds(counts, stage.device):
            total, chosen = threshold, list[tuple[int, int]]()
            for index, count in enumerate(counts):
                if not count:
                    continue
                table = self.classes[stage.device][index]
                some = np.flatnonzero(table.allowed(stage.device, threshold))
                used = table.used(stage.in_flight)[some]
                total += count * float(used.min())
                chosen += [(index, int(some[used.argmin()]))] * count
            if total < least:
                least, best = total, chosen
        return best

    def least_sync(self, kind: int) -> Array:
        """A lower bound on the sync time of each composition on a kind of stage."""
        if kind not in self._least_syncs:
            device = self.kinds[kind].device
            syncs = [c.sync[:, None] for c in self.classes[device]]
            least = self._least(syncs, device, np.array([np.inf]))[:, :, 0]
            self._least_syncs[kind] = self._sums(least)[:, 0]
        return self._least_syncs[kind]

    def lower_time(self, kind: int) -> Array:
        """A lower bound on the time of each composition; inf where, exactly, none fits."""
        fits = self.least_bytes(kind) <= self.kinds[kind].free_bytes
        return np.where(fits, self.relaxed_time(kind), np.inf)

    def relaxed_time(self, kind: int) -> Array:
        """The same of any way to fit, whether there is one or not.

        The transient peak is relaxed to a few steps: options up to a step's end, at its start.
        """
        stage = self.kinds[kind]
        multipliers = np.array(self._multipliers(stage))
        values = [
            c.time[:, None] + multipliers * c.used(stage.in_flight)[:, None]
            for c in self.classes[stage.device]
        ]
        steps = np.array_split(self.thresholds, min(_MAX_STEPS, len(self.thresholds)))
        first, last = (np.array([step[end] for step in steps]) for end in (0, -1))
        least = self._least(values, stage.device, last)
        priced = multipliers * (stage.free_bytes - first)[:, None]
        total = self._sums(least.reshape(len(least), -1)).reshape(-1, *priced.shape)
        surely = total * (1 - _ROUNDING) - (priced + _ROUNDING * np.abs(priced))
        return np.asarray(np.maximum(surely.max(axis=2), 0.0).min(axis=1) * stage.scale)

    def bounds(self, kind: int) -> tuple[Array, Array | None]:
        """Bounds on the ways [way, composition] to run on a kind of stage: of their times, and of
        what they count towards the bottleneck where that is not their time."""
        return self.lower_time(kind)[None, :], None

    def _least(self, values: list[Array], device: int, limits: Array) -> Array:
        """The least values [class, limit, case] of options on a device with transients up to each
        limit. `values` holds a row per option and a column per case."""
        tables = self.classes[device]
        return np.array(
            [table.least(own, device, limits) for own, table in zip(values, tables, strict=True)]
        )

    def _sums(self, least: Array) -> Array:
        """Per composition and case, the sum over its blocks of the least values [class, case];
        infinite where a class that has some has none."""
        missing = np.isinf(least)
        total = self._counts @ np.where(missing, 0.0, least)
        if missing.any():
            total[self._counts @ missing > 0] = np.inf
        return np.asarray(total)

    def _multipliers(self, stage: StageKind) -> list[float]:
        """Seconds per byte at which a block would change its option: where the bound is tight."""
        values = {0.0}
        for table in self.classes[stage.device]:
            used, own = table.used(stage.in_flight), table.device == stage.device
            trades = (used[:, None] > used) & (table.time[:, None] < table.time)
            i, j = np.nonzero(trades & own[:, None] & own)
            values.update(((table.time[j] - table.time[i]) / (used[i] - used[j])).tolist())
        ordered = sorted(values)
        step = -(-len(ordered) // _MAX_MULTIPLIERS)
        return ordered[::step]

    def price(self, kind: int, composition: int) -> tuple[Price, ...]:
        """Pareto-optimal (time, sync) of a composition on a kind of stage, exact, by time."""
        key = (kind, composition)
        if key not in self._prices:
            counts = tuple(int(c) for c in self.compositions[composition])
            self._prices[key] = self._price(self.kinds[kind], counts)
        return self._prices[key]

    def _price(self, stage: StageKind, counts: tuple[int, ...]) -> tuple[Price, ...]:
        thresholds = self.own_thresholds(counts, stage.device)
        found: list[Price] = []
        if len(thresholds) > _MAX_STEPS or not self._grows:
            return self._packed(stage, counts, thresholds)
        for threshold in thresholds:
            frontier = self._frontier(stage, threshold, counts)
            if frontier is None:
                return self._packed(stage, counts, thresholds)
            found += _fitting(frontier, stage, threshold)
        return _pareto_prices(found)

    def _packed(
        self, stage: StageKind, counts: tuple[int, ...], thresholds: list[float]
    ) -> tuple[Price, ...]:
        """The fastest way, the one of least time + sync / weight, and a bound on all others.

        In exchange for the time that a way takes more than the fastest it can only save as much
        sync as `weight` allows, so (least time, weight * (least sum - least time)) is as good.
        """
        present = [(c, n) for c, n in enumerate(counts) if n]
        tables = [(self.classes[stage.device][c], n) for c, n in present]
        fastest = self._pack(stage, present, thresholds, sync_share=0.0)
        if fastest is None:
            return ()
        syncs = [(t.sync[t.device == stage.device], n) for t, n in tables]
        least_sync = sum(n * float(sync.min()) for sync, n in syncs)
        prices, bounds = [fastest[0]], (fastest[1], least_sync)
        if any(sync.min() < sync.max() for sync, _ in syncs):
            share = 1.0 / self.weight if self.weight else 0.0
            both = self._pack(stage, present, thresholds, sync_share=share)
            if both is not None and share:
                prices.append(both[0])
                floor = self.weight * (both[1] - fastest[1])
                bounds = (fastest[1], max(least_sync, floor))
        bound = Price(
            time_s=stage.scale * bounds[0] * (1 - _ROUNDING),
            sync_s=bounds[1] * (1 - _ROUNDING),
            options=None,
        )
        return (*_pareto_prices(prices), bound)

    def _pack(
        self,
        stage: StageKind,
        present: list[tuple[int, int]],
        thresholds: list[float],
        *,
        sync_share: float,
    ) -> tuple[Price, float] | None:
        """The packing of least time + sync_share * sync over all transient peaks; its bound."""
        best: tuple[Packing, float] | None = None
        bound = math.inf
        for lower, threshold in self.ordered(stage, present, thresholds, sync_share):
            if time.perf_counter() > self.deadline:
                raise OutOfTime
            if best is not None and lower >= best[0].cost:
                break
            groups = self._groups(stage, present, threshold, sync_share)
            cutoff = math.inf if best is None else best[0].cost
            packing = pack(groups, stage.free_bytes - threshold, cutoff)
            if packing is not None:
                bound = min(bound, packing.bound)
            if packing is not None and packing.cost < cutoff:
                best = packing, threshold
        if best is None:
            return None
        price = self._packed_price(stage, present, packing=best[0], threshold=best[1])
        return price, min(bound, best[0].cost)

    def _groups(
        self,
        stage: StageKind,
        present: list[tuple[int, int]],
        threshold: float,
        sync_share: float,
    ) -> list[Group]:
        groups = []
        for index, count in present:
            table = self.classes[stage.device][index]
            some = table.allowed(stage.device, threshold)
            cost = (table.time + sync_share * table.sync)[some]
            groups.append(Group(count=count, cost=cost, used=table.used(stage.in_flight)[some]))
        return groups

    def ordered(
        self,
        stage: StageKind,
        present: list[tuple[int, int]],
        thresholds: list[float],
        sync_share: float,
    ) -> list[tuple[float, float]]:
        """(lower bound on cost, threshold) of the thresholds that fit, ascending."""
        limits = np.array(thresholds)
        last = self._groups(stage, present, thresholds[-1], sync_share)
        multiplier, _ = best_multiplier(last, stage.free_bytes - thresholds[-1])
        least, lower = np.zeros(len(limits)), -multiplier * (stage.free_bytes - limits)
        for (index, count), group in zip(present, last, strict=True):
            table = self.classes[stage.device][index]
            own = table.transient[table.allowed(stage.device, thresholds[-1])]
            allowed = own <= limits[:, None]
            value = group.cost + multiplier * group.used
            least += count * np.where(allowed, group.used, np.inf).min(axis=1)
            lower += count * np.where(allowed, value, np.inf).min(axis=1)
        fitting = least <= stage.free_bytes - limits
        lower -= _ROUNDING * (np.abs(lower) + abs(multiplier * stage.free_bytes))
        return sorted(zip(lower[fitting].tolist(), limits[fitting].tolist(), strict=True))

    def _packed_price(
        self,
        stage: StageKind,
        present: list[tuple[int, int]],
        *,
        packing: Packing,
        threshold: float,
    ) -> Price:
        kinds = [index for index, count in present for _ in range(count)]
        tables = self.classes[stage.device]
        allowed = {
            i: np.flatnonzero(tables[i].allowed(stage.device, threshold)) for i, _ in present
        }
        options = [
            (i, int(allowed[i][local])) for i, local in zip(kinds, packing.options, strict=True)
        ]
        return Price(
            time_s=stage.scale * math.fsum(float(tables[i].time[o]) for i, o in options),
            sync_s=math.fsum(float(tables[i].sync[o]) for i, o in options),
            options=lambda: options,
        )

    def own_thresholds(self, counts: Sequence[int], device: int) -> list[float]:
        """The transient peaks that a run of so many blocks may have."""
        tables = [self.classes[device][c] for c, count in enumerate(counts) if count]
        present = [table.transient[table.device == device] for table in tables]
        floor = max(float(t.min()) for t in present)
        return sorted({float(t) for ts in present for t in ts if t >= floor})

    def _frontier(
        self, stage: StageKind, threshold: float, counts: tuple[int, ...]
    ) -> Frontier | None:
        """The frontier of a composition; None where it, or one it is made from, is too large."""
        device, in_flight = stage.device, stage.in_flight
        missing = []
        while (device, in_flight, threshold, counts) not in self._frontiers:
            missing.append(counts)
            if sum(counts) == 1:
                break
            counts = _one_less(counts)
        current: Frontier | None = empty_frontier()
        if (device, in_flight, threshold, counts) in self._frontiers:
            current = self._frontiers[device, in_flight, threshold, counts]
        largest = self._largest[in_flight] - threshold
        for counts in reversed(missing):
            if time.perf_counter() > self.deadline:
                raise OutOfTime
            if current is not None:
                current = extend(
                    current,
                    _last(counts),
                    self.classes[device][_last(counts)],
                    device=device,
                    in_flight=in_flight,
                    threshold=threshold,
                    largest=largest,
                    weight=self.weight,
                )
            if current is not None and len(current.time) > _MAX_POINTS:
                current = None
            self._frontiers[device, in_flight, threshold, counts] = current
        return current


def _fitting(frontier: Frontier, stage: StageKind, threshold: float) -> list[Price]:
    """The ways of a frontier that fit, each with less sync than all faster ones."""
    fitting = np.flatnonzero(frontier.used <= stage.free_bytes - threshold)
    sync = frontier.sync[fitting]
    before = np.concatenate([[np.inf], np.minimum.accumulate(sync)[:-1]])
    return [
        Price(
            time_s=stage.scale * float(frontier.time[way]),
            sync_s=float(frontier.sync[way]),
            options=functools.partial(frontier.options, int(way)),
        )
        for way in fitting[sync < before[: len(sync)]]
    ]


def _pareto_prices(prices: Sequence[Price]) -> tuple[Price, ...]:
    """The prices that no other matches or beats in time and sync, by time."""
    kept: list[Price] = []
    for price in sorted(prices, key=lambda p: (p.time_s, p.sync_s)):
        if not kept or price.sync_s < kept[-1].sync_s:
            kept.append(price)
    return tuple(kept)


def _stage_kinds(problem: PartitionProblem) -> tuple[list[StageKind], list[int]]:
    kinds: dict[StageKind, int] = {}
    kind_of_stage = []
    hops = (1.0, *problem.hop_scale, 1.0)
    for k in range(problem.num_stages):
        capacity = problem.capacity_bytes[k]
        allowed = capacity + CAPACITY_TOLERANCE * abs(capacity)
        kind = StageKind(
            in_flight=problem.in_flight[k],
            free_bytes=allowed - problem.stage_fixed_bytes[k],
            scale=problem.time_scale[k],
            device=problem.stage_device[k],
            hops=(hops[k], hops[k + 1]),
        )
        kind_of_stage.append(kinds.setdefault(kind, len(kinds)))
    return list(kinds), kind_of_stage


def _time_weight(problem: PartitionProblem) -> float:
    """What a second of a stage's own block time costs at least, in seconds of objective."""
    uses = 1.0 + problem.bottleneck_weight if problem.num_stages == 1 else 1.0
    return uses * min(problem.time_scale)
