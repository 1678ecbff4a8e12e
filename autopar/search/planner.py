"""The outer search: best grid first, pruned by bounds, until nothing unsolved can be better."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf
from typing import NamedTuple

from autopar.errors import InfeasiblePlan
from autopar.ir.graph import Ref
from autopar.ir.placement import Layout
from autopar.search.bounds import Bounds, Sharpness
from autopar.search.grid import Grid
from autopar.search.grids import grids
from autopar.search.infeasible import (
    NothingFits,
    explain_attention,
    explain_infeasible,
    explain_unsplittable,
)
from autopar.search.options import ClassOption, class_options
from autopar.search.pricer import Pricer
from autopar.search.problems import ShardingProblems
from autopar.search.setting import Setting
from autopar.search.sharding import Upkeep, sync_shares_s
from autopar.search.stages import Staged, at_least, partition_problem, solve_stages
from autopar.search.state import (
    UNSPLIT,
    ZeroChoice,
    shared_choices,
    zero_choices,
)
from solvers.backends import get_backend
from solvers.partition import PartitionProblem, lower_bound
from solvers.partition_relaxation import relaxed_bound
from solvers.solution import Status, relative_gap

Progress = Callable[[str, float | None], None]
"""(what is being done, fraction done or None)."""


class _Entry(NamedTuple):
    """A grid that waits for its turn. Entries compare by what the grid promises, and then by its
    place among equals. It is bounded again, sharper, only when its turn comes."""

    promise: float
    place: tuple[int, int, tuple[int, ...], int]
    bound: float
    sharpness: Sharpness
    grid: Grid


PATIENCE = 48
"""Grids whose stages were solved, in a row without a better plan, after which the search ends.
Unlike a limit on time, it ends in the same place on any machine."""

_HOPELESS = 4
"""Grids whose state alone does not fit that are solved to say by how much."""

_TIE = 1e-9
_MOST_FIXINGS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The outcome of a search: the best stages, what else was solved, and the bound.

    Of `total` grids those neither solved, unfit nor `unsolved` were ruled out by a bound.
    """

    best: Staged
    solved: tuple[Staged, ...]
    unfit: tuple[Staged, ...]
    total: int
    unsolved: int
    bound_s: float
    status: Status
    timed_out: bool = False
    gave_up: bool = False
    close_enough: bool = False


@dataclass
class _Seen:
    """What a search has solved so far; `left_s` bounds the `unsolved` grids for which there was no
    time."""

    total: int = 0
    looked_at: int = 0
    solved: list[Staged] = field(default_factory=list)
    unfit: list[Staged] = field(default_factory=list)
    best: Staged | None = None
    unsolved: int = 0
    in_vain: int = 0
    timed_out: bool = False
    close_enough: bool = False
    left_s: float = inf
    top: int = 0
    ceiling_s: float = inf
    _fastest: dict[object, float] = field(default_factory=dict)

    @property
    def limit_s(self) -> float:
        """What a plan must take less than, to be better than the best, or to be among the `top`
        that come after it, each by another technique."""
        if len(self._fastest) <= self.top:
            return self.ceiling_s
        return min(self.ceiling_s, sorted(self._fastest.values())[self.top] * (1 - _TIE))

    @property
    def compares(self) -> bool:
        """Whether there is a plan already that others must beat."""
        return self.best is not None or self.ceiling_s < inf

    def ends_search(self, queue: Sequence[_Entry], gap: float) -> bool:
        """Whether the best is known to be within `gap` of all that is left."""
        if self.best is None or not gap or len(self._fastest) <= self.top:
            return False
        left_s = min((entry.bound for entry in queue), default=inf)
        objective = self.best.solution.objective
        return relative_gap(objective, min(left_s, objective)) <= gap

    def leave(self, queue: Sequence[_Entry]) -> None:
        """Give up what is left, of which that counts which might have been better."""
        left = [entry.bound for entry in queue if entry.bound < self.limit_s]
        self.unsolved += len(left)
        self.left_s = min(self.left_s, *left, inf)

    def add(self, staged: Staged) -> None:
        """Keep what was found of a grid."""
        fits = staged.solution.status.has_solution
        (self.solved if fits else self.unfit).append(staged)
        if not fits:
            return
        objective, technique = staged.solution.objective, staged.grid.technique
        if self.best is None or objective < self.best.solution.objective * (1 - _TIE):
            self.best, self.in_vain = staged, 0
        self._fastest[technique] = min(objective, self._fastest.get(technique, inf))


