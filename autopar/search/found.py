"""What a search found."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.search.stages import Staged
from solvers.solution import Status


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
