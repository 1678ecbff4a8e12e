"""A simulated step as a trace for Perfetto or chrome://tracing.

The format is the JSON object form of the Trace Event Format: complete events (`X`) in microseconds,
metadata events (`M`) for the names of rows, flow events (`s`, `f`) from a send to its receive, and
counter events (`C`) for what a rank holds.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.schedules.action import Action, ActionKind, matching_recv
from autopar.schedules.step import Step
from autopar.schedules.timeline import Event, Stream, Timeline, stream_of

_TITLE = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.BACKWARD_INPUT: "backward input",
    ActionKind.BACKWARD_WEIGHT: "backward weight",
    ActionKind.SEND_FORWARD: "send activation",
    ActionKind.RECV_FORWARD: "receive activation",
    ActionKind.SEND_BACKWARD: "send gradient",
    ActionKind.RECV_BACKWARD: "receive gradient",
}

_ROWS_PER_STREAM = 1000
"""Row ids of a stream start at its number times this, so that streams stay sorted."""

_Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """Something besides the action list that occupies a stream of a rank for a while."""

    rank: int
    stream: Stream
    name: str
    start_s: float
    end_s: float
    args: Mapping[str, Any] = field(default_factory=dict)


def chrome_trace(timeline: Timeline) -> str:
    """Deterministic JSON: one process per rank, one row per stream, times in microseconds.

    Receives that overlap on a rank (from both neighbours at once) get a further row each, as rows
    of the viewer cannot show overlapping slices.
    """
    names = [f"rank {rank}" for rank in range(timeline.schedule.num_ranks)]
    figures = {"step_us": _us(timeline.step_s), "bubble_fraction": timeline.bubble_fraction}
    return _text(timeline, _rows(timeline, (), names), figures)


def step_trace(step: Step, names: Sequence[str] = ()) -> str:
    """The same of a whole step, with its collectives in a row of their own and the memory of each
    rank as a counter in MiB. `names` are those of the ranks.

    Collectives beside an action are drawn from its start, sums of gradients beside the last
    backward up to its end: how they lie between its blocks is not kept.
    """
    timeline = step.timeline
    names = list(names) or [f"rank {rank}" for rank in range(timeline.schedule.num_ranks)]
    entries = _rows(timeline, tuple(_slices(step)), names)
    for rank, curve in enumerate(step.memory):
        for time_s, held_bytes in curve:
            held = {"MiB": round(held_bytes / 2**20, 3)}
            entries.append(
                {"ph": "C", "name": "memory", "pid": rank, "ts": _us(time_s), "args": held}
            )
    figures = {
        "step_us": _us(step.step_s),
        "bubble_fraction": step.bubble_fraction,
        "exposed_communication_fraction": step.exposed_fraction,
        "utilization": step.utilization,
    }
    return _text(timeline, entries, figures)


def _rows(timeline: Timeline, slices: Sequence[Slice], names: Sequence[str]) -> list[_Json]:
    by_row: dict[tuple[int, Stream], list[Event | Slice]] = defaultdict(list)
    for event in timeline.events():
        by_row[event.rank, stream_of(event.action.kind)].append(event)
    for extra in slices:
        by_row[extra.rank, extra.stream].append(extra)
    entries: list[_Json] = []
    flows = {send: i for i, send in enumerate(_sends(timeline))}
    flows |= {matching_recv(send): i for send, i in flows.items()}
    for rank, name in enumerate(names):
        entries.append(_name("process_name", name, rank, 0))
        for number, stream in enumerate(Stream):
            if stream is Stream.COLLECTIVES and not by_row[rank, stream]:
                continue
            for lane, items in enumerate(_lanes(by_row[rank, stream])):
                row = number * _ROWS_PER_STREAM + lane
                label = f"{stream} {lane + 1}" if lane else str(stream)
                entries.append(_name("thread_name", label, rank, row))
                for item in items:
                    entries.append(_slice(item, row))
                    if isinstance(item, Event) and item.action in flows:
                        entries.append(_flow(item, row, flows[item.action]))
    return entries


def _text(timeline: Timeline, entries: list[_Json], figures: Mapping[str, float]) -> str:
    rounded = {name: round(figure, 6) for name, figure in figures.items()}
    trace = {
        "displayTimeUnit": "ms",
        "otherData": {"schedule": timeline.schedule.name, **rounded},
        "traceEvents": entries,
    }
    return json.dumps(trace, separators=(",", ":"), sort_keys=True) + "\n"


def _slices(step: Step) -> Iterator[Slice]:
    """What a step has besides its action lists."""
    for rank, row in enumerate(step.timeline.schedule.ranks):
        own = sorted({action.stage for action in row})
        yield from _once(step, rank, own)
        starts, ends = step.timeline.start_s[rank], step.timeline.end_s[rank]
        last = {a.stage: i for i, a in enumerate(row) if a.kind is ActionKind.BACKWARD}
        for i, action in enumerate(row):
            beside_s, name = _beside(step, action)
            if beside_s:
                end_s = starts[i] + beside_s
                yield _collective(rank, name, starts[i], end_s, stage=action.stage)
            load = step.loads[action.stage]
            if last.get(action.stage) == i and load.sum_beside_s + load.sum_left_s:
                span = ends[i] - load.sum_beside_s, ends[i] + load.sum_left_s
                yield _collective(rank, "sum gradients", *span, stage=action.stage)
            if action.kind is ActionKind.BACKWARD and not step.timeline.schedule.flushes:
                yield Slice(
                    rank=rank,
                    stream=Stream.COMPUTE,
                    name="update",
                    start_s=ends[i],
                    end_s=ends[i] + load.update_s,
                    args={"stage": action.stage},
                )


def _once(step: Step, rank: int, own: Sequence[int]) -> Iterator[Slice]:
    """What a rank does once a step."""
    optimizer_s = sum(step.loads[stage].optimizer_s for stage in own)
    if step.begin_s[rank]:
        yield Slice(
            rank=rank, stream=Stream.COMPUTE, name="optimizer", start_s=0.0, end_s=optimizer_s
        )
        if step.begin_s[rank] > optimizer_s:
            yield _collective(rank, "gather updated weights", optimizer_s, step.begin_s[rank])
    if step.sync_end_s[rank] > step.sync_begin_s[rank]:
        span = step.sync_begin_s[rank], step.sync_end_s[rank]
        yield _collective(rank, "sum gradients", *span)
    tied_s = sum(step.loads[stage].tied_s for stage in own)
    if tied_s:
        span = step.meet_s[rank] - tied_s, step.meet_s[rank]
        yield _collective(rank, "sum gradients of tied parameters", *span)


def _collective(rank: int, name: str, start_s: float, end_s: float, **args: Any) -> Slice:
    return Slice(
        rank=rank, stream=Stream.COLLECTIVES, name=name, start_s=start_s, end_s=end_s, args=args
    )


def _beside(step: Step, action: Action) -> tuple[float, str]:
    """Seconds of communication beside an action's compute, and what it does."""
    load = step.loads[action.stage]
    if action.kind is ActionKind.FORWARD:
        return load.forward_beside_s, "gather weights"
    if action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT):
        return load.backward_beside_s, "gather weights"
    return 0.0, ""


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _sends(timeline: Timeline) -> list[Action]:
    rows = timeline.schedule.ranks
    return [action for row in rows for action in row if action.kind.is_send]


