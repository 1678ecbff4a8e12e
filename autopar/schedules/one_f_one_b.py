"""1F1B with a flush: one forward, one backward (Narayanan et al., 2021, arXiv:2006.09503).

Also called PipeDream-Flush. It takes as long as GPipe on equal stages, with fewer micro-batches in
flight.
"""

from __future__ import annotations

from autopar.schedules.action import Action, ActionKind, Schedule


def one_f_one_b(num_stages: int, num_micro_batches: int) -> Schedule:
    """One stage per rank. Stage i holds at most `num_stages - i` micro-batches in flight."""
    return Schedule(
        name="1f1b",
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        ranks=tuple(
            _row(stage, min(num_stages - 1 - stage, num_micro_batches), num_micro_batches)
            for stage in range(num_stages)
        ),
    )


def _row(stage: int, warmup: int, num_micro_batches: int) -> tuple[Action, ...]:
    """`warmup` forwards, then forward and backward in turn, then the backwards left over."""
    row = [Action(ActionKind.FORWARD, stage, i) for i in range(warmup)]
    for i in range(num_micro_batches - warmup):
        row.append(Action(ActionKind.FORWARD, stage, warmup + i))
        row.append(Action(ActionKind.BACKWARD, stage, i))
    row.extend(
        Action(ActionKind.BACKWARD, stage, i)
        for i in range(num_micro_batches - warmup, num_micro_batches)
    )
    return tuple(row)
