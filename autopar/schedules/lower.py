"""Messages between ranks, written into the action lists.

A channel is an ordered pair of ranks and a direction (forward values or backward gradients).
Sends are asynchronous: they leave a buffer behind and never wait for the receiver. Receives block,
and take the messages of their channel in the order they were sent. Under these rules lowering adds
no deadlock: a receive only ever waits for a message sent before one that is needed right then.
"""

from __future__ import annotations

from collections import defaultdict, deque

from autopar.errors import InputError
from autopar.schedules.action import (
    MATCHING_RECV,
    Action,
    ActionKind,
    Schedule,
    matching_recv,
)

_K = ActionKind
_SEND = {
    _K.FORWARD: _K.SEND_FORWARD,
    _K.BACKWARD: _K.SEND_BACKWARD,
    _K.BACKWARD_INPUT: _K.SEND_BACKWARD,
}
"""The send that a value is made for."""

_RECV = {
    _K.FORWARD: (_K.RECV_FORWARD, -1),
    _K.BACKWARD: (_K.RECV_BACKWARD, 1),
    _K.BACKWARD_INPUT: (_K.RECV_BACKWARD, 1),
}
"""The receive that a value is needed from, and the offset to the stage that sends."""

_Queues = dict[tuple[int, int, ActionKind], deque[Action]]


def insert_communication(schedule: Schedule) -> Schedule:
    """The same computation with its sends and receives spelled out.

    A send stands right after the action that makes the value, a receive right before the one that
    needs it (after the receives of messages that its channel carries earlier, where a rank uses
    them in another order than they are sent). An executor may post a receive earlier than it
    stands, as long as the order within its channel is kept. Stages on one rank exchange no
    messages. A schedule that already has communication is returned as it is. Takes a valid
    schedule; raises InputError where a needed value is never made.
    """
    if schedule.has_communication:
        return schedule
    owner = schedule.stage_rank
    queues = _sent(schedule, owner)
    return Schedule(
        name=schedule.name,
        num_stages=schedule.num_stages,
        num_micro_batches=schedule.num_micro_batches,
        ranks=tuple(_lower(schedule, rank, owner, queues) for rank in range(schedule.num_ranks)),
    )


def _send_after(action: Action, owner: tuple[int, ...]) -> Action | None:
    """The send that the result of an action needs, if another rank wants it."""
    if action.kind not in _SEND:
        return None
    send = _SEND[action.kind]
    to = action.stage + MATCHING_RECV[send][1]
    if not 0 <= to < len(owner) or owner[to] == owner[action.stage]:
        return None
    return Action(send, action.stage, action.micro_batch)


def _recv_before(action: Action, owner: tuple[int, ...]) -> tuple[Action, int] | None:
    """The receive that an action needs and the rank it comes from, if that is another one."""
    if action.kind not in _RECV:
        return None
    receive, offset = _RECV[action.kind]
    source = action.stage + offset
    if not 0 <= source < len(owner) or owner[source] == owner[action.stage]:
        return None
    return Action(receive, action.stage, action.micro_batch), owner[source]


def _sent(schedule: Schedule, owner: tuple[int, ...]) -> _Queues:
    """Per channel, the receives that match its sends, in the order of the sends."""
    queues: _Queues = defaultdict(deque)
    for rank, row in enumerate(schedule.ranks):
        for action in row:
            if send := _send_after(action, owner):
                receive = matching_recv(send)
                queues[rank, owner[receive.stage], receive.kind].append(receive)
    return queues


def _lower(
    schedule: Schedule, rank: int, owner: tuple[int, ...], queues: _Queues
) -> tuple[Action, ...]:
    row: list[Action] = []
    early: set[Action] = set()
    for action in schedule.ranks[rank]:
        if need := _recv_before(action, owner):
            receive, source = need
            row.extend(_receives(receive, queues[source, rank, receive.kind], early))
        row.append(action)
        if send := _send_after(action, owner):
            row.append(send)
    return tuple(row)


def _receives(needed: Action, queue: deque[Action], early: set[Action]) -> list[Action]:
    """Receives up to the needed one; those that come before it are noted in `early`."""
    taken: list[Action] = []
    if needed in early:
        return taken
    while queue:
        taken.append(queue.popleft())
        if taken[-1] == needed:
            return taken
        early.add(taken[-1])
    raise InputError(f"no rank makes the value that {needed} takes; validate the schedule first")
