"""Which messages are known to have arrived, from what comes back.

A send leaves a buffer behind that must live until the message has arrived, and not every backend
tells when that is. The peer tells by what it sends next: an action list has its order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from autopar.schedules.action import Action, ActionKind, Schedule, matching_recv
from autopar.schedules.lower import insert_communication

_K = ActionKind

Arrivals = Mapping[Action, tuple[Action, ...]]
"""By a receive of a rank: its sends that have arrived once the receive is done. The others are only
known to at the end of the step."""

_TAKES: dict[ActionKind, tuple[ActionKind, int]] = {
    _K.FORWARD: (_K.SEND_FORWARD, -1),
    _K.BACKWARD: (_K.SEND_BACKWARD, 1),
    _K.BACKWARD_INPUT: (_K.SEND_BACKWARD, 1),
}
"""What an action waits for: the kind of the send, and the stage that it is of from this one."""


def arrivals(schedule: Schedule) -> tuple[Arrivals, ...]:
    """By rank, for a valid schedule that flushes; see `Arrivals`."""
    schedule = insert_communication(schedule)
    owners = schedule.stage_rank
    found: list[dict[Action, tuple[Action, ...]]] = [{} for _ in schedule.ranks]
    for rank, row in enumerate(schedule.ranks):
        taken: dict[int, list[Action]] = defaultdict(list)
        for action in row:
            if action.kind in _TAKES:
                kind, offset = _TAKES[action.kind]
                source = action.stage + offset
                if 0 <= source < len(owners) and owners[source] != rank:
                    taken[owners[source]].append(Action(kind, source, action.micro_batch))
            elif action.kind.is_send:
                receive = matching_recv(action)
                peer = owners[receive.stage]
                found[peer][receive] = tuple(taken.pop(peer, ()))
    return tuple(found)


def most_under_way(lowered: Schedule, known: Sequence[Arrivals]) -> tuple[int, ...]:
    """By rank, the most messages that it has buffers for at once: one that it takes, and those that
    it sent and does not know to have arrived."""
    found = []
    for row, arrived in zip(lowered.ranks, known, strict=True):
        under_way = most = 0
        for action in row:
            under_way += action.kind.is_send
            under_way -= len(arrived.get(action, ()))
            most = max(most, under_way)
        found.append(most + any(not action.kind.is_compute for action in row))
    return tuple(found)
