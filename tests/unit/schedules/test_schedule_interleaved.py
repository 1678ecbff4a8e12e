from itertools import product

import pytest

from autopar.errors import InputError
from autopar.schedules.in_flight import peak_in_flight, peak_weighted
from autopar.schedules.lower import insert_communication
from autopar.schedules.placement import looped, vee
from autopar.schedules.registry import SCHEDULES, build_schedule
from autopar.schedules.simulate import simulate
from autopar.schedules.timeline import StageTimes
from autopar.schedules.validate import validate


def interleaved(ranks, chunks, micro_batches):
    return build_schedule("interleaved-1f1b", ranks, micro_batches, chunks)


def test_the_lists_of_a_small_case():
    """Two ranks of two stages; rank 1 leads by one round, rank 0 by two forwards more."""
    assert list(interleaved(2, 2, 2).rows()) == [
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1",
    ]


@pytest.mark.parametrize(("ranks", "chunks"), [*product([1, 2, 3, 4, 6], [1, 2, 3, 4])])
def test_any_number_of_micro_batches_is_valid(ranks, chunks):
    for micro_batches in range(1, 4 * ranks):
        schedule = interleaved(ranks, chunks, micro_batches)
        validate(insert_communication(schedule))
        assert schedule.stage_rank == looped(ranks, chunks)


@pytest.mark.parametrize(("ranks", "chunks"), [*product([1, 2, 4, 6], [1, 2, 3])])
@pytest.mark.parametrize("backward_s", [1.0, 2.0])
def test_the_bubble_is_the_published_one_also_with_a_remainder(ranks, chunks, backward_s):
    """(p - 1) / (v M + p - 1): Narayanan et al., 2021 (arXiv:2104.04473), section 2.2."""
    times = StageTimes(
        forward_s=(1.0,) * (ranks * chunks), backward_s=(backward_s,) * (ranks * chunks)
    )
    for micro_batches in range(ranks, 4 * ranks):
        timeline = simulate(interleaved(ranks, chunks, micro_batches), times)
        expected = (ranks - 1) / (chunks * micro_batches + ranks - 1)
        assert timeline.bubble_fraction == pytest.approx(expected, abs=1e-12)


def test_the_first_rank_holds_the_published_number_of_stage_activations():
    """p v + p - 1: Korthikanti et al., 2022 (arXiv:2205.05198), section 4.2.3."""
    schedule = interleaved(4, 2, 16)
    assert peak_weighted(schedule, [1] * 8) == (4 * 2 + 4 - 1, 9, 7, 5)
    assert peak_in_flight(schedule) == (8, 8, 7, 5, 4, 4, 3, 1)
    assert peak_weighted(schedule, [3, 0, 0, 0, 0, 0, 0, 1]) == (24, 0, 0, 1)


def test_a_v_shape_turns_on_one_rank():
    assert looped(3, 2) == (0, 1, 2, 0, 1, 2)
    assert vee(3, 2) == (0, 1, 2, 2, 1, 0)
    assert vee(2, 3) == (0, 1, 1, 0, 0, 1)
    assert vee(1, 2) == (0, 0)


def test_chunks_that_a_schedule_cannot_take_are_refused():
    with pytest.raises(InputError, match=r"'1f1b' over 2 stages per rank; it takes one stage per"):
        build_schedule("1f1b", 2, 4, chunks=2)
    with pytest.raises(InputError, match=r"'gpipe' over 0 chunks; expected at least one"):
        build_schedule("gpipe", 2, 4, chunks=0)
    assert SCHEDULES["interleaved-1f1b"].why_not(2, 5, 3) is None
