"""Whether a schedule computes the step: everything once, in an order that never stands still."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.errors import InputError
from autopar.schedules.action import Action, ActionKind, Schedule, matching_recv
from autopar.schedules.endless import unroll
from autopar.schedules.grid import Clocks, render_grid
from autopar.schedules.order import Blocked, execute

_K = ActionKind
_SPLIT = (_K.BACKWARD_INPUT, _K.BACKWARD_WEIGHT)
_EXCLUDES: dict[ActionKind, tuple[ActionKind, ...]] = {
    _K.BACKWARD: _SPLIT,
    _K.BACKWARD_INPUT: (_K.BACKWARD,),
    _K.BACKWARD_WEIGHT: (_K.BACKWARD,),
}
"""A backward is either full or split."""

_Where = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """The first thing wrong. `position` is one past the end where an action is missing.

    `clocks` are those of the actions that could run, where it came to running them.
    """

    rank: int
    position: int
    reason: str
    clocks: Clocks


def validate(schedule: Schedule) -> None:
    """Raise InputError, with the place marked in the grid, unless the schedule is sound.

    Sound means: every stage on one rank; for every stage and micro-batch one forward and one
    backward (or one input and one weight part), each after what it needs; with communication
    spelled out, exactly one send and one receive for each value that crosses ranks, in the same
    order on both sides of each channel (a pair of ranks and a direction); and no rank ever waits
    for a value that cannot come. Sends are taken to be buffered, receives to block. A schedule that
    never drains is run for three steps.
    """
    for what, size in (
        ("stages", schedule.num_stages),
        ("micro-batches", schedule.num_micro_batches),
        ("ranks", schedule.num_ranks),
    ):
        if size < 1:
            raise InputError(f"schedule {schedule.name!r} has {size} {what}; expected at least one")
    fault = find_fault(schedule)
    if fault is not None:
        raise InputError(_explain(schedule, fault))
    if not schedule.flushes:
        validate(unroll(schedule, 3))


def find_fault(schedule: Schedule) -> Fault | None:
    """The first fault of a schedule of non-zero size, or None where it is sound.

    Of one that never drains, its list is looked at by itself, but not what runs between steps.
    """
    whole = (_placement, _repeats, _omissions)
    across = (_communication, _channel_order) if schedule.flushes else ()
    for check in (*whole, *across):
        for (rank, position), reason in check(schedule):
            unknown: Clocks = ((),) * schedule.num_ranks
            return Fault(rank=rank, position=position, reason=reason, clocks=unknown)
    if not schedule.flushes:
        return None
    execution = execute(schedule)
    if not execution.blocked:
        return None
    block, reason = _root_cause(schedule, execution.blocked)
    return Fault(rank=block.rank, position=block.position, reason=reason, clocks=execution.clocks)


def _explain(schedule: Schedule, fault: Fault) -> str:
    row = schedule.ranks[fault.rank]
    action = f"action {row[fault.position]}" if fault.position < len(row) else "end of its list"
    grid = render_grid(schedule, mark=(fault.rank, fault.position), clocks=fault.clocks)
    return (
        f"schedule {schedule.name!r} ({schedule.num_stages} stages, "
        f"{schedule.num_micro_batches} micro-batches) cannot run: rank {fault.rank}, position "
        f"{fault.position}, {action}: {fault.reason}\n{grid}\n"
        f"Correct the action list of rank {fault.rank}, or choose a built-in schedule."
    )


def _each(schedule: Schedule) -> Iterator[tuple[_Where, Action]]:
    for rank, row in enumerate(schedule.ranks):
        for position, action in enumerate(row):
            yield (rank, position), action


def _placement(schedule: Schedule) -> Iterator[tuple[_Where, str]]:
    """Stages and micro-batches are in range; a stage has one rank."""
    owners: dict[int, int] = {}
    for where, action in _each(schedule):
        if not 0 <= action.stage < schedule.num_stages:
            yield where, f"stages go from 0 to {schedule.num_stages - 1}"
        if not 0 <= action.micro_batch < schedule.num_micro_batches:
            yield where, f"micro-batches go from 0 to {schedule.num_micro_batches - 1}"
        if owners.setdefault(action.stage, where[0]) != where[0]:
            yield where, f"stage {action.stage} is already on rank {owners[action.stage]}"
    for stage in range(schedule.num_stages):
        if stage not in owners:
            yield (0, len(schedule.ranks[0])), f"stage {stage} is on no rank"


def _repeats(schedule: Schedule) -> Iterator[tuple[_Where, str]]:
    """Nothing is done twice, and a backward is either full or split."""
    seen: dict[Action, int] = {}
    for (rank, position), action in _each(schedule):
        first = seen.setdefault(action, position)
        if first != position:
            yield (rank, position), f"it already runs at position {first}"
        for kind in _EXCLUDES.get(action.kind, ()):
            other = Action(kind, action.stage, action.micro_batch)
            if other in seen:
                yield (rank, position), f"{other} already does its work at position {seen[other]}"


def _omissions(schedule: Schedule) -> Iterator[tuple[_Where, str]]:
    """Every stage runs every micro-batch forward and backward."""
    done = {action for _, action in _each(schedule)}
    for stage, rank in enumerate(schedule.stage_rank):
        end = (rank, len(schedule.ranks[rank]))
        for i in range(schedule.num_micro_batches):
            if Action(_K.FORWARD, stage, i) not in done:
                yield end, f"{Action(_K.FORWARD, stage, i)} is missing"
            split = [Action(kind, stage, i) for kind in _SPLIT]
            if Action(_K.BACKWARD, stage, i) in done or all(part in done for part in split):
                continue
            if any(part in done for part in split):
                lacking = next(part for part in split if part not in done)
                yield end, f"{lacking} is missing"
            yield end, f"{Action(_K.BACKWARD, stage, i)} is missing"


def _communication(schedule: Schedule) -> Iterator[tuple[_Where, str]]:
    """Where messages are spelled out, those that cross ranks are there and no others."""
    if not schedule.has_communication:
        return
    owner, needed = schedule.stage_rank, set(_messages(schedule))
    present: set[Action] = set()
    for where, action in _each(schedule):
        if not action.kind.is_compute:
            present.add(action)
            if action not in needed:
                yield where, "no value crosses ranks here; drop the message"
    for action in _messages(schedule):
        if action not in present:
            rank = owner[action.stage]
            yield (rank, len(schedule.ranks[rank])), f"{action} is missing"


def _messages(schedule: Schedule) -> Iterator[Action]:
    """Every send and receive that the schedule needs, send before its receive."""
    owner = schedule.stage_rank
    for stage in range(schedule.num_stages - 1):
        if owner[stage] == owner[stage + 1]:
            continue
        for i in range(schedule.num_micro_batches):
            for kind, sender in ((_K.SEND_FORWARD, stage), (_K.SEND_BACKWARD, stage + 1)):
                send = Action(kind, sender, i)
                yield send
                yield matching_recv(send)


def _channel_order(schedule: Schedule) -> Iterator[tuple[_Where, str]]:
    """Both sides of a channel list its messages in the same order."""
    owner = schedule.stage_rank
    sent: dict[tuple[int, int, ActionKind], list[Action]] = defaultdict(list)
    for (rank, _), action in _each(schedule):
        if action.kind.is_send:
            receive = matching_recv(action)
            sent[rank, owner[receive.stage], receive.kind].append(receive)
    arriving = {channel: iter(queue) for channel, queue in sent.items()}
    for (rank, position), action in _each(schedule):
        if action.kind.is_recv:
            offset = -1 if action.kind is _K.RECV_FORWARD else 1
            sender = owner[action.stage + offset]
            expected = next(arriving[sender, rank, action.kind])
            if expected != action:
                yield (rank, position), f"rank {sender} sends the value for {expected} first"


def _root_cause(schedule: Schedule, blocked: tuple[Blocked, ...]) -> tuple[Blocked, str]:
    """A rank in the wrong order by itself, if there is one; else one of a circle of ranks."""
    at = {action: where for where, action in _each(schedule)}

    def source(block: Blocked) -> _Where:
        split = Action(_K.BACKWARD_INPUT, block.missing.stage, block.missing.micro_batch)
        return at[block.missing] if block.missing in at else at[split]

    for block in blocked:
        rank, position = source(block)
        if rank == block.rank:
            needed = schedule.ranks[rank][position]
            return block, f"it needs {needed}, which stands later, at position {position}"
    block = blocked[0]
    rank, position = source(block)
    stop = next(other for other in blocked if other.rank == rank)
    waiting = schedule.ranks[rank][stop.position]
    return block, (
        f"it waits for {schedule.ranks[rank][position]}, which rank {rank} never reaches: it "
        f"stands still at position {stop.position}, {waiting}, waiting for {stop.missing}: deadlock"
    )
