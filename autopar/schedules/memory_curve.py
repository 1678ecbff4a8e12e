"""Bytes that a rank holds over a step, by the order and the times of its actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from autopar.schedules.action import Action, ActionKind, Schedule
from autopar.schedules.endless import finite

_K = ActionKind


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """Bytes per rank that a stage takes.

    `static_bytes` at all times; `saved_bytes` between the forward and the backward of every
    micro-batch; `deferred_bytes` between the parts of a backward, where the schedule splits it;
    `working_bytes` while an action of the stage runs.
    """

    static_bytes: float
    saved_bytes: float = 0.0
    deferred_bytes: float = 0.0
    working_bytes: float = 0.0


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


_HOLDS: dict[ActionKind, tuple[int, int, int, int]] = {
    _K.FORWARD: (1, 0, 0, 0),
    _K.BACKWARD: (0, 0, -1, 0),
    _K.BACKWARD_INPUT: (0, 0, -1, 1),
    _K.BACKWARD_WEIGHT: (0, 0, 0, -1),
}
"""Micro-batches saved and deferred that an action adds at its start, and at its end: a forward
fills what it saves while it runs, a backward frees it when it is done."""


def memory_curve(
    row: Sequence[Action],
    start_s: Sequence[float],
    end_s: Sequence[float],
    memory: Sequence[StageMemory],
    static_bytes: float,
) -> tuple[Point, ...]:
    """What the rank that runs `row` holds, from time 0; one point for every change.

    `memory` is of all stages of the schedule, `static_bytes` of those of this rank together.
    """
    held = static_bytes
    points = [Point(0.0, held)]
    for action, begin_s, done_s in zip(row, start_s, end_s, strict=True):
        if not action.kind.is_compute:
            continue
        stage = memory[action.stage]
        saved, deferred, freed, left = _HOLDS[action.kind]
        held += saved * stage.saved_bytes + deferred * stage.deferred_bytes
        points.append(Point(begin_s, held + stage.working_bytes))
        held += freed * stage.saved_bytes + left * stage.deferred_bytes
        points.append(Point(done_s, held))
    # at one time the last change holds, after one to more; a change to the same is none
    seen = [a for a, b in pairwise(points) if a.time_s < b.time_s or a.held_bytes > b.held_bytes]
    kept = [*seen, points[-1]]
    return (kept[0], *(b for a, b in pairwise(kept) if a.held_bytes != b.held_bytes))


def peak_moments(schedule: Schedule, memory: Sequence[StageMemory]) -> tuple[Moment, ...]:
    """Per rank the action during which it holds the most; the order decides, not the times."""
    moments = []
    for row in finite(schedule).ranks:
        saved, deferred = [0] * len(memory), [0] * len(memory)
        held, peak, found = 0.0, -1.0, Moment(0, (), ())
        for action in row:
            if not action.kind.is_compute:
                continue
            at, stage = action.stage, memory[action.stage]
            more, due, freed, left = _HOLDS[action.kind]
            saved[at] += more
            deferred[at] += due
            held += more * stage.saved_bytes + due * stage.deferred_bytes
            if held + stage.working_bytes > peak:
                peak = held + stage.working_bytes
                found = Moment(at, tuple(saved), tuple(deferred))
            saved[at] += freed
            deferred[at] += left
            held += freed * stage.saved_bytes + left * stage.deferred_bytes
        moments.append(found)
    return tuple(moments)
