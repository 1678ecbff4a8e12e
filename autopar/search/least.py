"""How little memory a setting can be trained in: the question before that of time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from autopar.costs.memory import reserve_bytes
from autopar.search.grid import Grid
from autopar.search.grids import grids
from autopar.search.options import ClassOption
from autopar.search.pipelines import held_together
from autopar.search.planner import PATIENCE, Planner
from autopar.search.setting import Setting
from autopar.search.stages import solve_stages
from solvers.partition import PartitionProblem
from solvers.partition_least import least_excess


@dataclass(frozen=True, kw_only=True, slots=True)
class Least:
    """The least bytes that the fullest rank needs beyond its capacity, or in all.

    `bound_bytes` is what no grid is below; without a `grid` nothing was looked at closer than by
    its bound. `solved` of `total` grids were; the others are ruled out, unless `ended` early.
    """

    excess_bytes: float
    bound_bytes: float
    grid: Grid | None = None
    solved: int = 0
    total: int = 0
    ended: bool = False

    @property
    def fits(self) -> bool:
        """Whether a plan is known to fit."""
        return self.grid is not None and self.excess_bytes <= 0

    @property
    def proven(self) -> bool:
        """Whether it is certain that a plan fits, or that none does."""
        return self.fits or self.bound_bytes > 0


def least_excess_bytes(planner: Planner) -> Least:
    """What the fullest rank needs beyond its capacity; ends at the first grid that fits.

    Raises InputError where the pins leave no grid.
    """
    return _least(planner, capacity=True)


def least_devices(setting: Setting) -> int | None:
    """Devices like the first that hold the state of all parameters between them: fewer cannot. None
    where what a device keeps for itself fills it."""
    room = setting.memory_bytes(0) - reserve_bytes(setting.cluster.device(0))
    return max(1, ceil(sum(setting.whole_state) / room)) if room > 0 else None


def least_peak_bytes(planner: Planner) -> Least:
    """What the fullest rank needs in all, over the schedules with a stage a rank.

    The search ends after `PATIENCE` grids without a smaller one.
    """
    return _least(planner, capacity=False)


def _least(planner: Planner, *, capacity: bool) -> Least:
    """Grids by what their state alone needs, until none left can need less."""
    deadline = time.monotonic() + planner.setting.time_limit_s
    everything = grids(planner.setting)
    offered, total = list(_smallest(everything, shared=capacity)), len(everything)
    queue = sorted(
        (planner.bounds.least_excess_bytes(grid, capacity), grid.chunks, grid.micro_batch, place)
        for place, grid in enumerate(offered)
    )
    best = Least(excess_bytes=inf, bound_bytes=inf, total=total)
    solved = in_vain = 0
    least = inf
    for bound, _, _, place in queue:
        late = time.monotonic() > deadline or in_vain >= PATIENCE
        if bound >= best.excess_bytes or (late and best.grid):
            ended = bound < best.excess_bytes
            return replace(best, solved=solved, bound_bytes=min(least, bound), ended=ended)
        if bound > 0 and capacity:
            # proven not to fit: by how much is then all that is asked
            in_vain = max(in_vain, PATIENCE - _HOPELESS)
        planner.progress("looking for what fits", solved / len(queue))
        excess, own = _excess_bytes(planner, offered[place], capacity)
        solved, in_vain, least = solved + 1, in_vain + 1, min(least, own)
        if excess < best.excess_bytes:
            best, in_vain = replace(best, excess_bytes=excess, grid=offered[place]), 0
        if capacity and best.excess_bytes <= 0:
            break
    return replace(best, solved=solved, bound_bytes=min(least, best.excess_bytes))


_HOPELESS = 4
"""Grids that are solved to say by how much they do not fit, though that they do not is certain."""


def _excess_bytes(planner: Planner, grid: Grid, capacity: bool) -> tuple[float, float]:
    """The least that was found over all ways to lay parameters that several blocks share, and a
    bound of it. They differ where stages share ranks: together they may fit, and no rank alone."""
    least = bound = inf
    for options, problem in planner.problems(grid):
        own = least_excess(problem if capacity else _unlimited(problem))
        bound = min(bound, own)
        if problem.shares_ranks:
            fits = own <= 0 and _fits(planner, grid, options, problem)
            own = own if fits else inf
        least = min(least, own)
    return least, bound


def _fits(
    planner: Planner,
    grid: Grid,
    options: Mapping[int, tuple[ClassOption, ...]],
    problem: PartitionProblem,
) -> bool:
    staged = solve_stages(planner.pricer, grid, options, problem)
    return staged.solution.status.has_solution


def _unlimited(problem: PartitionProblem) -> PartitionProblem:
    return replace(problem, capacity_bytes=(0.0,) * problem.num_stages)


def _smallest(offered: Sequence[Grid], *, shared: bool) -> Iterator[Grid]:
    """The grids that can need the least: of those that differ in the micro-batch alone the one with
    the smallest, for more samples at once hold more, and the one with all samples at once, which
    has no gradients to add up; of schedules those that no other holds less than."""
    first: dict[object, Grid] = {}
    for grid in offered:
        key = (*grid.technique, grid.micro_batches > 1)
        if key not in first or grid.micro_batch < first[key].micro_batch:
            first[key] = grid
    for base in dict.fromkeys(grid.base for grid in first.values()):
        alike = [grid for grid in first.values() if grid.base == base]
        alone = [grid for grid in alike if grid.chunks == 1]
        yield from _least_held(alone)
        if shared or not alone:
            yield from (grid for grid in alike if grid.chunks > 1)


def _least_held(alike: Iterable[Grid]) -> Iterator[Grid]:
    """Grids whose stages hold the fewest micro-batches, of equals the first."""
    held = [(held_together(grid.pipe), grid) for grid in alike]
    for index, (own, grid) in enumerate(held):
        beaten = any(
            all(a <= b for a, b in zip(other, own, strict=True)) and (other != own or at < index)
            for at, (other, _) in enumerate(held)
            if at != index
        )
        if not beaten:
            yield grid
