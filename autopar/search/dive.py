"""In which order a search looks at grids until it has a plan.

Nothing is proven before all grids that may be better have been looked at closely; a first plan is
found much sooner, where the few that look best are followed to the end first. What a grid will take
is guessed from how sharp its bound is, and from whether grids of its schedule did not fit.
"""

from __future__ import annotations

import heapq
from math import inf

from autopar.search.bounds import Sharpness
from autopar.search.grid import Grid
from autopar.search.seen import TIE, Entry, Seen
from autopar.search.stages import Staged

_RISE = 1.1
"""What a sharper bound makes of the one before, at about the most."""

_SEVERAL = 1.15
"""The same of a schedule whose ranks hold several stages, by what whole blocks make uneven: these
also take longest to solve."""

_UNFIT = 2.0
"""The same of a schedule of which a grid did not fit."""


class Dive:
    """Orders a queue of grids by guesses until there is a plan."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._beyond: dict[object, float] = {}
        self.on = not seen.compares

    def ordered(self, queue: list[Entry]) -> list[Entry]:
        """The queue as a heap by what is guessed; by what is promised once diving is over."""
        queue = [self.guessed(entry) for entry in queue]
        heapq.heapify(queue)
        return queue

    def guessed(self, entry: Entry) -> Entry:
        """The entry at its place in the queue."""
        if not self.on:
            return entry._replace(promise=entry.plain)
        rise: float = _RISE ** (Sharpness.SCHEDULED - entry.sharpness)
        guess = _SEVERAL if entry.grid.chunks > 1 else 1.0
        beyond = self._beyond.get(_kind(entry.grid), guess)
        return entry._replace(promise=entry.plain * rise * beyond)

    def ends(self) -> bool:
        """Whether diving has just come to its end."""
        over = self.on and self._seen.compares
        self.on = self.on and not over
        return over

    def stands_back(self, queue: list[Entry], entry: Entry) -> bool:
        """Whether an entry that was taken out goes back further behind, by what is known since."""
        again = self.guessed(entry)
        if not self.on or again.promise == inf or again.promise <= entry.promise * (1 + TIE):
            return False
        heapq.heappush(queue, again)
        return True

    def learn(self, grid: Grid, staged: Staged) -> None:
        """A grid without a plan tells of others of its schedule."""
        if not staged.solution.status.has_solution:
            self._beyond[_kind(grid)] = _UNFIT


def _kind(grid: Grid) -> object:
    return grid.schedule, grid.chunks
