"""Stages that share ranks: the memory of a rank ties stages together that are far apart.

The dynamic program needs a capacity per stage. So each rank's capacity is dealt out to its stages,
in several ways, and each way is solved exactly; what fits apart fits together. Giving every stage
the whole capacity is a relaxation, exact where memory is not what decides. `shared_bound` prices
the memory of all ranks instead, by a Lagrangian: with `used` what a stage holds,

    sum_weight * sum T + max_weight * max T + max Y
      >= min over partitions of sum (sum_weight * T + max_weight * T / ranks + Y / ranks + p * used)
         - p * sum capacity

for any price p >= 0, as a maximum over ranks is at least the mean.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solvers.partition_arcs import Laid
from solvers.partition_compositions import compositions
from solvers.partition_dp import ChainSearch
from solvers.partition_pricing import Pricer, StageKind
from solvers.partition_problem import BlockOption, PartitionProblem
from solvers.partition_table import chain_arcs
from solvers.solution import CAPACITY_TOLERANCE, Conflict

Array = NDArray[np.float64]

_ROUNDING = 1e-12
_LADDER = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, math.inf)
"""Prices of memory at which shares are dealt out, in multiples of the middle one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A problem without shared ranks. `kept` are the options left of every class.

    With `relaxes` its bound holds for the problem that it came from.
    """

    problem: PartitionProblem
    original: PartitionProblem
    kept: tuple[tuple[int, ...], ...]
    relaxes: bool = False

    def options(self, chosen: tuple[int, ...]) -> tuple[int, ...]:
        """The options of every block, as the original problem numbers them."""
        blocks = self.original.blocks
        return tuple(self.kept[kind][o] for kind, o in zip(blocks, chosen, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortfall:
    """The partition that lacks the fewest bytes, at the least that its stages need."""

    conflict: Conflict
    cuts: tuple[int, ...]
    stage_bytes: tuple[float, ...]


def parts(problem: PartitionProblem) -> Iterator[Part]:
    """Problems without shared ranks: first the relaxation, then ways to deal out capacities."""
    everything = tuple(tuple(range(len(options))) for options in problem.classes)
    whole = tuple(range(problem.num_stages))
    fewest = min(len(stages) for stages in problem.rank_stages())
    often = 1 + problem.stage_share * (fewest - 1)  # how often a rank's longest stage counts
    apart = dataclasses.replace(
        problem,
        stage_rank=whole,
        stage_share=0.0,
        max_weight=often * problem.bottleneck_weight,
    )
    yield Part(problem=apart, original=problem, kept=everything, relaxes=True)
    chunks = max(len(stages) for stages in problem.rank_stages())
    for threshold in _thresholds(problem):
        kept = tuple(
            tuple(i for i, o in enumerate(options) if o.transient_bytes <= threshold)
            for options in problem.classes
        )
        used = set(problem.blocks)
        if any(not kept[kind] for kind in used):
            continue
        classes = tuple(
            tuple(
                dataclasses.replace(o, sync_s=chunks * o.sync_s, transient_bytes=0.0)
                for o in ([options[i] for i in own] or options)
            )
            for options, own in zip(problem.classes, kept, strict=True)
        )
        seen = set()
        for price in _prices(problem, kept):
            capacities = _deal(problem, kept, price, threshold)
            if capacities not in seen:
                seen.add(capacities)
                dealt = dataclasses.replace(apart, classes=classes, capacity_bytes=capacities)
                yield Part(problem=dealt, original=problem, kept=kept)


def _thresholds(problem: PartitionProblem) -> list[float]:
    """Largest transients to allow: the least that every class can run in, and any."""
    present = [problem.classes[kind] for kind in sorted(set(problem.blocks))]
    least = max(
        min(o.transient_bytes for o in options if o.device == device)
        for options in present
        for device in set(problem.stage_device)
    )
    most = max(o.transient_bytes for options in present for o in options)
    return sorted({most, least}, reverse=True)


def _prices(problem: PartitionProblem, kept: tuple[tuple[int, ...], ...]) -> list[float]:
    """Seconds per byte, from memory for free to memory above all."""
    middle = _exchange_rates(problem, kept)
    if not middle:
        return [0.0]
    typical = middle[len(middle) // 2]
    return [factor * typical for factor in _LADDER]


def _exchange_rates(problem: PartitionProblem, kept: tuple[tuple[int, ...], ...]) -> list[float]:
    """Seconds per byte at which a block would change its option, ascending."""
    in_flight = float(np.mean(problem.in_flight))
    rates = set()
    for kind in sorted(set(problem.blocks)):
        options = [problem.classes[kind][i] for i in kept[kind]]
        for a in options:
            for b in options:
                saved = _held(a, in_flight) - _held(b, in_flight)
                if saved > 0 and b.time_s > a.time_s:
                    rates.add((b.time_s - a.time_s) / saved)
    return sorted(rates)


def _held(option: BlockOption, in_flight: float) -> float:
    return option.static_bytes + in_flight * option.saved_bytes


def _deal(
    problem: PartitionProblem, kept: tuple[tuple[int, ...], ...], price: float, threshold: float
) -> tuple[float, ...]:
    """A capacity for every stage: a rank's, less its fixed bytes and the largest transient, in
    proportion to what an even share of the blocks would hold at a price of memory."""
    counts = np.bincount(problem.blocks, minlength=len(problem.classes)) / problem.num_stages
    needs = []
    for in_flight, device in zip(problem.in_flight, problem.stage_device, strict=True):
        need = 0.0
        for kind in sorted(set(problem.blocks)):
            every = [problem.classes[kind][i] for i in kept[kind]]
            options = [o for o in every if o.device == device]
            best = min(options, key=lambda o: _priced(o, price, in_flight))
            need += float(counts[kind]) * _held(best, in_flight)
        needs.append(max(need, 1.0))
    capacities = [0.0] * problem.num_stages
    for stages in problem.rank_stages():
        fixed = math.fsum(problem.stage_fixed_bytes[k] for k in stages)
        free = problem.capacity_bytes[stages[0]] - fixed - threshold
        total = math.fsum(needs[k] for k in stages)
        for k in stages:
            capacities[k] = problem.stage_fixed_bytes[k] + free * needs[k] / total
    return tuple(capacities)


def _priced(option: BlockOption, price: float, in_flight: int) -> tuple[float, float]:
    held = _held(option, in_flight)
    if math.isinf(price):
        return held, option.time_s
    return option.time_s + price * held, held


class _Relaxed:
    """Shortest paths in which every block takes its cheapest option at a price of memory."""

    def __init__(self, problem: PartitionProblem) -> None:
        self.problem = problem
        whole = tuple(range(problem.num_stages))
        apart = dataclasses.replace(problem, stage_rank=whole).scaled()
        run, counts = compositions(apart.blocks, len(apart.classes))
        self.pricer = Pricer.of(apart, counts, math.inf)
        self.search = ChainSearch.of(apart, self.pricer.kind_of_stage, math.inf)
        self.places = chain_arcs(apart, self.pricer.kinds, run)
        self.ranks = problem.rank_stages()
        present = [problem.classes[kind] for kind in sorted(set(problem.blocks))]
        transient = max(min(o.transient_bytes for o in options) for options in present)
        # The largest transient of all ranks is on one of them; each rank has some block's least.
        least = min(o.transient_bytes for options in present for o in options)
        spared = (len(self.ranks) - 1) * least + transient
        capacity = math.fsum(
            problem.capacity_bytes[stages[0]] * (1 + CAPACITY_TOLERANCE) for stages in self.ranks
        )
        self.capacity = capacity - math.fsum(problem.stage_fixed_bytes) - spared

    def costs(
        self, price: float, *, time_weight: float, cut_weight: float, sync_weight: float
    ) -> list[Laid]:
        """Per kind of stage, the cost of its cheapest way."""
        found = []
        each = zip(self.pricer.kinds, self.places, self.search.boxes(), strict=True)
        for kind, everywhere, box in each:
            least = []
            for c in self.pricer.classes[kind.device]:
                cost = time_weight * kind.scale * c.time + sync_weight * c.sync
                own = (cost + price * c.used(kind.in_flight))[c.device == kind.device]
                least.append(float(own.min()) if len(own) else 0.0)  # 0: no block of the class
            place = everywhere.narrowed(box, self.search.longest)
            costs = self.pricer.compositions @ np.array(least)
            found.append(place.lay(costs, cut_weight * place.cuts_s))
        return found


def shared_bound(problem: PartitionProblem) -> float:
    """A lower bound on the objective by the Lagrangian of all ranks' memory together."""
    relaxed = _Relaxed(problem)
    weight = relaxed.search.weight / len(relaxed.ranks)
    weights = {
        "time_weight": 1 + weight,
        "cut_weight": 1 + weight if problem.boundary_in_max else 1.0,
        "sync_weight": 1 / len(relaxed.ranks),
    }
    kept = tuple(tuple(range(len(options))) for options in problem.classes)
    rates = [0.0, *_exchange_rates(problem, kept)]
    step = -(-len(rates) // 16)
    best = 0.0
    for price in [problem.sum_weight * (1 + weight) * rate for rate in rates[::step]]:
        found = relaxed.search.shortest(relaxed.costs(price, **weights))
        if found is not None:
            total, spent = found[0], price * relaxed.capacity
            best = max(best, total - spent - _ROUNDING * (total + abs(spent)))
    return best


def least_shortfall(problem: PartitionProblem) -> Shortfall:
    """The partition of least bytes; `conflict` is empty where that is not too much for all ranks
    together, so that some partition may fit."""
    relaxed = _Relaxed(problem)
    found = relaxed.search.shortest(
        relaxed.costs(1.0, time_weight=0.0, cut_weight=0.0, sync_weight=0.0)
    )
    if found is None:  # unreachable: any cut positions are a path
        raise AssertionError("no cut positions")
    total, positions = found
    options = []
    for stage, kind in enumerate(relaxed.pricer.kind_of_stage):
        stage_kind = relaxed.pricer.kinds[kind]
        blocks = problem.blocks[positions[stage] : positions[stage + 1]]
        options += [_smallest(problem.classes[b], stage_kind) for b in blocks]
    cuts = positions[1:-1]
    use = problem.use(cuts, tuple(options))
    short = problem.lacking(use) if total > relaxed.capacity else []
    return Shortfall(
        conflict=tuple((f"stage {stage}", lacking) for stage, lacking in short),
        cuts=cuts,
        stage_bytes=use.used_bytes,
    )


def least_excess_together(problem: PartitionProblem) -> float:
    """Bytes beyond its capacity that the fullest rank needs at the least, as a mean of all ranks:
    a lower bound, which memory that is dealt out otherwise may not reach."""
    relaxed = _Relaxed(problem)
    found = relaxed.search.shortest(
        relaxed.costs(1.0, time_weight=0.0, cut_weight=0.0, sync_weight=0.0)
    )
    return math.inf if found is None else (found[0] - relaxed.capacity) / len(relaxed.ranks)


def _smallest(options: tuple[BlockOption, ...], stage: StageKind) -> int:
    """The option of a stage's device that holds the least, of such the one of the least
    transient."""
    needs = [
        (_held(o, stage.in_flight), o.transient_bytes, i)
        for i, o in enumerate(options)
        if o.device == stage.device
    ]
    return min(needs)[2]
