"""How many micro-batches a stage holds at once: what its saved activations are multiplied by."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.schedules.action import ActionKind, Schedule
from autopar.schedules.endless import finite

_CHANGE = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1, ActionKind.BACKWARD_WEIGHT: -1}


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Per stage, the most micro-batches whose forward ran and whose backward has not finished.

    A split backward finishes with its weight part, which still needs the saved activations. The
    order on a stage's own rank decides it, so no times are needed.
    """
    held = [0] * schedule.num_stages
    peak = [0] * schedule.num_stages
    for row in finite(schedule).ranks:
        for action in row:
            held[action.stage] += _CHANGE.get(action.kind, 0)
            peak[action.stage] = max(peak[action.stage], held[action.stage])
    return tuple(peak)


def peak_weighted(schedule: Schedule, saved_bytes: Sequence[int]) -> tuple[int, ...]:
    """Per rank, the most bytes it holds at once; a forward of stage s saves `saved_bytes[s]`.

    Less than the peaks of its stages together where a rank has several: they are not at their peaks
    at the same time.
    """
    peaks = []
    for row in finite(schedule).ranks:
        held = peak = 0
        for action in row:
            held += _CHANGE.get(action.kind, 0) * saved_bytes[action.stage]
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)


def weight_versions(schedule: Schedule) -> tuple[int, ...]:
    """Per stage, how many versions of its weights there are at once.

    One where all micro-batches of a step see the same weights. In a stream that never drains every
    micro-batch in flight keeps those of its forward for its backward (weight stashing, Narayanan et
    al., 2019, section 3.3): num_ranks - i on stage i of PipeDream.
    """
    return (1,) * schedule.num_stages if schedule.flushes else peak_in_flight(schedule)
