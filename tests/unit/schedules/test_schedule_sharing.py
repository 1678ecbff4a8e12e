"""Ranks that share cores: a rank that waits leaves its part of them to the others."""

import pytest

from autopar.schedules.registry import build_schedule
from autopar.schedules.sharing import share_cores
from autopar.schedules.simulate import simulate
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
    alone = timeline(*step, send_s=0.25)
    shared, ends_s = share_cores(alone, (0.5,) * step[1], 1.0)
    assert shared.finish_s == pytest.approx(alone.finish_s)
    assert sum(shared.start_s, ()) == pytest.approx(sum(alone.start_s, ()))
    assert ends_s == pytest.approx([finish_s + 0.5 for finish_s in alone.finish_s])
    assert shared.busy_s == pytest.approx(alone.busy_s)


@pytest.mark.parametrize("step", STEPS, ids=str)
@pytest.mark.parametrize("slowdown", [1.5, 2.0, 4.0])
def test_a_step_takes_what_the_cores_and_the_longest_path_take(step, slowdown):
    alone = timeline(*step)
    shared, _ = share_cores(alone, (0.0,) * step[1], slowdown)
    work_s, path_s = sum(alone.busy_s) / step[1], alone.step_s / slowdown
    assert max(work_s, path_s) <= shared.step_s + 1e-9 <= work_s + path_s + 1e-9


def test_one_core_for_all_is_never_idle():
    alone = timeline("gpipe", 4, 3)
    shared, ends_s = share_cores(alone, (1.0, 0.0, 0.0, 3.0), 4.0)
    assert max(ends_s) == pytest.approx((sum(alone.busy_s) + 4.0) / 4)
    assert shared.step_s < max(ends_s)


def test_two_stages_by_hand():
    # one micro-batch: each of four actions of 1 and 2 s runs alone, twice as fast
    shared, ends_s = share_cores(timeline("1f1b", 2, 1), (1.0, 1.0), 2.0)
    assert shared.end_s[1][-2:] == pytest.approx((2.0, 2.0))
    # then the optimizer of the last stage runs beside the backward of the first, until it is done
    # at 3 s; the first ends its backward at 3.5 s and its own optimizer's step at 4 s
    assert ends_s == pytest.approx((4.0, 3.0))


def test_a_message_is_waited_for():
    shared, _ = share_cores(timeline("1f1b", 2, 1, send_s=0.5), (0.0, 0.0), 2.0)
    assert shared.step_s == pytest.approx(0.5 + 0.5 + 0.5 + 1.0 + 0.5 + 1.0)
