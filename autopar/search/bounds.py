"""What no plan on a grid beats: bounds of its step, cheap ones first and ever sharper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf

from autopar.costs.memory import reserve_bytes
from autopar.ir.collective import CollectiveOp
from autopar.search.grid import Grid
from autopar.search.home import Home
from autopar.search.pipelines import Weights, equal_step, has_closed_form, least_step
from autopar.search.pricer import Pricer
from autopar.search.problems import ShardingProblems
from autopar.search.state import least_state_bytes
from solvers.partition import BlockOption, PartitionProblem, lower_bound


class Sharpness(IntEnum):
    """What a bound has in it: every op at its fastest, the moves between them too, and the
    schedule's real bubble."""

    COMPUTE = 0
    SHARDED = 1
    SCHEDULED = 2


@dataclass
class Bounds:
    """Bounds the grids of one setting, remembering the shardings they rest on."""

    problems: ShardingProblems
    _shares: dict[Grid, tuple[float, float]] = field(default_factory=dict)

    @property
    def pricer(self) -> Pricer:
        """What prices the blocks."""
        return self.problems.pricer

    def computed(self, grid: Grid) -> float:
        """The cheapest bound, of sharpness `COMPUTE`."""
        return self._bound(grid, self._least_weights(grid), self._least)

    def sharper(self, grid: Grid, sharpness: Sharpness) -> tuple[float, Sharpness]:
        """The next sharper bound of a grid, and how sharp it is."""
        if sharpness == Sharpness.COMPUTE:
            closed = has_closed_form(grid.pipe, self._slowdown)
            return self.sharded(grid), Sharpness.SCHEDULED if closed else Sharpness.SHARDED
        return self._bound(grid, self.weights(grid), self._fastest), Sharpness.SCHEDULED

    def sharded(self, grid: Grid) -> float:
        """Step time that no plan on the grid beats, whatever bubble its schedule leaves."""
        return self._bound(grid, self._least_weights(grid), self._fastest)

    def upkeep_s(self, grid: Grid, step_s: float) -> float:
        """About what a grid's step takes beside `step_s` for its parameters: to sum gradients, and
        to gather weights where their state does not fit otherwise, as far as the step does not hide
        that. No bound: it tells which grids to look at first."""
        whole, setting = self.pricer.setting.whole_state, self.pricer.setting
        split = grid.pipeline * grid.tensor
        axes = tuple(axis.name for axis in grid.mesh if axis.splits_samples and axis.size > 1)
        gradients = whole.gradients / split
        seconds = self.pricer.joined_s(grid, CollectiveOp.ALL_REDUCE, gradients, axes)
        shared = (whole.master + whole.optimizer) / grid.batch_ranks
        room = setting.memory_bytes(0) - reserve_bytes(setting.cluster.device(0))
        if (whole.weights + whole.gradients + shared) / split > room:
            weights = whole.weights / split
            once_s = self.pricer.joined_s(grid, CollectiveOp.ALL_GATHER, weights, axes)
            seconds += max(0.0, 2 * grid.micro_batches * once_s - step_s)
        return seconds

    def weights(self, grid: Grid) -> Weights:
        """The objective of a grid: exact for equal stages and hidden messages.

        Of a schedule that splits the backward it depends on what the parts take, for which the
        fastest sharding of every block stands.
        """
        pipe, slowdown = grid.pipe, self._slowdown
        if has_closed_form(pipe, slowdown):
            return self._least_weights(grid)
        return Weights.of(equal_step(pipe, *self._parts(grid), slowdown), pipe, slowdown)

    def _least_weights(self, grid: Grid) -> Weights:
        """The objective of a bound: the least bubble that the schedule can leave."""
        return Weights.of(least_step(grid.pipe, self._slowdown), grid.pipe, self._slowdown)

    @property
    def _slowdown(self) -> float:
        return self.pricer.setting.cluster.slowdown

    def _parts(self, grid: Grid) -> tuple[float, float]:
        """The shares of forwards and of weight gradients in the work of all blocks."""
        if grid.base not in self._shares:
            chain, home = self.pricer.setting.chain, self.pricer.homes(grid)[0]
            forward_s = weight_s = total_s = 0.0
            for block_class in chain.classes:
                cost = self.problems.at(home).fastest_passes(grid, block_class.index)
                if cost is None:
                    continue
                count = len(block_class.members)
                forward_s += count * cost.forward_s
                weight_s += count * cost.weight_s
                total_s += count * (cost.forward_s + cost.backward_s)
            shares = (forward_s / total_s, weight_s / total_s) if total_s else (0.5, 0.0)
            self._shares[grid.base] = shares
        return self._shares[grid.base]

    def _bound(
        self, grid: Grid, weights: Weights, least: Callable[[int, Grid, Home], float]
    ) -> float:
        """The objective of blocks that take the `least` time of their class, memory for free.

        Infinite where the parameters' state alone cannot fit: such grids are only looked at to say
        by how much, if nothing else fits.
        """
        chain, stages = self.pricer.setting.chain, grid.pipe.num_stages
        if not self._state_may_fit(grid):
            return inf
        homes = self.pricer.homes(grid)
        kinds = list(dict.fromkeys(homes))
        fastest = [[least(c.index, grid, home) for home in kinds] for c in chain.classes]
        if any(inf in times for times in fastest):
            return inf
        classes = tuple(
            tuple(
                BlockOption(time_s=time_s, static_bytes=0.0, saved_bytes=0.0, device=kind)
                for kind, time_s in enumerate(times)
            )
            for times in fastest
        )
        return lower_bound(
            PartitionProblem(
                blocks=tuple(block.class_index for block in chain.blocks),
                classes=classes,
                num_stages=stages,
                in_flight=(0,) * stages,
                capacity_bytes=(1.0,) * stages,
                num_micro_batches=grid.micro_batches,
                sum_weight=weights.sum,
                max_weight=weights.longest,
                stage_device=tuple(kinds.index(homes[place]) for place in grid.pipe.placement),
            )
        )

    def _state_may_fit(self, grid: Grid) -> bool:
        """Whether one share of every parameter's state fits the stages' memory put together."""
        return self.least_excess_bytes(grid) <= 0

    def least_excess_bytes(self, grid: Grid, capacity: bool = True) -> float:
        """Bytes beyond its `capacity` (or all that it holds) that some rank needs for state alone,
        which no layout of it is below."""
        setting = self.pricer.setting
        ranks = range(0, grid.pipeline * grid.stage_devices, grid.stage_devices)
        held = least_state_bytes(self.pricer, grid)
        for rank, count in setting.cluster.counts(ranks):
            held += count * reserve_bytes(setting.cluster.device(rank), grid.communicators)
            held -= count * setting.memory_bytes(rank) * capacity
        return held / len(ranks)

    def _fastest(self, class_index: int, grid: Grid, home: Home) -> float:
        """Least time of a class's block for one micro-batch, gradients summed for free."""
        solved = self.problems.at(home).fastest(grid, class_index)
        return inf if solved is None else max(solved.bound, 0.0)

    def _least(self, class_index: int, grid: Grid, home: Home) -> float:
        """Time of a class's block with every op at its fastest and values moved for free."""
        return self.problems.at(home).bounding(grid, class_index).least_s
