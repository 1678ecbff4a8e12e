"""Stages on devices of several kinds, each with options of its own, against brute force."""

from __future__ import annotations

import dataclasses
import math

import pytest

from solvers import partition
from solvers.backends import get_backend
from solvers.brute_force import best_partition
from solvers.partition import BlockOption, PartitionProblem, lower_bound, solve_partition
from solvers.partition_pooled import pooled_bound
from solvers.partition_relaxation import relaxed_bound
from solvers.random_problems import random_mixed_problem, random_mixed_shared_problem
from solvers.solution import Status


@pytest.mark.parametrize("method", ["dp", "ilp"])
def test_mixed_devices_equal_brute_force(method):
    feasible = 0
    for seed in range(60):
        problem = random_mixed_problem(seed)
        solution, best = solve_partition(problem, method=method), best_partition(problem)
        assert lower_bound(problem) <= best * (1 + 1e-9)
        assert pooled_bound(problem) <= best * (1 + 1e-9)
        if math.isinf(best):
            assert solution.status is Status.INFEASIBLE
            continue
        feasible += 1
        assert solution.status is Status.OPTIMAL
        assert solution.objective == pytest.approx(best, rel=1e-6, abs=1e-12)
        use = problem.use(solution.cuts, solution.options)
        assert solution.objective == problem.objective(use)
    assert feasible > 20


def test_the_linear_relaxation_bounds_mixed_devices():
    backend, tight = get_backend("highs"), 0
    for seed in range(40):
        problem = random_mixed_problem(seed)
        bound, best = relaxed_bound(problem, backend), best_partition(problem)
        assert bound <= best * (1 + 1e-6) + 1e-9
        tight += math.isfinite(best) and bound >= 0.8 * best
    assert tight > 10


def two_kinds(**changes: object) -> PartitionProblem:
    """Six equal blocks on a fast stage and one that takes twice as long."""
    fast = BlockOption(time_s=1.0, static_bytes=1.0, saved_bytes=0.0)
    slow = BlockOption(time_s=2.0, static_bytes=1.0, saved_bytes=0.0, device=1)
    values: dict[str, object] = {
        "blocks": (0,) * 6,
        "classes": ((fast, slow),),
        "num_stages": 2,
        "in_flight": (1, 1),
        "capacity_bytes": (6.0, 6.0),
        "num_micro_batches": 8,
        "stage_device": (0, 1),
    }
    return PartitionProblem(**{**values, **changes})  # type: ignore[arg-type]


def test_a_stage_on_a_slow_device_gets_fewer_blocks():
    solution = solve_partition(two_kinds())
    assert solution.cuts == (4,)
    assert solution.stage_time_s == (4.0, 4.0)
    assert solution.options == (0, 0, 0, 0, 1, 1)


def test_the_cheap_bound_knows_how_much_slower_a_device_is():
    assert lower_bound(two_kinds()) == pytest.approx(6.0 + 7 * 4.0)


def test_a_class_that_no_device_is_slow_at_does_not_hide_what_others_take():
    fast, slow = two_kinds().classes[0]
    free = BlockOption(time_s=0.1, static_bytes=0.0, saved_bytes=0.0)
    classes = ((fast, slow), (free, dataclasses.replace(free, device=1)))
    problem = two_kinds(blocks=(0,) * 6 + (1,), classes=classes)
    best = best_partition(problem)
    assert best == pytest.approx(4.0 + 4.1 + 7 * 4.1)
    assert lower_bound(problem) < 0.9 * best < 0.97 * best < pooled_bound(problem) <= best


def test_cuts_cost_what_their_hop_makes_of_them():
    near = solve_partition(two_kinds(boundary_s=(1.0,) * 5))
    far = solve_partition(two_kinds(boundary_s=(1.0,) * 5, hop_scale=(3.0,)))
    assert near.stage_time_s == (5.0, 5.0)
    assert far.stage_time_s == (7.0, 7.0)


def test_a_class_without_options_for_a_device_is_refused():
    with pytest.raises(ValueError, match=r"classes\[0\]: no option for device 2"):
        two_kinds(stage_device=(0, 2))


def test_options_of_another_device_are_refused():
    with pytest.raises(ValueError, match="stage 1 is on device 1"):
        two_kinds().use((4,), (0,) * 6)


@pytest.mark.parametrize("tries", [True, False])
def test_mixed_devices_that_share_ranks_are_bounded_by_brute_force(tries, monkeypatch):
    if not tries:  # the way of large problems
        monkeypatch.setattr(partition, "can_try_all", lambda problem: False)
        monkeypatch.setattr(partition, "rank_graphs", lambda problem, deadline: [])
    exact = 0
    for seed in range(80):
        problem = random_mixed_shared_problem(seed)
        solution, best = solve_partition(problem, method="dp"), best_partition(problem)
        assert lower_bound(problem) <= best * (1 + 1e-9)
        assert pooled_bound(problem) <= best * (1 + 1e-9)
        assert solution.bound <= best * (1 + 1e-9) + 1e-12
        if solution.status.has_solution:
            assert solution.objective == problem.objective(
                problem.use(solution.cuts, solution.options)
            )
            best_found = solution.objective <= best * (1 + 1e-6) + 1e-12
            exact += best_found
            assert best_found or not partition.can_try_all(problem)
        else:
            assert math.isinf(best) or not partition.can_try_all(problem)
    assert exact > 20
