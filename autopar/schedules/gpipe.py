"""GPipe: all forwards, then all backwards (Huang et al., 2019, arXiv:1811.06965)."""

from __future__ import annotations

from autopar.schedules.action import Action, ActionKind, Schedule


def gpipe(num_ranks: int, chunks: int, num_micro_batches: int) -> Schedule:
    """One stage per rank. Every stage holds all micro-batches in flight at the turn."""
    micro_batches = range(num_micro_batches)
    return Schedule(
        name="gpipe",
        num_stages=num_ranks * chunks,
        num_micro_batches=num_micro_batches,
        ranks=tuple(
            tuple(
                Action(kind, stage, micro_batch)
                for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)
                for micro_batch in micro_batches
            )
            for stage in range(num_ranks)
        ),
    )
