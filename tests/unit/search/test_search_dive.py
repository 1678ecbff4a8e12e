"""Until it has a plan a search follows what looks best to the end, where its schedule fits."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from autopar.ir.mesh import stage_mesh
from autopar.search.bounds import Sharpness
from autopar.search.dive import Dive
from autopar.search.grid import Grid
from autopar.search.seen import Entry, Seen
from solvers.solution import Status

GRID = Grid(
    pipeline=2,
    mesh=stage_mesh(data=2, tensor=1),
    micro_batch=1,
    micro_batches=4,
    schedule="1f1b",
)


def entry(promise, sharpness=Sharpness.COMPUTE, position=0, schedule="1f1b"):
    place = (2, 1, (2, 1), position)
    grid = replace(GRID, schedule=schedule)
    return Entry(promise, place, promise, sharpness, grid, promise)


def solved(status):
    return SimpleNamespace(solution=SimpleNamespace(status=status))


def test_what_is_known_closely_goes_before_what_promises_a_little_more():
    dive = Dive(Seen(total=3))
    vague, close, worse = entry(1.0), entry(1.3, Sharpness.SCHEDULED, 1), entry(9.0, position=2)
    assert dive.ordered([vague, worse, close])[0].grid is close.grid
    assert [dive.guessed(e).plain for e in (vague, close)] == [1.0, 1.3]


def test_grids_of_a_schedule_that_did_not_fit_stand_back_once():
    dive = Dive(Seen(total=2))
    first = entry(1.0, Sharpness.SCHEDULED, schedule="zbv")
    other = dive.guessed(entry(1.1, Sharpness.SCHEDULED, 1, schedule="zbv"))
    dive.learn(first.grid, solved(Status.OPTIMAL))
    queue = []
    assert not dive.stands_back(queue, other)
    dive.learn(first.grid, solved(Status.INFEASIBLE))
    assert dive.stands_back(queue, other)
    assert queue[0].promise == pytest.approx(1.1 * 2)
    assert not dive.stands_back(queue, queue[0])
    assert not dive.stands_back(queue, dive.guessed(entry(1.2, Sharpness.SCHEDULED, 2)))


def test_a_search_that_has_a_plan_to_beat_does_not_dive():
    dive = Dive(Seen(total=1, ceiling_s=5.0))
    assert dive.ordered([entry(1.0)])[0].promise == 1.0
    seen = Seen(total=1)
    dive = Dive(seen)
    (waiting,) = dive.ordered([entry(1.0)])
    assert waiting.promise > 1.0 and not dive.ends()
    seen.ceiling_s = 5.0
    assert dive.ends() and not dive.ends()
    assert dive.ordered([waiting])[0].promise == 1.0
