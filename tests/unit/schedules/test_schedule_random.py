"""Properties of schedules of any shape, and of the built ones under random times.

A random schedule puts stages on ranks at will, splits some backwards, and takes actions in any
order that the data allows: whatever a builder may ever give is one of these.
"""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import InputError
from autopar.report.timeline import chrome_trace
from autopar.schedules.action import Action, ActionKind, Schedule
from autopar.schedules.grid import render_grid
from autopar.schedules.in_flight import peak_in_flight
from autopar.schedules.lower import insert_communication
from autopar.schedules.order import execute
from autopar.schedules.registry import build_schedule
from autopar.schedules.simulate import simulate
from autopar.schedules.timeline import StageTimes
from autopar.schedules.validate import find_fault, validate

K = ActionKind
seconds = st.integers(0, 9).map(float)


def needs(action, stages):
    """What must have run before, written out again apart from the code under test."""
    kind, s, m = action.kind, action.stage, action.micro_batch
    if kind is K.FORWARD:
        return [{Action(K.FORWARD, s - 1, m)}] if s else []
    if kind is K.BACKWARD_WEIGHT:
        return [{Action(K.BACKWARD_INPUT, s, m)}]
    gradient = {Action(kind, s + 1, m) for kind in (K.BACKWARD, K.BACKWARD_INPUT)}
    return [{Action(K.FORWARD, s, m)}, *([gradient] if s + 1 < stages else [])]


@st.composite
def schedules(draw):
    stages, micro_batches = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    owner = draw(st.lists(st.integers(0, 2), min_size=stages, max_size=stages))
    owner = [sorted(set(owner)).index(rank) for rank in owner]
    todo = []
    for stage in range(stages):
        for i in range(micro_batches):
            split = draw(st.booleans())
            backward = (K.BACKWARD_INPUT, K.BACKWARD_WEIGHT) if split else (K.BACKWARD,)
            todo.extend(Action(kind, stage, i) for kind in (K.FORWARD, *backward))
    rows = [[] for _ in range(max(owner) + 1)]
    done = set()
    while todo:
        ready = [a for a in todo if all(done & options for options in needs(a, stages))]
        action = draw(st.sampled_from(ready))
        todo.remove(action)
        done.add(action)
        rows[owner[action.stage]].append(action)
    return Schedule(
        name="random",
        num_stages=stages,
        num_micro_batches=micro_batches,
        ranks=tuple(map(tuple, rows)),
    )


@st.composite
def times_for(draw, stages):
    def tuple_of(size):
        return tuple(draw(st.lists(seconds, min_size=size, max_size=size)))

    return StageTimes(
        forward_s=tuple_of(stages),
        backward_s=tuple_of(stages),
        backward_input_s=tuple_of(stages),
        backward_weight_s=tuple_of(stages),
        send_forward_s=tuple_of(stages - 1),
        send_backward_s=tuple_of(stages - 1),
    )


def with_rank(schedule, rank, row):
    ranks = (*schedule.ranks[:rank], tuple(row), *schedule.ranks[rank + 1 :])
    return replace(schedule, ranks=ranks)


def pick_rank(data, schedule):
    ranks = [rank for rank, row in enumerate(schedule.ranks) if row]
    return data.draw(st.sampled_from(ranks))


@given(schedule=schedules())
def test_any_order_the_data_allows_is_valid_and_stays_so_when_lowered(schedule):
    validate(schedule)
    validate(insert_communication(schedule))
    assert Schedule.parse("random", 1, 1, schedule.rows()).ranks == schedule.ranks


@given(schedule=schedules(), lowered=st.booleans(), data=st.data())
def test_dropping_an_action_is_rejected(schedule, lowered, data):
    schedule = insert_communication(schedule) if lowered else schedule
    rank = pick_rank(data, schedule)
    row = list(schedule.ranks[rank])
    row.pop(data.draw(st.integers(0, len(row) - 1)))
    with pytest.raises(InputError):
        validate(with_rank(schedule, rank, row))


