"""A whole training step by events: update, action lists, gradient sums, and what each rank holds.

Steps follow each other. All ranks meet where the loss is summed over all of them, which is after
their gradients are summed, those of parameters on several ranks between these too, and before their
optimizers step. From one such meeting to the next a rank steps its optimizer, gathers the weights
that it updated a share of, runs its action list, and sums its gradients; the ranks that come late
into a pipeline update while it fills. A schedule that never drains has no meeting: every backward
is followed by its sum and update, and the step is that of the steady state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autopar.schedules.action import Action, ActionKind, Schedule
from autopar.schedules.arrivals import arrivals
from autopar.schedules.endless import closing
from autopar.schedules.held import StageMemory, update_bytes
from autopar.schedules.memory_curve import NOTHING, Point, changes, memory_curve
from autopar.schedules.sharing import share_cores
from autopar.schedules.simulate import simulate
from autopar.schedules.timeline import StageTimes, Timeline

_K = ActionKind
_RECEIVES = frozenset(kind for kind in ActionKind if kind.is_recv)
_SENDS = frozenset(kind for kind in ActionKind if kind.is_send)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageLoad:
    """What one stage asks of its ranks. Seconds are per micro-batch, those of a step say so.

    `forward_s` and `backward_s` are whole passes, with the seconds in `*_waits_s` in which compute
    waits for collectives; `backward_weight_s` is the part of the backward that computes weight
    gradients; `*_beside_s` run beside compute. The sends are to the next stage and to the one
    before. Once a step: `last_backward_s` more in the last backward and `sum_beside_s` beside it,
    `sync_s` after it, of which `sum_left_s` go on at its end and the rest begins when the rank has
    run its list; `tied_s` to sum gradients with the pipeline ranks in `tied_ranks`, once all these
    are there; `optimizer_s`, and `gather_s` to gather updated weights. `shares_links`: what runs
    beside compute takes the links that messages take.
    """

    forward_s: float
    backward_s: float
    backward_weight_s: float = 0.0
    send_forward_s: float = 0.0
    send_backward_s: float = 0.0
    forward_waits_s: float = 0.0
    backward_waits_s: float = 0.0
    forward_beside_s: float = 0.0
    backward_beside_s: float = 0.0
    last_backward_s: float = 0.0
    sum_beside_s: float = 0.0
    sum_left_s: float = 0.0
    sync_s: float = 0.0
    tied_s: float = 0.0
    tied_ranks: tuple[int, ...] = ()
    optimizer_s: float = 0.0
    gather_s: float = 0.0
    shares_links: bool = False
    memory: StageMemory = NOTHING

    @property
    def update_s(self) -> float:
        """All that is done once a step."""
        return self.sync_s + self.optimizer_s + self.gather_s


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTime:
    """Where the seconds of a rank's step go; they add up to the step.

    `collectives_s` and `messages_s` are exposed communication: compute waits, and a collective of
    this rank, or a message to it, is under way. `idle_s` is the bubble.
    """

    compute_s: float
    collectives_s: float
    messages_s: float
    idle_s: float

    @property
    def exposed_s(self) -> float:
        """Exposed communication."""
        return self.collectives_s + self.messages_s

    @property
    def step_s(self) -> float:
        """The step."""
        return self.compute_s + self.exposed_s + self.idle_s

    @property
    def utilization(self) -> float:
        """Share of the step in which the rank computes; 0 for a step of no length."""
        return self.compute_s / self.step_s if self.step_s else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A simulated step. Times count from where all ranks meet; `begin_s` is when each begins its
    list, `sync_begin_s` and `sync_end_s` are those of its sums of gradients after the list, and at
    `meet_s` it has those between ranks too."""

    loads: tuple[StageLoad, ...]
    timeline: Timeline
    step_s: float
    begin_s: tuple[float, ...]
    sync_begin_s: tuple[float, ...]
    sync_end_s: tuple[float, ...]
    meet_s: tuple[float, ...]
    ranks: tuple[RankTime, ...]

    @property
    def memory(self) -> tuple[tuple[Point, ...], ...]:
        """What each rank holds from time 0 on; computed anew."""
        sync_s = tuple(zip(self.sync_begin_s, self.sync_end_s, strict=True))
        return _curves(self.timeline, self.loads, _stages_of(self.timeline.schedule), sync_s)

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """The most that each rank holds."""
        return tuple(max(point.held_bytes for point in curve) for curve in self.memory)

    @property
    def utilization(self) -> float:
        """Share of all ranks' time in which they compute."""
        return self._share("compute_s")

    @property
    def bubble_fraction(self) -> float:
        """Share of all ranks' time in which they wait for each other."""
        return self._share("idle_s")

    @property
    def exposed_fraction(self) -> float:
        """Share of all ranks' time in which they wait for communication."""
        return self._share("exposed_s")

    def _share(self, part: str) -> float:
        total_s = self.step_s * len(self.ranks)
        return sum(getattr(rank, part) for rank in self.ranks) / total_s if total_s else 0.0


