"""What no plan on a grid beats: bounds of its step, cheap ones first and ever sharper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import IntEnum
from math import inf
from typing import NamedTuple

import numpy as np

from autopar.costs.memory import reserve_bytes
from autopar.ir.collective import CollectiveOp
from autopar.search.floors import Floors
from autopar.search.frontier import Frontiers, keeps_one_less
from autopar.search.grid import Grid
from autopar.search.home import Home
from autopar.search.pipelines import Shares, Weights, equal_step, has_closed_form, least_step
from autopar.search.pricer import Pricer
from autopar.search.problems import ShardingProblems
from autopar.search.stages import chain_problem
from autopar.search.state import expert_split, least_state_bytes
from solvers.partition import BlockOption, PartitionProblem, lower_bound
from solvers.partition_loads import loaded_bound
from solvers.partition_pooled import pooled_bound

_BACKWARD = 2 / 3
"""Share of a micro-batch's time in which its gradients are summed."""

Least = Callable[[int, Grid, Home], float]
"""Seconds that no block of a class beats on a grid and a home."""


class Bound(NamedTuple):
    """What a step takes at the least, and with memory and parameters for free."""

    step_s: float
    plain_s: float


class Sharpness(IntEnum):
    """What a bound has in it: every op at its fastest; the moves between ops too; what parameters
    take and hold; how long forwards and backwards take a schedule to start and to end; what stages
    have in flight; and what bytes cost, and the schedule's real bubble."""

    COMPUTE = 0
    SHARDED = 1
    HELD = 2
    STARTED = 3
    IN_FLIGHT = 4
    SCHEDULED = 5


