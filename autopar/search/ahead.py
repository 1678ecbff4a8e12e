"""What a search asks of its setting, and who answers: the search itself, or workers ahead of it.

An answer depends on the setting and the question alone, never on what was asked before. So plans
are the same whoever answers, however many there are, and whoever is done first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, Protocol

from autopar.search.grid import Grid

Answer = object

_SELDOM = 20
"""How many times as long as telling what is likely to be asked takes, it is not told anew: with
hardly anything left to do helpers are always idle, and a look at a long queue takes a while."""


class Question(NamedTuple):
    """One of the functions of a search that are named in `planner.ANSWERS`, and its arguments."""

    what: str
    grid: Grid
    more: int = 0

    @property
    def kin(self) -> object:
        """Questions of equal kin share what ops may do, and what that takes them: how values pass
        between blocks does not count."""
        return tuple((axis.name, axis.size) for axis in self.grid.block_mesh)

    @property
    def family(self) -> object:
        """Questions of one family share sharding problems too, which are most of the work."""
        return self.kin, self.grid.micro_batch


Then = Callable[[Question, Answer], Question | None]
"""What is likely to be asked once a question is answered so, if anything."""


class Unanswered(Exception):
    """The answer is an error."""


class Helpers(Protocol):
    """Who answers the questions of one search ahead of it."""

    def expect(self, questions: Iterable[Question], then: Then) -> None:
        """Questions that are likely to be asked next, and `then` those that follow from their
        answers, in place of those expected before."""

    def get(self, question: Question, answer: Callable[[Question], Answer]) -> Answer:
        """The answer, worked out elsewhere or by `answer`. Raises Unanswered."""

    @property
    def idle(self) -> bool:
        """Whether they have little left to do."""


@dataclass
class Ahead:
    """Asks the search, and the helpers that it may have."""

    answer: Callable[[Question], Answer]
    helpers: Helpers | None = None
    _told_until: float = field(default=-inf, init=False)

    def get(self, question: Question) -> Answer:
        """The answer to a question. Raises what working it out raises."""
        if self.helpers is not None:
            try:
                return self.helpers.get(question, self.answer)
            except Unanswered:
                pass
        return self.answer(question)

    def expect(self, questions: Iterable[Question]) -> None:
        """Questions that are likely to be asked next, in that order."""
        if self.helpers is not None:
            self.helpers.expect(questions, lambda question, answer: None)

    def look(self, likely: Callable[[], tuple[Iterable[Question], Then]], anew: bool) -> None:
        """The same and what follows from the answers, where there are helpers with little left to
        do, or all is to be told `anew`: what is `likely` is found out only then, and takes no more
        than a small share of the search."""
        if self.helpers is None:
            return
        if not anew and (time.monotonic() < self._told_until or not self.helpers.idle):
            return
        started_s = time.thread_time()
        self.helpers.expect(*likely())
        self._told_until = time.monotonic() + _SELDOM * (time.thread_time() - started_s)
