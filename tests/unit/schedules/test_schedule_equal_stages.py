import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import InputError
from autopar.schedules.equal_stages import (
    StageWork,
    bubble_s,
    dualpipe_bubble_bound_s,
    rank_in_flight,
)
from autopar.schedules.in_flight import peak_weighted
from autopar.schedules.registry import SCHEDULES, build_schedule
from autopar.schedules.simulate import simulate
from autopar.schedules.timeline import StageTimes

CHUNKS = {"one": (1,), "two": (2,), "many": (1, 2, 3)}
seconds = st.integers(1, 9).map(float)
works = st.builds(StageWork, forward_s=seconds, backward_input_s=seconds, backward_weight_s=seconds)


def simulated(name, ranks, micro_batches, chunks, work):
    stages = ranks * chunks
    times = StageTimes(
        forward_s=(work.forward_s,) * stages,
        backward_s=(work.backward_input_s + work.backward_weight_s,) * stages,
        backward_input_s=(work.backward_input_s,) * stages,
        backward_weight_s=(work.backward_weight_s,) * stages,
    )
    return simulate(build_schedule(name, ranks, micro_batches, chunks), times)


@st.composite
def sizes(draw, name):
    ranks = draw(st.integers(1, 6))
    return (
        ranks,
        draw(st.integers(ranks, 20)),
        draw(st.sampled_from(CHUNKS[SCHEDULES[name].chunks])),
    )


EXACT = [name for name in SCHEDULES if name not in ("zbv", "dualpipev")]


@pytest.mark.parametrize("name", EXACT)
@given(data=st.data(), work=works)
def test_the_bubble_is_the_simulated_one(name, data, work):
    ranks, micro_batches, chunks = data.draw(sizes(name))
    timeline = simulated(name, ranks, micro_batches, chunks, work)
    idle_s = timeline.step_s - timeline.busy_s[0]
    assert bubble_s(name, ranks, micro_batches, work) == pytest.approx(idle_s, abs=1e-9)


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_gpipe_and_one_f_one_b_have_the_same_bubble_with_few_micro_batches(micro_batches):
    work = StageWork(forward_s=2.0, backward_input_s=3.0, backward_weight_s=1.0)
    for name in ("gpipe", "1f1b"):
        timeline = simulated(name, 4, micro_batches, 1, work)
        assert timeline.step_s - timeline.busy_s[0] == 18
        assert bubble_s(name, 4, micro_batches, work) == 18


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("name", ["interleaved-1f1b", "looped-bfs"])
def test_several_stages_per_rank_divide_the_bubble(name, chunks):
    """(B - 1)/(v M + B - 1) of the step; 3/35 for B = 4, M = 16, v = 2."""
    work = StageWork(forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
    fraction = simulated(name, 4, 16, chunks, work).bubble_fraction
    assert fraction == pytest.approx(3 / (16 * chunks + 3), abs=1e-12)


def test_zb_h1_has_the_published_bubble_and_the_memory_of_one_f_one_b():
    """(p-1)(T_F + T_B - T_W): Qi et al., 2023 (arXiv:2401.10241), table 2."""
    work = StageWork(forward_s=4.0, backward_input_s=5.0, backward_weight_s=3.0)
    timeline = simulated("zb-h1", 4, 8, 1, work)
    assert timeline.step_s - timeline.busy_s[0] == 3 * (4 + 5 - 3)
    assert bubble_s("1f1b", 4, 8, work) == 3 * (4 + 5 + 3)
    held = {name: peak_weighted(build_schedule(name, 4, 8), [1] * 4) for name in ("1f1b", "zb-h1")}
    assert held == {"1f1b": (4, 3, 2, 1), "zb-h1": (4, 4, 4, 4)}


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
@pytest.mark.parametrize("extra", [0, 1, 6])
def test_zbv_never_idles_between_first_and_last_action(ranks, extra):
    micro_batches = 2 * ranks - 1 + extra
    work = StageWork(forward_s=2.0, backward_input_s=2.0, backward_weight_s=2.0)
    timeline = simulated("zbv", ranks, micro_batches, 2, work)
    for rank in range(ranks):
        compute = [e for e in timeline.events() if e.rank == rank and e.action.kind.is_compute]
        lasts_s = compute[-1].end_s - compute[0].start_s
        assert lasts_s == timeline.busy_s[rank] == 12 * micro_batches
    assert timeline.step_s - timeline.busy_s[0] == bubble_s("zbv", ranks, micro_batches, work)
    held = peak_weighted(build_schedule("zbv", ranks, micro_batches, 2), [1] * (2 * ranks))
    assert held == (2 * ranks,) * ranks


@given(ranks=st.integers(1, 6), extra=st.integers(0, 6), work=works)
def test_dualpipev_stays_below_its_published_bubble(ranks, extra, work):
    weight_s = min(work.backward_weight_s, work.backward_input_s)
    work = StageWork(
        forward_s=min(work.forward_s, work.backward_input_s + weight_s),
        backward_input_s=work.backward_input_s,
        backward_weight_s=weight_s,
    )
    micro_batches = 2 * ranks + extra
    timeline = simulated("dualpipev", ranks, micro_batches, 2, work)
    idle_s = timeline.step_s - timeline.busy_s[0]
    assert idle_s <= dualpipe_bubble_bound_s(ranks, work) + 1e-9
    assert idle_s >= (ranks - 1) * work.forward_s


@settings(max_examples=150)
@given(data=st.data())
def test_stages_in_flight_are_the_counted_ones(data):
    name = data.draw(st.sampled_from(list(SCHEDULES)))
    ranks, micro_batches, chunks = data.draw(sizes(name))
    few = data.draw(st.booleans()) and SCHEDULES[name].flushes
    micro_batches = data.draw(st.integers(1, ranks)) if few else micro_batches
    counted = peak_weighted(
        build_schedule(name, ranks, micro_batches, chunks), [1] * (ranks * chunks)
    )
    form = rank_in_flight(name, ranks, micro_batches, chunks)
    if SCHEDULES[name].chunks == "two" and micro_batches < 2 * ranks:
        assert all(mine <= most for mine, most in zip(counted, form, strict=True))
    else:
        assert counted == form


def test_where_there_is_no_closed_form_it_says_so():
    equal = StageWork(forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
    uneven = StageWork(forward_s=1.0, backward_input_s=2.0, backward_weight_s=1.0)
    with pytest.raises(InputError, match="there is one for gpipe, 1f1b"):
        bubble_s("dualpipev", 2, 8, equal)
    with pytest.raises(InputError, match="with 4 ranks it holds from 7 micro-batches on"):
        bubble_s("zbv", 4, 6, equal)
    with pytest.raises(InputError, match="holds where forward, input and weight part take equally"):
        bubble_s("zbv", 4, 8, uneven)
    with pytest.raises(InputError, match="no closed form for what schedule 'best' holds"):
        rank_in_flight("best", 2, 2)
