import pytest

from autopar.errors import InputError
from autopar.schedules.action import Schedule
from autopar.schedules.in_flight import peak_in_flight
from autopar.schedules.lower import insert_communication
from autopar.schedules.order import execute
from autopar.schedules.registry import build_schedule
from autopar.schedules.simulate import simulate
from autopar.schedules.timeline import StageTimes


def uniform(stages, forward_s=1.0, backward_s=1.0, send_s=0.0):
    return StageTimes(
        forward_s=(forward_s,) * stages,
        backward_s=(backward_s,) * stages,
        send_forward_s=(send_s,) * (stages - 1),
        send_backward_s=(send_s,) * (stages - 1),
    )


def spans(timeline):
    return {str(e.action): (e.start_s, e.end_s) for e in timeline.events()}


# (B-1)/(M+B-1): Huang et al., 2019 (GPipe, arXiv:1811.06965), section 2.3; for 1F1B with a flush
# Narayanan et al., 2021 (arXiv:2104.04473), section 2.2. 75 %, 27 %, 16 %, 8.6 % for B = 4.
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    ("stages", "micro_batches", "bubble"),
    [(4, 1, 0.75), (4, 8, 3 / 11), (4, 16, 3 / 19), (4, 32, 3 / 35), (1, 5, 0.0), (8, 3, 0.7)],
)
def test_bubble_of_equal_stages(name, stages, micro_batches, bubble):
    timeline = simulate(build_schedule(name, stages, micro_batches), uniform(stages))
    assert timeline.bubble_fraction == pytest.approx(bubble, abs=1e-12)
    assert timeline.busy_s == (2.0 * micro_batches,) * stages
    assert timeline.step_s == 2.0 * (micro_batches + stages - 1)


def check_clocks(name, stages, micro_batches):
    schedule = build_schedule(name, stages, micro_batches)
    expected = 2 * (micro_batches + stages - 1)
    assert execute(schedule).num_clocks == expected
    assert simulate(schedule, uniform(stages)).step_s == expected


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [1, 2, 3, 5, 16, 128])
@pytest.mark.parametrize("micro_batches", [2, 3, 9, 32])
def test_clock_count(name, stages, micro_batches):
    check_clocks(name, stages, micro_batches)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_clock_count_over_the_whole_range(name):
    for stages in range(1, 129):
        for micro_batches in range(2, 33) if stages % 16 == 1 else (2, 32):
            check_clocks(name, stages, micro_batches)


@pytest.mark.parametrize("stages", [1, 2, 4, 9])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 20])
def test_micro_batches_in_flight(stages, micro_batches):
    gpipe, one_f_one_b = (
        peak_in_flight(build_schedule(name, stages, micro_batches)) for name in ("gpipe", "1f1b")
    )
    assert gpipe == (micro_batches,) * stages
    assert one_f_one_b == tuple(min(micro_batches, stages - i) for i in range(stages))


def test_a_split_backward_holds_activations_until_its_weight_part():
    split = Schedule.parse("zb", 1, 2, ["0F0 0I0 0F1 0I1 0W0 0W1"])
    full = Schedule.parse("b", 1, 2, ["0F0 0B0 0F1 0B1"])
    assert (peak_in_flight(split), peak_in_flight(full)) == ((2,), (1,))


def test_communication_does_not_change_what_is_in_flight():
    schedule = build_schedule("1f1b", 4, 6)
    assert peak_in_flight(insert_communication(schedule)) == peak_in_flight(schedule)


def test_overlapped_sends_cost_the_sender_nothing_and_delay_the_receiver():
    timeline = simulate(build_schedule("gpipe", 2, 2), uniform(2, 2.0, 3.0, 1.0))
    assert spans(timeline) == {
        "0F0": (0, 2),
        "0SF0": (2, 3),
        "0F1": (2, 4),
        "0SF1": (4, 5),
        "1RF0": (2, 3),
        "1F0": (3, 5),
        "1RF1": (4, 5),
        "1F1": (5, 7),
        "1B0": (7, 10),
        "1SB0": (10, 11),
        "0RB0": (10, 11),
        "0B0": (11, 14),
        "1B1": (10, 13),
        "1SB1": (13, 14),
        "0RB1": (13, 14),
        "0B1": (14, 17),
    }
    assert timeline.busy_s == (10, 10)
    assert timeline.finish_s == (17, 14)
    assert timeline.bubble_fraction == pytest.approx(1 - 20 / 34)


