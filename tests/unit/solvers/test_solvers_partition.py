from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest

from solvers import partition_pricing, partition_ranks, partition_trials
from solvers.brute_force import best_partition
from solvers.partition import (
    BlockOption,
    PartitionProblem,
    PartitionSolution,
    lower_bound,
    solve_partition,
)
from solvers.random_problems import random_partition_problem, random_shared_problem
from solvers.solution import Status


def assert_consistent(problem: PartitionProblem, solution: PartitionSolution) -> None:
    """The fields describe the partition that `cuts` and `options` give."""
    use = problem.use(solution.cuts, solution.options)
    assert solution.objective == problem.objective(use)
    assert math.isfinite(solution.objective)
    assert solution.stage_time_s == use.time_s
    assert solution.stage_bytes == use.used_bytes
    assert len(solution.options) == len(problem.blocks)
    if problem.fixed_cuts is not None:
        assert solution.cuts == problem.fixed_cuts


def assert_right(problem: PartitionProblem, solution: PartitionSolution) -> None:
    best = best_partition(problem)
    assert lower_bound(problem) <= best * (1 + 1e-9)
    if math.isinf(best):
        assert solution.status is Status.INFEASIBLE
        assert solution.options == ()
        assert solution.conflict
        assert all(shortfall > 0 for _, shortfall in solution.conflict)
        return
    assert solution.status is Status.OPTIMAL
    assert solution.objective == pytest.approx(best, rel=1e-6, abs=1e-12)
    assert solution.bound <= best * (1 + 1e-9) + 1e-12
    assert_consistent(problem, solution)


@pytest.mark.parametrize("block", range(6))
def test_dp_equals_brute_force(block):
    for seed in range(100 * block, 100 * (block + 1)):
        problem = random_partition_problem(seed)
        assert_right(problem, solve_partition(problem, method="dp"))


@pytest.mark.parametrize("block", range(2))
def test_ilp_equals_brute_force(block):
    for seed in range(100 * block, 100 * (block + 1)):
        problem = random_partition_problem(seed)
        assert_right(problem, solve_partition(problem))


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_equals_brute_force_in_bulk(block):
    """5,000 problems, of which the engine proves every other."""
    for seed in range(1000 + 250 * block, 1000 + 250 * (block + 1)):
        problem = random_partition_problem(seed)
        assert_right(problem, solve_partition(problem, method="dp"))
        if seed % 2:
            assert_right(problem, solve_partition(problem, method="ilp"))


def test_random_problems_cover_what_matters():
    problems = [random_partition_problem(seed) for seed in range(300)]
    infeasible = sum(math.isinf(best_partition(p)) for p in problems)
    assert 30 <= infeasible <= 200
    for name in ("time_scale", "stage_fixed_bytes", "boundary_s"):
        assert any(len(set(getattr(p, name))) > 1 for p in problems)
    options = [o for p in problems for c in p.classes for o in c]
    assert any(o.sync_s for o in options)
    assert any(o.transient_bytes for o in options)
    assert any(p.fixed_cuts for p in problems)


def test_packed_prices_are_exact_without_sync_and_bounded_with_it(monkeypatch):
    """The knapsack path, which otherwise only large problems take."""
    monkeypatch.setattr(partition_pricing, "_MAX_POINTS", 0)
    monkeypatch.setattr(partition_trials, "_MAX_TRIALS", 0)
    exact = 0
    for seed in range(400):
        problem = random_partition_problem(seed)
        solution, best = solve_partition(problem, method="dp"), best_partition(problem)
        if math.isinf(best):
            assert solution.status is Status.INFEASIBLE
            continue
        assert_consistent(problem, solution)
        assert solution.bound <= best * (1 + 1e-9) + 1e-12
        assert solution.objective >= best * (1 - 1e-9)
        has_sync = any(o.sync_s for c in problem.classes for o in c)
        if not has_sync:
            assert solution.status is Status.OPTIMAL
        if solution.status is Status.OPTIMAL:
            exact += 1
            assert solution.objective == pytest.approx(best, rel=1e-6, abs=1e-12)
    assert exact > 200


