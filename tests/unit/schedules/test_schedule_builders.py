"""What holds for every schedule of the table, at any size that it takes."""

import json
from collections import Counter
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import InputError
from autopar.report.timeline import chrome_trace
from autopar.schedules.action import ActionKind, Schedule
from autopar.schedules.closed_form import flush_step_lower_bound_s
from autopar.schedules.endless import finite
from autopar.schedules.grid import render_grid
from autopar.schedules.in_flight import peak_in_flight, peak_weighted
from autopar.schedules.lower import insert_communication
from autopar.schedules.registry import SCHEDULES, build_schedule
from autopar.schedules.simulate import simulate
from autopar.schedules.timeline import StageTimes
from autopar.schedules.validate import validate

K = ActionKind
CHUNKS = {"one": (1,), "two": (2,), "many": (1, 2, 3, 4)}


@st.composite
def sizes(draw):
    """Name, ranks, micro-batches, chunks that the table allows."""
    name = draw(st.sampled_from(list(SCHEDULES)))
    ranks, micro_batches = draw(st.integers(1, 7)), draw(st.integers(1, 20))
    if not SCHEDULES[name].flushes:
        micro_batches = max(micro_batches, ranks)
    return name, ranks, micro_batches, draw(st.sampled_from(CHUNKS[SCHEDULES[name].chunks]))


@st.composite
def times_of(draw, stages):
    def some(count):
        numbers = st.integers(1, 9).map(float)
        return tuple(draw(st.lists(numbers, min_size=count, max_size=count)))

    input_s, weight_s = some(stages), some(stages)
    return StageTimes(
        forward_s=some(stages),
        backward_s=tuple(map(sum, zip(input_s, weight_s, strict=True))),
        backward_input_s=input_s,
        backward_weight_s=weight_s,
        send_forward_s=some(stages - 1),
        send_backward_s=some(stages - 1),
    )


@settings(max_examples=150)
@given(size=sizes())
def test_every_stage_runs_every_micro_batch_once_on_its_rank(size):
    name, ranks, micro_batches, chunks = size
    row, schedule = SCHEDULES[name], build_schedule(*size)
    assert (schedule.name, schedule.num_ranks, schedule.flushes) == (name, ranks, row.flushes)
    assert (schedule.num_stages, schedule.num_micro_batches) == (ranks * chunks, micro_batches)
    assert schedule.stage_rank == row.placement(ranks, chunks)
    actions = Counter(action for actions in schedule.ranks for action in actions)
    assert set(actions.values()) == {1}
    kinds = Counter(action.kind for action in actions)
    total = ranks * chunks * micro_batches
    assert kinds[K.FORWARD] == total
    assert kinds[K.BACKWARD] + kinds[K.BACKWARD_INPUT] == total
    assert kinds[K.BACKWARD_INPUT] == kinds[K.BACKWARD_WEIGHT]
    if not row.splits_backward:
        assert kinds[K.BACKWARD] == total


@settings(max_examples=150)
@given(size=sizes(), data=st.data(), overlap=st.booleans())
def test_every_schedule_is_valid_and_runs_through(size, data, overlap):
    schedule = build_schedule(*size)
    validate(schedule)
    lowered = insert_communication(schedule)
    validate(lowered)
    assert insert_communication(lowered) == lowered
    compute = tuple(tuple(a for a in row if a.kind.is_compute) for row in lowered.ranks)
    assert compute == schedule.ranks
    times = data.draw(times_of(schedule.num_stages))
    timeline = simulate(lowered, times, overlap)
    assert simulate(schedule, times, overlap) == timeline
    work_s = [f + b for f, b in zip(times.forward_s, times.backward_s, strict=True)]
    for rank, busy_s in enumerate(timeline.busy_s):
        mine = sum(w for w, owner in zip(work_s, schedule.stage_rank, strict=True) if owner == rank)
        assert busy_s == mine * schedule.num_micro_batches
        assert timeline.finish_s[rank] >= busy_s - 1e-9
    if schedule.flushes:
        bound_s = flush_step_lower_bound_s(times, schedule.num_micro_batches, schedule.stage_rank)
        assert bound_s <= timeline.step_s + 1e-9


@settings(max_examples=100)
@given(size=sizes(), data=st.data())
def test_a_rank_holds_the_saved_bytes_of_all_its_stages_at_once(size, data):
    """Oracle: the sum over stages after every action, from sets of what is held."""
    schedule = build_schedule(*size)
    stages = schedule.num_stages
    saved = data.draw(st.lists(st.integers(0, 9), min_size=stages, max_size=stages))
    expected = []
    for row in finite(schedule).ranks:
        held, most = set(), 0
        for action in row:
            key = (action.stage, action.micro_batch)
            if action.kind is K.FORWARD:
                held.add(key)
            if action.kind in (K.BACKWARD, K.BACKWARD_WEIGHT):
                held.remove(key)
            most = max(most, sum(saved[stage] for stage, _ in held))
        assert not held
        expected.append(most)
    assert peak_weighted(schedule, saved) == tuple(expected)
    peaks = peak_in_flight(schedule)
    for rank, most in enumerate(expected):
        mine = [s for s, owner in enumerate(schedule.stage_rank) if owner == rank]
        parts = [peaks[stage] * saved[stage] for stage in mine]
        assert max(parts) <= most <= sum(parts)


