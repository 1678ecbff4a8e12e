"""The time an action list takes, by running it.

Each rank has a compute stream, which goes through the rank's list in order, and a communication
stream, which carries its sends one after the other. With overlap a send starts once the action
before it is done and the stream is free, and costs the compute stream nothing; a receive makes the
compute stream wait until the message is there. Without overlap both sides give their compute
stream to a message: the sender while it sends, the receiver for as long, from the moment it takes
the message and not before it is being sent. Sends never wait for the receiver (they are buffered).

Collectives that run beside an action's compute on the links that messages take (weights gathered
ahead, gradients summed) are served first come first served with the sends. NCCL gives the kernels
of several communicators no order; but however two transfers share a link, it is busy for as long as
both take together, and the one that ends last ends then. First come first served is the simplest of
these, and deterministic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import gcd

from autopar.errors import InputError
from autopar.schedules.action import Action, ActionKind, Schedule
from autopar.schedules.endless import spans, unroll
from autopar.schedules.lower import insert_communication
from autopar.schedules.timeline import StageTimes, Timeline

_K = ActionKind
_Costs = dict[ActionKind, tuple[float, ...]]
_LEAST, _PER_STAGE, _MULTIPLE = 64, 4, 12
"""Micro-batches for which a pipeline without a flush settles, and again for which it is timed."""


def simulate(
    schedule: Schedule,
    times: StageTimes,
    overlap: bool = True,
    begin_s: Sequence[float] = (),
) -> Timeline:
    """Run a valid schedule on the given times.

    `begin_s` is when each rank is ready, by default at once. Communication is inserted where the
    schedule has none (to simulate one schedule often, insert it once beforehand). Of a schedule
    that never drains this is one step of the steady state, whenever ranks began. Raises InputError
    where times do not fit the schedule, or where it stands still (`validate` tells why).
    """
    lowered = insert_communication(schedule)
    if not schedule.flushes:
        return _steady(lowered, times, overlap)
    begin_s = tuple(begin_s) or (0.0,) * lowered.num_ranks
    run = _Run(lowered, times, overlap, begin_s)
    start_s, end_s = run.spans()
    return Timeline(
        schedule=lowered,
        start_s=tuple(map(tuple, start_s)),
        end_s=tuple(map(tuple, end_s)),
        busy_s=tuple(_busy_s(row, run.costs, times) for row in lowered.ranks),
        finish_s=tuple(max(row, default=begin) for row, begin in zip(end_s, begin_s, strict=True)),
    )


def _steady(lowered: Schedule, times: StageTimes, overlap: bool) -> Timeline:
    """A late step of a long run; a rank finishes once it could begin the next step.

    The time between steps is the mean over the second half of the run. With messages it alternates
    over as many micro-batches as there are stages in the slowest round trip (see `closed_form`), so
    that the mean is exact where their number divides 12, and else off by less than one in 64.
    """
    one = lowered.num_micro_batches
    wanted = max(_LEAST, _PER_STAGE * lowered.num_stages)
    in_turn = _MULTIPLE // gcd(_MULTIPLE, one)
    count = in_turn * -(-wanted // (in_turn * one))
    run = simulate(unroll(lowered, 2 * count + 1), times, overlap)
    half, last = spans(lowered, count), spans(lowered, 2 * count)
    period_s = max(
        (start_s[b.start] - start_s[a.start]) / count
        for start_s, a, b in zip(run.start_s, half, last, strict=True)
    )
    start_s, end_s = (
        [row[span] for row, span in zip(rows, last, strict=True)]
        for rows in (run.start_s, run.end_s)
    )
    zero_s = min(map(min, start_s))
    costs = _costs(lowered, times)
    return Timeline(
        schedule=lowered,
        start_s=tuple(tuple(s - zero_s for s in row) for row in start_s),
        end_s=tuple(tuple(s - zero_s for s in row) for row in end_s),
        busy_s=tuple(_busy_s(row, costs, times) for row in lowered.ranks),
        finish_s=(period_s,) * lowered.num_ranks,
    )


def _busy_s(row: tuple[Action, ...], costs: _Costs, times: StageTimes) -> float:
    counts = Counter((action.kind, action.stage) for action in row)
    busy_s = sum(
        count * costs[kind][stage] for (kind, stage), count in counts.items() if kind.is_compute
    )
    for (kind, stage), count in counts.items():
        if kind is _K.BACKWARD:
            busy_s += times.last_backward_s[stage] if times.last_backward_s else 0.0
            busy_s += count * times.update_s[stage] if times.update_s else 0.0
    return busy_s


def _costs(schedule: Schedule, times: StageTimes) -> _Costs:
    """Seconds per kind and stage; a message costs the same under its send and its receive."""
    stages, used = schedule.num_stages, {a.kind for row in schedule.ranks for a in row}
    boundaries = (0.0,) * (stages - 1)
    send_forward_s = times.send_forward_s or boundaries
    send_backward_s = times.send_backward_s or boundaries
    fields = (
        ("forward_s", times.forward_s, stages, True),
        ("backward_s", times.backward_s, stages, _K.BACKWARD in used),
        ("backward_input_s", times.backward_input_s, stages, _K.BACKWARD_INPUT in used),
        ("backward_weight_s", times.backward_weight_s, stages, _K.BACKWARD_WEIGHT in used),
        ("send_forward_s", send_forward_s, stages - 1, True),
        ("send_backward_s", send_backward_s, stages - 1, True),
        *(
            (name, getattr(times, name), stages, bool(getattr(times, name)))
            for name in ("last_backward_s", "update_s", "forward_beside_s", "backward_beside_s")
        ),
    )
    for name, given, expected, needed in fields:
        if needed and len(given) != expected:
            raise InputError(
                f"times for schedule {schedule.name!r}: {name} has {len(given)} entries, expected "
                f"{expected} for its {stages} stages"
            )
    return {
        _K.FORWARD: times.forward_s,
        _K.BACKWARD: times.backward_s,
        _K.BACKWARD_INPUT: times.backward_input_s,
        _K.BACKWARD_WEIGHT: times.backward_weight_s,
        _K.SEND_FORWARD: send_forward_s,
        _K.RECV_FORWARD: (0.0, *send_forward_s),
        _K.SEND_BACKWARD: (0.0, *send_backward_s),
        _K.RECV_BACKWARD: send_backward_s,
    }


_COMPUTE, _SEND, _RECV = range(3)


class _Run:
    """One simulation. Each rank is a generator that gives the key of a message it must wait for.

    A message's key is the same for its send and its receive.
    """

    def __init__(
        self, schedule: Schedule, times: StageTimes, overlap: bool, begin_s: Sequence[float]
    ) -> None:
        self.schedule, self.overlap, self.begin_s = schedule, overlap, begin_s
        self.costs = _costs(schedule, times)
        none = (0.0,) * schedule.num_stages
        self.last_s = times.last_backward_s or none
        self.update_s = times.update_s or none
        self.start_s: list[list[float]] = [[] for _ in schedule.ranks]
        self.end_s: list[list[float]] = [[] for _ in schedule.ranks]
        self.sent: dict[int, tuple[float, float]] = {}
        self.waiting: dict[int, int] = {}
        self.runnable = list(range(schedule.num_ranks))
        one, all_ = schedule.num_micro_batches, schedule.num_stages * schedule.num_micro_batches
        first_key = {
            _K.SEND_FORWARD: one,
            _K.RECV_FORWARD: 0,
            _K.SEND_BACKWARD: all_ - one,
            _K.RECV_BACKWARD: all_,
        }
        beside_s = {
            _K.FORWARD: times.forward_beside_s or none,
            _K.BACKWARD: times.backward_beside_s or none,
            _K.BACKWARD_INPUT: times.backward_beside_s or none,
        }
        self.table = {
            kind: (
                _COMPUTE if kind.is_compute else _SEND if kind.is_send else _RECV,
                self.costs[kind],
                first_key.get(kind, 0),
                beside_s.get(kind, none),
            )
            for kind in ActionKind
        }

    def spans(self) -> tuple[list[list[float]], list[list[float]]]:
        """Start and end of every action, per rank."""
        ranks = [self._rank(rank) for rank in range(self.schedule.num_ranks)]
        while self.runnable:
            rank = self.runnable.pop()
            key = next(ranks[rank], None)
            if key is not None:
                self.waiting[key] = rank
        for rank, row in enumerate(self.schedule.ranks):
            position = len(self.end_s[rank])
            if position < len(row):
                raise InputError(
                    f"schedule {self.schedule.name!r} stands still: rank {rank} never gets past "
                    f"position {position}, action {row[position]}; validate it to see why"
                )
        return self.start_s, self.end_s

    def _rank(self, rank: int) -> Iterator[int]:
        starts, ends = self.start_s[rank], self.end_s[rank]
        sent, waiting, table, overlap = self.sent, self.waiting, self.table, self.overlap
        micro_batches, row = self.schedule.num_micro_batches, self.schedule.ranks[rank]
        # the last whole backward of a stage, by its place in the list
        last = {a.stage: i for i, a in enumerate(row) if a.kind is _K.BACKWARD}
        longer_s = {i: self.last_s[stage] for stage, i in last.items() if self.last_s[stage]}
        update_s, due_s = self.update_s, 0.0
        compute_free_s = link_free_s = self.begin_s[rank]
        for index, action in enumerate(row):
            stage = action.stage
            role, cost_s, first_key, beside_s = table[action.kind]
            if role == _COMPUTE:
                start_s = compute_free_s + due_s
                end_s = compute_free_s = start_s + cost_s[stage]
                if index in longer_s:
                    end_s = compute_free_s = end_s + longer_s[index]
                if beside_s[stage]:
                    link_free_s = max(link_free_s, start_s) + beside_s[stage]
                due_s = update_s[stage] if action.kind is _K.BACKWARD else 0.0
            else:
                key = first_key + stage * micro_batches + action.micro_batch
                if role == _SEND:
                    start_s = max(compute_free_s, link_free_s) if overlap else compute_free_s
                    end_s = link_free_s = start_s + cost_s[stage]
                    sent[key] = (start_s, end_s)
                    if key in waiting:
                        self.runnable.append(waiting.pop(key))
                    if not overlap:
                        compute_free_s = end_s
                else:
                    if key not in sent:
                        yield key
                    start_s, end_s = sent.pop(key)
                    if not overlap:
                        start_s = max(compute_free_s + due_s, start_s)
                        end_s = start_s + cost_s[stage]
                    # an update that is due runs before what is received is waited for
                    compute_free_s = max(compute_free_s + due_s, end_s) - due_s
            starts.append(start_s)
            ends.append(end_s)