def test_sends_of_a_rank_go_one_after_the_other():
    timeline = simulate(build_schedule("gpipe", 2, 3), uniform(2, 1.0, 1.0, 4.0))
    assert [spans(timeline)[f"0SF{i}"] for i in range(3)] == [(1, 5), (5, 9), (9, 13)]
    assert spans(timeline)["1F2"] == (13, 14)


def test_without_overlap_a_message_takes_compute_time_on_both_sides():
    schedule = build_schedule("gpipe", 2, 2)
    timeline = simulate(schedule, uniform(2, 2.0, 3.0, 1.0), overlap=False)
    assert spans(timeline) == {
        "0F0": (0, 2),
        "0SF0": (2, 3),
        "0F1": (3, 5),
        "0SF1": (5, 6),
        "1RF0": (2, 3),
        "1F0": (3, 5),
        "1RF1": (5, 6),
        "1F1": (6, 8),
        "1B0": (8, 11),
        "1SB0": (11, 12),
        "0RB0": (11, 12),
        "0B0": (12, 15),
        "1B1": (12, 15),
        "1SB1": (15, 16),
        "0RB1": (15, 16),
        "0B1": (16, 19),
    }
    assert timeline.busy_s == (10, 10)


def test_a_receiver_that_is_late_still_pays_for_a_message_without_overlap():
    times = StageTimes(
        forward_s=(1.0, 5.0), backward_s=(1.0, 1.0), send_forward_s=(2.0,), send_backward_s=(0.0,)
    )
    timeline = simulate(build_schedule("gpipe", 2, 2), times, overlap=False)
    assert spans(timeline)["0SF1"] == (4, 6)
    assert spans(timeline)["1F0"] == (3, 8)
    assert spans(timeline)["1RF1"] == (8, 10)


def test_boundaries_have_their_own_send_times():
    times = StageTimes(
        forward_s=(1.0,) * 3,
        backward_s=(1.0,) * 3,
        send_forward_s=(10.0, 20.0),
        send_backward_s=(300.0, 400.0),
    )
    for overlap in (True, False):
        assert simulate(build_schedule("1f1b", 3, 1), times, overlap).step_s == 6 + 730


def test_split_backwards_use_their_own_times():
    split = Schedule.parse("zb", 2, 1, ["0F0 0I0 0W0", "1F0 1I0 1W0"])
    times = StageTimes(
        forward_s=(1.0, 1.0),
        backward_s=(),
        backward_input_s=(2.0, 3.0),
        backward_weight_s=(5.0, 7.0),
    )
    timeline = simulate(split, times)
    assert spans(timeline)["0I0"] == (5, 7)
    assert timeline.finish_s == (12, 12)
    assert timeline.busy_s == (8, 11)


def test_lowered_once_or_on_the_way_is_the_same():
    schedule, times = build_schedule("1f1b", 4, 7), uniform(4, 1.0, 2.0, 0.25)
    assert simulate(schedule, times) == simulate(insert_communication(schedule), times)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"forward_s": (1.0,)}, "forward_s has 1 entries, expected 2"),
        ({"backward_s": (1.0,) * 3}, "backward_s has 3 entries, expected 2"),
        ({"send_forward_s": (1.0,) * 2}, "send_forward_s has 2 entries, expected 1"),
        ({"send_backward_s": (1.0,) * 2}, "send_backward_s has 2 entries, expected 1"),
    ],
)
def test_times_that_do_not_fit_are_refused(change, message):
    fields = {"forward_s": (1.0,) * 2, "backward_s": (1.0,) * 2} | change
    with pytest.raises(InputError, match=message):
        simulate(build_schedule("gpipe", 2, 2), StageTimes(**fields))


def test_split_times_are_needed_only_by_split_schedules():
    split = Schedule.parse("zb", 1, 1, ["0F0 0I0 0W0"])
    with pytest.raises(InputError, match="backward_input_s has 0 entries, expected 1"):
        simulate(split, uniform(1))


def test_a_schedule_that_stands_still_is_refused():
    stuck = Schedule.parse("stuck", 2, 2, ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"])
    with pytest.raises(InputError, match=r"rank 0 never gets past position 2, action 0RB0"):
        simulate(stuck, uniform(2))


def test_a_step_of_no_length_has_no_bubble():
    assert simulate(build_schedule("gpipe", 2, 2), uniform(2, 0.0, 0.0)).bubble_fraction == 0.0
