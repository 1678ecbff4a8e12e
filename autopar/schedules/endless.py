"""Schedules that never drain: the list of a step as a window of an endless stream.

Where `Schedule.flushes` is false, every rank repeats its list step after step without waiting for
the others. A backward that stands before its forward belongs to the step before: `0F0 0B1 0F1 0B0`
runs backward 1 of the step before between its two forwards. A run of n steps is the `opening`,
n - 1 times the list itself, and the `closing`; together they are a plain schedule of the
micro-batches of n steps (`unroll`).
"""

from __future__ import annotations

from dataclasses import replace

from autopar.schedules.action import Action, ActionKind, Schedule

_K = ActionKind
_PRODUCERS: tuple[tuple[ActionKind, tuple[ActionKind, ...]], ...] = (
    (_K.BACKWARD, (_K.FORWARD,)),
    (_K.BACKWARD_INPUT, (_K.FORWARD,)),
    (_K.BACKWARD_WEIGHT, (_K.BACKWARD_INPUT,)),
    (_K.SEND_FORWARD, (_K.FORWARD,)),
    (_K.SEND_BACKWARD, (_K.BACKWARD, _K.BACKWARD_INPUT)),
)
"""Kind to those, of the same stage and micro-batch, that come before it; earlier rows first."""


def opening(schedule: Schedule) -> Schedule:
    """What the first step runs: the list without what belongs to a step before."""
    return _part(schedule, of_step_before=False)


def closing(schedule: Schedule) -> Schedule:
    """What is left to run after the last step; nothing for a schedule that drains."""
    return _part(schedule, of_step_before=True)


def finite(schedule: Schedule, steps: int = 3) -> Schedule:
    """A schedule that drains as it is; any other unrolled.

    Three steps are one that fills the pipeline, one that finds and leaves it full, and one that
    empties it: whatever can happen between steps happens in them.
    """
    return schedule if schedule.flushes else unroll(schedule, steps)


def unroll(schedule: Schedule, steps: int) -> Schedule:
    """`steps` steps from the first action to the last, micro-batches counted through."""
    one = schedule.num_micro_batches
    rows = []
    for row in schedule.ranks:
        before = _of_step_before(row)
        lateness = [(action, int(action in before)) for action in row]
        numbered = (
            (action, action.micro_batch + (step - late) * one)
            for step in range(steps + 1)
            for action, late in lateness
        )
        rows.append(tuple(Action(a.kind, a.stage, i) for a, i in numbered if 0 <= i < steps * one))
    return replace(schedule, num_micro_batches=steps * one, ranks=tuple(rows), flushes=True)


def spans(schedule: Schedule, step: int) -> tuple[slice, ...]:
    """Per rank, where the list of a step after the first lies in `unroll`."""
    opened = opening(schedule)
    starts = (
        len(first) + (step - 1) * len(row)
        for first, row in zip(opened.ranks, schedule.ranks, strict=True)
    )
    return tuple(
        slice(start, start + len(row)) for start, row in zip(starts, schedule.ranks, strict=True)
    )


def _part(schedule: Schedule, *, of_step_before: bool) -> Schedule:
    rows = []
    for row in schedule.ranks:
        before = frozenset() if schedule.flushes else _of_step_before(row)
        rows.append(tuple(action for action in row if (action in before) is of_step_before))
    return replace(schedule, ranks=tuple(rows), flushes=True)


def _of_step_before(row: tuple[Action, ...]) -> frozenset[Action]:
    """Actions of a rank that belong to the step before the one in whose list they stand.

    What stands before its producer does, and whatever comes of that; so does a received gradient
    that is used there, unless it stands behind its use and so is received a step early.
    """
    position = {action: i for i, action in enumerate(row)}
    before: set[Action] = set()
    for kind, producers in _PRODUCERS:
        for action in row:
            if action.kind is kind:
                for producer in producers:
                    source = Action(producer, action.stage, action.micro_batch)
                    if source in before or position.get(source, -1) > position[action]:
                        before.add(action)
    for action in row:
        if action.kind is _K.RECV_BACKWARD:
            for kind in (_K.BACKWARD, _K.BACKWARD_INPUT):
                use = Action(kind, action.stage, action.micro_batch)
                if use in before and position[action] < position[use]:
                    before.add(action)
    return frozenset(before)
