import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import InputError
from autopar.schedules.action import Schedule
from autopar.schedules.closed_form import one_f_one_b_period_s
from autopar.schedules.endless import closing, finite, opening, unroll
from autopar.schedules.in_flight import peak_in_flight, peak_weighted, weight_versions
from autopar.schedules.lower import insert_communication
from autopar.schedules.registry import SCHEDULES, build_schedule
from autopar.schedules.simulate import simulate
from autopar.schedules.timeline import StageTimes
from autopar.schedules.validate import validate


@st.composite
def sizes(draw):
    ranks = draw(st.integers(1, 6))
    return ranks, draw(st.integers(ranks, 14))


def uniform(stages, forward_s, backward_s):
    return StageTimes(forward_s=(forward_s,) * stages, backward_s=(backward_s,) * stages)


def test_a_run_is_opening_steps_and_closing():
    schedule = insert_communication(build_schedule("pipedream", 2, 2))
    assert list(schedule.rows()) == [
        "0F0 0SF0 0RB1 0B1 0F1 0SF1 0RB0 0B0",
        "1RF0 1F0 1B0 1SB0 1RF1 1F1 1B1 1SB1",
    ]
    assert next(opening(schedule).rows()) == "0F0 0SF0 0F1 0SF1 0RB0 0B0"
    assert list(closing(schedule).rows()) == ["0RB1 0B1", ""]
    assert next(unroll(schedule, 2).rows()) == (
        "0F0 0SF0 0F1 0SF1 0RB0 0B0 0F2 0SF2 0RB1 0B1 0F3 0SF3 0RB2 0B2 0RB3 0B3"
    )
    for part in (opening(schedule), closing(schedule), unroll(schedule, 2)):
        assert part.flushes


def test_a_schedule_that_drains_is_all_opening():
    schedule = build_schedule("zbv", 3, 5, 2)
    assert opening(schedule) == finite(schedule) == schedule
    assert closing(schedule).ranks == ((), (), ())


@given(size=sizes(), steps=st.integers(1, 5))
def test_any_number_of_steps_is_a_valid_schedule_with_its_messages(size, steps):
    ranks, micro_batches = size
    schedule = build_schedule("pipedream", ranks, micro_batches)
    run = unroll(schedule, steps)
    validate(run)
    assert run.num_micro_batches == steps * micro_batches
    assert unroll(insert_communication(schedule), steps) == insert_communication(run)
    one_f_one_b = build_schedule("1f1b", ranks, steps * micro_batches)
    assert run.ranks == one_f_one_b.ranks


@given(size=sizes(), work=st.tuples(st.integers(1, 9), st.integers(1, 9)))
def test_there_is_no_bubble_in_the_steady_state(size, work):
    ranks, micro_batches = size
    schedule = build_schedule("pipedream", ranks, micro_batches)
    timeline = simulate(schedule, uniform(ranks, *map(float, work)))
    assert timeline.bubble_fraction == 0
    assert timeline.step_s == sum(work) * micro_batches
    assert min(map(min, timeline.start_s)) == 0


@settings(max_examples=60)
@given(size=sizes(), data=st.data())
def test_the_period_is_that_of_one_f_one_b(size, data):
    """Exactly, up to four ranks; with five stages in the slowest round trip to within 1/64."""
    ranks, micro_batches = size

    def some(count):
        numbers = st.integers(1, 9).map(float)
        return tuple(data.draw(st.lists(numbers, min_size=count, max_size=count)))

    times = StageTimes(
        forward_s=some(ranks),
        backward_s=some(ranks),
        send_forward_s=some(ranks - 1),
        send_backward_s=some(ranks - 1),
    )
    step_s = simulate(build_schedule("pipedream", ranks, micro_batches), times).step_s
    assert step_s == pytest.approx(
        micro_batches * one_f_one_b_period_s(times), rel=1e-9 if ranks <= 4 else 1 / 64
    )


@given(size=sizes())
def test_a_stage_keeps_as_many_weights_as_micro_batches(size):
    """num_ranks - i: Narayanan et al., 2019 (PipeDream, SOSP), section 3.3."""
    ranks, micro_batches = size
    schedule = build_schedule("pipedream", ranks, micro_batches)
    assert weight_versions(schedule) == tuple(ranks - i for i in range(ranks))
    assert peak_in_flight(schedule) == weight_versions(schedule)
    assert peak_weighted(schedule, [10] * ranks) == tuple(10 * (ranks - i) for i in range(ranks))
    assert weight_versions(build_schedule("1f1b", ranks, micro_batches)) == (1,) * ranks


def test_fewer_micro_batches_than_ranks_are_refused():
    with pytest.raises(InputError, match="over 3 micro-batches; expected at least 4, one for each"):
        build_schedule("pipedream", 4, 3)
    assert SCHEDULES["pipedream"].why_not(4, 1, 4) is None


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["0F0 0B1 0F1 0B0", "1F0 1F1 1B1"], "rank 1, position 3, end of its list: 1B0 is missing"),
        (["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"], "deadlock"),
        (["0F0 0RB1 0B1 0F1 0SF1 0RB0 0B0", "1RF0 1F0 1B0 1SB0 1RF1 1F1 1B1 1SB1"], "0SF0"),
    ],
)
def test_faults_across_steps_are_found(rows, message):
    with pytest.raises(InputError, match=message):
        validate(Schedule.parse("stream", 2, 2, rows, flushes=False))


def test_weight_parts_may_run_in_the_next_step():
    rows = ["0F0 0I1 0W0 0F1 0I0 0W1", "1F0 1I0 1F1 1I1 1W0 1W1"]
    schedule = Schedule.parse("stream", 2, 2, rows, flushes=False)
    validate(schedule)
    validate(insert_communication(schedule))
    assert next(opening(schedule).rows()) == "0F0 0F1 0I0"
    assert list(closing(schedule).rows()) == ["0I1 0W0 0W1", ""]
    assert peak_in_flight(schedule) == (3, 2)
