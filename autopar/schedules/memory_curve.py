"""Bytes that a rank holds over a step, by the order and the times of its actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from autopar.schedules.action import Action, ActionKind, Schedule
from autopar.schedules.arrivals import Arrivals
from autopar.schedules.endless import finite
from autopar.schedules.held import StageMemory, memory_over, static_bytes

_K = ActionKind


NOTHING = StageMemory(static_bytes=0.0)


class Point(NamedTuple):
    """From `time_s` on a rank holds `held_bytes`."""

    time_s: float
    held_bytes: float


class Moment(NamedTuple):
    """The action of a rank during which it holds the most: the stage that runs, and how many
    micro-batches each stage holds, whole and with their weight gradients left."""

    stage: int
    saved: tuple[int, ...]
    deferred: tuple[int, ...]


def memory_curve(
    row: Sequence[Action],
    start_s: Sequence[float],
    end_s: Sequence[float],
    stages: Mapping[int, StageMemory],
    arrived: Arrivals | None = None,
    *,
    saved_bytes: float = 0.0,
    gradients: bool = False,
) -> tuple[Point, ...]:
    """What the rank that runs `row` holds, from time 0; one point for every change.

    `stages` are those of this rank, for the rest see `schedules.held.memory_over`.
    """
    made = sum(stage.gradient_bytes for stage in stages.values()) * gradients
    points = [Point(0.0, static_bytes(stages.values()) + made + saved_bytes)]
    spans = [span for a, *span in zip(row, start_s, end_s, strict=True) if a.kind.is_compute]
    walk = memory_over(row, stages, arrived, saved_bytes=saved_bytes, gradients=gradients)
    for (begin_s, done_s), held in zip(spans, walk, strict=True):
        points += [Point(begin_s, held.peak_bytes), Point(done_s, held.after_bytes)]
    return changes(points)


def changes(points: Sequence[Point]) -> tuple[Point, ...]:
    """The points at which something changes: at one time the last of them holds, after one to
    more; a change to the same is none."""
    seen = [a for a, b in pairwise(points) if a.time_s < b.time_s or a.held_bytes > b.held_bytes]
    kept = [*seen, points[-1]]
    return (kept[0], *(b for a, b in pairwise(kept) if a.held_bytes != b.held_bytes))


_COUNTS: dict[ActionKind, tuple[int, int, int, int]] = {
    _K.FORWARD: (1, 0, 0, 0),
    _K.BACKWARD: (0, 0, -1, 0),
    _K.BACKWARD_INPUT: (0, 0, -1, 1),
    _K.BACKWARD_WEIGHT: (0, 0, 0, -1),
}
"""Micro-batches saved and deferred that an action adds at its start, and at its end."""


def peak_moments(schedule: Schedule, memory: Sequence[StageMemory]) -> tuple[Moment, ...]:
    """Per rank the action during which it holds the most; the order decides, not the times."""
    moments = []
    for row in finite(schedule).ranks:
        saved, deferred = [0] * len(memory), [0] * len(memory)
        peak, found = -1.0, Moment(0, (), ())
        own = {action.stage: memory[action.stage] for action in row}
        for action, held, _ in memory_over(row, own, gradients=not schedule.flushes):
            at = action.stage
            more, due, freed, left = _COUNTS[action.kind]
            saved[at] += more
            deferred[at] += due
            if held > peak:
                peak, found = held, Moment(at, tuple(saved), tuple(deferred))
            saved[at] += freed
            deferred[at] += left
        moments.append(found)
    return tuple(moments)
