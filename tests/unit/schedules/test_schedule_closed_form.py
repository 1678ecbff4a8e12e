import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import InputError
from autopar.schedules.closed_form import (
    PERIODS,
    flush_step_lower_bound_s,
    flush_step_s,
    gpipe_period_s,
    one_f_one_b_period_s,
)
from autopar.schedules.registry import SCHEDULES, build_schedule
from autopar.schedules.simulate import simulate
from autopar.schedules.timeline import StageTimes

seconds = st.integers(0, 12).map(float)
micro_batch_counts = st.integers(1, 14)


@st.composite
def stage_times(draw, sends=True, proportional=False, max_stages=7):
    stages = draw(st.integers(1, max_stages))

    def tuple_of(size):
        return tuple(draw(st.lists(seconds, min_size=size, max_size=size)))

    forward_s = tuple_of(stages)
    ratio = draw(st.sampled_from([0.5, 1.0, 2.0, 3.0]))
    backward_s = tuple(ratio * s for s in forward_s) if proportional else tuple_of(stages)
    size = stages - 1 if sends else 0
    return StageTimes(
        forward_s=forward_s,
        backward_s=backward_s,
        send_forward_s=tuple_of(size),
        send_backward_s=tuple_of(size),
    )


def simulated_s(name, times, micro_batches):
    return simulate(build_schedule(name, times.num_stages, micro_batches), times).step_s


def test_every_closed_form_belongs_to_a_schedule():
    assert PERIODS.keys() <= SCHEDULES.keys()


def test_the_form_is_sum_and_bottleneck():
    times = StageTimes(forward_s=(1.0, 2.0, 1.0), backward_s=(2.0, 4.0, 2.0))
    assert flush_step_s(times, 5) == 12 + 4 * 6
    assert flush_step_s(times, 5, "gpipe") == 12 + 4 * 6


def test_gpipe_pays_for_the_longest_forward_and_the_longest_backward():
    times = StageTimes(forward_s=(3.0, 1.0), backward_s=(1.0, 5.0))
    assert gpipe_period_s(times) == 8
    assert one_f_one_b_period_s(times) == 6


def test_one_f_one_b_cannot_hide_sends():
    """Four equal stages of T = 3 and three boundaries of 2 x 0.5: (12 + 3) / 4."""
    times = StageTimes(
        forward_s=(1.0,) * 4,
        backward_s=(2.0,) * 4,
        send_forward_s=(0.5,) * 3,
        send_backward_s=(0.5,) * 3,
    )
    assert one_f_one_b_period_s(times) == 3.75
    assert gpipe_period_s(times) == 3.0
    assert simulated_s("1f1b", times, 9) == 15 + 8 * 3.75
    assert simulated_s("gpipe", times, 9) == 15 + 8 * 3.0


@pytest.mark.parametrize("name", PERIODS)
@given(stages=st.integers(1, 9), micro_batches=micro_batch_counts, work=st.tuples(seconds, seconds))
def test_equal_to_the_simulation_for_equal_stages(name, stages, micro_batches, work):
    times = StageTimes(forward_s=(work[0],) * stages, backward_s=(work[1],) * stages)
    assert flush_step_s(times, micro_batches, name) == simulated_s(name, times, micro_batches)
    assert flush_step_s(times, micro_batches, name) == sum(work) * (micro_batches + stages - 1)


@given(
    stages=st.integers(1, 9),
    micro_batches=micro_batch_counts,
    work=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    sends=st.tuples(st.integers(0, 9), st.integers(0, 9)),
)
def test_one_f_one_b_form_for_equal_stages_and_sends(stages, micro_batches, work, sends):
    forward_s, backward_s = map(float, work)
    out_s, back_s = (min(send, forward_s, backward_s) for send in sends)
    times = StageTimes(
        forward_s=(forward_s,) * stages,
        backward_s=(backward_s,) * stages,
        send_forward_s=(out_s,) * (stages - 1),
        send_backward_s=(back_s,) * (stages - 1),
    )
    above_s = flush_step_s(times, micro_batches) - simulated_s("1f1b", times, micro_batches)
    assert -1e-9 <= above_s < forward_s + backward_s + out_s + back_s
    if (micro_batches - 1) % stages == 0:
        assert above_s == pytest.approx(0, abs=1e-9)


@given(times=stage_times(), micro_batches=micro_batch_counts)
def test_gpipe_form_is_exact(times, micro_batches):
    assert flush_step_s(times, micro_batches, "gpipe") == simulated_s("gpipe", times, micro_batches)


@settings(max_examples=300)
@given(times=stage_times(), micro_batches=micro_batch_counts)
def test_one_f_one_b_form_is_off_by_no_more_than_documented(times, micro_batches):
    form_s, real_s = flush_step_s(times, micro_batches), simulated_s("1f1b", times, micro_batches)
    short_s = max(0.0, gpipe_period_s(times) - one_f_one_b_period_s(times))
    fill = min(times.num_stages, micro_batches) - 1
    assert real_s <= form_s + fill * short_s + 1e-9


@given(times=stage_times(sends=False, proportional=True), micro_batches=micro_batch_counts)
def test_one_f_one_b_form_is_an_upper_bound_for_proportional_backwards(times, micro_batches):
    form_s = flush_step_s(times, micro_batches)
    assert simulated_s("1f1b", times, micro_batches) <= form_s + 1e-9
    stage_s = [f + b for f, b in zip(times.forward_s, times.backward_s, strict=True)]
    assert form_s == sum(stage_s) + (micro_batches - 1) * max(stage_s)


@pytest.mark.parametrize("name", PERIODS)
@given(times=stage_times(), micro_batches=micro_batch_counts)
def test_nothing_beats_the_lower_bound(name, times, micro_batches):
    bound_s = flush_step_lower_bound_s(times, micro_batches)
    assert bound_s <= simulated_s(name, times, micro_batches) + 1e-9


def test_the_lower_bound_is_reached_by_a_slow_first_stage():
    times = StageTimes(forward_s=(4.0, 1.0), backward_s=(4.0, 1.0))
    assert flush_step_lower_bound_s(times, 6) == 48
    assert simulated_s("1f1b", times, 6) == 48


def test_a_schedule_without_closed_form_is_refused():
    times = StageTimes(forward_s=(1.0,), backward_s=(1.0,))
    with pytest.raises(InputError, match="no closed form for schedule 'zbv'"):
        flush_step_s(times, 2, "zbv")