def transformer(
    num_stages: int = 16, options: int = 3, tightness: float = 0.3, micro_batches: int = 64
) -> PartitionProblem:
    """126 equal layers between an embedding and a head; recompute trades time for memory."""
    saved = np.linspace(1.0, 0.1, options) * 2e9
    layer = tuple(
        BlockOption(
            time_s=0.01 * (1 + 0.33 * i / max(options - 1, 1)),
            static_bytes=1e9,
            saved_bytes=float(size),
            sync_s=0.002,
            transient_bytes=0.2e9 * (1 + i),
        )
        for i, size in enumerate(saved)
    )
    embedding = (BlockOption(time_s=0.003, static_bytes=2e9, saved_bytes=1e8, sync_s=0.004),)
    head = (
        BlockOption(time_s=0.013, static_bytes=2e9, saved_bytes=5e8, transient_bytes=2e9),
        BlockOption(time_s=0.015, static_bytes=2e9, saved_bytes=1e8, transient_bytes=1e9),
    )
    per_stage = 128 / num_stages
    least, most = (per_stage * (1e9 + num_stages * s) for s in (saved[-1], saved[0]))
    return PartitionProblem(
        blocks=(1, *[0] * 126, 2),
        classes=(layer, embedding, head),
        num_stages=num_stages,
        in_flight=tuple(num_stages - k for k in range(num_stages)),
        capacity_bytes=(least + tightness * (most - least) + 4e9,) * num_stages,
        num_micro_batches=micro_batches,
        boundary_s=(1e-4,) * 127,
    )


@pytest.mark.parametrize("num_stages", [1, 2, 16, 64])
def test_long_uniform_chain_is_proven_by_both_methods(num_stages):
    problem = transformer(num_stages)
    by_dp = solve_partition(problem, method="dp")
    by_ilp = solve_partition(problem, method="ilp")
    assert by_dp.status is by_ilp.status is Status.OPTIMAL
    assert by_dp.engine == "dp"
    assert by_ilp.engine == "highs"
    assert by_ilp.objective == pytest.approx(by_dp.objective, rel=1e-9)
    assert 0.7 * by_dp.objective <= lower_bound(problem) <= by_dp.objective
    assert_consistent(problem, by_dp)


def test_certify_runs_the_ilp_after_the_dp():
    solution = solve_partition(transformer(8), method="dp", certify=True)
    assert solution.engine == "highs"
    assert solution.status is Status.OPTIMAL


def test_different_blocks_on_few_stages():
    """No two blocks alike: frontiers would grow without end, the knapsack's core does not."""
    rng = np.random.default_rng(0)
    classes = []
    for _ in range(24):
        work, size = rng.lognormal(0, 0.7) * 0.01, rng.lognormal(0, 0.7) * 1e9
        classes.append(
            tuple(
                BlockOption(
                    time_s=work * (1 + 0.1 * i + 0.02 * rng.random()),
                    static_bytes=size,
                    saved_bytes=size * (1 - 0.3 * i),
                )
                for i in range(3)
            )
        )
    total = sum(c[0].static_bytes for c in classes)
    problem = PartitionProblem(
        blocks=tuple(range(24)),
        classes=tuple(classes),
        num_stages=2,
        in_flight=(2, 1),
        capacity_bytes=(0.5 * total * 2.3,) * 2,
        num_micro_batches=8,
    )
    solution = solve_partition(problem)
    assert solution.status is Status.OPTIMAL
    assert solution.objective == pytest.approx(
        min(
            solve_partition(dataclasses.replace(problem, fixed_cuts=(cut,)), method="dp").objective
            for cut in range(1, 24)
        ),
        rel=1e-6,
    )


def test_more_capacity_is_never_worse():
    objectives = []
    for tightness in np.linspace(-0.05, 1.0, 8):
        solution = solve_partition(transformer(8, tightness=float(tightness)), method="dp")
        objectives.append(solution.objective)
    for tighter, looser in itertools.pairwise(objectives):
        assert looser <= tighter * (1 + 1e-9)
    assert objectives[-1] < objectives[0]
    for seed in range(100):
        problem = random_partition_problem(seed)
        wider = tuple(c * 1.3 for c in problem.capacity_bytes)
        loose = dataclasses.replace(problem, capacity_bytes=wider)
        before, after = (solve_partition(p, method="dp").objective for p in (problem, loose))
        assert after <= before * (1 + 1e-9)


