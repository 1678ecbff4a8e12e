import pytest

from autopar.errors import InputError
from autopar.schedules.action import Schedule
from autopar.schedules.lower import insert_communication
from autopar.schedules.registry import build_schedule
from autopar.schedules.validate import find_fault, validate


def parse(*rows, stages=2, micro_batches=2):
    return Schedule.parse("test", stages, micro_batches, rows)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 8, 17])
def test_built_schedules_are_valid_also_when_lowered(name, stages, micro_batches):
    schedule = build_schedule(name, stages, micro_batches)
    validate(schedule)
    validate(insert_communication(schedule))


@pytest.mark.parametrize(
    ("rows", "rank", "position", "reason"),
    [
        (["0F0 0F1 0B0 0B1", "1F0 1F1 1B0"], 1, 3, "1B1 is missing"),
        (["0F0 0B0 0B1", "1F0 1B0 1F1 1B1"], 0, 3, "0F1 is missing"),
        (["0F0 0F1 0F0 0B0 0B1", "1F0 1F1 1B0 1B1"], 0, 2, "already runs at position 0"),
        (["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1 1I0"], 1, 4, "1B0 already does its work"),
        (["0F0 0F1 0B0 0B1", "1F0 1F1 1W0 1B0 1B1"], 1, 3, "1W0 already does its work"),
        (["0F0 0F1 0B0 0B1", "1F0 1F1 1I0 1B1"], 1, 4, "1W0 is missing"),
        (["0F0 0F1 0B0 0B1", "1F0 1F1 1W0 1B1"], 1, 4, "1I0 is missing"),
        (["0F0 0F1 0B0 0B1", "1F0 1F1 1W0 1I0 1B1"], 1, 2, "needs 1I0, which stands later"),
        (["0F0 0F1 0B0 0B1", "1F0 1B1 1F1 1B0"], 1, 1, "needs 1F1, which stands later"),
        (["0F0 0F1 0B0 0B1", "1F0 1F2 1B0 1B1"], 1, 1, "micro-batches go from 0 to 1"),
        (["0F0 0F1 0B0 0B1", "1F0 1F1 2B0 1B1"], 1, 2, "stages go from 0 to 1"),
        (["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 0B1"], 1, 3, "stage 0 is already on rank 0"),
        (["0F0 0F1 0B0 0B1"], 0, 4, "stage 1 is on no rank"),
        (["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"], 0, 1, "waits for 1B0, which rank 1 never reaches"),
    ],
)
def test_the_first_fault_is_named_with_its_place(rows, rank, position, reason):
    fault = find_fault(parse(*rows))
    assert fault is not None
    assert (fault.rank, fault.position) == (rank, position)
    assert reason in fault.reason


def test_the_error_shows_the_grid_with_the_action_marked():
    with pytest.raises(InputError) as caught:
        validate(parse("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"))
    assert str(caught.value).splitlines() == [
        "schedule 'test' (2 stages, 2 micro-batches) cannot run: rank 0, position 1, action 0B0: "
        "it waits for 1B0, which rank 1 never reaches: it stands still at position 1, 1F1, "
        "waiting for 0F1: deadlock",
        "clock 0 to 4",
        "rank 0 | 0F0   [0B0] 0F1   0B1   .",
        "rank 1 | .     1F0   1F1   1B0   1B1",
        "Correct the action list of rank 0, or choose a built-in schedule.",
    ]


def test_a_missing_action_is_marked_past_the_end():
    with pytest.raises(InputError) as caught:
        validate(parse("0F0 0B0", "1F0", micro_batches=1))
    assert "rank 1, position 1, end of its list: 1B0 is missing" in str(caught.value)
    assert "rank 1 | 1F0 []" in str(caught.value)


def test_the_grid_in_an_error_is_cut_to_the_surroundings():
    rows = list(build_schedule("1f1b", 40, 100).rows())
    rows[20] = rows[20].replace("20F50 20B30 ", "20B30 20F50 ").replace(" 20B99", "")
    with pytest.raises(InputError) as caught:
        validate(Schedule.parse("long", 40, 100, rows))
    lines = str(caught.value).splitlines()
    assert "20B99 is missing" in lines[0]
    assert len(lines) == 1 + 1 + 17 + 1
    assert max(map(len, lines[1:])) < 140


def test_several_stages_on_a_rank_and_split_backwards_are_valid():
    looped = parse("0F0 2F0 2B0 0B0", "1F0 3F0 3B0 1B0", stages=4, micro_batches=1)
    vee = parse("0F0 3F0 3I0 3W0 0I0 0W0", "1F0 2F0 2I0 1I0 2W0 1W0", stages=4, micro_batches=1)
    for schedule in (looped, vee):
        validate(schedule)
        validate(insert_communication(schedule))


_LOWERED = ("0F0 0SF0 0F1 0SF1 0RB0 0B0 0RB1 0B1", "1RF0 1F0 1RF1 1F1 1B0 1SB0 1B1 1SB1")


@pytest.mark.parametrize(
    ("rank", "old", "new", "where", "reason"),
    [
        (1, "1RF1 ", "", (1, 7), "1RF1 is missing"),
        (0, "0SF1 ", "", (0, 7), "0SF1 is missing"),
        (0, "0SF1", "0SF1 0SF1", (0, 4), "already runs at position 3"),
        (0, "0F0 0SF0", "0SF0 0F0", (0, 0), "needs 0F0, which stands later"),
        (1, "1B0 1SB0", "1SB0 1B0", (1, 4), "needs 1B0, which stands later"),
        (0, "0RB0 0B0", "0B0 0RB0", (0, 4), "needs 0RB0, which stands later"),
        (1, "1RF0 1F0", "1F0 1RF0", (1, 0), "needs 1RF0, which stands later"),
        (1, "1RF0 1F0 1RF1", "1RF1 1RF0 1F0", (1, 0), "rank 0 sends the value for 1RF0 first"),
        (0, "0SF0 0F1 0SF1", "0F1 0SF1 0SF0", (1, 0), "rank 0 sends the value for 1RF1 first"),
        (1, "1B0 1SB0", "1B0 1SB0 1SF0", (1, 6), "no value crosses ranks here"),
        (0, "0SF1 0RB0", "0RB0 0SF1", (0, 3), "waits for 1SB0, which rank 1 never reaches"),
        (1, "1F1 1B0 1SB0", "1B0 1SB0 1F1", None, ""),
    ],
)
def test_messages_are_checked_where_they_are_spelled_out(rank, old, new, where, reason):
    rows = list(_LOWERED)
    assert old in rows[rank]
    rows[rank] = rows[rank].replace(old, new)
    fault = find_fault(parse(*rows))
    if where is None:
        assert fault is None
    else:
        assert (fault.rank, fault.position) == where
        assert reason in fault.reason


def test_receives_that_wait_for_each_other_are_a_deadlock():
    rows = ("0F0 0SF0 0RB0 0F1 0SF1 0B0 0RB1 0B1", "1RF0 1F0 1RF1 1F1 1B0 1SB0 1B1 1SB1")
    fault = find_fault(parse(*rows))
    assert (fault.rank, fault.position) == (0, 2)
    assert "waits for 1SB0, which rank 1 never reaches" in fault.reason
    assert fault.reason.endswith("deadlock")


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_empty_schedules_are_refused(sizes):
    stages, micro_batches, ranks = sizes
    with pytest.raises(InputError, match="expected at least one"):
        validate(Schedule.parse("empty", stages, micro_batches, [""] * ranks))
