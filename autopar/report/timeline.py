"""A simulated step as a trace for Perfetto or chrome://tracing.

The format is the JSON object form of the Trace Event Format: complete events (`X`) in microseconds,
metadata events (`M`) for the names of rows, flow events (`s`, `f`) from a send to its receive.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from autopar.schedules.action import Action, ActionKind, matching_recv
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


def chrome_trace(timeline: Timeline) -> str:
    """Deterministic JSON: one process per rank, one row per stream, times in microseconds.

    Receives that overlap on a rank (from both neighbours at once) get a further row each, as rows
    of the viewer cannot show overlapping slices.
    """
    by_row: dict[tuple[int, Stream], list[Event]] = defaultdict(list)
    for event in timeline.events():
        by_row[event.rank, stream_of(event.action.kind)].append(event)
    entries: list[_Json] = []
    flows = {send: i for i, send in enumerate(_sends(timeline))}
    flows |= {matching_recv(send): i for send, i in flows.items()}
    for rank in range(timeline.schedule.num_ranks):
        entries.append(_name("process_name", f"rank {rank}", rank, 0))
        for number, stream in enumerate(Stream):
            for lane, events in enumerate(_lanes(by_row[rank, stream])):
                row = number * _ROWS_PER_STREAM + lane
                label = f"{stream} {lane + 1}" if lane else str(stream)
                entries.append(_name("thread_name", label, rank, row))
                for event in events:
                    entries.append(_slice(event, row))
                    if event.action in flows:
                        entries.append(_flow(event, row, flows[event.action]))
    trace = {
        "displayTimeUnit": "ms",
        "otherData": {
            "schedule": timeline.schedule.name,
            "step_us": _us(timeline.step_s),
            "bubble_fraction": round(timeline.bubble_fraction, 6),
        },
        "traceEvents": entries,
    }
    return json.dumps(trace, separators=(",", ":"), sort_keys=True) + "\n"


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _sends(timeline: Timeline) -> list[Action]:
    rows = timeline.schedule.ranks
    return [action for row in rows for action in row if action.kind.is_send]


def _lanes(events: list[Event]) -> list[list[Event]]:
    """Split a stream's events so that none overlap: each goes to the first lane that is free."""
    lanes: list[list[Event]] = [[]]
    for event in sorted(events, key=lambda event: (event.start_s, event.end_s)):
        free = (lane for lane in lanes if not lane or lane[-1].end_s <= event.start_s)
        lane = next(free, None)
        if lane is None:
            lanes.append(lane := [])
        lane.append(event)
    return lanes


def _name(kind: str, name: str, rank: int, row: int) -> _Json:
    return {"ph": "M", "name": kind, "pid": rank, "tid": row, "args": {"name": name}}


def _slice(event: Event, row: int) -> _Json:
    action, start_us = event.action, _us(event.start_s)
    return {
        "ph": "X",
        "name": str(action),
        "cat": _TITLE[action.kind],
        "pid": event.rank,
        "tid": row,
        "ts": start_us,
        "dur": round(_us(event.end_s) - start_us, 3),
        "args": {"stage": action.stage, "micro_batch": action.micro_batch},
    }


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