def test_same_input_same_answer():
    for problem in (transformer(16), random_partition_problem(3)):
        assert solve_partition(problem) == solve_partition(problem)


def test_renaming_classes_changes_nothing_but_the_names():
    for seed in range(60):
        problem = random_partition_problem(seed)
        last = len(problem.classes) - 1
        renamed = dataclasses.replace(
            problem,
            classes=problem.classes[::-1],
            blocks=tuple(last - kind for kind in problem.blocks),
        )
        first, other = solve_partition(problem, method="dp"), solve_partition(renamed, method="dp")
        assert other.objective == pytest.approx(first.objective, rel=1e-12)
        assert dict(other.conflict) == pytest.approx(dict(first.conflict))


def test_infeasible_says_which_stage_lacks_how_much():
    block = (
        BlockOption(time_s=1.0, static_bytes=10.0, saved_bytes=4.0, transient_bytes=1.0),
        BlockOption(time_s=2.0, static_bytes=10.0, saved_bytes=1.0, transient_bytes=3.0),
    )
    problem = PartitionProblem(
        blocks=(0, 0, 0, 0),
        classes=(block,),
        num_stages=2,
        in_flight=(2, 1),
        capacity_bytes=(25.0, 30.0),
        num_micro_batches=4,
    )
    solution = solve_partition(problem)
    assert solution.status is Status.INFEASIBLE
    # two blocks each: 2*10 + 2*2*1 + 3 = 27 > 25, 2*10 + 1*2 + 3 = 25 <= 30
    assert solution.conflict == (("stage 0", 2.0),)
    assert solution.cuts == (2,)
    assert solution.stage_bytes == (27.0, 25.0)
    assert solution.bound == math.inf
    enough = dataclasses.replace(problem, capacity_bytes=(27.0, 30.0))
    assert solve_partition(enough).status is Status.OPTIMAL


def test_fewer_blocks_than_stages_is_infeasible():
    block = (BlockOption(time_s=1.0, static_bytes=0.0, saved_bytes=0.0),)
    problem = PartitionProblem(
        blocks=(0, 0),
        classes=(block,),
        num_stages=3,
        in_flight=(1,) * 3,
        capacity_bytes=(1.0,) * 3,
        num_micro_batches=1,
    )
    assert solve_partition(problem).conflict == (("blocks", 1.0),)
    assert lower_bound(problem) == math.inf


def test_slow_stage_gets_fewer_blocks():
    block = (BlockOption(time_s=1.0, static_bytes=1.0, saved_bytes=0.0),)
    problem = PartitionProblem(
        blocks=(0,) * 9,
        classes=(block,),
        num_stages=2,
        in_flight=(1, 1),
        capacity_bytes=(9.0, 9.0),
        num_micro_batches=100,
        time_scale=(2.0, 1.0),
    )
    assert solve_partition(problem).cuts == (3,)


def test_costly_boundary_is_avoided_and_fixed_cuts_are_honoured():
    block = (BlockOption(time_s=1.0, static_bytes=1.0, saved_bytes=0.0),)
    problem = PartitionProblem(
        blocks=(0,) * 6,
        classes=(block,),
        num_stages=2,
        in_flight=(1, 1),
        capacity_bytes=(6.0, 6.0),
        num_micro_batches=4,
        boundary_s=(0.0, 0.0, 5.0, 0.1, 0.0),
    )
    free = solve_partition(problem)
    assert free.cuts == (2,)
    pinned = solve_partition(dataclasses.replace(problem, fixed_cuts=(3,)))
    assert pinned.cuts == (3,)
    assert pinned.stage_time_s == (8.0, 8.0)
    assert pinned.objective > free.objective


