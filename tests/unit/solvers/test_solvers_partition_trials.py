from __future__ import annotations

import dataclasses
import math

import pulp
import pytest

from solvers import partition
from solvers.backends import get_backend
from solvers.brute_force import best_partition
from solvers.partition import BlockOption, PartitionProblem, solve_partition
from solvers.partition_trials import can_try_all, least_lacking
from solvers.random_problems import random_shared_problem
from solvers.solution import Status


@pytest.mark.parametrize("block", range(4))
def test_stages_that_share_ranks_equal_brute_force(block, monkeypatch):
    monkeypatch.setattr(partition, "rank_graphs", lambda problem, deadline: [])
    for seed in range(250 * block, 250 * (block + 1)):
        problem = random_shared_problem(seed)
        assert can_try_all(problem)
        solution, best = solve_partition(problem), best_partition(problem)
        if math.isinf(best):
            assert solution.status is Status.INFEASIBLE, seed
            assert solution.options == ()
            assert all(short > 0 for _, short in solution.conflict) and solution.conflict
            continue
        assert solution.status is Status.OPTIMAL, seed
        assert solution.objective == pytest.approx(best, rel=1e-9, abs=1e-12), seed
        use = problem.use(solution.cuts, solution.options)
        assert solution.objective == problem.objective(use)
        assert solution.stage_bytes == use.used_bytes


def engine_objective(problem: PartitionProblem) -> float:
    """The objective by an engine: a block is of a stage or of the one that the next block is of."""
    model = pulp.LpProblem("stages", pulp.LpMinimize)
    top, sync = (model.add_variable(name, lowBound=0.0) for name in ("top", "sync"))
    stages, blocks = range(problem.num_stages), range(len(problem.blocks))
    place = {
        (b, k, o): model.add_variable(f"x_{b}_{k}_{o}", cat="Binary")
        for b in blocks
        for k in stages
        for o in range(len(problem.classes[problem.blocks[b]]))
    }

    def total(stage, value, only=None):
        return pulp.lpSum(
            x * value(problem.classes[problem.blocks[b]][o])
            for (b, k, o), x in place.items()
            if k == stage and only in (None, b)
        )

    def one(option):
        return 1.0

    cut = {}
    for b in blocks:
        model += pulp.lpSum(x for (block, _, _), x in place.items() if block == b) == 1
        if b == 0:
            continue
        for k in stages:  # no block comes before the one before it, nor two stages after
            later = [total(j, one, b) for j in stages if j >= k]
            model += pulp.lpSum(later) >= pulp.lpSum(total(j, one, b - 1) for j in stages if j >= k)
            cut[b, k] = model.add_variable(f"c_{b}_{k}", lowBound=0.0)
            model += cut[b, k] >= total(k, one, b) - total(k, one, b - 1)
            model += cut[b, k] >= total(k, one, b - 1) - total(k, one, b)
    times, works, cuts = [], [], []
    for k in stages:
        model += total(k, one) >= problem.min_blocks
        work = problem.time_scale[k] * total(k, lambda o: o.time_s)
        edges = pulp.lpSum(problem.boundary_s[b - 1] * cut[b, k] for b in blocks if b)
        times.append(work + edges)
        works.append(work)
        cuts.append(edges)
    for rank, on_rank in enumerate(problem.rank_stages()):
        work, edges = (pulp.lpSum(values[k] for k in on_rank) for values in (works, cuts))
        for taken in (work + edges,) if problem.boundary_in_max else (work, edges):
            model += taken <= top
        widest = model.add_variable(f"transient_{rank}", lowBound=0.0)
        used = [widest]
        for k in on_rank:
            for b in blocks:
                model += total(k, lambda o: o.transient_bytes, b) <= widest
            held = total(k, lambda o, k=k: o.static_bytes + problem.in_flight[k] * o.saved_bytes)
            used += [held, problem.stage_fixed_bytes[k]]
        model += pulp.lpSum(used) <= problem.capacity_bytes[on_rank[0]]
        model += pulp.lpSum(total(k, lambda o: o.sync_s) for k in on_rank) <= sync
    if problem.fixed_cuts is not None:
        for k, stage in enumerate(problem.stages(problem.fixed_cuts)):
            for b in stage:
                model += total(k, one, b) == 1
    model.setObjective(
        problem.sum_weight * pulp.lpSum(times) + problem.bottleneck_weight * top + sync
    )
    return get_backend("highs").solve(model, time_limit_s=60.0, gap=1e-8).objective


def test_an_engine_agrees():
    for seed in range(40):
        problem = random_shared_problem(5000 + seed)
        assert solve_partition(problem).objective == pytest.approx(
            engine_objective(problem), rel=1e-6, abs=1e-6
        ), seed


def test_what_lacks_the_least_is_named():
    block = (
        BlockOption(time_s=1.0, static_bytes=10.0, saved_bytes=4.0, transient_bytes=3.0),
        BlockOption(time_s=1.5, static_bytes=10.0, saved_bytes=1.0, transient_bytes=5.0),
    )
    problem = PartitionProblem(
        blocks=(0,) * 5,
        classes=(block,),
        num_stages=4,
        in_flight=(1,) * 4,
        capacity_bytes=(30.0,) * 4,
        num_micro_batches=2,
        stage_rank=(0, 1, 0, 1),
    )
    # a rank of two blocks fits: 2 * 10 + 2 * 1 + 5 = 27; one of three lacks 3 * 11 + 5 - 30 = 8
    cuts, options = least_lacking(problem)
    lacking = problem.lacking(problem.use(cuts, options))
    assert [short for _, short in lacking] == [8.0]
    solution = solve_partition(problem)
    assert [short for _, short in solution.conflict] == [8.0]
    assert {len(stage) for stage in problem.stages(solution.cuts)} == {1, 2}
    enough = dataclasses.replace(problem, capacity_bytes=(38.0,) * 4)
    assert solve_partition(enough).status is Status.OPTIMAL


def test_large_problems_are_not_tried():
    block = tuple(
        BlockOption(time_s=1.0 + i, static_bytes=1.0, saved_bytes=2.0 - i) for i in range(3)
    )
    problem = PartitionProblem(
        blocks=(0,) * 24,
        classes=(block,),
        num_stages=4,
        in_flight=(1,) * 4,
        capacity_bytes=(99.0,) * 4,
        num_micro_batches=2,
        stage_rank=(0, 1, 0, 1),
    )
    assert not can_try_all(problem)
    assert can_try_all(dataclasses.replace(problem, blocks=(0,) * 6, boundary_s=()))
