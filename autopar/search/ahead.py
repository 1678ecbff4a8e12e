"""What a search asks of its setting, and who answers: the search itself, or workers ahead of it.

An answer depends on the setting and the question alone, never on what was asked before. So plans
are the same whoever answers, however many there are, and whoever is done first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from autopar.search.grid import Grid

Answer = object


class Question(NamedTuple):
    """One of the functions of a search that are named in `planner.ANSWERS`, and its arguments."""

    what: str
    grid: Grid
    more: int = 0

    @property
    def kin(self) -> object:
        """Questions of equal kin share what ops may do."""
        return self.grid.block_mesh

    @property
    def family(self) -> object:
        """Questions of one family share sharding problems too, which are most of the work."""
        return self.kin, self.grid.micro_batch


class Unanswered(Exception):
    """The answer is an error."""


class Helpers(Protocol):
    """Who answers the questions of one search ahead of it."""

    def expect(self, questions: Iterable[Question]) -> None:
        """Questions that are likely to be asked next, in place of those expected before."""

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

    def get(self, question: Question) -> Answer:
        """The answer to a question. Raises what working it out raises."""
        if self.helpers is not None:
            try:
                return self.helpers.get(question, self.answer)
            except Unanswered:
                pass
        return self.answer(question)

    @property
    def idle(self) -> bool:
        """Whether there are helpers, and questions that will be asked are worth telling them."""
        return self.helpers is not None and self.helpers.idle

    def expect(self, questions: Iterable[Question]) -> None:
        """Questions that are likely to be asked next, in that order."""
        if self.helpers is not None:
            self.helpers.expect(questions)
