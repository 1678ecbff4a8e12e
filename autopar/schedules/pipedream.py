"""PipeDream: 1F1B that never drains (Narayanan et al., 2019, SOSP; arXiv:1806.03377).

Each stage applies the gradient of a micro-batch right after its backward. There is no bubble once
the pipeline is full; the price is staleness. A backward uses the weights of its forward (weight
stashing), so that stage i keeps as many versions as it holds micro-batches: p - i.
"""

from __future__ import annotations

from autopar.schedules.action import Action, ActionKind, Schedule


def pipedream(num_ranks: int, chunks: int, num_micro_batches: int) -> Schedule:
    """One stage per rank, and the step as a window of an endless stream.

    Stage i is always p - 1 - i forwards ahead: a backward that stands before its forward in the
    list belongs to the step before.
    """
    rows = []
    for stage in range(num_ranks):
        lead = num_ranks - 1 - stage
        row = []
        for i in range(num_micro_batches):
            row.append(Action(ActionKind.FORWARD, stage, i))
            row.append(Action(ActionKind.BACKWARD, stage, (i - lead) % num_micro_batches))
        rows.append(tuple(row))
    return Schedule(
        name="pipedream",
        num_stages=num_ranks * chunks,
        num_micro_batches=num_micro_batches,
        ranks=tuple(rows),
        flushes=False,
    )


def pipedream_limits(num_ranks: int, chunks: int, num_micro_batches: int) -> str | None:
    """A backward may reach back into one step, not more."""
    if num_micro_batches < num_ranks:
        return (
            f"{num_micro_batches} micro-batches; expected at least {num_ranks}, one for each rank "
            "that works on another micro-batch at the same time"
        )
    return None
