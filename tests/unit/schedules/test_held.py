"""The walk over a rank's actions, on numbers small enough to follow by hand."""

from __future__ import annotations

import pytest

from autopar.schedules.action import Action, ActionKind
from autopar.schedules.arrivals import arrivals
from autopar.schedules.held import StageMemory, memory_over, peak_bytes, update_bytes
from autopar.schedules.lower import insert_communication
from autopar.schedules.registry import build_schedule

STAGE = StageMemory(
    static_bytes=1000,
    gradient_bytes=100,
    saved_bytes=70,
    forward_bytes=75,
    backward_bytes=80,
    first_backward_bytes=110,
    last_backward_bytes=60,
    update_bytes=30,
)


def walk(schedule, stages, rank=0):
    row = schedule.ranks[rank]
    return [
        (str(action), peak, after)
        for action, peak, after in memory_over(row, stages, arrivals(schedule)[rank])
    ]


def test_gradients_come_as_activations_go():
    one = build_schedule("1f1b", 1, 1)
    assert walk(one, {0: STAGE}) == [("0F0", 1075, 1070), ("0B0", 1110, 1100)]
    assert update_bytes([STAGE]) == 1130
    assert peak_bytes(one.ranks[0], {0: STAGE}) == 1130


def test_gradients_stay_to_the_next_forward():
    found = walk(build_schedule("1f1b", 1, 3), {0: STAGE})
    assert [peak for _, peak, _ in found] == [1075, 1110, 1175, 1180, 1175, 1160]
    assert found[-1][2] == 1100


def test_a_flush_has_no_gradients_before_its_backwards():
    found = walk(build_schedule("gpipe", 1, 3), {0: STAGE})
    assert [peak for _, peak, _ in found] == [1075, 1145, 1215, 1250, 1250, 1160]


def test_a_split_backward_leaves_its_weight_part():
    stage = StageMemory(
        static_bytes=0,
        gradient_bytes=40,
        saved_bytes=10,
        deferred_bytes=6,
        forward_bytes=11,
        backward_bytes=13,
        weight_bytes=8,
        first_weight_bytes=45,
    )
    schedule = build_schedule("zb-h1", 1, 2)
    found = walk(schedule, {0: stage})
    peaks = {name: peak for name, peak, _ in found}
    assert peaks["0I0"] == 13
    assert peaks["0W0"] == found[[n for n, *_ in found].index("0W0") - 1][2] - 6 + 45
    assert found[-1][2] == 40


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_messages_wait_for_their_answer(name):
    """Values that were sent are there until a gradient comes back."""
    schedule = insert_communication(build_schedule(name, 2, 3))
    stage = StageMemory(static_bytes=0, saved_bytes=1, send_bytes=100, forward_bytes=1)
    found = walk(schedule, {0: stage})
    forwards = [peak for action, peak, _ in found if "F" in action]
    waiting = [round(peak, -2) for peak in forwards]
    assert waiting == ([0, 100, 200] if name == "gpipe" else [0, 100, 100])
    assert found[-1][2] == 0


def test_the_walk_of_a_plain_stage():
    stage = StageMemory.alike(static_bytes=5, saved_bytes=3, working_bytes=2)
    found = walk(build_schedule("1f1b", 1, 1), {0: stage})
    assert found == [("0F0", 10, 8), ("0B0", 10, 5)]


def test_what_a_neighbour_on_the_rank_takes_is_held_until_it_does():
    stages = {
        0: StageMemory(static_bytes=0, saved_bytes=10, send_bytes=4),
        1: StageMemory(static_bytes=0, saved_bytes=20, receive_bytes=3),
    }
    row = [
        Action(kind, stage, 0)
        for kind, stage in (
            (ActionKind.FORWARD, 0),
            (ActionKind.FORWARD, 1),
            (ActionKind.BACKWARD, 1),
            (ActionKind.BACKWARD, 0),
        )
    ]
    found = [held.after_bytes for held in memory_over(row, stages)]
    assert found == [10 + 3, 10 + 20, 10 + 4, 0]