def test_time_limit_is_labelled():
    problem = transformer(16)
    best = solve_partition(problem, method="dp")
    hurried = solve_partition(problem, method="ilp", time_limit_s=0.0)
    assert hurried.status is Status.TIME_LIMIT
    assert hurried.bound <= best.objective
    assert hurried.objective == math.inf
    assert hurried.options == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"in_flight": (1,)}, "in_flight: expected 2 values, found 1"),
        ({"blocks": (0, 3)}, r"blocks\[1\]: no class 3 among 1"),
        ({"fixed_cuts": (2,)}, "fixed_cuts"),
        ({"num_micro_batches": 0}, "num_micro_batches: expected at least 1"),
        ({"time_scale": (1.0, -1.0)}, "time_scale: expected finite numbers from 0, found -1.0"),
        ({"classes": ((),)}, r"classes\[0\]: expected at least one option"),
    ],
)
def test_malformed_problems_are_refused(change, message):
    good = {
        "blocks": (0, 0),
        "classes": ((BlockOption(time_s=1.0, static_bytes=1.0, saved_bytes=1.0),),),
        "num_stages": 2,
        "in_flight": (2, 1),
        "capacity_bytes": (9.0, 9.0),
        "num_micro_batches": 2,
    }
    with pytest.raises(ValueError, match=message):
        PartitionProblem(**(good | change))
    with pytest.raises(ValueError, match="expected one of ilp, dp"):
        solve_partition(PartitionProblem(**good), method="guess")


@pytest.mark.parametrize("block", range(2))
def test_any_weights_of_the_terms_are_solved_exactly(block):
    for seed in range(100 * block, 100 * (block + 1)):
        rng = np.random.default_rng(seed)
        problem = dataclasses.replace(
            random_partition_problem(seed),
            sum_weight=float(rng.choice([0.25, 0.5, 1.0, 2.0])),
            max_weight=float(rng.choice([0.0, 1.5, 7.0])),
            boundary_in_max=bool(rng.random() < 0.5),
        )
        assert_right(problem, solve_partition(problem, method="ilp" if block else "dp"))


@pytest.mark.parametrize("block", range(3))
def test_stages_that_share_a_rank_against_brute_force(block, monkeypatch):
    """Too many ways to try, classes that change too often: bounds hold always; what is called
    optimal or infeasible is; most are solved."""
    monkeypatch.setattr(partition_trials, "_MAX_TRIALS", 0)
    monkeypatch.setattr(partition_ranks, "_MAX_LAYOUTS", 0)
    optimal = 0
    for seed in range(100 * block, 100 * (block + 1)):
        problem = random_shared_problem(seed)
        solution, best = solve_partition(problem), best_partition(problem)
        assert lower_bound(problem) <= best * (1 + 1e-9)
        assert solution.bound <= best * (1 + 1e-9) + 1e-12
        assert solution.objective >= best * (1 - 1e-9)
        if solution.status is Status.INFEASIBLE:
            assert math.isinf(best)
        if solution.status.has_solution:
            assert_consistent(problem, solution)
        if solution.status is Status.OPTIMAL:
            assert solution.objective == pytest.approx(best, rel=1e-6, abs=1e-12)
            optimal += 1
    assert optimal >= 45


def test_a_rank_holds_the_stages_of_both_its_chunks():
    """Four layers on two ranks of two stages each: a rank pays for both, its transient once."""
    block = (
        BlockOption(time_s=1.0, static_bytes=10.0, saved_bytes=4.0, transient_bytes=3.0),
        BlockOption(time_s=1.5, static_bytes=10.0, saved_bytes=1.0, transient_bytes=3.0),
    )
    problem = PartitionProblem(
        blocks=(0,) * 4,
        classes=(block,),
        num_stages=4,
        in_flight=(3, 2, 1, 1),
        capacity_bytes=(39.0,) * 4,
        num_micro_batches=2,
        stage_rank=(0, 1, 0, 1),
    )
    # rank 0: 2 * 10 + (3 + 1) * 4 + 3 = 39; rank 1 less
    loose = solve_partition(problem)
    assert loose.status is Status.OPTIMAL
    assert loose.options == (0, 0, 0, 0)
    assert loose.stage_bytes == (10 + 12 + 3, 10 + 8 + 3, 10 + 4, 10 + 4)
    tight = solve_partition(dataclasses.replace(problem, capacity_bytes=(38.0,) * 4))
    assert tight.options in ((1, 0, 0, 0), (0, 0, 1, 0))
    assert tight.bound <= tight.objective
    none = solve_partition(dataclasses.replace(problem, capacity_bytes=(25.0,) * 4))
    assert none.status is Status.INFEASIBLE
    # at least 2 * 10 + (3 + 1) * 1 + 3 bytes on rank 0, 2 * 10 + (2 + 1) * 1 + 3 on rank 1
    assert none.conflict == (("stage 0", 2.0), ("stage 1", 1.0))
