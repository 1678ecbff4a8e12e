"""The schedules of torch.distributed.pipelining as a second witness.

Their action lists, without idle slots and communication, become our `Schedule`. Whatever they offer
must be valid here, and ours must have no more bubble on the same costs.
"""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from autopar.schedules.action import Action, ActionKind, Schedule
from autopar.schedules.in_flight import peak_in_flight, peak_weighted
from autopar.schedules.lower import insert_communication
from autopar.schedules.registry import build_schedule
from autopar.schedules.simulate import simulate
from autopar.schedules.timeline import StageTimes
from autopar.schedules.validate import validate

KINDS = {kind.value for kind in ActionKind if kind.is_compute}


def convert(name, order, stages, micro_batches):
    rows = []
    for rank in sorted(order):
        flat = [b for a in order[rank] if a for b in (a.sub_actions or [a])]
        rows.append(
            " ".join(str(action) for action in flat if action.computation_type.value in KINDS)
        )
    return Schedule.parse(name, stages, micro_batches, rows)


def single(name, stages, micro_batches):
    stage = SimpleNamespace(num_stages=stages, has_backward=True, is_last=False)
    order = getattr(torch_schedules, name)(stage, micro_batches).pipeline_order
    return convert(name, order, stages, micro_batches)


def multi(name, ranks, local, micro_batches):
    stages = [
        SimpleNamespace(
            num_stages=ranks * local,
            group_size=ranks,
            group_rank=0,
            stage_index=i * ranks,
            is_first=i == 0,
            is_last=False,
            submod=None,
        )
        for i in range(local)
    ]
    order = getattr(torch_schedules, name)(stages, micro_batches).pipeline_order
    return convert(name, order, ranks * local, micro_batches)


def torch_one_f_one_b(stages, micro_batches):
    """torch 2.13 counts the last rank's forwards from 1 in this table (not when it runs it)."""
    schedule = single("Schedule1F1B", stages, micro_batches)
    last = tuple(
        Action(a.kind, a.stage, a.micro_batch - (a.kind is ActionKind.FORWARD))
        for a in schedule.ranks[-1]
    )
    return Schedule(
        name=schedule.name,
        num_stages=stages,
        num_micro_batches=micro_batches,
        ranks=(*schedule.ranks[:-1], last),
    )


SIZES = [(1, 1), (1, 4), (2, 2), (2, 5), (3, 3), (4, 8), (4, 17), (8, 16)]


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_gpipe_and_one_f_one_b_are_the_same_lists(stages, micro_batches):
    assert (
        build_schedule("gpipe", stages, micro_batches).ranks
        == single("ScheduleGPipe", stages, micro_batches).ranks
    )
    assert (
        build_schedule("1f1b", stages, micro_batches).ranks
        == torch_one_f_one_b(stages, micro_batches).ranks
    )


MULTI = [
    ("ScheduleInterleaved1F1B", 1),
    ("ScheduleInterleaved1F1B", 2),
    ("ScheduleInterleaved1F1B", 3),
    ("ScheduleLoopedBFS", 2),
    ("ScheduleInterleavedZeroBubble", 2),
    ("ScheduleZBVZeroBubble", 2),
    ("ScheduleDualPipeV", 2),
]


def unit_times(stages):
    ones = (1.0,) * stages
    return StageTimes(
        forward_s=ones, backward_s=(2.0,) * stages, backward_input_s=ones, backward_weight_s=ones
    )


@pytest.mark.parametrize(("name", "local"), MULTI)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("micro_batches", [8, 16])
def test_every_schedule_of_theirs_is_valid_here(name, local, ranks, micro_batches):
    schedule = multi(name, ranks, local, micro_batches)
    validate(schedule)
    lowered = insert_communication(schedule)
    validate(lowered)
    timeline = simulate(lowered, unit_times(schedule.num_stages))
    assert timeline.busy_s == (3.0 * local * micro_batches,) * ranks
    assert 0 < timeline.bubble_fraction < 0.5


@pytest.mark.parametrize("local", [1, 2, 4])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (4, 16)])
def test_their_interleaved_bubble_is_the_published_one(local, ranks, micro_batches):
    """(B-1)/(v*M + B-1), Narayanan et al., 2021 (arXiv:2104.04473), section 2.2."""
    schedule = multi("ScheduleInterleaved1F1B", ranks, local, micro_batches)
    ones = (1.0,) * schedule.num_stages
    timeline = simulate(schedule, StageTimes(forward_s=ones, backward_s=ones))
    expected = (ranks - 1) / (local * micro_batches + ranks - 1)
    assert timeline.bubble_fraction == pytest.approx(expected, abs=1e-12)


