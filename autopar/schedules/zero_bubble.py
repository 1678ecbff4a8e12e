"""Schedules that split the backward to fill the bubble (Qi et al., 2023, arXiv:2401.10241).

Only the input part of a backward is waited for by another rank; weight parts run where a rank would
idle. ZB-H1 keeps the memory of 1F1B: rank i lets its first i weight parts wait, so that every rank
holds as many micro-batches as the first. The bubble is (p - 1)(T_F + T_I - T_W), against
(p - 1)(T_F + T_I + T_W) of 1F1B (see `equal_stages`).
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.schedules.action import Action, ActionKind, Schedule
from autopar.schedules.interleaved import group_sizes, in_groups

_K = ActionKind


def zb_h1(num_ranks: int, chunks: int, num_micro_batches: int) -> Schedule:
    """One stage per rank."""
    return _zero_bubble("zb-h1", num_ranks, chunks, num_micro_batches)


def interleaved_zb(num_ranks: int, chunks: int, num_micro_batches: int) -> Schedule:
    """The same over several stages per rank, in the groups of interleaved 1F1B."""
    return _zero_bubble("interleaved-zb", num_ranks, chunks, num_micro_batches)


def _zero_bubble(name: str, num_ranks: int, chunks: int, num_micro_batches: int) -> Schedule:
    sizes = group_sizes(num_ranks, num_micro_batches)
    rows = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * chunks, num_ranks)
        rows.append(
            _row(
                in_groups(_K.FORWARD, stages, sizes),
                in_groups(_K.BACKWARD_INPUT, stages[::-1], sizes),
                in_groups(_K.BACKWARD_WEIGHT, stages[::-1], sizes),
                warmup=num_ranks - 1 - rank + (chunks - 1) * sizes[0],
                delay=rank,
            )
        )
    return Schedule(
        name=name,
        num_stages=num_ranks * chunks,
        num_micro_batches=num_micro_batches,
        ranks=tuple(rows),
    )


def _row(
    forwards: Sequence[Action],
    inputs: Sequence[Action],
    weights: Sequence[Action],
    warmup: int,
    delay: int,
) -> tuple[Action, ...]:
    """`warmup` forwards, then forward, input, weight in turn, weights `delay` behind inputs."""
    row = list(forwards[:warmup])
    for i, backward in enumerate(inputs):
        row += [*forwards[warmup + i : warmup + i + 1], backward]
        row += weights[i - delay : i - delay + 1] if i >= delay else []
    return (*row, *weights[max(0, len(inputs) - delay) :])
