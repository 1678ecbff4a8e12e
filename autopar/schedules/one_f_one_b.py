"""1F1B with a flush: one forward, one backward (Narayanan et al., 2021, arXiv:2006.09503).

Also called PipeDream-Flush. It takes as long as GPipe on equal stages, with fewer micro-batches in
flight.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.schedules.action import Action, ActionKind, Schedule


def one_f_one_b(num_ranks: int, chunks: int, num_micro_batches: int) -> Schedule:
    """One stage per rank. Stage i holds at most `num_ranks - i` micro-batches in flight."""
    rows = []
    for stage in range(num_ranks):
        forwards, backwards = (
            [Action(kind, stage, i) for i in range(num_micro_batches)]
            for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)
        )
        rows.append(alternate(forwards, backwards, warmup=num_ranks - 1 - stage))
    return Schedule(
        name="1f1b",
        num_stages=num_ranks * chunks,
        num_micro_batches=num_micro_batches,
        ranks=tuple(rows),
    )


def alternate(
    forwards: Sequence[Action], backwards: Sequence[Action], warmup: int
) -> tuple[Action, ...]:
    """`warmup` forwards, then forward and backward in turn, then the backwards left over."""
    warmup = min(warmup, len(forwards))
    row = list(forwards[:warmup])
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        row += [forward, backward]
    return (*row, *backwards[len(forwards) - warmup :])
