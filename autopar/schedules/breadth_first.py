"""Looped breadth-first pipeline (Lamy-Poirier, 2022, arXiv:2211.05953).

GPipe over several stages per rank: a rank runs all micro-batches through one stage before it takes
up its next one, so that a stage's weights are used in one go per direction. Every stage holds all
micro-batches in flight; the bubble is that of interleaved 1F1B.
"""

from __future__ import annotations

from autopar.schedules.action import ActionKind, Schedule
from autopar.schedules.interleaved import in_groups


def looped_bfs(num_ranks: int, chunks: int, num_micro_batches: int) -> Schedule:
    """`chunks` stages per rank, placed in a loop."""
    rows = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * chunks, num_ranks)
        everything = (num_micro_batches,)
        forwards = in_groups(ActionKind.FORWARD, stages, everything)
        rows.append((*forwards, *in_groups(ActionKind.BACKWARD, stages[::-1], everything)))
    return Schedule(
        name="looped-bfs",
        num_stages=num_ranks * chunks,
        num_micro_batches=num_micro_batches,
        ranks=tuple(rows),
    )
