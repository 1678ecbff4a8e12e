"""Schedules over two stages per rank, placed there and back: ZB-V and DualPipeV.

A rank's list is a sequence of phases, each a short pattern repeated some number of times. A token
of a pattern is a kind and which of the rank's stages: `F0` is the next forward of the first one,
`W` the weight part that has waited longest. Both want a number of micro-batches that fills the
pipeline; with fewer, those that there are run in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from autopar.schedules.action import Action, ActionKind, Schedule

_Phases = Iterable[tuple[int, str]]
_BACKWARD = {ActionKind.BACKWARD_INPUT: ActionKind.BACKWARD}
"""Full backwards and input parts count through the same micro-batches."""


def zbv(num_ranks: int, chunks: int, num_micro_batches: int) -> Schedule:
    """ZB-V (Qi et al., 2024, arXiv:2405.15362, section 4): no bubble where T_F = T_I = T_W.

    No rank idles between its first and last action from 2 p - 1 micro-batches on, with p
    micro-batches' worth of activations on every rank, as 1F1B has on the first.
    """
    p, enough = num_ranks, max(num_micro_batches, 2 * num_ranks - 1)

    def phases(rank: int) -> _Phases:
        left = p - rank
        return (
            (2 * left - 1, "F0"),
            (rank, "F1 F0"),
            (left, "F1 I1 W1"),
            (enough - 2 * p + rank + 1, "F0 I0 W0 F1 I1 W1"),
            (left - 1, "I0 W0 F1 I1 W1"),
            (rank, "I0 I1"),
            (left, "I0 W0"),
            (rank, "W1"),
            (rank, "W0"),
        )

    return _schedule(
        "zbv", num_ranks, num_micro_batches, [_row(phases(r), r, 2 * p) for r in range(p)]
    )


def dualpipev(num_ranks: int, chunks: int, num_micro_batches: int) -> Schedule:
    """DualPipe cut in half (DeepSeek-AI, 2024, arXiv:2412.19437, section 3.2.1).

    Forwards of one stage run beside full backwards of the other, so that the messages of one hide
    behind the other's work; backwards are split only while the pipeline fills and drains. It is
    full from 2 p micro-batches on.
    """
    p, enough = num_ranks, max(num_micro_batches, 2 * num_ranks)

    def phases(rank: int) -> _Phases:
        left = p - rank - 1
        drain = "B1 B0 " * (rank + 1)
        half = len(drain) // 2
        return (
            (2 * left, "F0"),
            (rank + 1, "F0 F1"),
            (left, "I1 W F1"),
            (enough - 2 * p + rank + 1, "F0 B1 F1 B0"),
            (left, "B1 F1 B0"),
            (1, drain[:half] + drain[half:].replace("B", "I")),
            (left, "W I0"),
            (rank + 1, "W"),
        )

    return _schedule(
        "dualpipev", num_ranks, num_micro_batches, [_row(phases(r), r, 2 * p) for r in range(p)]
    )


def _row(phases: _Phases, rank: int, num_stages: int) -> list[Action]:
    stages = (rank, num_stages - 1 - rank)
    row: list[Action] = []
    done: dict[tuple[ActionKind, int], int] = {}
    waiting: deque[Action] = deque()
    for count, pattern in phases:
        tokens = [(ActionKind(t[0]), stages[int(t[1])] if t[1:] else -1) for t in pattern.split()]
        for kind, stage in tokens * count:
            if stage < 0:
                row.append(waiting.popleft())
                continue
            counted = (_BACKWARD.get(kind, kind), stage)
            micro_batch = done.get(counted, 0)
            done[counted] = micro_batch + 1
            row.append(Action(kind, stage, micro_batch))
            if kind is ActionKind.BACKWARD_INPUT:
                waiting.append(Action(ActionKind.BACKWARD_WEIGHT, stage, micro_batch))
    return row


def _schedule(
    name: str, num_ranks: int, num_micro_batches: int, rows: Iterable[list[Action]]
) -> Schedule:
    """The rows without the micro-batches that are there only to fill the pattern."""
    return Schedule(
        name=name,
        num_stages=2 * num_ranks,
        num_micro_batches=num_micro_batches,
        ranks=tuple(
            tuple(action for action in row if action.micro_batch < num_micro_batches)
            for row in rows
        ),
    )
