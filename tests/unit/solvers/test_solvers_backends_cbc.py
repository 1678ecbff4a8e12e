"""What CBC 2.10 was seen to say, played back by a stand-in."""

from __future__ import annotations

import math

import pulp
import pytest

from solvers.backends import Cbc, _logged_bound
from solvers.solution import Status

SCRIPT = """#!/bin/sh
while [ "$1" != "-solution" ]; do shift; done
sleep 0.05
echo "{log}"
echo "{solution}" > "$2"
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    def play(*, log, solution):
        executable = tmp_path / "cbc"
        executable.write_text(SCRIPT.format(log=log, solution=solution))
        executable.chmod(0o755)
        monkeypatch.setattr(Cbc, "_executable", staticmethod(lambda: str(executable)))

    return play


def one_variable() -> pulp.LpProblem:
    lp = pulp.LpProblem("one", pulp.LpMinimize)
    x = lp.add_variable("x", 0, 1, cat=pulp.LpInteger)
    lp.setObjective(pulp.LpAffineExpression({x: 2.0}, constant=10.0))
    row = pulp.LpAffineExpression({x: 1.0})
    lp.addConstraint(pulp.LpConstraint(row, pulp.LpConstraintGE, "row", 0.5))
    return lp


@pytest.mark.parametrize(
    ("log", "time_limit_s", "status"),
    [
        ("Pre-processing says infeasible or unbounded", 30.0, Status.INFEASIBLE),
        ("Pre-processing says infeasible or unbounded", 0.01, Status.TIME_LIMIT),
        ("Problem is infeasible - 0.00 seconds", 0.01, Status.INFEASIBLE),
    ],
)
def test_infeasible_claimed_when_out_of_time_is_no_proof(stand_in, log, time_limit_s, status):
    stand_in(log=log, solution="Infeasible - objective value 0.0")
    result = Cbc().solve(one_variable(), time_limit_s=time_limit_s, gap=0.0)
    assert result.status is status
    assert result.objective == math.inf


def test_no_solution_on_time_keeps_the_logged_bound_only(stand_in):
    log = "Continuous objective value is 1 - 0.00 seconds\nLower bound:    1.5"
    stopped = "Stopped on time (no integer solution - continuous used) - objective value 0.25"
    stand_in(log=log, solution=stopped)
    result = Cbc().solve(one_variable(), time_limit_s=30.0, gap=0.0)
    assert (result.status, result.objective) == (Status.TIME_LIMIT, math.inf)
    assert result.bound == pytest.approx(10.0 + 1.45)


def test_point_that_violates_a_row_is_no_solution(stand_in):
    stand_in(
        log="Lower bound: 1.5", solution="Stopped on time - objective value 0.0\n0 X0000000 0 0"
    )
    result = Cbc().solve(one_variable(), time_limit_s=30.0, gap=0.0)
    assert (result.status, result.objective) == (Status.TIME_LIMIT, math.inf)


def test_solution_on_time_is_feasible_not_optimal(stand_in):
    stand_in(
        log="Lower bound: 1.500", solution="Stopped on time - objective value 2.0\n0 X0000000 1 0"
    )
    result = Cbc().solve(one_variable(), time_limit_s=30.0, gap=0.0)
    assert (result.status, result.objective) == (Status.FEASIBLE, 12.0)
    assert result.bound == pytest.approx(11.4995)


def test_printed_bounds_are_rounded_down():
    assert _logged_bound("Lower bound:   0.433\n") == pytest.approx(0.4325)
    assert _logged_bound("Continuous objective value is 2.65247 - 0.00 s\n") < 2.65247
    assert _logged_bound("Result - Optimal solution found\n") == -math.inf
