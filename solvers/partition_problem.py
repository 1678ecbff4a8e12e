"""The partition problem: a chain of blocks cut into stages, one option per block."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from solvers.solution import Solution, fits


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockOption:
    """One way to run a block: per-micro-batch time, and what it holds.

    `static_bytes` once, `saved_bytes` per micro-batch in flight, `transient_bytes` while the block
    runs (blocks of a stage take turns). `sync_s` is spent once a step, e.g. on gradients. `device`
    is the kind of device that all of this is for.
    """

    time_s: float
    static_bytes: float
    saved_bytes: float
    sync_s: float = 0.0
    transient_bytes: float = 0.0
    device: int = 0

    def scaled(self, factor: float) -> BlockOption:
        """The same with its time multiplied."""
        return BlockOption(
            time_s=factor * self.time_s,
            static_bytes=self.static_bytes,
            saved_bytes=self.saved_bytes,
            sync_s=self.sync_s,
            transient_bytes=self.transient_bytes,
            device=self.device,
        )

    def held_bytes(self, in_flight: int) -> float:
        """What it holds with so many micro-batches in flight, whether it runs or not."""
        return self.static_bytes + in_flight * self.saved_bytes

    @property
    def numbers(self) -> tuple[float, ...]:
        """All that it takes and holds."""
        return (
            self.time_s,
            self.static_bytes,
            self.saved_bytes,
            self.sync_s,
            self.transient_bytes,
            self.device,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StageUse:
    """Time per micro-batch, time per step and peak bytes of every stage of one partition.

    Of its time a stage takes `cuts_s` for the cuts at both its ends. Times and bytes of stages that
    share a rank add up to the rank's.
    """

    time_s: tuple[float, ...]
    cuts_s: tuple[float, ...]
    sync_s: tuple[float, ...]
    used_bytes: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionProblem:
    """Cut `blocks` (class index of each, in chain order) into `num_stages` runs of blocks.

    With T_k the time of stage k, `time_scale[k]` times the sum of its blocks' plus `boundary_s` of
    the cuts at both its ends, and Y_k the sum of its blocks' sync_s, minimise

        sum_k T_k + (num_micro_batches - 1) * max_k T_k + max_k Y_k

    such that stage_fixed_bytes[k] + sum static + in_flight[k] * sum saved + max transient <=
    capacity_bytes[k]. `boundary_s[i]` is the cost of a cut after block i; that between stages k and
    k + 1 is `hop_scale[k]` times it. Empty `time_scale`, `hop_scale`, `stage_fixed_bytes` and
    `boundary_s` stand for ones and zeros. `fixed_cuts`, where given, are the cuts.

    Stage k is on a device of kind `stage_device[k]` (0 by default) and runs its blocks by options
    of that kind, of which every class has some.

    Other pipelines weigh the terms differently: `sum_weight` multiplies the sum of T, `max_weight`,
    where given, replaces num_micro_batches - 1, and without `boundary_in_max` cuts take their time
    beside the blocks, so that of the longest T the longer of both counts. `stage_rank` says which
    stages share a device (none by default): the capacity, the same for all of them, then holds for
    their bytes together, of transients the largest, and T and Y are summed over them before the
    maximum. Of the sum of T, `stage_share` counts as if all stages of the rank took as long as its
    longest (`counted`). Raises ValueError naming the field that is malformed.
    """

    blocks: tuple[int, ...]
    classes: tuple[tuple[BlockOption, ...], ...]
    num_stages: int
    in_flight: tuple[int, ...]
    capacity_bytes: tuple[float, ...]
    num_micro_batches: int
    time_scale: tuple[float, ...] = ()
    stage_fixed_bytes: tuple[float, ...] = ()
    boundary_s: tuple[float, ...] = ()
    fixed_cuts: tuple[int, ...] | None = None
    min_blocks: int = 1
    sum_weight: float = 1.0
    max_weight: float | None = None
    boundary_in_max: bool = True
    stage_rank: tuple[int, ...] = ()
    stage_device: tuple[int, ...] = ()
    hop_scale: tuple[float, ...] = ()
    stage_share: float = 0.0

    def __post_init__(self) -> None:
        stages, cuts = self.num_stages, max(len(self.blocks) - 1, 0)
        defaults = {
            "time_scale": (1.0,) * stages,
            "stage_fixed_bytes": (0.0,) * stages,
            "boundary_s": (0.0,) * cuts,
            "stage_rank": tuple(range(stages)),
            "stage_device": (0,) * stages,
            "hop_scale": (1.0,) * (stages - 1),
        }
        for name, default in defaults.items():
            object.__setattr__(self, name, tuple(getattr(self, name)) or default)
        lengths = {
            "in_flight": stages,
            "capacity_bytes": stages,
            "time_scale": stages,
            "stage_fixed_bytes": stages,
            "boundary_s": cuts,
            "stage_rank": stages,
            "stage_device": stages,
            "hop_scale": max(stages - 1, 0),
        }
        for name, length in lengths.items():
            values = getattr(self, name)
            if len(values) != length:
                raise ValueError(f"{name}: expected {length} values, found {len(values)}")
            if name != "capacity_bytes":
                _check_numbers(name, values)
        for name in ("num_stages", "num_micro_batches", "min_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, found {getattr(self, name)}")
        if not (math.isfinite(self.sum_weight) and self.sum_weight > 0):
            raise ValueError(f"sum_weight: expected more than 0, found {self.sum_weight}")
        if not (math.isfinite(self.bottleneck_weight) and self.bottleneck_weight >= 0):
            raise ValueError(f"max_weight: expected a number from 0, found {self.max_weight}")
        if not 0 <= self.stage_share <= 1:
            raise ValueError(f"stage_share: expected 0 to 1, found {self.stage_share}")
        self._check_blocks()
        self._check_cuts()
        self._check_ranks()

    @property
    def bottleneck_weight(self) -> float:
        """What the longest time of a rank is multiplied by."""
        return self.num_micro_batches - 1 if self.max_weight is None else self.max_weight

    @property
    def shares_ranks(self) -> bool:
        """Whether some rank has several stages."""
        return len(set(self.stage_rank)) < self.num_stages

    def rank_stages(self) -> tuple[tuple[int, ...], ...]:
        """The stages of every rank that has any, by rank."""
        return _rank_stages(self.stage_rank)

    def scaled(self) -> PartitionProblem:
        """The same problem with times that have `sum_weight` in them, of which it then is 1."""
        if self.sum_weight == 1.0:
            return self
        a = self.sum_weight
        return dataclasses.replace(
            self,
            classes=tuple(tuple(o.scaled(a) for o in options) for options in self.classes),
            boundary_s=tuple(a * cost for cost in self.boundary_s),
            sum_weight=1.0,
            max_weight=self.bottleneck_weight / a,
        )

    def _check_blocks(self) -> None:
        if not self.blocks:
            raise ValueError("blocks: expected at least one, found none")
        for kind in sorted(set(self.blocks)):
            if not 0 <= kind < len(self.classes):
                index = self.blocks.index(kind)
                raise ValueError(f"blocks[{index}]: no class {kind} among {len(self.classes)}")
        for index, options in enumerate(self.classes):
            if not options:
                raise ValueError(f"classes[{index}]: expected at least one option, found none")
            for option in options:
                _check_numbers(f"classes[{index}]", option.numbers)
        for index in sorted(set(self.blocks)):
            lacking = set(self.stage_device) - {option.device for option in self.classes[index]}
            if lacking:
                raise ValueError(f"classes[{index}]: no option for device {min(lacking)}")

    def _check_cuts(self) -> None:
        if self.fixed_cuts is None:
            return
        ends = (0, *self.fixed_cuts, len(self.blocks))
        sizes = [end - start for start, end in itertools.pairwise(ends)]
        if len(sizes) != self.num_stages or min(sizes) < self.min_blocks:
            raise ValueError(
                f"fixed_cuts: {self.fixed_cuts} do not cut {len(self.blocks)} blocks into "
                f"{self.num_stages} stages of at least {self.min_blocks}"
            )

    def _check_ranks(self) -> None:
        for stages in self.rank_stages():
            if len({self.capacity_bytes[k] for k in stages}) > 1:
                raise ValueError(f"capacity_bytes: stages {stages} of one rank have different ones")

    def stages(self, cuts: tuple[int, ...]) -> list[range]:
        """Block indices of every stage."""
        ends = (0, *cuts, len(self.blocks))
        return [range(start, end) for start, end in itertools.pairwise(ends)]

    def use(self, cuts: tuple[int, ...], options: tuple[int, ...]) -> StageUse:
        """What every stage takes with these cuts and one option per block."""
        chosen = [self.classes[kind][o] for kind, o in zip(self.blocks, options, strict=True)]
        times, edges, syncs, used, transients = [], [], [], [], []
        hops = [
            scale * self.boundary_s[c - 1] for c, scale in zip(cuts, self.hop_scale, strict=True)
        ]
        for k, stage in enumerate(self.stages(cuts)):
            held = [chosen[b] for b in stage]
            if any(o.device != self.stage_device[k] for o in held):
                raise ValueError(f"options: stage {k} is on device {self.stage_device[k]}")
            work = self.time_scale[k] * math.fsum(o.time_s for o in held)
            edges.append(math.fsum(hops[max(k - 1, 0) : k + 1]))
            times.append(work + edges[-1])
            syncs.append(math.fsum(o.sync_s for o in held))
            static = math.fsum(o.static_bytes for o in held)
            saved = math.fsum(o.saved_bytes for o in held)
            used.append(self.stage_fixed_bytes[k] + static + self.in_flight[k] * saved)
            transients.append(max(o.transient_bytes for o in held))
        for stages in self.rank_stages():
            widest = max(stages, key=lambda k: transients[k])
            used[widest] += transients[widest]
        return StageUse(
            time_s=tuple(times), cuts_s=tuple(edges), sync_s=tuple(syncs), used_bytes=tuple(used)
        )

    def lacking(self, use: StageUse) -> list[tuple[int, float]]:
        """(a rank's first stage, bytes that the rank lacks) where its stages do not fit."""
        found = []
        for stages in self.rank_stages():
            needed = math.fsum(use.used_bytes[k] for k in stages)
            if not fits(needed, self.capacity_bytes[stages[0]]):
                found.append((stages[0], needed - self.capacity_bytes[stages[0]]))
        return found

    def objective(self, use: StageUse) -> float:
        """Step time in seconds; inf where a rank's stages do not fit."""
        if self.lacking(use):
            return math.inf
        ranks = self.rank_stages()
        longest = max(self._top(use, stages) for stages in ranks)
        sync = max(math.fsum(use.sync_s[k] for k in stages) for stages in ranks)
        return self.sum_weight * math.fsum(use.time_s) + self.bottleneck_weight * longest + sync

    def _top(self, use: StageUse, stages: Sequence[int]) -> float:
        """The time of a rank as it counts towards the longest."""
        if self.boundary_in_max:
            return self.counted([use.time_s[k] for k in stages])
        work_s = self.counted([use.time_s[k] - use.cuts_s[k] for k in stages])
        return max(work_s, self.counted([use.cuts_s[k] for k in stages]))

    def counted(self, times: Sequence[float]) -> float:
        """What the times of a rank's stages count for."""
        total = math.fsum(times)
        if not self.stage_share:
            return total
        return (1 - self.stage_share) * total + self.stage_share * len(times) * max(times)


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionSolution(Solution):
    """`cuts[k]` is the block where stage k + 1 starts; `options` one per block.

    Infeasible: `cuts` and `stage_bytes` are those of the partition that lacks the fewest bytes in
    total, `conflict` says which stages lack how many, and `options` is empty.
    """

    cuts: tuple[int, ...]
    options: tuple[int, ...]
    stage_time_s: tuple[float, ...]
    stage_bytes: tuple[float, ...]


@functools.lru_cache(maxsize=256)
def _rank_stages(stage_rank: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    held: dict[int, list[int]] = {}
    for stage, rank in enumerate(stage_rank):
        held.setdefault(rank, []).append(stage)
    return tuple(tuple(held[rank]) for rank in sorted(held))


def _check_numbers(name: str, values: tuple[float, ...]) -> None:
    for value in dict.fromkeys(values):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name}: expected finite numbers from 0, found {value}")