def simulate_step(
    schedule: Schedule, loads: Sequence[StageLoad], overlap: bool = True, slowdown: float = 1.0
) -> Step:
    """Run a step of a valid schedule; `overlap` tells whether messages run beside compute.

    Where ranks share cores, loads are those of ranks that all compute, `slowdown` times what one
    takes by itself (`sharing`). Raises InputError as `simulate` does.
    """
    stages = _stages_of(schedule)
    begin_s = tuple(
        sum(loads[s].optimizer_s + loads[s].gather_s for s in own) if schedule.flushes else 0.0
        for own in stages
    )
    timeline = simulate(schedule, stage_times(loads, flushes=schedule.flushes), overlap, begin_s)
    sync_begin_s, sync_end_s = _sums_s(timeline, stages, loads)
    paces = (1.0,) * schedule.num_ranks
    shares = schedule.flushes and slowdown > 1 and schedule.num_ranks > 1
    if shares:
        late = [end - finish for end, finish in zip(sync_end_s, timeline.finish_s, strict=True)]
        shared = share_cores(timeline, slowdown, begin_s, late, _waits(loads))
        busy = zip(shared.timeline.busy_s, timeline.busy_s, strict=True)
        paces = tuple(now / alone if alone else 1.0 for now, alone in busy)
        timeline, begin_s = shared.timeline, shared.begin_s
        sync_begin_s, sync_end_s = timeline.finish_s, shared.end_s
    tied_s = [sum(loads[s].tied_s for s in own) for own in stages]
    meet_s = _tied(sync_end_s, tied_s, [load.tied_ranks for load in loads if load.tied_s])
    frames = [
        _Frame(begin, end - finish + tied, max(meet_s))
        for begin, end, finish, tied in zip(
            begin_s, sync_end_s, timeline.finish_s, tied_s, strict=True
        )
    ]
    return Step(
        loads=tuple(loads),
        timeline=timeline,
        step_s=max(meet_s),
        begin_s=begin_s,
        sync_begin_s=sync_begin_s,
        sync_end_s=sync_end_s,
        meet_s=meet_s,
        ranks=tuple(
            _rank_time(
                timeline,
                rank,
                own,
                _at_pace(loads, paces[rank]),
                frames[rank],
                overlap,
                shares,
            )
            for rank, own in enumerate(stages)
        ),
    )


class _Frame(NamedTuple):
    """When a rank begins its list, what it takes for sums after it, and the step."""

    begin_s: float
    sums_s: float
    step_s: float


def _waits(loads: Sequence[StageLoad]) -> dict[tuple[ActionKind, int], float]:
    """The collectives in the actions of every stage."""
    found = {}
    for stage, load in enumerate(loads):
        found[_K.FORWARD, stage] = load.forward_waits_s
        found[_K.BACKWARD, stage] = found[_K.BACKWARD_INPUT, stage] = load.backward_waits_s
    return found


def _at_pace(loads: Sequence[StageLoad], pace: float) -> Sequence[StageLoad]:
    """Loads with the passes as long as they were on average."""
    if pace == 1.0:
        return loads
    scaled = ("forward", "backward", "backward_weight", "forward_waits", "backward_waits")
    names = [f"{name}_s" for name in (*scaled, "last_backward", "optimizer")]
    return [replace(load, **{name: pace * getattr(load, name) for name in names}) for load in loads]


def stage_times(loads: Sequence[StageLoad], *, flushes: bool = True) -> StageTimes:
    """The times that an action list is simulated on."""
    beside = [load.shares_links for load in loads]
    return StageTimes(
        forward_s=tuple(load.forward_s for load in loads),
        backward_s=tuple(load.backward_s for load in loads),
        backward_input_s=tuple(load.backward_s - load.backward_weight_s for load in loads),
        backward_weight_s=tuple(load.backward_weight_s for load in loads),
        send_forward_s=tuple(load.send_forward_s for load in loads[:-1]),
        send_backward_s=tuple(load.send_backward_s for load in loads[1:]),
        last_backward_s=tuple(load.last_backward_s for load in loads) if flushes else (),
        update_s=() if flushes else tuple(load.update_s for load in loads),
        forward_beside_s=tuple(
            load.forward_beside_s * own for load, own in zip(loads, beside, strict=True)
        ),
        backward_beside_s=tuple(
            load.backward_beside_s * own for load, own in zip(loads, beside, strict=True)
        ),
    )


def _stages_of(schedule: Schedule) -> list[list[int]]:
    stages: list[list[int]] = [[] for _ in schedule.ranks]
    for stage, rank in enumerate(schedule.stage_rank):
        stages[rank].append(stage)
    return stages


def _tied(
    ends_s: Sequence[float], tied_s: Sequence[float], groups: Iterable[tuple[int, ...]]
) -> tuple[float, ...]:
    """When each rank is done with the sums between ranks, group after group."""
    done_s = list(ends_s)
    for ranks in sorted(set(groups)):
        end_s = max(done_s[rank] for rank in ranks) + max(tied_s[rank] for rank in ranks)
        for rank in ranks:
            done_s[rank] = end_s
    return tuple(done_s)


