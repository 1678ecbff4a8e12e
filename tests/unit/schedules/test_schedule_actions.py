import pytest

from autopar.errors import InputError
from autopar.schedules.action import Action, ActionKind, Schedule, matching_recv
from autopar.schedules.grid import render_grid
from autopar.schedules.registry import SCHEDULES, build_schedule


@pytest.mark.parametrize("kind", ActionKind)
def test_text_form_round_trips(kind):
    action = Action(kind, 12, 305)
    assert str(action) == f"12{kind.value}305"
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "2F", "F0", "2X0", "2F0 ", "-1F0", "2FF0", "2SB"])
def test_other_text_is_refused(text):
    with pytest.raises(InputError, match="not a schedule action"):
        Action.parse(text)


def test_kinds_are_compute_send_or_receive():
    assert [kind.value for kind in ActionKind if kind.is_compute] == ["F", "B", "I", "W"]
    assert [kind.value for kind in ActionKind if kind.is_send] == ["SF", "SB"]
    assert [kind.value for kind in ActionKind if kind.is_recv] == ["RF", "RB"]


def test_a_send_names_its_receive_on_the_neighbour():
    assert str(matching_recv(Action.parse("1SF3"))) == "2RF3"
    assert str(matching_recv(Action.parse("2SB3"))) == "1RB3"


def test_rows_round_trip():
    schedule = build_schedule("1f1b", 3, 4)
    assert Schedule.parse("1f1b", 3, 4, schedule.rows()) == schedule
    assert str(build_schedule("gpipe", 1, 2)) == "rank 0: 0F0 0F1 0B0 0B1"


def test_stage_rank_follows_the_actions():
    rows = ["0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"]
    assert Schedule.parse("v", 4, 1, rows).stage_rank == (0, 1, 1, 0)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["0F0 0B0", "0F0"], "stage 0 is on rank 0 and on rank 1"),
        (["0F0 0B0", ""], "stage 1 is on no rank"),
        (["0F0 0B0", "1F0 2F0"], "stage 2 is on rank 1; expected every stage from 0 to 1"),
    ],
)
def test_stage_rank_needs_one_rank_for_every_stage(rows, message):
    with pytest.raises(InputError, match=message):
        _ = Schedule.parse("x", 2, 1, rows).stage_rank


def test_one_f_one_b_is_the_published_order():
    assert list(build_schedule("1f1b", 3, 4).rows()) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_one_f_one_b_with_fewer_micro_batches_than_stages():
    assert list(build_schedule("1f1b", 4, 2).rows()) == [
        "0F0 0F1 0B0 0B1",
        "1F0 1F1 1B0 1B1",
        "2F0 2F1 2B0 2B1",
        "3F0 3B0 3F1 3B1",
    ]


def test_gpipe_is_all_forwards_then_all_backwards():
    assert list(build_schedule("gpipe", 2, 3).rows()) == [
        "0F0 0F1 0F2 0B0 0B1 0B2",
        "1F0 1F1 1F2 1B0 1B1 1B2",
    ]


def test_unknown_schedule_lists_the_names():
    with pytest.raises(InputError, match=r"unknown schedule 'zb'; choose one of gpipe, 1f1b"):
        build_schedule("zb", 2, 2)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("sizes", [(0, 1), (1, 0)])
def test_sizes_below_one_are_refused(name, sizes):
    with pytest.raises(InputError, match="expected at least one"):
        build_schedule(name, *sizes)


def test_grid_shows_rank_by_clock():
    assert render_grid(build_schedule("1f1b", 2, 2)).splitlines() == [
        "clock 0 to 5",
        "rank 0 | 0F0 0F1 .   0B0 .   0B1",
        "rank 1 | .   1F0 1B0 1F1 1B1 .",
    ]