@dataclass
class Bounds:
    """Bounds the grids of one setting, remembering the shardings they rest on."""

    problems: ShardingProblems
    _floors: dict[Home, Floors] = field(default_factory=dict)
    _frontiers: dict[Home, Frontiers] = field(default_factory=dict)
    _shares: dict[Grid, Shares] = field(default_factory=dict)
    _plain: dict[object, float] = field(default_factory=dict)
    _holding: dict[object, float] = field(default_factory=dict)
    _excess: dict[Grid, float] = field(default_factory=dict)

    @property
    def pricer(self) -> Pricer:
        """What prices the blocks."""
        return self.problems.pricer

    def computed(self, grid: Grid) -> float:
        """The cheapest bound, of sharpness `COMPUTE`."""
        return self._bound(grid, self._least_weights(grid), self._least)

    def sharper(self, grid: Grid, sharpness: Sharpness) -> tuple[Bound, Sharpness]:
        """The next sharper bound of a grid, and how sharp it is."""
        if sharpness == Sharpness.COMPUTE:
            plain = self._bound(grid, self._least_weights(grid), self._fastest)
            return Bound(plain, plain), Sharpness.SHARDED
        if sharpness == Sharpness.SHARDED:
            sharp = Sharpness.HELD if grid.pipe.splits_backward else Sharpness.STARTED
            return self._held(grid, self._least_weights(grid)), sharp
        if sharpness == Sharpness.HELD:
            return self._held(grid, self._started_weights(grid)), Sharpness.STARTED
        if sharpness == Sharpness.STARTED:
            return self._in_flight(grid, self._started_weights(grid)), Sharpness.IN_FLIGHT
        return self._scheduled(grid, self.weights(grid)), Sharpness.SCHEDULED

    def sharded(self, grid: Grid) -> float:
        """Step time that no plan on the grid beats, whatever bubble its schedule leaves."""
        return self._held(grid, self._least_weights(grid)).step_s

    def upkeep_s(self, grid: Grid, step_s: float) -> float:
        """About what a grid's step takes beside `step_s` for its parameters: to sum gradients, and
        to gather weights where their state does not fit otherwise, as far as the step does not hide
        that. No bound: it tells which grids to look at first."""
        whole, setting = self.pricer.setting.whole_state, self.pricer.setting
        split = grid.pipeline * grid.tensor
        axes = tuple(axis.name for axis in grid.mesh if axis.splits_samples and axis.size > 1)
        gradients = whole.gradients / split
        seconds = self.pricer.joined_s(grid, CollectiveOp.ALL_REDUCE, gradients, axes)
        last_s = step_s / (grid.micro_batches + grid.pipeline - 1)
        seconds = max(0.0, seconds - _BACKWARD * last_s)
        shared = (whole.master + whole.optimizer) / grid.batch_ranks
        room = setting.memory_bytes(0) - reserve_bytes(setting.cluster.device(0))
        experts, apart = setting.expert_state, expert_split(setting, grid)
        alone = (experts.weights + experts.gradients) * (1 - 1 / apart)
        if (whole.weights + whole.gradients + shared - alone) / split > room:
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
        return Weights.of(equal_step(pipe, self._parts(grid), slowdown), pipe, slowdown)

    def _least_weights(self, grid: Grid) -> Weights:
        """The objective of a bound: the least bubble that the schedule can leave."""
        weight = 1.0
        if grid.pipe.splits_backward:
            classes = self.pricer.setting.chain.classes
            first, *others = self.pricer.places.spots(grid)
            spots = [first, *(spot for spot in others if grid.own)]
            weight = max(
                self.problems.at(home).of(own, c.index).most_weight
                for home, own in spots
                for c in classes
            )
        step = least_step(grid.pipe, self._slowdown, weight=weight)
        return Weights.of(step, grid.pipe, self._slowdown)

    def _started_weights(self, grid: Grid) -> Weights:
        """The same where it is known what the parts of a split backward take."""
        if not grid.pipe.splits_backward:
            return self._least_weights(grid)
        parts = self._parts(grid)
        step = least_step(grid.pipe, self._slowdown, parts.forward, parts.weight)
        return Weights.of(step, grid.pipe, self._slowdown)

    @property
    def _slowdown(self) -> float:
        return self.pricer.setting.cluster.slowdown

    def _parts(self, grid: Grid) -> Shares:
        """The shares of the parts of a pass in the work of all blocks."""
        if grid.base not in self._shares:
            chain, (home, own) = self.pricer.setting.chain, self.pricer.places.spots(grid)[0]
            parts_s = np.zeros(len(Shares._fields))
            total_s = 0.0
            for block_class in chain.classes:
                cost = self.problems.at(home).fastest_passes(own, block_class.index)
                if cost is None:
                    continue
                count = len(block_class.members)
                waits_s = cost.forward_s - cost.forward_compute_s
                late_s = cost.backward_s - cost.backward_compute_s
                parts_s += count * np.array([cost.forward_s, cost.weight_s, waits_s, late_s])
                total_s += count * (cost.forward_s + cost.backward_s)
            shares = Shares(*(parts_s / total_s).tolist()) if total_s else Shares(0.5, 0.0)
            self._shares[grid.base] = shares
        return self._shares[grid.base]

    def _bound(self, grid: Grid, weights: Weights, least: Least) -> float:
        """The objective of blocks that take the `least` time of their class, memory for free.

        Infinite where the parameters' state alone cannot fit: such grids are only looked at to say
        by how much, if nothing else fits.
        """
        if not self._state_may_fit(grid):
            return inf
        key = _alike(grid, weights, least)
        if key not in self._plain:
            self._plain[key] = self._plain_bound(grid, weights, least)
        return self._plain[key]

    def _plain_bound(self, grid: Grid, weights: Weights, least: Least) -> float:
        chain = self.pricer.setting.chain
        spots = self.pricer.places.spots(grid)
        fastest = [[least(c.index, own, home) for home, own in spots] for c in chain.classes]
        if any(inf in times for times in fastest):
            return inf
        classes = tuple(
            tuple(
                BlockOption(time_s=time_s, static_bytes=0.0, saved_bytes=0.0, device=kind)
                for kind, time_s in enumerate(times)
            )
            for times in fastest
        )
        return lower_bound(self._pooled_problem(grid, weights, classes))

    def _pooled_problem(
        self,
        grid: Grid,
        weights: Weights,
        classes: tuple[tuple[BlockOption, ...], ...],
        in_flight: int = 0,
        room_bytes: float = 1.0,
    ) -> PartitionProblem:
        """The chain where every rank has the same room; by default with memory for free."""
        chain, stages = self.pricer.setting.chain, grid.pipe.num_stages
        devices = self.pricer.places.kinds(grid)
        return PartitionProblem(
            blocks=tuple(block.class_index for block in chain.blocks),
            classes=classes,
            num_stages=stages,
            in_flight=(in_flight,) * stages,
            capacity_bytes=(room_bytes,) * stages,
            num_micro_batches=grid.micro_batches,
            sum_weight=weights.sum,
            max_weight=weights.longest,
            stage_share=weights.stage,
            stage_rank=grid.pipe.placement,
            stage_device=tuple(devices[place] for place in grid.pipe.placement),
        )

    def _held(self, grid: Grid, weights: Weights) -> Bound:
        """The same of the fastest shardings, with what parameters take and hold at the least, all
        memory together, as if every stage had one micro-batch in flight.

        Stages that do not flush update otherwise; theirs is the bound without.
        """
        plain = self._bound(grid, weights, self._fastest)
        if not grid.pipe.flushes or plain == inf:
            return Bound(plain, plain)
        pipe = grid.pipe
        key = _alike(grid, weights, self._fastest), pipe.splits_backward, pipe.runs_backwards_last
        if key not in self._holding:
            self._holding[key] = self._holding_bound(grid, weights)
        return Bound(max(plain, self._holding[key]), plain)

    def _holding_bound(self, grid: Grid, weights: Weights) -> float:
        free = sum(
            count * (self.pricer.setting.memory_bytes(rank) - reserve)
            for rank, count, reserve in self._firsts(grid)
        )
        classes = self._floor_classes(grid)
        return pooled_bound(self._pooled_problem(grid, weights, classes, 1, free / grid.pipeline))

    def _in_flight(self, grid: Grid, weights: Weights) -> Bound:
        """The same with all that each stage has in flight."""
        sharded = self._held(grid, weights)
        if not grid.pipe.flushes or sharded.step_s == inf:
            return sharded
        full = pooled_bound(self._stage_problem(grid, weights))
        return sharded._replace(step_s=max(sharded.step_s, full))

    def _scheduled(self, grid: Grid, weights: Weights) -> Bound:
        """The same with what bytes cost, and every rank with whole blocks in its own memory."""
        plain = self._bound(grid, weights, self._fastest)
        if not grid.pipe.flushes or plain == inf:
            return Bound(plain, plain)
        priced = self._priced(grid, weights)
        return Bound(plain if priced is None else max(plain, loaded_bound(priced)), plain)

    def _stage_problem(self, grid: Grid, weights: Weights) -> PartitionProblem:
        classes = self._floor_classes(grid)
        return chain_problem(self.pricer, grid, classes, weights, messages=False)

    def _priced(self, grid: Grid, weights: Weights) -> PartitionProblem | None:
        """The chain with what classes take where bytes have a price; None where that is not known:
        with several numbers in flight of which one is none."""
        spots = self.pricer.places.spots(grid)
        for home, _ in spots:
            floors = self._floors.setdefault(home, Floors(self.pricer.at(home)))
            self._frontiers.setdefault(home, Frontiers(self.problems.at(home), floors))
        classes = tuple(
            tuple(
                option
                for device, (home, own) in enumerate(spots)
                for option in self._frontiers[home].options(own, c.index, device)
            )
            for c in self.pricer.setting.chain.classes
        )
        if not all(classes):
            return None
        problem = chain_problem(self.pricer, grid, classes, weights, messages=False)
        if not keeps_one_less(grid):
            return problem
        if min(problem.in_flight) < 1:
            return None
        return replace(problem, in_flight=tuple(held - 1 for held in problem.in_flight))

    def _floor_classes(self, grid: Grid) -> tuple[tuple[BlockOption, ...], ...]:
        spots = self.pricer.places.spots(grid)
        for home, _ in spots:
            self._floors.setdefault(home, Floors(self.pricer.at(home)))
        return tuple(
            tuple(
                option
                for device, (home, own) in enumerate(spots)
                for option in self._floors[home].options(
                    own, c.index, self._fastest(c.index, own, home), device
                )
            )
            for c in self.pricer.setting.chain.classes
        )

    def _state_may_fit(self, grid: Grid) -> bool:
        """Whether one share of every parameter's state fits the stages' memory put together."""
        if grid.base not in self._excess:
            self._excess[grid.base] = self.least_excess_bytes(grid)
        return self._excess[grid.base] <= 0

    def least_excess_bytes(self, grid: Grid, capacity: bool = True) -> float:
        """Bytes beyond its `capacity` (or all that it holds) that some rank needs for state alone,
        which no layout of it is below."""
        setting = self.pricer.setting
        held = min(
            least_state_bytes(self.pricer, spot.grid) for spot in self.pricer.places.spots(grid)
        )
        for rank, count, reserve in self._firsts(grid):
            held += count * reserve
            held -= count * setting.memory_bytes(rank) * capacity
        return held / grid.pipeline

    def _firsts(self, grid: Grid) -> list[tuple[int, int, int]]:
        """The first rank of stages that are alike in this, their count, and what it sets aside."""
        cluster = self.pricer.setting.cluster
        if grid.own:
            counts = [(grid.ranks(place)[0], 1, grid.at(place)) for place in range(grid.pipeline)]
        else:
            ranks = range(0, grid.pipeline * grid.stage_devices, grid.stage_devices)
            counts = [(rank, count, grid) for rank, count in cluster.counts(ranks)]
        return [
            (rank, count, reserve_bytes(cluster.device(rank), own.communicators))
            for rank, count, own in counts
        ]

    def _fastest(self, class_index: int, grid: Grid, home: Home) -> float:
        """Least time of a class's block for one micro-batch, gradients summed for free."""
        solved = self.problems.at(home).fastest(grid, class_index)
        return inf if solved is None else max(solved.bound, 0.0)

    def _least(self, class_index: int, grid: Grid, home: Home) -> float:
        """Time of a class's block with every op at its fastest and values moved for free."""
        return self.problems.at(home).of(grid, class_index).least_s


def _alike(grid: Grid, weights: Weights, least: Least) -> object:
    """What a bound depends on that leaves out what stages have in flight: schedules that hold their
    stages alike and weigh their times alike have the same."""
    return grid.base, grid.pipe.placement, weights, least.__name__