def _sums_s(
    timeline: Timeline, stages: Sequence[Sequence[int]], loads: Sequence[StageLoad]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """When each rank goes on to sum gradients after its list, and when it is done with its own."""
    if not timeline.schedule.flushes:
        return timeline.finish_s, timeline.finish_s
    begin_s = list(timeline.finish_s)
    if any(load.sum_left_s for load in loads):
        for rank, row in enumerate(timeline.schedule.ranks):
            spans = zip(row, timeline.end_s[rank], strict=True)
            last_s = {a.stage: end_s for a, end_s in spans if a.kind is _K.BACKWARD}
            for stage, end_s in last_s.items():
                begin_s[rank] = max(begin_s[rank], end_s + loads[stage].sum_left_s)
    late_s = [sum(loads[s].sync_s - loads[s].sum_left_s for s in own) for own in stages]
    return tuple(begin_s), tuple(map(sum, zip(begin_s, late_s, strict=True)))


def _rank_time(
    timeline: Timeline,
    rank: int,
    own: Sequence[int],
    loads: Sequence[StageLoad],
    frame: _Frame,
    overlap: bool,
    shares: bool,
) -> RankTime:
    flushes, many = timeline.schedule.flushes, timeline.schedule.num_micro_batches
    often = 1 if flushes else many
    optimizer_s = often * sum(loads[s].optimizer_s for s in own)
    gather_s = often * sum(loads[s].gather_s for s in own)
    updates_s = 0.0 if flushes else often * sum(loads[s].update_s for s in own)
    waits_s = many * sum(loads[s].forward_waits_s + loads[s].backward_waits_s for s in own)
    longer = {s for s in own if flushes and loads[s].last_backward_s}
    if longer:
        whole = {a.stage for a in timeline.schedule.ranks[rank] if a.kind is _K.BACKWARD}
        waits_s += sum(loads[s].last_backward_s for s in longer & whole)
    sums_s = frame.sums_s if flushes else often * sum(loads[s].sync_s for s in own)
    compute_s = timeline.busy_s[rank] - updates_s - waits_s + optimizer_s
    collectives_s = waits_s + gather_s + sums_s
    left_s = max(0.0, frame.step_s - compute_s - collectives_s)
    waited_s = _message_waits_s(timeline, rank, loads, frame.begin_s, overlap, shares)
    messages_s = min(left_s, waited_s)
    return RankTime(
        compute_s=compute_s,
        collectives_s=collectives_s,
        messages_s=messages_s,
        idle_s=left_s - messages_s,
    )


def _message_waits_s(
    timeline: Timeline,
    rank: int,
    loads: Sequence[StageLoad],
    begin_s: float,
    overlap: bool,
    shares: bool,
) -> float:
    """How long compute waits while a message that it needs is under way, or where ranks share cores
    is sent; without overlap, how long it is given to messages."""
    row = timeline.schedule.ranks[rank]
    starts, ends = timeline.start_s[rank], timeline.end_s[rank]
    if not overlap:
        spans = zip(row, starts, ends, strict=True)
        return sum(end_s - start_s for a, start_s, end_s in spans if not a.kind.is_compute)
    waited_s, free_s, flushes = 0.0, begin_s, timeline.schedule.flushes
    for action, start_s, end_s in zip(row, starts, ends, strict=True):
        if action.kind in _RECEIVES:
            if end_s > free_s:
                waited_s += end_s - max(free_s, start_s)
                free_s = end_s
        elif action.kind in _SENDS:
            if shares:
                waited_s, free_s = waited_s + end_s - start_s, end_s
        else:
            free_s = end_s
            if action.kind is _K.BACKWARD and not flushes:
                free_s += loads[action.stage].update_s
    return waited_s


def _curves(
    timeline: Timeline,
    loads: Sequence[StageLoad],
    stages: Sequence[Sequence[int]],
    sync_s: Sequence[tuple[float, float]],
) -> tuple[tuple[Point, ...], ...]:
    """`sync_s` has begin and end of each rank's sums: the update at the start of a step, which ends
    the one before, holds as much as they."""
    schedule = timeline.schedule
    late = closing(schedule).ranks
    known = arrivals(schedule) if schedule.flushes else ({},) * len(stages)
    curves = []
    for rank, own in enumerate(stages):
        memory = {stage: loads[stage].memory for stage in own}
        before = [] if schedule.flushes else [memory[a.stage] for a in late[rank] if _frees(a)]
        curve = memory_curve(
            schedule.ranks[rank],
            timeline.start_s[rank],
            timeline.end_s[rank],
            memory,
            known[rank],
            saved_bytes=sum(stage.saved_bytes for stage in before),
            gradients=not schedule.flushes,
        )
        if schedule.flushes:
            begin_s, end_s = sync_s[rank]
            summing, left = update_bytes(memory.values()), curve[-1].held_bytes
            curve = changes((*curve, Point(begin_s, summing), Point(end_s, left)))
        curves.append(curve)
    return tuple(curves)


def _frees(action: Action) -> bool:
    """Whether the action ends what a micro-batch is held for."""
    return action.kind is _K.BACKWARD
