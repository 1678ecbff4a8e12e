"""How many micro-batches a stage holds at once: what its saved activations are multiplied by."""

from __future__ import annotations

from autopar.schedules.action import ActionKind, Schedule

_CHANGE = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1, ActionKind.BACKWARD_WEIGHT: -1}


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Per stage, the most micro-batches whose forward ran and whose backward has not finished.

    A split backward finishes with its weight part, which still needs the saved activations. The
    order on a stage's own rank decides it, so no times are needed.
    """
    held = [0] * schedule.num_stages
    peak = [0] * schedule.num_stages
    for row in schedule.ranks:
        for action in row:
            held[action.stage] += _CHANGE.get(action.kind, 0)
            peak[action.stage] = max(peak[action.stage], held[action.stage])
    return tuple(peak)
