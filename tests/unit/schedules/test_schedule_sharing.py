"""Ranks that share cores: a rank that waits leaves its part of them to the others."""

import pytest

from autopar.schedules.action import ActionKind
from autopar.schedules.registry import build_schedule
from autopar.schedules.sharing import share_cores
from autopar.schedules.simulate import simulate
from autopar.schedules.step import StageLoad, simulate_step
from autopar.schedules.timeline import StageTimes, Timeline

STEPS = (("gpipe", 4, 8), ("1f1b", 4, 8), ("1f1b", 4, 2), ("zb-h1", 4, 6), ("1f1b", 2, 1))


def timeline(name: str, ranks: int, micro_batches: int, *, send_s: float = 0.0) -> Timeline:
    times = StageTimes(
        forward_s=(1.0,) * ranks,
        backward_s=(2.0,) * ranks,
        backward_input_s=(1.0,) * ranks,
        backward_weight_s=(1.0,) * ranks,
        send_forward_s=(send_s,) * (ranks - 1),
        send_backward_s=(send_s,) * (ranks - 1),
    )
    return simulate(build_schedule(name, ranks, micro_batches), times)


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_with_a_core_for_each_nothing_changes(step):
    alone = timeline(*step)
    found = share_cores(alone, 1.0, (0.25,) * step[1], (0.5,) * step[1])
    shared, ends_s = found.timeline, found.end_s
    assert found.begin_s == (0.25,) * step[1]
    assert shared.finish_s == pytest.approx([0.25 + s for s in alone.finish_s])
    assert sum(shared.start_s, ()) == pytest.approx(
        [0.25 + s for row in alone.start_s for s in row]
    )
    assert ends_s == pytest.approx([finish_s + 0.75 for finish_s in alone.finish_s])
    assert shared.busy_s == pytest.approx(alone.busy_s)


@pytest.mark.parametrize("step", STEPS, ids=str)
@pytest.mark.parametrize("slowdown", [1.5, 2.0, 4.0])
def test_a_step_takes_what_the_cores_and_the_longest_path_take(step, slowdown):
    alone = timeline(*step)
    shared = share_cores(alone, slowdown, (0.0,) * step[1], (0.0,) * step[1]).timeline
    work_s, path_s = sum(alone.busy_s) / step[1], alone.step_s / slowdown
    assert max(work_s, path_s) <= shared.step_s + 1e-9 <= work_s + path_s + 1e-9


def test_one_core_for_all_is_never_idle():
    alone = timeline("gpipe", 4, 3)
    found = share_cores(alone, 4.0, (0.5, 0.0, 2.0, 0.0), (0.0,) * 4)
    assert max(found.end_s) == pytest.approx((sum(alone.busy_s) + 2.5) / 4)


def test_two_stages_by_hand():
    # one micro-batch: each of four actions of 1 and 2 s runs alone, twice as fast
    found = share_cores(timeline("1f1b", 2, 1), 2.0, (0.0, 0.0), (1.0, 1.0))
    shared, ends_s = found.timeline, found.end_s
    assert shared.end_s[1][-2:] == pytest.approx((2.0, 2.0))
    # then the last stage sums gradients for 1 s beside the backward of the first, which has half of
    # the cores until 3 s, ends at 3.5 s and sums for 1 s too: alone that is no faster
    assert ends_s == pytest.approx((4.5, 3.0))


def test_collectives_are_no_faster_alone():
    waits_s = {(ActionKind.FORWARD, 0): 0.5, (ActionKind.BACKWARD, 0): 1.0}
    found = share_cores(timeline("1f1b", 2, 1), 2.0, (0.0, 0.0), (0.0, 0.0), waits_s)
    assert found.end_s[0] == pytest.approx((0.25 + 0.5) + 0.5 + 1.0 + (0.5 + 1.0))
    assert found.timeline.busy_s == pytest.approx((2.25, 1.5))


def test_a_message_is_waited_for():
    alone = timeline("1f1b", 2, 1, send_s=0.5)
    shared = share_cores(alone, 2.0, (0.0, 0.0), (0.0, 0.0)).timeline
    assert shared.step_s == pytest.approx(0.5 + 0.5 + 0.5 + 1.0 + 0.5 + 1.0)


def test_a_message_takes_its_senders_part():
    # one core: two forwards of 1 s and the message between them, then the other rank's beside
    alone = timeline("gpipe", 2, 2, send_s=0.5)
    shared = share_cores(alone, 2.0, (0.0, 0.0), (0.0, 0.0)).timeline
    assert shared.start_s[0][:3] == pytest.approx((0.0, 0.5, 1.0))
    load = StageLoad(forward_s=1.0, backward_s=2.0, send_forward_s=0.5, send_backward_s=0.5)
    step = simulate_step(build_schedule("gpipe", 2, 2), (load,) * 2, slowdown=2.0)
    assert (
        step.step_s
        > simulate_step(
            build_schedule("gpipe", 2, 2),
            (StageLoad(forward_s=1.0, backward_s=2.0),) * 2,
            slowdown=2.0,
        ).step_s
    )
    assert min(rank.messages_s for rank in step.ranks) >= 2 * 0.5


def test_a_message_takes_as_much_of_its_receiver():
    times = StageTimes(
        forward_s=(1.0, 2.0), backward_s=(1.0, 1.0), send_forward_s=(0.5,), send_backward_s=(0.0,)
    )
    alone = simulate(build_schedule("gpipe", 2, 2), times)
    shared = share_cores(alone, 2.0, (0.0, 0.0), (0.0, 0.0)).timeline
    rows = zip(shared.schedule.ranks[1], shared.end_s[1], strict=True)
    forward_s = next(end_s for action, end_s in rows if action.kind is ActionKind.FORWARD)
    # alone to 0.5 s, the message to 1 s; both compute to 2 s; beside the second message one of
    # three takes a third of the core for 0.5 s; what is left runs alone
    assert forward_s == pytest.approx(2.5 + (1.0 - 0.5 * 2 / 3) / 2)


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_where_the_seconds_of_a_rank_go_adds_up(schedule):
    load = StageLoad(
        forward_s=1.0, backward_s=2.0, backward_weight_s=1.0, optimizer_s=0.5, sync_s=0.25
    )
    alone, shared = (
        simulate_step(build_schedule(schedule, 4, 8), (load,) * 4, slowdown=slowdown)
        for slowdown in (1.0, 2.0)
    )
    work_s = 8 * 3.0 + 0.5 + 0.25
    assert work_s < shared.step_s < alone.step_s
    for rank in shared.ranks:
        assert rank.step_s == pytest.approx(shared.step_s)
        assert rank.compute_s < work_s
    assert shared.sync_end_s != alone.sync_end_s
