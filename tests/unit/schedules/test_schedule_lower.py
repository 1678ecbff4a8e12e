from collections import defaultdict

import pytest

from autopar.errors import InputError
from autopar.schedules.action import Schedule, matching_recv
from autopar.schedules.lower import insert_communication
from autopar.schedules.registry import build_schedule
from autopar.schedules.validate import validate


def test_two_stages_of_one_f_one_b():
    assert list(insert_communication(build_schedule("1f1b", 2, 2)).rows()) == [
        "0F0 0SF0 0F1 0SF1 0RB0 0B0 0RB1 0B1",
        "1RF0 1F0 1B0 1SB0 1RF1 1F1 1B1 1SB1",
    ]


def test_stages_on_one_rank_exchange_nothing():
    vee = Schedule.parse("v", 4, 1, ["0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"])
    assert list(insert_communication(vee).rows()) == [
        "0F0 0SF0 3RF0 3F0 3B0 3SB0 0RB0 0B0",
        "1RF0 1F0 2F0 2SF0 2RB0 2B0 1B0 1SB0",
    ]
    alone = build_schedule("1f1b", 1, 3)
    assert insert_communication(alone) == alone


def test_a_split_backward_sends_its_gradient_after_the_input_part():
    split = Schedule.parse("zb", 2, 1, ["0F0 0I0 0W0", "1F0 1I0 1W0"])
    assert list(insert_communication(split).rows()) == [
        "0F0 0SF0 0RB0 0I0 0W0",
        "1RF0 1F0 1I0 1SB0 1W0",
    ]


def test_values_used_out_of_order_are_received_in_the_order_they_are_sent():
    crossed = Schedule.parse("x", 2, 2, ["0F0 0F1 0B1 0B0", "1F1 1F0 1B0 1B1"])
    lowered = insert_communication(crossed)
    assert list(lowered.rows()) == [
        "0F0 0SF0 0F1 0SF1 0RB0 0RB1 0B1 0B0",
        "1RF0 1RF1 1F1 1F0 1B0 1SB0 1B1 1SB1",
    ]
    validate(lowered)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_every_send_has_one_receive_in_the_same_order(name):
    lowered = insert_communication(build_schedule(name, 5, 9))
    owner, sent, taken = lowered.stage_rank, defaultdict(list), defaultdict(list)
    for rank, row in enumerate(lowered.ranks):
        for action in row:
            if action.kind.is_send:
                receive = matching_recv(action)
                sent[rank, owner[receive.stage], receive.kind].append(receive)
            if action.kind.is_recv:
                step = -1 if action.kind.value == "RF" else 1
                taken[owner[action.stage + step], rank, action.kind].append(action)
    assert sent == taken
    assert sorted(map(len, sent.values())) == [9] * 8


def test_compute_order_is_kept_and_lowering_twice_changes_nothing():
    schedule = build_schedule("1f1b", 4, 6)
    lowered = insert_communication(schedule)
    kept = tuple(tuple(a for a in row if a.kind.is_compute) for row in lowered.ranks)
    assert kept == schedule.ranks
    assert insert_communication(lowered) == lowered


def test_a_value_that_is_never_made_is_refused():
    with pytest.raises(InputError, match="no rank makes the value that 1F0 needs"):
        insert_communication(Schedule.parse("x", 2, 1, ["0B0", "1F0 1B0"]))
