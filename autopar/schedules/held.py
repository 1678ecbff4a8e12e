"""What a rank holds over a step: its action list walked with what each action makes and frees."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from autopar.schedules.action import MATCHING_RECV, SENT_AS, Action, ActionKind
from autopar.schedules.arrivals import Arrivals

_K = ActionKind


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """What one stage holds on one rank, in bytes.

    `static_bytes` from step to step: weights, master weights, optimizer state; `gradient_bytes`
    from the first backward to the end of the step. A forward leaves `saved_bytes` and holds
    `forward_bytes` at its peak. A backward begins with what was saved and holds `backward_bytes` at
    its peak, the first one `first_backward_bytes` with the gradients that it makes, the last of
    several `last_backward_bytes`, less the gradients that it reduces as it goes; its input part,
    where it is split, leaves `deferred_bytes`, and the weight part holds `weight_bytes`, the first
    one `first_weight_bytes` with the gradients that it makes. `update_bytes` are the most that
    summing gradients and stepping the optimizer hold besides weights, state and gradients.
    `receive_bytes` and `send_bytes` are those of a message from the stage before, or of its
    gradient back, and of one to the next.
    """

    static_bytes: float
    gradient_bytes: float = 0.0
    saved_bytes: float = 0.0
    deferred_bytes: float = 0.0
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    first_backward_bytes: float = 0.0
    last_backward_bytes: float = 0.0
    weight_bytes: float = 0.0
    first_weight_bytes: float = 0.0
    update_bytes: float = 0.0
    receive_bytes: float = 0.0
    send_bytes: float = 0.0

    def message_bytes(self, action: Action) -> float:
        """The buffer of a message."""
        before = action.kind in (_K.RECV_FORWARD, _K.SEND_BACKWARD)
        return self.receive_bytes if before else self.send_bytes

    @staticmethod
    def alike(
        static_bytes: float,
        saved_bytes: float = 0.0,
        deferred_bytes: float = 0.0,
        working_bytes: float = 0.0,
    ) -> StageMemory:
        """A stage of which every action holds `working_bytes` beside what is saved."""
        running = saved_bytes + working_bytes
        return StageMemory(
            static_bytes=static_bytes,
            saved_bytes=saved_bytes,
            deferred_bytes=deferred_bytes,
            forward_bytes=running,
            backward_bytes=running,
            first_backward_bytes=running,
            last_backward_bytes=running,
            weight_bytes=deferred_bytes + working_bytes,
            first_weight_bytes=deferred_bytes + working_bytes,
        )


class Held(NamedTuple):
    """An action, the most its rank holds while it runs, and what is left after it, in bytes."""

    action: Action
    peak_bytes: float
    after_bytes: float


def static_bytes(stages: Collection[StageMemory]) -> float:
    """What a rank that holds these stages holds between steps."""
    return sum(stage.static_bytes for stage in stages)


def memory_over(
    actions: Iterable[Action],
    stages: Mapping[int, StageMemory],
    arrived: Arrivals | None = None,
    *,
    saved_bytes: float = 0.0,
    gradients: bool = False,
) -> Iterator[Held]:
    """What a rank that holds `stages` holds while it runs the computing ones of its actions.

    `saved_bytes` are there from the start, and so may `gradients` be. The buffer of a receive lives
    until the action that needs it, that of a send until it is known to have `arrived`. What a stage
    leaves to a neighbour on the same rank is held like a receive.
    """
    actions, arrived = tuple(actions), arrived or {}
    buffers, waiting = dict[Action, float](), 0.0
    last = {a.stage: a for a in actions if a.kind is _K.BACKWARD}
    made = {k: stage.gradient_bytes if gradients else 0.0 for k, stage in stages.items()}
    held = static_bytes(stages.values()) + sum(made.values()) + saved_bytes
    for action in actions:
        kind, at, micro_batch = action
        stage = stages[at]
        if not kind.is_compute:
            buffers[action] = nbytes = stage.message_bytes(action)
            waiting += nbytes - sum(buffers.pop(send, 0.0) for send in arrived.get(action, ()))
            continue
        if kind in _NEEDS:
            waiting -= buffers.pop(Action(_NEEDS[kind], at, micro_batch), 0.0)
        begun = held + waiting
        first = not made[at]
        frees, left, own = _change(kind, stage, first=first)
        if not first and action == last.get(at):
            own = stage.last_backward_bytes
        held += left - frees
        if first and kind in _MAKES_GRADIENTS:
            held += stage.gradient_bytes
            made[at] = stage.gradient_bytes
        if kind in SENT_AS:
            receive, offset = MATCHING_RECV[SENT_AS[kind]]
            if (to := at + offset) in stages:
                passed = Action(receive, to, micro_batch)
                buffers[passed] = nbytes = stages[to].message_bytes(passed)
                waiting += nbytes
        yield Held(action, begun - frees + own, held + waiting)


def _change(kind: ActionKind, stage: StageMemory, *, first: bool) -> tuple[float, float, float]:
    """Bytes that an action finds and frees, those that it leaves, and the most it holds."""
    if kind is _K.FORWARD:
        return 0.0, stage.saved_bytes, stage.forward_bytes
    if kind is _K.BACKWARD:
        own = stage.first_backward_bytes if first else stage.backward_bytes
        return stage.saved_bytes, 0.0, own
    if kind is _K.BACKWARD_INPUT:
        return stage.saved_bytes, stage.deferred_bytes, stage.backward_bytes
    own = stage.first_weight_bytes if first else stage.weight_bytes
    return stage.deferred_bytes, 0.0, own


_NEEDS = {
    _K.FORWARD: _K.RECV_FORWARD,
    _K.BACKWARD: _K.RECV_BACKWARD,
    _K.BACKWARD_INPUT: _K.RECV_BACKWARD,
}
"""How an action would receive what it needs."""

_MAKES_GRADIENTS = frozenset((_K.BACKWARD, _K.BACKWARD_WEIGHT))


def update_bytes(stages: Collection[StageMemory]) -> float:
    """The most that a rank holds at the end of a step: all gradients, and what summing them and
    stepping takes."""
    gradients = sum(stage.gradient_bytes for stage in stages)
    return static_bytes(stages) + gradients + max(stage.update_bytes for stage in stages)


def peak_bytes(
    actions: Iterable[Action],
    stages: Mapping[int, StageMemory],
    arrived: Arrivals | None = None,
) -> float:
    """The most that a rank holds in a step."""
    running = max(held.peak_bytes for held in memory_over(actions, stages, arrived))
    return max(running, update_bytes(stages.values()))


__all__ = ["Held", "StageMemory", "memory_over", "peak_bytes", "static_bytes", "update_bytes"]