@dataclass
class Planner:
    """Searches the grids of one setting."""

    setting: Setting
    progress: Progress = lambda what, done: None
    pricer: Pricer = field(init=False)
    shardings: ShardingProblems = field(init=False)
    bounds: Bounds = field(init=False)
    _options: dict[object, tuple[ClassOption, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pricer = Pricer(self.setting)
        self.shardings = ShardingProblems(self.pricer)
        self.bounds = Bounds(self.shardings)

    def search(self) -> Found:
        """Best-first over all grids.

        Raises InfeasiblePlan with the numbers of the closest miss, InputError where the pins leave
        no grid.
        """
        found = self.search_below(inf, self.setting.time_limit_s)
        assert isinstance(found, Found)
        return found

    def search_below(self, ceiling_s: float, time_limit_s: float) -> Found | float:
        """The same within a time, of plans whose objective is below `ceiling_s`; where there is
        none, what all are known to take at the least."""
        deadline = time.monotonic() + time_limit_s
        candidates = grids(self.setting)
        self._check_pins(candidates)
        seen = _Seen(total=len(candidates), top=self.setting.top or 0, ceiling_s=ceiling_s)
        self._drain(self._heap(candidates), seen, deadline)
        if seen.best is None and ceiling_s < inf:
            return min([seen.left_s, ceiling_s, *map(self._left_s, seen.unfit)])
        if seen.best is None:
            raise NothingFits(explain_infeasible(self.pricer, seen.unfit))
        return self._found(seen)

    def _drain(self, queue: list[_Entry], seen: _Seen, deadline: float) -> None:
        """Look at grids, those first that promise most, until none left can be better."""
        while queue:
            entry = heapq.heappop(queue)
            bound, grid = entry.bound, entry.grid
            if seen.compares and bound >= seen.limit_s:
                continue
            if bound == inf and (seen.compares or len(seen.unfit) >= _HOPELESS):
                return
            late = time.monotonic() > deadline
            if seen.compares and (late or seen.in_vain >= PATIENCE):
                seen.timed_out = late
                seen.leave([entry, *queue])
                return
            self.progress("searching grids", seen.looked_at / seen.total)
            if entry.sharpness < Sharpness.SCHEDULED and bound < inf:
                # With a sharper bound the grid may stand further back.
                heapq.heappush(queue, self._sharper(entry))
                continue
            seen.looked_at += 1
            best, solved = seen.best, False
            for staged in self._solve(grid, seen):
                seen.add(staged)
                solved = True
            seen.in_vain += solved and seen.best is best
            if solved and seen.ends_search(queue, self.setting.gap):
                seen.close_enough = True
                seen.leave(queue)
                return

    def _found(self, seen: _Seen) -> Found:
        """The best of what was seen, proven by an engine, and what bounds everything else."""
        self.progress("proving the stages", None)
        best = seen.best
        assert best is not None
        proof = solve_stages(self.pricer, best.grid, best.options, best.problem, certify=True)
        chosen = proof if proof.solution.status.has_solution else best
        chosen = at_least(chosen, best.solution.bound)
        others = [staged for staged in (*seen.solved, *seen.unfit) if staged is not best]
        left_s = min([seen.left_s, *map(self._left_s, others)])
        optimal = chosen.solution.status is Status.OPTIMAL
        optimal = optimal and left_s >= chosen.solution.objective * (1 - _TIE)
        return Found(
            best=chosen,
            solved=tuple(seen.solved),
            unfit=tuple(seen.unfit),
            total=seen.total,
            unsolved=seen.unsolved,
            bound_s=min(left_s, chosen.solution.bound),
            status=Status.OPTIMAL if optimal else Status.FEASIBLE,
            timed_out=seen.timed_out,
            gave_up=seen.unsolved > 0 and not (seen.timed_out or seen.close_enough),
            close_enough=seen.close_enough,
        )

    def _left_s(self, staged: Staged) -> float:
        """What a grid whose solver ran out of time may still be found to take; inf if proven."""
        if staged.solution.status not in (Status.FEASIBLE, Status.TIME_LIMIT):
            return inf
        bound = max(staged.solution.bound, self.bounds.sharded(staged.grid))
        if staged.problem.shares_ranks:  # with more in flight than every plan needs
            return bound
        return max(bound, lower_bound(staged.problem))

    def _check_pins(self, candidates: Sequence[Grid]) -> None:
        """Raise InfeasiblePlan for a pin that would be honoured in name only."""
        degree = self.setting.pins.tensor
        message = explain_attention(self.setting, candidates)
        if message is None and degree is not None and degree > 1:
            message = explain_unsplittable(self.pricer, degree)
        if message is not None:
            raise InfeasiblePlan(message)

    def _heap(self, candidates: Sequence[Grid]) -> list[_Entry]:
        """A heap of grids by what they promise; of equals, simpler ones come first."""
        queue: list[_Entry] = []
        for position, grid in enumerate(candidates):
            self.progress("bounding grids", position / len(candidates))
            place = (grid.pipeline, grid.tensor, grid.sizes, position)
            bound = self.bounds.computed(grid)
            promise = bound + self.bounds.upkeep_s(grid, bound)
            queue.append(_Entry(promise, place, bound, Sharpness.COMPUTE, grid))
        heapq.heapify(queue)
        return queue

    def _sharper(self, entry: _Entry) -> _Entry:
        sharper, sharpness = self.bounds.sharper(entry.grid, entry.sharpness)
        bound, plain = max(sharper.step_s, entry.bound), sharper.plain_s
        promise = max(bound, plain + self.bounds.upkeep_s(entry.grid, plain))
        return entry._replace(promise=promise, bound=bound, sharpness=sharpness)

    def _solve(self, grid: Grid, seen: _Seen) -> Iterator[Staged]:
        """The best stages of a grid for every way to lay parameters that several blocks share.

        Those that provably do not beat the best of all that was `seen` are left out. Where stages
        share ranks, which takes long to solve, only the way with the least bound that fits is
        solved; what the others could still take is remembered as left.
        """
        found = [
            (self._relaxed(problem, seen.limit_s), index, options, problem)
            for index, (options, problem) in enumerate(self.problems(grid))
        ]
        fits = False
        for bound, _, options, problem in sorted(found, key=lambda item: item[:2]):
            if seen.compares and bound >= seen.limit_s:
                return
            if fits and problem.shares_ranks:
                seen.left_s = min(seen.left_s, bound)
                return
            staged = solve_stages(self.pricer, grid, options, problem, limit_s=seen.limit_s)
            staged = at_least(staged, bound)
            fits = staged.solution.status.has_solution
            yield staged

    def problems(
        self, grid: Grid
    ) -> Iterator[tuple[dict[int, tuple[ClassOption, ...]], PartitionProblem]]:
        """The problem for every way to lay parameters that several blocks share."""
        for fixed, shared in product(self._fixings(grid), self._shared_zeros(grid)):
            options = {
                c.index: self._class_options(grid, c.index, fixed, shared)
                for c in self.setting.chain.classes
            }
            if all(options.values()):
                problem = partition_problem(self.pricer, grid, options, self.bounds.weights(grid))
                yield options, problem

    def _relaxed(self, problem: PartitionProblem, enough: float) -> float:
        return relaxed_bound(problem, get_backend(self.setting.backend), enough=enough)

    def _shared_zeros(self, grid: Grid) -> tuple[ZeroChoice, ...]:
        """The ZeRO choices for the parameters that several blocks read, which must agree."""
        if not self.setting.shared_parameters:
            return (UNSPLIT,)
        return shared_choices(zero_choices(self.pricer.prices(grid), self.setting.pins.zero))

    def _class_options(
        self, grid: Grid, class_index: int, fixed: Mapping[str, Layout], shared: ZeroChoice
    ) -> tuple[ClassOption, ...]:
        block = self.setting.chain.representative(class_index)
        names = {self.setting.sources[ref.name].fqn for ref in block.parameters}
        relevant = {name: layout for name, layout in fixed.items() if name in names}
        if not self.setting.shared_positions[class_index]:
            shared = UNSPLIT
        stages = grid.pipe.num_stages
        key = (grid.base, stages, class_index, tuple(sorted(relevant.items())), shared)
        if key not in self._options:
            per_home = [
                class_options(self.shardings.at(home), grid, class_index, relevant, shared)
                for home in dict.fromkeys(self.pricer.homes(grid))
            ]
            self._options[key] = tuple(
                option if not index else replace(option, home=index)
                for index, options in enumerate(per_home)
                for option in options
                if all(per_home)
            )
        return self._options[key]

    def _fixings(self, grid: Grid) -> Iterator[dict[str, Layout]]:
        """Layouts for the parameters that several blocks read, which must agree on them.

        Between classes all layouts that both offer are tried. Blocks of one class agree on that
        of the class's fastest sharding.
        """
        per_name = []
        for ref, classes in self.setting.shared_parameters.items():
            name = self.setting.sources[ref.name].fqn
            offered = [self._offered(grid, class_index, ref) for class_index in sorted(classes)]
            common = sorted(set.intersection(*offered), key=str)
            if len(classes) == 1:
                common = self._fastest_layout(grid, min(classes), ref) or common
            per_name.append([(name, layout) for layout in common])
        for count, combination in enumerate(product(*per_name)):
            if count == _MOST_FIXINGS:
                return
            yield dict(combination)

    def _offered(self, grid: Grid, class_index: int, ref: Ref) -> set[Layout]:
        block = self.setting.chain.representative(class_index)
        parameters = self.pricer.space(block, self.pricer.block_mesh(grid, block)).parameters
        return {x for source, layouts in parameters if source.name == ref.name for x in layouts}

    def _fastest_layout(self, grid: Grid, class_index: int, ref: Ref) -> list[Layout]:
        problem, prices = self.shardings.of(grid, class_index), self.pricer.prices(grid)
        sync_s = sync_shares_s(problem.space, prices, grid.micro_batches)
        solved = problem.solve(Upkeep(sync_s=sync_s))
        name = self.setting.sources[ref.name].fqn
        return [] if solved is None else [x for fqn, x in solved.parameters if fqn == name]
