"""Until it has a plan a search follows what looks best to the end; then it goes on around that."""

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


def entry(promise, sharpness=Sharpness.SCHEDULED, position=0, **changed):
    place = (2, 1, (2, 1), position)
    return Entry(promise, place, promise, sharpness, replace(GRID, **changed), promise)


def solved(status, **changed):
    solution = SimpleNamespace(status=status, objective=2.0)
    return SimpleNamespace(solution=solution, grid=replace(GRID, **changed))


def test_what_is_known_closely_goes_before_what_promises_a_little_more():
    dive = Dive(Seen(total=3))
    vague, close = entry(1.0, Sharpness.COMPUTE), entry(1.3, Sharpness.SCHEDULED, 1)
    assert dive.ordered([vague, entry(9.0, position=2), close])[0].grid is close.grid
    assert [dive.guessed(e).plain for e in (vague, close)] == [1.0, 1.3]


def test_the_simplest_schedule_goes_first():
    queue = Dive(Seen(total=2)).ordered([entry(1.0, schedule="zbv", chunks=2), entry(1.2)])
    assert queue[0].grid.schedule == "1f1b"


def test_grids_of_a_pipeline_that_did_not_fit_stand_back():
    dive, queue = Dive(Seen(total=2)), []
    other = dive.guessed(entry(1.1, position=1, micro_batch=2))
    dive.learn(GRID, solved(Status.OPTIMAL))
    assert not dive.stands_back(queue, other)
    dive.learn(GRID, solved(Status.INFEASIBLE))
    assert dive.stands_back(queue, other)
    assert queue[0].promise == pytest.approx(1.1 * 1.2)
    assert not dive.stands_back(queue, queue[0])
    assert not dive.stands_back(queue, dive.guessed(entry(1.2, position=2, pipeline=4)))


def test_neighbours_of_the_best_plan_go_before_grids_that_promise_more():
    seen = Seen(total=4)
    dive = Dive(seen)
    twice = {"micro_batch": 2, "pipeline": 4}
    near, far, beyond = entry(1.5, pipeline=4), entry(1.0, position=1, **twice), entry(4.0)
    assert dive.ordered([near, far, beyond])[0].grid is far.grid
    seen.add(solved(Status.OPTIMAL))
    assert dive.moves() and not dive.moves()
    assert dive.ordered([near, far, beyond])[0].grid is near.grid
    seen.add(solved(Status.OPTIMAL, **twice))
    assert not dive.moves()  # no better
    better = solved(Status.OPTIMAL, **twice)
    better.solution.objective = 1.9
    seen.add(better)
    assert dive.moves()
    assert dive.ordered([near, far, beyond])[0].grid is far.grid


def test_grids_far_from_the_best_plan_go_by_their_bounds():
    seen = Seen(total=3)
    dive = Dive(seen)
    seen.add(solved(Status.OPTIMAL))
    dive.moves()
    twice = {"micro_batch": 2, "pipeline": 4}
    high, low = entry(1.2, **twice), entry(1.4, position=1, **twice)._replace(bound=1.1)
    assert dive.ordered([high, low])[0].bound == 1.1
    assert not dive.stands_back([], dive.guessed(low))
    assert dive.ordered([low, entry(1.5, pipeline=4)])[0].grid.micro_batch == 1


def test_a_search_that_has_a_plan_to_beat_goes_by_what_grids_promise():
    dive = Dive(Seen(total=1, ceiling_s=5.0))
    vague, close = entry(1.0, Sharpness.COMPUTE), entry(1.1)
    assert dive.ordered([vague, close])[0].promise == 1.0
    assert not dive.moves()