OURS = {
    "ScheduleInterleaved1F1B": "interleaved-1f1b",
    "ScheduleInterleavedZeroBubble": "interleaved-zb",
    "ScheduleZBVZeroBubble": "zbv",
    "ScheduleDualPipeV": "dualpipev",
    "ScheduleLoopedBFS": "looped-bfs",
}
TWO_STAGES = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")


def theirs_or_none(name, ranks, local, micro_batches):
    try:
        return multi(name, ranks, local, micro_batches)
    except ValueError:
        return None  # sizes that they do not take


@pytest.mark.parametrize("name", [name for name in OURS if name != "ScheduleLoopedBFS"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_several_stages_per_rank_are_the_same_lists(name, ranks):
    compared = 0
    for local in (2,) if name in TWO_STAGES else (1, 2, 3):
        for micro_batches in range(1, 4 * ranks + 4):
            ours = build_schedule(OURS[name], ranks, micro_batches, local)
            theirs = theirs_or_none(name, ranks, local, micro_batches)
            if theirs is not None:
                assert ours.ranks == theirs.ranks
                compared += 1
    assert compared >= 6


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_looped_bfs_is_the_same_but_for_the_order_of_backwards_within_a_stage(ranks):
    for local, micro_batches in ((1, 1), (2, 3), (3, 4), (2, 9)):
        ours = build_schedule("looped-bfs", ranks, micro_batches, local)
        theirs = multi("ScheduleLoopedBFS", ranks, local, micro_batches)
        mirrored = tuple(
            tuple(
                Action(a.kind, a.stage, micro_batches - 1 - a.micro_batch)
                if a.kind is ActionKind.BACKWARD
                else a
                for a in row
            )
            for row in theirs.ranks
        )
        assert ours.ranks == mirrored


@st.composite
def costs(draw, stages):
    def some(count):
        numbers = st.integers(0, 9).map(float)
        return tuple(draw(st.lists(numbers, min_size=count, max_size=count)))

    return StageTimes(
        forward_s=some(stages),
        backward_s=some(stages),
        backward_input_s=some(stages),
        backward_weight_s=some(stages),
        send_forward_s=some(stages - 1),
        send_backward_s=some(stages - 1),
    )


@settings(max_examples=100)
@given(data=st.data(), name=st.sampled_from(list(OURS)), ranks=st.integers(1, 4))
def test_ours_takes_no_longer_and_holds_no_more_than_theirs(data, name, ranks):
    local = 2 if name in TWO_STAGES else data.draw(st.integers(1, 3))
    micro_batches = data.draw(st.integers(1, 12))
    theirs = theirs_or_none(name, ranks, local, micro_batches)
    ours = build_schedule(OURS[name], ranks, micro_batches, local)
    validate(ours)
    if theirs is None:
        return
    times = data.draw(costs(ranks * local))
    mine, other = (simulate(schedule, times) for schedule in (ours, theirs))
    assert mine.busy_s == other.busy_s
    assert mine.step_s <= other.step_s
    saved = data.draw(st.lists(st.integers(0, 9), min_size=ranks * local, max_size=ranks * local))
    assert peak_weighted(ours, saved) == peak_weighted(theirs, saved)


@settings(max_examples=50)
@given(
    size=st.sampled_from([(2, 4), (3, 6), (4, 8)]),
    work=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=4, max_size=4),
)
def test_ours_has_no_more_bubble_than_theirs(size, work):
    stages, micro_batches = size
    forward_s, backward_s = (tuple(map(float, s)) for s in zip(*work[:stages], strict=True))
    times = StageTimes(forward_s=forward_s, backward_s=backward_s)
    ours = build_schedule("1f1b", stages, micro_batches)
    for theirs in (
        single("ScheduleGPipe", stages, micro_batches),
        torch_one_f_one_b(stages, micro_batches),
    ):
        assert (
            simulate(ours, times).bubble_fraction <= simulate(theirs, times).bubble_fraction + 1e-12
        )
        assert all(
            mine <= other
            for mine, other in zip(peak_in_flight(ours), peak_in_flight(theirs), strict=True)
        )
