"""In which order a search looks at grids.

Nothing is proven before all grids that may be better have been looked at closely; a good plan is
found much sooner. For a first one grids are followed to the end of which most is known: what they
will take is guessed from how sharp their bound is, whether grids like them did not fit, and
whether their schedule is the simplest. Then the neighbours of the best plan have their turn, which
are likely to fit too. All others come by their bounds, the least first: wherever a search ends, the
bound of what is left is then as high as it can be.
"""

from __future__ import annotations

import heapq
from math import inf

from autopar.ir.mesh import CONTEXT, SHARD
from autopar.search.bounds import Sharpness
from autopar.search.grid import Grid
from autopar.search.pipelines import FREE
from autopar.search.seen import TIE, Entry, Seen
from autopar.search.stages import Staged

_RISE = 1.1
"""What a sharper bound makes of the one before, at about the most."""

_LATER = 1.5
"""The same of schedules but the simplest, which is as likely to fit as any and quicker to solve:
others are its neighbours."""

_UNFIT = 1.2
"""The same of grids for every one of their pipeline and schedule that did not fit."""

_FAR = 3.0
"""The same of the bounds of grids that are no neighbours of the best: they differ in more than one
decision."""


class Dive:
    """Orders a queue of grids by guesses: until there is a plan, and then by where it is."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._unfit: dict[object, float] = {}
        self._best = seen.best

    def ordered(self, queue: list[Entry]) -> list[Entry]:
        """The queue as a heap by what is guessed."""
        queue = [self.guessed(entry) for entry in queue]
        heapq.heapify(queue)
        return queue

    def guessed(self, entry: Entry) -> Entry:
        """The entry at its place in the queue."""
        if self._best is not None and _steps(entry.grid, self._best.grid) > 1:
            return entry._replace(promise=_FAR * entry.bound)
        return entry._replace(promise=entry.plain * self._factor(entry))

    def _factor(self, entry: Entry) -> float:
        grid = entry.grid
        later = 1.0 if (grid.schedule, grid.chunks) == FREE[0] else _LATER
        if self._best is not None:
            return later
        if self._seen.compares:
            return 1.0
        rise: float = _RISE ** (Sharpness.SCHEDULED - entry.sharpness)
        return rise * later * self._unfit.get(_kind(grid), 1.0)

    def moves(self) -> bool:
        """Whether there is a new best plan, from which to go on."""
        moved = self._best is not self._seen.best
        self._best = self._seen.best
        return moved

    def stands_back(self, queue: list[Entry], entry: Entry) -> bool:
        """Whether an entry that was taken out goes back further behind, by what is known since."""
        again = self.guessed(entry)
        if again.promise == inf or again.promise <= entry.promise * (1 + TIE):
            return False
        heapq.heappush(queue, again)
        return True

    def learn(self, grid: Grid, staged: Staged) -> None:
        """A grid without a plan tells of others of its pipeline and schedule."""
        if not staged.solution.status.has_solution:
            self._unfit[_kind(grid)] = _UNFIT * self._unfit.get(_kind(grid), 1.0)


def _kind(grid: Grid) -> object:
    return grid.pipeline, grid.schedule, grid.chunks


def _steps(grid: Grid, other: Grid) -> int:
    """In how many decisions two grids differ: the ranks that share samples follow from others."""
    return sum(a != b for a, b in zip(_decisions(grid), _decisions(other), strict=True))


def _decisions(grid: Grid) -> tuple[object, ...]:
    return (
        grid.pipeline,
        grid.tensor,
        grid.degree(CONTEXT),
        grid.degree(SHARD),
        grid.micro_batch,
        (grid.schedule, grid.chunks),
        grid.own,
    )
