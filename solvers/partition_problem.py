"""The partition problem: a chain of blocks cut into stages, one option per block."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass

from solvers.solution import Solution, fits


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockOption:
    """One way to run a block: per-micro-batch time, and what it holds.

    `static_bytes` once, `saved_bytes` per micro-batch in flight, `transient_bytes` while the block
    runs (blocks of a stage take turns). `sync_s` is spent once a step, e.g. on gradients.
    """

    time_s: float
    static_bytes: float
    saved_bytes: float
    sync_s: float = 0.0
    transient_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StageUse:
    """Time per micro-batch, time per step and peak bytes of every stage of one partition."""

    time_s: tuple[float, ...]
    sync_s: tuple[float, ...]
    used_bytes: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionProblem:
    """Cut `blocks` (class index of each, in chain order) into `num_stages` runs of blocks.

    With T_k the time of stage k, `time_scale[k]` times the sum of its blocks' plus `boundary_s` of
    the cuts at both its ends, and Y_k the sum of its blocks' sync_s, minimise

        sum_k T_k + (num_micro_batches - 1) * max_k T_k + max_k Y_k

    such that stage_fixed_bytes[k] + sum static + in_flight[k] * sum saved + max transient <=
    capacity_bytes[k]. `boundary_s[i]` is the cost of a cut after block i. Empty `time_scale`,
    `stage_fixed_bytes` and `boundary_s` stand for ones and zeros. `fixed_cuts`, where given, are
    the cuts. Raises ValueError naming the field that is malformed.
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

    def __post_init__(self) -> None:
        stages, cuts = self.num_stages, max(len(self.blocks) - 1, 0)
        defaults = {
            "time_scale": (1.0,) * stages,
            "stage_fixed_bytes": (0.0,) * stages,
            "boundary_s": (0.0,) * cuts,
        }
        for name, default in defaults.items():
            object.__setattr__(self, name, tuple(getattr(self, name)) or default)
        lengths = {
            "in_flight": stages,
            "capacity_bytes": stages,
            "time_scale": stages,
            "stage_fixed_bytes": stages,
            "boundary_s": cuts,
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
        self._check_blocks()
        self._check_cuts()

    def _check_blocks(self) -> None:
        if not self.blocks:
            raise ValueError("blocks: expected at least one, found none")
        for index, kind in enumerate(self.blocks):
            if not 0 <= kind < len(self.classes):
                raise ValueError(f"blocks[{index}]: no class {kind} among {len(self.classes)}")
        for index, options in enumerate(self.classes):
            if not options:
                raise ValueError(f"classes[{index}]: expected at least one option, found none")
            for option in options:
                _check_numbers(f"classes[{index}]", dataclasses.astuple(option))

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

    def stages(self, cuts: tuple[int, ...]) -> list[range]:
        """Block indices of every stage."""
        ends = (0, *cuts, len(self.blocks))
        return [range(start, end) for start, end in itertools.pairwise(ends)]

    def use(self, cuts: tuple[int, ...], options: tuple[int, ...]) -> StageUse:
        """What every stage takes with these cuts and one option per block."""
        chosen = [self.classes[kind][o] for kind, o in zip(self.blocks, options, strict=True)]
        times, syncs, used = [], [], []
        for k, stage in enumerate(self.stages(cuts)):
            held = [chosen[b] for b in stage]
            boundary = [self.boundary_s[c - 1] for c in cuts if c in (stage.start, stage.stop)]
            work = math.fsum(o.time_s for o in held)
            times.append(self.time_scale[k] * work + math.fsum(boundary))
            syncs.append(math.fsum(o.sync_s for o in held))
            static = math.fsum(o.static_bytes for o in held)
            saved = math.fsum(o.saved_bytes for o in held)
            transient = max(o.transient_bytes for o in held)
            fixed = self.stage_fixed_bytes[k]
            used.append(fixed + static + self.in_flight[k] * saved + transient)
        return StageUse(time_s=tuple(times), sync_s=tuple(syncs), used_bytes=tuple(used))

    def objective(self, use: StageUse) -> float:
        """Step time in seconds; inf where a stage does not fit."""
        pairs = zip(use.used_bytes, self.capacity_bytes, strict=True)
        if not all(fits(used, capacity) for used, capacity in pairs):
            return math.inf
        bottleneck = (self.num_micro_batches - 1) * max(use.time_s)
        return math.fsum(use.time_s) + bottleneck + max(use.sync_s)


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


def _check_numbers(name: str, values: tuple[float, ...]) -> None:
    for value in values:
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name}: expected finite numbers from 0, found {value}")
