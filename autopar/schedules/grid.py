"""A schedule as text: one row per rank, one column per clock."""

from __future__ import annotations

from autopar.schedules.action import Schedule
from autopar.schedules.endless import finite
from autopar.schedules.order import execute

_WINDOW = 8
"""Columns and rows shown on each side of a mark."""


Clocks = tuple[tuple[int, ...], ...]


def render_grid(
    schedule: Schedule, *, mark: tuple[int, int] | None = None, clocks: Clocks | None = None
) -> str:
    """Rank by clock, as every action taking one clock would run.

    `mark` is a (rank, position) to put in brackets; position may be one past the end, for an action
    that is missing there. With a mark only the part around it is shown. `clocks` are those of an
    `Execution`, by default that of the schedule (which raises InputError where a stage has no
    single rank); actions that have none follow the last one that has. Of a schedule that never
    drains a run of two steps is shown.
    """
    if clocks is None:
        schedule = finite(schedule, 2)
        clocks = execute(schedule).clocks
    rows = [_cells(schedule, rank, clocks[rank]) for rank in range(schedule.num_ranks)]
    first, last = 0, max((max(row, default=-1) for row in rows), default=-1) + 1
    shown = list(range(len(rows)))
    if mark is not None:
        rank, position = mark
        cells = rows[rank]
        column = [*sorted(cells), max(cells, default=-1) + 1][position]
        cells[column] = f"[{cells.get(column, '')}]"
        first, last = max(0, column - _WINDOW), min(max(last, column + 1), column + _WINDOW + 1)
        shown = shown[max(0, rank - _WINDOW) : rank + _WINDOW + 1]
    return _table([rows[rank] for rank in shown], shown, range(first, last))


def _cells(schedule: Schedule, rank: int, clocks: tuple[int, ...]) -> dict[int, str]:
    """Clock to text; what never runs stands behind what does."""
    actions = schedule.ranks[rank]
    after = clocks[-1] + 1 if clocks else 0
    stuck = range(after, after + len(actions) - len(clocks))
    return {clock: str(action) for clock, action in zip((*clocks, *stuck), actions, strict=True)}


def _table(rows: list[dict[int, str]], ranks: list[int], columns: range) -> str:
    width = max((len(row.get(c, "")) for row in rows for c in columns), default=1)
    label = max(len(str(rank)) for rank in ranks)
    lines = []
    for rank, row in zip(ranks, rows, strict=True):
        cells = " ".join(row.get(column, ".").ljust(width) for column in columns)
        lines.append(f"rank {rank:>{label}} | {cells}".rstrip())
    return "\n".join([f"clock {columns.start} to {columns.stop - 1}", *lines])