@given(schedule=schedules(), lowered=st.booleans(), data=st.data())
def test_repeating_an_action_is_rejected(schedule, lowered, data):
    schedule = insert_communication(schedule) if lowered else schedule
    rank = pick_rank(data, schedule)
    row = list(schedule.ranks[rank])
    row.insert(data.draw(st.integers(0, len(row))), data.draw(st.sampled_from(row)))
    fault = find_fault(with_rank(schedule, rank, row))
    assert "already" in fault.reason


@given(schedule=schedules(), lowered=st.booleans(), data=st.data())
def test_swapping_a_forward_with_its_backward_is_rejected(schedule, lowered, data):
    schedule = insert_communication(schedule) if lowered else schedule
    rank = pick_rank(data, schedule)
    row = list(schedule.ranks[rank])
    forward = data.draw(st.sampled_from([a for a in row if a.kind is K.FORWARD]))
    backward = next(
        a
        for a in row
        if a.kind in (K.BACKWARD, K.BACKWARD_INPUT)
        and (a.stage, a.micro_batch) == (forward.stage, forward.micro_batch)
    )
    i, j = row.index(forward), row.index(backward)
    row[i], row[j] = row[j], row[i]
    with pytest.raises(InputError):
        validate(with_rank(schedule, rank, row))


@settings(max_examples=200)
@given(schedule=schedules(), data=st.data())
def test_any_two_actions_swapped_are_accepted_exactly_when_they_can_run(schedule, data):
    """The oracle runs ranks round robin with sets, until nothing moves."""
    rank = pick_rank(data, schedule)
    row = list(schedule.ranks[rank])
    i, j = (data.draw(st.integers(0, len(row) - 1)) for _ in range(2))
    row[i], row[j] = row[j], row[i]
    swapped = with_rank(schedule, rank, row)
    done, position, moved = set(), [0] * schedule.num_ranks, True
    while moved:
        moved = False
        for r, actions in enumerate(swapped.ranks):
            if position[r] == len(actions):
                continue
            action = actions[position[r]]
            if all(done & options for options in needs(action, schedule.num_stages)):
                done.add(action)
                position[r] += 1
                moved = True
    can_run = position == [len(actions) for actions in swapped.ranks]
    assert (find_fault(swapped) is None) == can_run
    if can_run:
        validate(insert_communication(swapped))


@given(data=st.data())
def test_step_is_the_longest_path_when_messages_take_no_time(data):
    schedule = data.draw(schedules())
    stages = schedule.num_stages
    times = replace(data.draw(times_for(stages)), send_forward_s=(), send_backward_s=())
    cost = {
        K.FORWARD: times.forward_s,
        K.BACKWARD: times.backward_s,
        K.BACKWARD_INPUT: times.backward_input_s,
        K.BACKWARD_WEIGHT: times.backward_weight_s,
    }
    every = {action for row in schedule.ranks for action in row}
    before = {b: a for row in schedule.ranks for a, b in pairwise(row)}
    end_s = {}

    def end(action):
        if action not in end_s:
            earlier = [end(a) for options in needs(action, stages) for a in options & every]
            earlier += [end(before[action])] if action in before else []
            end_s[action] = max(earlier, default=0.0) + cost[action.kind][action.stage]
        return end_s[action]

    timeline = simulate(schedule, times)
    assert timeline.step_s == max(map(end, every))
    compute = {e.action: e.end_s for e in timeline.events() if e.action.kind.is_compute}
    assert compute == end_s


@given(data=st.data(), overlap=st.booleans())
def test_no_stream_does_two_things_at_once_and_no_message_arrives_early(data, overlap):
    schedule = data.draw(schedules())
    timeline = simulate(schedule, data.draw(times_for(schedule.num_stages)), overlap)
    at = {(e.action.kind, e.action.stage, e.action.micro_batch): e for e in timeline.events()}
    for rank in range(timeline.schedule.num_ranks):
        mine = [e for e in timeline.events() if e.rank == rank]
        compute = [e for e in mine if e.action.kind.is_compute]
        sends = [e for e in mine if e.action.kind.is_send]
        for events in (compute, sends) if overlap else (mine,):
            for one, two in pairwise(events):
                assert one.end_s <= two.start_s
    for (kind, stage, i), event in at.items():
        if kind.is_recv:
            send, offset = (K.SEND_FORWARD, -1) if kind is K.RECV_FORWARD else (K.SEND_BACKWARD, 1)
            assert event.end_s >= at[send, stage + offset, i].end_s
        for options in needs(event.action, schedule.num_stages) if kind.is_compute else ():
            ends = [at[a.kind, a.stage, i].end_s for a in options if (a.kind, a.stage, i) in at]
            assert event.start_s >= min(ends)
    assert 0 <= timeline.bubble_fraction <= 1


