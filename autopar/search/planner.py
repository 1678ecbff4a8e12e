"""The outer search: best grid first, pruned by bounds, until nothing unsolved can be better."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product
from math import ceil, inf
from typing import cast

from autopar.errors import InfeasiblePlan
from autopar.ir.graph import Ref
from autopar.ir.placement import Layout
from autopar.search.ahead import Ahead, Answer, Question
from autopar.search.bounds import Bounds, Sharpness
from autopar.search.dive import Dive
from autopar.search.found import Found
from autopar.search.grid import Grid
from autopar.search.grids import grids
from autopar.search.infeasible import (
    NothingFits,
    explain_attention,
    explain_infeasible,
    explain_unsplittable,
)
from autopar.search.options import ClassOption, class_options
from autopar.search.pipelines import stage_share
from autopar.search.pricer import Pricer
from autopar.search.problems import ShardingProblems
from autopar.search.seen import (
    TIE,
    Entry,
    Seen,
    Sharper,
    first_question,
    likely_next,
    next_question,
    pop_quick,
)
from autopar.search.setting import Setting
from autopar.search.sharding import Upkeep, sync_shares_s
from autopar.search.simulated import Simulator
from autopar.search.stages import Staged, at_least, partition_problem, solve_stages
from autopar.search.state import (
    UNSPLIT,
    ZeroChoice,
    shared_choices,
    zero_choices,
)
from solvers.backends import get_backend
from solvers.partition import PartitionProblem, lower_bound
from solvers.partition_loads import loaded_bound
from solvers.partition_pooled import pooled_bound
from solvers.partition_relaxation import relaxed_bound
from solvers.solution import Status

Progress = Callable[[str, float | None], None]
"""(what is being done, fraction done or None)."""


PATIENCE = 48
"""Grids whose stages were solved, in a row without a better plan, after which the search ends.
Unlike a limit on time, it ends in the same place on any machine."""

_HOPELESS = 4
"""Grids that do not fit which are solved to say by how much, while there is nothing to beat."""

Fixed = tuple[Mapping[str, Layout], ...]
"""How the parameters lie that several blocks read, for every spot of a grid."""

_MOST_FIXINGS = 8

_LEAST_S = 2.0
"""Seconds that a solver may take even when the time is up."""

Problem = tuple[dict[int, tuple[ClassOption, ...]], PartitionProblem]
"""The options of every class, and the partition problem that they make."""

Problems = tuple[Problem, ...]
Computed = tuple[float, float]


@dataclass
class Planner:
    """Searches the grids of one setting."""

    setting: Setting
    progress: Progress = lambda what, done: None
    pricer: Pricer = field(init=False)
    shardings: ShardingProblems = field(init=False)
    bounds: Bounds = field(init=False)
    simulator: Simulator = field(init=False)
    ahead: Ahead = field(init=False)
    _options: dict[object, tuple[ClassOption, ...]] = field(default_factory=dict)
    _deadline: float = inf

    def __post_init__(self) -> None:
        self.pricer = Pricer(self.setting)
        self.shardings = ShardingProblems(self.pricer)
        self.bounds = Bounds(self.shardings)
        self.simulator = Simulator(pricer=self.pricer)
        self.ahead = Ahead(self.answer)

    def answer(self, question: Question) -> Answer:
        """The answer to a question, worked out here: the same whatever was asked before."""
        return ANSWERS[question.what](self, question)

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
        self._deadline = time.monotonic() + time_limit_s
        candidates = grids(self.setting)
        self._check_pins(candidates)
        if self.setting.team is not None:
            self.ahead.helpers = self.setting.team.helpers(self.setting, len(candidates))
        seen = Seen(total=len(candidates), top=self.setting.top or 0, ceiling_s=ceiling_s)
        self._drain(self._heap(candidates), seen)
        if seen.best is None and ceiling_s < inf:
            return min([seen.left_s, ceiling_s, *map(self._left_s, seen.unfit)])
        if seen.best is None:
            raise NothingFits(explain_infeasible(self.pricer, seen.unfit))
        return self._found(seen)

    @property
    def _late(self) -> bool:
        return time.monotonic() > self._deadline

    def _drain(self, queue: list[Entry], seen: Seen) -> None:
        """Look at grids, those first that promise most, until none left can be better.

        The few that look best are followed to the end first, and then the neighbours of the best
        plan. Once the time is up that will do; where there is none, the first that is found of the
        grids that are quick to solve.
        """
        dive = Dive(seen)
        queue = dive.ordered(queue)
        while queue:
            late = self._late
            if dive.moves():
                queue = dive.ordered(queue)
                self._look_ahead(queue, seen, anew=True)
            entry = pop_quick(queue) if late and not seen.compares else heapq.heappop(queue)
            bound, grid = entry.bound, entry.grid
            if not late and dive.stands_back(queue, entry):
                continue
            if bound >= seen.limit_s < inf:
                continue
            if bound == inf and (seen.limit_s < inf or len(seen.unfit) >= _HOPELESS):
                return
            if seen.compares and (late or seen.in_vain >= PATIENCE):
                seen.timed_out = late
                seen.leave([entry, *queue])
                return
            self.progress("searching grids", seen.looked_at / seen.total)
            if entry.sharpness < Sharpness.SCHEDULED and bound < inf:
                # With a sharper bound the grid may stand further back.
                heapq.heappush(queue, dive.guessed(self._sharper(entry)))
                self._look_ahead(queue, seen)
                continue
            seen.looked_at += 1
            best, solved = seen.best, False
            self._look_ahead(queue, seen)
            for staged in self._solve(grid, seen):
                seen.add(staged)
                dive.learn(grid, staged)
                solved = True
                if late and seen.compares:
                    seen.left_s = min(seen.left_s, bound)
                    break
            seen.in_vain += solved and seen.best is best
            if seen.ends_search(queue, self.setting.gap):
                seen.close_enough = True
                seen.leave(queue)
                return

    def _found(self, seen: Seen) -> Found:
        """The best of what was seen, and what bounds everything else."""
        chosen = seen.best
        assert chosen is not None
        others = [staged for staged in (*seen.solved, *seen.unfit) if staged is not chosen]
        left_s = min([seen.left_s, *map(self._left_s, others)])
        optimal = chosen.solution.status is Status.OPTIMAL
        optimal = optimal and left_s >= chosen.solution.objective * (1 - TIE)
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

    def _time_left_s(self) -> float:
        """What a solver may take: the time that is left, and a little where there is none."""
        limit_s = self.setting.time_limit_s
        return min(limit_s, max(self._deadline - time.monotonic(), _LEAST_S))

    def _left_s(self, staged: Staged) -> float:
        """What a grid whose solver ran out of time may still be found to take; inf if proven."""
        if staged.solution.status not in (Status.FEASIBLE, Status.TIME_LIMIT):
            return inf
        sharded_s = cast(float, self.ahead.get(Question("sharded", staged.grid)))
        bound = max(staged.solution.bound, sharded_s)
        if staged.problem.shares_ranks:  # with more in flight than every plan needs
            return bound
        return max(bound, lower_bound(staged.problem))

    def _check_pins(self, candidates: Sequence[Grid]) -> None:
        """Raise InfeasiblePlan for a pin that would be honoured in name only."""
        message = explain_attention(self.setting, candidates)
        for degree in sorted(self.setting.pins.tensors - {1}):
            message = message or explain_unsplittable(self.pricer, degree)
        if message is not None:
            raise InfeasiblePlan(message)

    def _heap(self, candidates: Sequence[Grid]) -> list[Entry]:
        """The grids with what they promise; of equals, simpler ones come first. Those that
        there is no time to bound promise nothing."""
        queue: list[Entry] = []
        self.ahead.expect(map(first_question, candidates))
        for position, grid in enumerate(candidates):
            self.progress("bounding grids", position / len(candidates))
            place = (grid.pipeline, grid.tensor, grid.sizes, position)
            bound, upkeep_s = 0.0, inf
            if not self._late:
                bound, upkeep_s = cast(Computed, self.ahead.get(first_question(grid)))
            promise = (bound + upkeep_s) * self._unevenness(grid)
            queue.append(Entry(promise, place, bound, Sharpness.COMPUTE, grid, promise))
        return queue

    def _sharper(self, entry: Entry) -> Entry:
        sharper, sharpness, upkeep_s = cast(Sharper, self.ahead.get(next_question(entry)))
        bound = max(sharper.step_s, entry.bound)
        promise = max(bound, sharper.plain_s + upkeep_s) * self._unevenness(entry.grid)
        return entry._replace(promise=promise, bound=bound, sharpness=sharpness, plain=promise)

    def _unevenness(self, grid: Grid) -> float:
        """About what ranks that wait for their longest stages may take more than is known of them
        before these are solved: whole blocks leave some stage longer than others, and what is in
        flight on every stage asks for more than on one. No bound: it tells where to look first."""
        pipe, blocks = grid.pipe, len(self.setting.chain.blocks)
        if pipe.chunks == 1 or not stage_share(pipe.schedule, pipe.ranks):
            return 1.0
        return pipe.chunks * ceil(blocks / pipe.num_stages) * pipe.ranks / blocks

    def _look_ahead(self, queue: Sequence[Entry], seen: Seen, anew: bool = False) -> None:
        self.ahead.look(lambda: likely_next(queue, seen), anew)

    def _solve(self, grid: Grid, seen: Seen) -> Iterator[Staged]:
        """The best stages of a grid for every way to lay parameters that several blocks share.

        Those that provably do not beat the best of all that was `seen` are left out.
        """
        found = [
            (self._relaxed(problem, seen.limit_s), index, options, problem)
            for index, (options, problem) in enumerate(self.problems(grid))
        ]
        for bound, _, options, problem in sorted(found, key=lambda item: item[:2]):
            if bound >= seen.limit_s < inf:
                return
            staged = solve_stages(
                self.pricer,
                grid,
                options,
                problem,
                limit_s=seen.limit_s,
                time_limit_s=self._time_left_s(),
                bound_s=bound,
            )
            yield at_least(staged, bound)

    def problems(self, grid: Grid) -> Problems:
        """The problem for every way to lay parameters that several blocks share."""
        return cast(Problems, self.ahead.get(Question("problems", grid)))

    def made_problems(self, grid: Grid) -> Iterator[Problem]:
        """The same, made here."""
        for fixed, shared in product(self._fixed(grid), self._shared_zeros(grid)):
            options = {
                c.index: self._class_options(grid, c.index, fixed, shared)
                for c in self.setting.chain.classes
            }
            if all(options.values()):
                problem = partition_problem(self.pricer, grid, options, self.bounds.weights(grid))
                yield options, problem

    def _relaxed(self, problem: PartitionProblem, enough: float) -> float:
        """What the options of a grid take at the least in any stages, by a linear program where a
        cheaper bound is not `enough`."""
        bound = max(pooled_bound(problem), loaded_bound(problem))
        if bound >= enough:
            return bound
        return max(bound, relaxed_bound(problem, get_backend(self.setting.backend), enough=enough))

    def _shared_zeros(self, grid: Grid) -> tuple[ZeroChoice, ...]:
        """The ZeRO choices for the parameters that several blocks read, which must agree."""
        if not self.setting.shared_parameters or grid.own:
            return (UNSPLIT,)
        return shared_choices(zero_choices(self.pricer.prices(grid), self.setting.pins.zero))

    def _class_options(
        self, grid: Grid, class_index: int, fixed: Fixed, shared: ZeroChoice
    ) -> tuple[ClassOption, ...]:
        block = self.setting.chain.representative(class_index)
        names = {self.setting.sources[ref.name].fqn for ref in block.parameters}
        relevant = [{n: layout for n, layout in each.items() if n in names} for each in fixed]
        if not self.setting.shared_positions[class_index]:
            shared = UNSPLIT
        stages = grid.pipe.num_stages
        settled = tuple(tuple(sorted(each.items())) for each in relevant)
        key = (grid.base, stages, class_index, settled, shared)
        if key not in self._options:
            per_home = [
                class_options(self.shardings.at(home), own, class_index, each, shared)
                for (home, own), each in zip(self.pricer.places.spots(grid), relevant, strict=True)
            ]
            self._options[key] = tuple(
                option if not index else replace(option, home=index)
                for index, options in enumerate(per_home)
                for option in options
                if all(per_home)
            )
        return self._options[key]

    def _fixed(self, grid: Grid) -> Iterator[Fixed]:
        """The same for every spot of a grid: one way for all, or where meshes differ one each."""
        spots = self.pricer.places.spots(grid)
        if not grid.own:
            yield from ((fixed,) * len(spots) for fixed in self._fixings(grid))
            return
        offered = {spot.grid: list(self._fixings(spot.grid)) for spot in spots}
        for chosen in islice(product(*offered.values()), _MOST_FIXINGS):
            by_grid = dict(zip(offered, chosen, strict=True))
            yield tuple(by_grid[spot.grid] for spot in spots)

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
        parameters = self.pricer.spaces.of(block, grid).parameters
        return {x for source, layouts in parameters if source.name == ref.name for x in layouts}

    def _fastest_layout(self, grid: Grid, class_index: int, ref: Ref) -> list[Layout]:
        problem, prices = self.shardings.of(grid, class_index), self.pricer.prices(grid)
        sync_s = sync_shares_s(problem.space, prices, grid.micro_batches)
        solved = problem.solve(Upkeep(sync_s=sync_s))
        name = self.setting.sources[ref.name].fqn
        return [] if solved is None else [x for fqn, x in solved.parameters if fqn == name]


def _computed(planner: Planner, question: Question) -> Computed:
    """The cheapest bound of a grid, and about what its parameters take beside."""
    bound = planner.bounds.computed(question.grid)
    return bound, planner.bounds.upkeep_s(question.grid, bound)


def _sharpened(planner: Planner, question: Question) -> Sharper:
    """The next sharper bound, how sharp it is, and about what parameters take beside."""
    bound, sharpness = planner.bounds.sharper(question.grid, Sharpness(question.more))
    return bound, sharpness, planner.bounds.upkeep_s(question.grid, bound.plain_s)


ANSWERS: dict[str, Callable[[Planner, Question], Answer]] = {
    "computed": _computed,
    "sharper": _sharpened,
    "sharded": lambda planner, question: planner.bounds.sharded(question.grid),
    "problems": lambda planner, question: tuple(planner.made_problems(question.grid)),
}
"""What a search asks about a grid."""