@pytest.mark.parametrize("name", SCHEDULES)
def test_stages_of_one_rank_exchange_no_messages(name):
    """All of them on one rank; and at the turn of a V."""
    chunks = CHUNKS[SCHEDULES[name].chunks][-1]
    assert not insert_communication(build_schedule(name, 1, 3, chunks)).has_communication
    lowered = insert_communication(build_schedule(name, 2, 3, chunks))
    messages = Counter(a.kind for row in lowered.ranks for a in row if not a.kind.is_compute)
    owner = lowered.stage_rank
    crossings = sum(owner[i] != owner[i + 1] for i in range(2 * chunks - 1))
    kinds = (K.SEND_FORWARD, K.RECV_FORWARD, K.SEND_BACKWARD, K.RECV_BACKWARD)
    assert messages == dict.fromkeys(kinds, 3 * crossings)
    assert crossings == (2 if SCHEDULES[name].chunks == "two" else 2 * chunks - 1)


def test_an_input_part_frees_what_its_weight_part_does_not_need():
    split = Schedule.parse("zb", 2, 2, ["0F0 0I0 0F1 0I1 0W0 0W1", "1F0 1F1 1I0 1W0 1I1 1W1"])
    assert peak_weighted(split, [10, 10]) == (20, 20)
    assert peak_weighted(split, [10, 10], [3, 3]) == (13, 20)
    assert peak_weighted(split, [10, 10], [12, 12]) == (24, 22)
    full = build_schedule("1f1b", 2, 2)
    assert peak_weighted(full, [10, 7], [1, 1]) == (20, 7)


def test_the_turn_of_a_v_costs_no_message():
    times = StageTimes(
        forward_s=(1.0,) * 4,
        backward_s=(2.0,) * 4,
        backward_input_s=(1.0,) * 4,
        backward_weight_s=(1.0,) * 4,
        send_forward_s=(2.0, 1000.0, 3.0),
        send_backward_s=(4.0, 1000.0, 5.0),
    )
    there_and_back_s = 4 + 2 + 3 + 4 + 5 + 4
    for name, weight_parts_s in (("zbv", 2), ("dualpipev", 3)):
        for overlap in (True, False):
            timeline = simulate(build_schedule(name, 2, 1, 2), times, overlap)
            assert timeline.step_s == there_and_back_s + weight_parts_s


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_trace_has_every_action(name):
    chunks = CHUNKS[SCHEDULES[name].chunks][-1]
    schedule = build_schedule(name, 3, 4, chunks)
    ones = (1.0,) * schedule.num_stages
    times = StageTimes(
        forward_s=ones, backward_s=ones, backward_input_s=ones, backward_weight_s=ones
    )
    timeline = simulate(schedule, times)
    entries = json.loads(chrome_trace(timeline))["traceEvents"]
    slices = [entry["name"] for entry in entries if entry["ph"] == "X"]
    assert sorted(slices) == sorted(str(event.action) for event in timeline.events())


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_grid_shows_every_action(name):
    chunks = CHUNKS[SCHEDULES[name].chunks][-1]
    schedule = build_schedule(name, 3, 4, chunks)
    cells = [line.split("|")[1].split() for line in render_grid(schedule).splitlines()[1:]]
    rows = [[str(action) for action in row] for row in finite(schedule, 2).ranks]
    assert [[cell for cell in row if cell != "."] for row in cells] == rows


@pytest.mark.parametrize(("name", "chunks"), [*product(SCHEDULES, [1, 2, 3])])
def test_a_number_of_chunks_is_taken_or_refused_as_the_table_says(name, chunks):
    taken = chunks in CHUNKS[SCHEDULES[name].chunks]
    assert (SCHEDULES[name].why_not(2, chunks, 4) is None) == taken
    if taken:
        assert build_schedule(name, 2, 4, chunks).num_stages == 2 * chunks
    else:
        with pytest.raises(InputError, match=f"'{name}' over {chunks} stages per rank; it takes"):
            build_schedule(name, 2, 4, chunks)


def test_the_lists_of_small_cases():
    """Drawn by hand from the figures: breadth-first, ZB-H1, ZB-V, DualPipeV, PipeDream."""
    rows = {
        ("looped-bfs", 2, 2, 2): (
            "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
            "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1",
        ),
        ("zb-h1", 2, 3, 1): (
            "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2",
            "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2",
        ),
        ("zbv", 2, 3, 2): (
            "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2",
            "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2",
        ),
        ("dualpipev", 1, 2, 2): ("0F0 1F0 0F1 1B0 1F1 0B0 1B1 0I1 0W1",),
        ("pipedream", 2, 2, 1): ("0F0 0B1 0F1 0B0", "1F0 1B0 1F1 1B1"),
    }
    for size, expected in rows.items():
        assert tuple(build_schedule(*size).rows()) == expected