@given(data=st.data(), overlap=st.booleans())
def test_more_time_anywhere_never_shortens_the_step(data, overlap):
    schedule = data.draw(schedules())
    times = data.draw(times_for(schedule.num_stages))
    fields = [field for field in StageTimes.__dataclass_fields__ if getattr(times, field)]
    field = data.draw(st.sampled_from(fields))
    values = list(getattr(times, field))
    values[data.draw(st.integers(0, len(values) - 1))] += data.draw(seconds)
    slower = replace(times, **{field: tuple(values)})
    assert simulate(schedule, slower, overlap).step_s >= simulate(schedule, times, overlap).step_s


@given(data=st.data())
def test_overlap_never_lengthens_the_step(data):
    schedule = data.draw(schedules())
    times = data.draw(times_for(schedule.num_stages))
    assert simulate(schedule, times).step_s <= simulate(schedule, times, overlap=False).step_s


@given(
    stages=st.integers(1, 8),
    micro_batches=st.integers(1, 12),
    work=st.tuples(seconds, seconds),
)
def test_one_f_one_b_takes_as_long_as_gpipe_on_equal_stages(stages, micro_batches, work):
    times = StageTimes(forward_s=(work[0],) * stages, backward_s=(work[1],) * stages)
    steps = {
        simulate(build_schedule(name, stages, micro_batches), times).step_s
        for name in ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs")
    }
    assert len(steps) == 1


@given(data=st.data())
def test_one_f_one_b_is_never_slower_than_gpipe_without_messages(data):
    stages, micro_batches = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 10))
    times = replace(data.draw(times_for(stages)), send_forward_s=(), send_backward_s=())
    one, gpipe = (
        simulate(build_schedule(name, stages, micro_batches), times) for name in ("1f1b", "gpipe")
    )
    assert one.step_s <= gpipe.step_s


@given(schedule=schedules())
def test_in_flight_is_counted_from_the_list(schedule):
    peaks = peak_in_flight(schedule)
    for stage, rank in enumerate(schedule.stage_rank):
        row = [a for a in schedule.ranks[rank] if a.stage == stage]
        counts = [
            sum(a.kind is K.FORWARD for a in row[:end])
            - sum(a.kind in (K.BACKWARD, K.BACKWARD_WEIGHT) for a in row[:end])
            for end in range(len(row) + 1)
        ]
        assert peaks[stage] == max(counts)
        assert counts[-1] == 0


@given(schedule=schedules())
def test_the_grid_shows_every_action_once(schedule):
    lines = render_grid(schedule).splitlines()[1:]
    cells = [line.split("|")[1].split() for line in lines]
    assert [[c for c in row if c != "."] for row in cells] == [
        list(map(str, row)) for row in schedule.ranks
    ]
    assert max(map(len, cells)) == execute(schedule).num_clocks


@given(data=st.data())
def test_trace_rows_hold_every_action_and_never_overlap(data):
    schedule = data.draw(schedules())
    timeline = simulate(schedule, data.draw(times_for(schedule.num_stages)))
    entries = json.loads(chrome_trace(timeline))["traceEvents"]
    slices = [entry for entry in entries if entry["ph"] == "X"]
    assert sorted(entry["name"] for entry in slices) == sorted(
        str(event.action) for event in timeline.events()
    )
    rows = {}
    for entry in slices:
        rows.setdefault((entry["pid"], entry["tid"]), []).append(entry)
    for row in rows.values():
        row.sort(key=lambda entry: (entry["ts"], entry["dur"]))
        for one, two in pairwise(row):
            assert one["ts"] + one["dur"] <= two["ts"]
    names = {(e["pid"], e["tid"]) for e in entries if e["name"] == "thread_name"}
    assert names >= rows.keys()
