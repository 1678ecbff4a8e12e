"""What each action waits for, and running a schedule without times.

The rules, for stage s and micro-batch m (a neighbour stage only where there is one):

| action | waits for                                                  |
|--------|------------------------------------------------------------|
| `sFm`  | `(s-1)Fm`; `sRFm` where s-1 is on another rank             |
| `sBm`  | `sFm` and `(s+1)Bm`; `sRBm` where s+1 is on another rank   |
| `sIm`  | as `sBm`; it gives the same gradient to stage s-1          |
| `sWm`  | `sIm`                                                      |
| `sSFm` | `sFm`                                                      |
| `sRFm` | `(s-1)SFm`                                                 |
| `sSBm` | `sBm` or `sIm`                                             |
| `sRBm` | `(s+1)SBm`                                                 |

In a schedule without communication a value is there for other ranks once it is computed. With it,
sends are asynchronous (buffered: they never wait for the receiver) and receives block.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.schedules.action import Action, ActionKind, Schedule

_K = ActionKind
_EVENT: dict[ActionKind, int] = {
    _K.FORWARD: 0,
    _K.BACKWARD: 1,
    _K.BACKWARD_INPUT: 1,
    _K.BACKWARD_WEIGHT: 2,
    _K.SEND_FORWARD: 3,
    _K.RECV_FORWARD: 4,
    _K.SEND_BACKWARD: 5,
    _K.RECV_BACKWARD: 6,
}
"""The event that an action brings about; a full and an input backward bring the same one."""

_KIND = {event: kind for kind, event in reversed(_EVENT.items())}


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocked:
    """Where a rank stands still for ever: action `position` waits for `missing`."""

    rank: int
    position: int
    missing: Action


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """An untimed run. `clocks` holds, per rank, the clock of each action that ran.

    Every action takes one clock and starts as soon as the rank and what it waits for allow.
    """

    clocks: tuple[tuple[int, ...], ...]
    blocked: tuple[Blocked, ...]

    @property
    def num_clocks(self) -> int:
        """Clocks until the last action has run."""
        return 1 + max((row[-1] for row in self.clocks if row), default=-1)


class _Dependencies:
    """Events as integers, so that a run is list look-ups."""

    def __init__(self, schedule: Schedule) -> None:
        owner = schedule.stage_rank
        self.micro_batches = schedule.num_micro_batches
        self.per_event = schedule.num_stages * schedule.num_micro_batches
        self.num_events = (max(_EVENT.values()) + 1) * self.per_event
        explicit = schedule.has_communication
        self.waits = {
            (kind, stage): tuple(
                event * self.per_event + other * self.micro_batches
                for event, other in _waits_for(kind, stage, owner, explicit)
                if 0 <= other < schedule.num_stages
            )
            for kind in ActionKind
            for stage in range(schedule.num_stages)
        }

    def brings(self, action: Action) -> int:
        """The event an action brings about."""
        first = _EVENT[action.kind] * self.per_event
        return first + action.stage * self.micro_batches + action.micro_batch

    def action(self, event: int) -> Action:
        """The action that brings `event` about (the full backward for a gradient)."""
        kind, index = divmod(event, self.per_event)
        return Action(_KIND[kind], *divmod(index, self.micro_batches))


def _waits_for(
    kind: ActionKind, stage: int, owner: tuple[int, ...], explicit: bool
) -> tuple[tuple[int, int], ...]:
    """`(event, stage)` pairs of the table above; stages beyond the ends are dropped later."""

    def incoming(neighbour: int, computed: ActionKind, received: ActionKind) -> tuple[int, int]:
        inside = 0 <= neighbour < len(owner)
        if explicit and inside and owner[neighbour] != owner[stage]:
            return _EVENT[received], stage
        return _EVENT[computed], neighbour

    forward = (_EVENT[_K.FORWARD], stage)
    gradient = (_EVENT[_K.BACKWARD], stage)
    backward = (forward, incoming(stage + 1, _K.BACKWARD, _K.RECV_BACKWARD))
    table: dict[ActionKind, tuple[tuple[int, int], ...]] = {
        _K.FORWARD: (incoming(stage - 1, _K.FORWARD, _K.RECV_FORWARD),),
        _K.BACKWARD: backward,
        _K.BACKWARD_INPUT: backward,
        _K.BACKWARD_WEIGHT: (gradient,),
        _K.SEND_FORWARD: (forward,),
        _K.RECV_FORWARD: ((_EVENT[_K.SEND_FORWARD], stage - 1),),
        _K.SEND_BACKWARD: (gradient,),
        _K.RECV_BACKWARD: ((_EVENT[_K.SEND_BACKWARD], stage + 1),),
    }
    return table[kind]


def execute(schedule: Schedule) -> Execution:
    """Run every rank as far as it comes.

    Stages and micro-batches must be in range. Raises InputError where a stage has no single rank.
    """
    dependencies = _Dependencies(schedule)
    waits = dependencies.waits
    happened = [-1] * dependencies.num_events
    clocks: list[list[int]] = [[] for _ in schedule.ranks]
    waiting: dict[int, list[int]] = {}
    runnable = list(range(schedule.num_ranks))
    while runnable:
        rank = runnable.pop()
        actions, row = schedule.ranks[rank], clocks[rank]
        clock = row[-1] + 1 if row else 0
        while len(row) < len(actions):
            action = actions[len(row)]
            needed = [first + action.micro_batch for first in waits[action.kind, action.stage]]
            missing = next((event for event in needed if happened[event] < 0), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            clock = max([clock, *(happened[event] + 1 for event in needed)])
            row.append(clock)
            event = dependencies.brings(action)
            happened[event] = clock
            runnable.extend(waiting.pop(event, ()))
            clock += 1
    blocked = [
        Blocked(rank=rank, position=len(clocks[rank]), missing=dependencies.action(event))
        for event, ranks in waiting.items()
        for rank in ranks
    ]
    return Execution(
        clocks=tuple(map(tuple, clocks)),
        blocked=tuple(sorted(blocked, key=lambda block: block.rank)),
    )
