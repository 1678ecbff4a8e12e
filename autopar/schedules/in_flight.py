"""How many micro-batches a stage holds at once: what its saved activations are multiplied by."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.schedules.action import ActionKind, Schedule
from autopar.schedules.endless import finite

_CHANGE = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1, ActionKind.BACKWARD_WEIGHT: -1}

_HOLDS = {
    ActionKind.FORWARD: (1, 0),
    ActionKind.BACKWARD: (-1, 0),
    ActionKind.BACKWARD_INPUT: (-1, 1),
    ActionKind.BACKWARD_WEIGHT: (0, -1),
}
"""By how many an action changes the forwards, and the weight parts, that data is held for."""


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


def held_at_peak(schedule: Schedule, saved_bytes: Sequence[float]) -> tuple[int, ...]:
    """Per stage, the micro-batches that it holds at the moment its rank holds the most bytes; a
    forward of stage s saves `saved_bytes[s]`, all of it up to the end of the backward."""
    at_peak = [0] * schedule.num_stages
    for row in finite(schedule).ranks:
        now: dict[int, int] = {}
        peak = -1.0
        for action in row:
            if action.kind not in _CHANGE:
                continue
            now[action.stage] = now.get(action.stage, 0) + _CHANGE[action.kind]
            held = sum(count * saved_bytes[stage] for stage, count in now.items())
            if held > peak:
                peak = held
                for stage, count in now.items():
                    at_peak[stage] = count
    return tuple(at_peak)


def peak_weighted(
    schedule: Schedule, saved_bytes: Sequence[int], deferred_bytes: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Per rank, the most bytes it holds at once; a forward of stage s saves `saved_bytes[s]`.

    A backward frees them; where it is split, its input part leaves `deferred_bytes[s]` for the
    weight part (by default all: what is saved is not known to be of no use to it).

    Less than the peaks of its stages together where a rank has several: they are not at their peaks
    at the same time.
    """
    left_bytes = saved_bytes if deferred_bytes is None else deferred_bytes
    peaks = []
    for row in finite(schedule).ranks:
        held = peak = 0
        for action in row:
            saved, left = _HOLDS.get(action.kind, (0, 0))
            held += saved * saved_bytes[action.stage] + left * left_bytes[action.stage]
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
