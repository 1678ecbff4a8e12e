"""What a search has seen, what waits for its turn, and what is therefore asked next."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, cast

from autopar.ir.mesh import CONTEXT
from autopar.search.ahead import Answer, Question, Then
from autopar.search.bounds import Bound, Sharpness
from autopar.search.grid import Grid
from autopar.search.stages import Staged
from solvers.solution import relative_gap

TIE = 1e-9
"""Relative difference between plans that are as good as each other."""

_NEXT = 8
"""Grids that are taken to be the next ones."""

_NEAR = 0.05
"""Share by which the best plan is taken to need more than what the first grid promises."""


Sharper = tuple[Bound, Sharpness, float]
"""The answer to a `sharper` question: the bound, how sharp it is, and about what parameters take
beside."""


class Entry(NamedTuple):
    """A grid that waits for its turn. Entries compare by what the grid promises (`plain`, or what
    is made of that), and then by its place among equals. It is bounded again, sharper, only when
    its turn comes."""

    promise: float
    place: tuple[int, int, tuple[int, ...], int]
    bound: float
    sharpness: Sharpness
    grid: Grid
    plain: float


def pop_quick(queue: list[Entry]) -> Entry:
    """Take the grid out of a heap that is quick to solve, of such the one that promises most: with
    a stage a rank and no context axis, and about which the most is known."""

    def dear(entry: Entry) -> tuple[bool, bool, int, Entry]:
        grid = entry.grid
        slow = grid.chunks > 1 or grid.degree(CONTEXT) > 1
        return entry.bound == inf, slow, -entry.sharpness, entry

    entry = min(queue, key=dear)
    queue.remove(entry)
    heapq.heapify(queue)
    return entry


@dataclass
class Seen:
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
        return min(self.ceiling_s, sorted(self._fastest.values())[self.top] * (1 - TIE))

    @property
    def compares(self) -> bool:
        """Whether there is a plan already that others must beat."""
        return self.best is not None or self.ceiling_s < inf

    def ends_search(self, queue: Sequence[Entry], gap: float) -> bool:
        """Whether the best is known to be within `gap` of all that is left."""
        if self.best is None or not gap or len(self._fastest) <= self.top:
            return False
        left_s = min((entry.bound for entry in queue), default=inf)
        objective = self.best.solution.objective
        return relative_gap(objective, min(left_s, objective)) <= gap

    def leave(self, queue: Sequence[Entry]) -> None:
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
        if self.best is None or objective < self.best.solution.objective * (1 - TIE):
            self.best, self.in_vain = staged, 0
        self._fastest[technique] = min(objective, self._fastest.get(technique, inf))


def first_question(grid: Grid) -> Question:
    """What is asked about a grid first: its cheapest bound."""
    return Question("computed", grid)


def next_question(entry: Entry) -> Question:
    """What is asked when a grid's turn comes: a sharper bound, or else what there is to solve."""
    if entry.sharpness < Sharpness.SCHEDULED:
        return Question("sharper", entry.grid, entry.sharpness)
    return Question("problems", entry.grid)


def likely_next(queue: Sequence[Entry], seen: Seen) -> tuple[list[Question], Then]:
    """What is likely to be asked about grids, by when, and what follows from the answers.

    Those that promise most come first, then those with the least bounds: sooner or later all are
    asked about whose bound is below what the best will take. As long as no plan is known, that is
    taken to be a little more than what the first promises.
    """
    limit_s, deepest = seen.limit_s, Sharpness.SCHEDULED
    if not seen.compares and queue:
        limit_s, deepest = (1 + _NEAR) * queue[0].promise, Sharpness.STARTED
    first = [entry for entry in heapq.nsmallest(_NEXT, queue) if entry.bound < seen.limit_s]
    left = [entry for entry in queue if entry.bound < limit_s and entry.sharpness < deepest]
    left.sort(key=lambda entry: entry.bound)
    sharpened = [entry for entry in first if entry.sharpness < Sharpness.SCHEDULED]
    solved = [entry for entry in first if entry.sharpness == Sharpness.SCHEDULED]

    def then(question: Question, answer: Answer) -> Question | None:
        if question.what != "sharper":
            return None
        bound, sharpness, _ = cast(Sharper, answer)
        more = bound.step_s < limit_s and sharpness < deepest
        return Question("sharper", question.grid, sharpness) if more else None

    return list(map(next_question, [*sharpened, *left, *solved])), then
