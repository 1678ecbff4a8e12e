"""What every solver returns: a status, an objective, a proven bound, and what conflicts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

CAPACITY_TOLERANCE = 1e-9
"""A capacity is met when usage <= limit + tolerance * |limit|; float sums differ by their order."""

Conflict = tuple[tuple[str, float], ...]
"""Names of constraints that cannot hold together, each with how much it falls short by."""


class Status(StrEnum):
    """How far a solve got. `TIME_LIMIT` means that nothing was found; `FEASIBLE` has a gap."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    TIME_LIMIT = "time_limit"

    @property
    def has_solution(self) -> bool:
        """Whether a solution comes with this status."""
        return self in (Status.OPTIMAL, Status.FEASIBLE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """Fields common to all solutions.

    `objective` is inf without a solution; `bound` is a proven lower bound on any solution's
    objective (inf when infeasible); `gap` is `relative_gap` of the two. `engine` names what
    produced the answer. `conflict` is empty unless infeasible.
    """

    status: Status
    objective: float
    bound: float
    gap: float
    engine: str
    solve_s: float = field(default=0.0, compare=False)
    conflict: Conflict = ()


def relative_gap(objective: float, bound: float) -> float:
    """(objective - bound) / |objective|, never negative; inf without a solution or a bound."""
    if math.isinf(objective) or math.isinf(bound):
        return math.inf
    difference = max(0.0, objective - bound)
    return difference / abs(objective) if objective else (math.inf if difference else 0.0)


def label(objective: float, bound: float, gap: float) -> Status:
    """`OPTIMAL` where the bound proves the objective to within `gap`, else `FEASIBLE`.

    The last bits of two float sums of the same terms may differ, hence the floor on `gap`.
    """
    proven = relative_gap(objective, bound) <= max(gap, 1e-9)
    return Status.OPTIMAL if proven else Status.FEASIBLE


def fits(usage: float, limit: float) -> bool:
    """Whether `usage` meets `limit` to within `CAPACITY_TOLERANCE`."""
    return usage <= limit + CAPACITY_TOLERANCE * abs(limit)