def _lanes(events: list[Event | Slice]) -> list[list[Event | Slice]]:
    """Split a stream's events so that none overlap: each goes to the first lane that is free."""
    lanes: list[list[Event | Slice]] = [[]]
    for event in sorted(events, key=lambda event: (event.start_s, event.end_s)):
        free = (lane for lane in lanes if not lane or lane[-1].end_s <= event.start_s)
        lane = next(free, None)
        if lane is None:
            lanes.append(lane := [])
        lane.append(event)
    return lanes


def _name(kind: str, name: str, rank: int, row: int) -> _Json:
    return {"ph": "M", "name": kind, "pid": rank, "tid": row, "args": {"name": name}}


def _slice(item: Event | Slice, row: int) -> _Json:
    start_us = _us(item.start_s)
    entry: _Json = {
        "ph": "X",
        "pid": item.rank,
        "tid": row,
        "ts": start_us,
        "dur": round(_us(item.end_s) - start_us, 3),
    }
    if isinstance(item, Slice):
        return entry | {"name": item.name, "cat": item.name, "args": dict(item.args)}
    action = item.action
    args = {"stage": action.stage, "micro_batch": action.micro_batch}
    return entry | {"name": str(action), "cat": _TITLE[action.kind], "args": args}


def _flow(event: Event, row: int, number: int) -> _Json:
    """One end of the arrow from the start of a send to the start of its receive."""
    begins = event.action.kind.is_send
    entry: _Json = {
        "ph": "s" if begins else "f",
        "id": number,
        "name": "message",
        "cat": "message",
        "pid": event.rank,
        "tid": row,
        "ts": _us(event.start_s),
    }
    return entry if begins else entry | {"bp": "e"}
