"""Interleaved 1F1B: several stages per rank (Narayanan et al., 2021, arXiv:2104.04473, 2.2).

With v stages per rank the pipeline fills in steps of a v-th of the work: equal stages idle for
(p - 1) / (v M + p - 1) of the step. Micro-batches go through the rounds in groups. The paper's
groups have p micro-batches, for M a multiple of p; here any other M is dealt into M // p groups of
nearly equal size (one group where M < p), so that no group is too small to keep the ranks busy
while it comes around.
"""

from __future__ import annotations

from autopar.schedules.action import Action, ActionKind, Schedule
from autopar.schedules.one_f_one_b import alternate


def interleaved_1f1b(num_ranks: int, chunks: int, num_micro_batches: int) -> Schedule:
    """`chunks` stages per rank, placed in a loop.

    Rank i runs 2 (p - 1 - i) + (v - 1) g forwards before it alternates, g being the size of the
    first group; that twofold lead, against the single one of 1F1B, hides the messages.
    """
    sizes = group_sizes(num_ranks, num_micro_batches)
    rows = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * chunks, num_ranks)
        forwards = in_groups(ActionKind.FORWARD, stages, sizes)
        backwards = in_groups(ActionKind.BACKWARD, stages[::-1], sizes)
        warmup = 2 * (num_ranks - 1 - rank) + (chunks - 1) * sizes[0]
        rows.append(alternate(forwards, backwards, warmup))
    return Schedule(
        name="interleaved-1f1b",
        num_stages=num_ranks * chunks,
        num_micro_batches=num_micro_batches,
        ranks=tuple(rows),
    )


def group_sizes(num_ranks: int, num_micro_batches: int) -> tuple[int, ...]:
    """Micro-batches that go around together: the largest groups first, as 1F1B needs them."""
    groups = max(1, num_micro_batches // num_ranks)
    size, larger = divmod(num_micro_batches, groups)
    return (size + 1,) * larger + (size,) * (groups - larger)


def in_groups(kind: ActionKind, stages: range, sizes: tuple[int, ...]) -> list[Action]:
    """One group after the other through all `stages` of a rank."""
    actions, first = [], 0
    for size in sizes:
        actions += [Action(kind, stage, first + i) for stage in stages for i in range(size)]
        first += size
    return actions
