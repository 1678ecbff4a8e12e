"""Messages between ranks, written into the action lists.

A channel is an ordered pair of ranks and a direction (forward values or backward gradients).
Sends are asynchronous: they leave a buffer behind and never wait for the receiver. Receives block,
and take the messages of their channel in the order they were sent. Under these rules lowering adds
no deadlock: a receive only ever waits for a message sent before one that is needed right then.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar.errors import InputError
from autopar.schedules.action import MATCHING_RECV, SENT_AS, Action, ActionKind, Schedule
from autopar.schedules.endless import spans, unroll

_Channel = tuple[int, int, ActionKind]
"""Sending rank, receiving rank, kind of the receive."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Links:
    """What crosses ranks, by kind and stage of the action that makes or needs it."""

    sends: dict[tuple[ActionKind, int], tuple[ActionKind, _Channel]]
    receives: dict[tuple[ActionKind, int], _Channel]


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
    if not schedule.flushes:
        return _lower_endless(schedule)
    links = _links(schedule.stage_rank)
    queues = _sent(schedule, links)
    return replace(schedule, ranks=tuple(_lower(row, links, queues) for row in schedule.ranks))


def _lower_endless(schedule: Schedule) -> Schedule:
    """The messages of a step in the middle of a run, where both ends of every channel are full."""
    step, one = 2, schedule.num_micro_batches
    run = insert_communication(unroll(schedule, step + 2))
    rows = []
    for row, span in zip(run.ranks, spans(schedule, step), strict=True):
        kept, computed = [], 0
        for action in row:
            computed += action.kind.is_compute
            at = computed if action.kind.is_recv else computed - 1
            if span.start <= at < span.stop:
                kept.append(Action(action.kind, action.stage, action.micro_batch % one))
        rows.append(tuple(kept))
    return replace(schedule, ranks=tuple(rows))


def _links(owner: tuple[int, ...]) -> _Links:
    links = _Links(sends={}, receives={})
    for kind, send in SENT_AS.items():
        receive, offset = MATCHING_RECV[send]
        for stage, rank in enumerate(owner):
            to = stage + offset
            if not 0 <= to < len(owner) or owner[to] == rank:
                continue
            channel = (rank, owner[to], receive)
            links.sends[kind, stage] = (send, channel)
            links.receives[kind, to] = channel
    return links


def _sent(schedule: Schedule, links: _Links) -> dict[_Channel, deque[Action]]:
    """Per channel, the receives that match its sends, in the order of the sends."""
    queues: dict[_Channel, deque[Action]] = defaultdict(deque)
    for row in schedule.ranks:
        for kind, stage, micro_batch in row:
            if link := links.sends.get((kind, stage)):
                send, channel = link
                to = stage + MATCHING_RECV[send][1]
                queues[channel].append(Action(channel[2], to, micro_batch))
    return queues


def _lower(
    actions: tuple[Action, ...], links: _Links, queues: dict[_Channel, deque[Action]]
) -> tuple[Action, ...]:
    row: list[Action] = []
    received: set[Action] = set()
    for action in actions:
        kind, stage, micro_batch = action
        channel = links.receives.get((kind, stage))
        if channel is not None:
            needed = Action(channel[2], stage, micro_batch)
            if needed not in received:
                taken = list(_up_to(needed, queues[channel], action))
                received.update(taken)
                row += taken
        row.append(action)
        if link := links.sends.get((kind, stage)):
            row.append(Action(link[0], stage, micro_batch))
    return tuple(row)


def _up_to(needed: Action, queue: deque[Action], action: Action) -> Iterator[Action]:
    """Take receives from a channel until the one that is `needed` for an action, and that one."""
    while queue:
        receive = queue.popleft()
        yield receive
        if receive == needed:
            return
    raise InputError(f"no rank makes the value that {action} needs; validate the schedule first")
