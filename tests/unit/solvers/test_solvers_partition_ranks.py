"""Ranks of several stages, rank by rank: equal to brute force, whatever they are laid out over."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from solvers import (
    partition_dealing,
    partition_pricing,
    partition_ranks,
    partition_splits,
    partition_trials,
)
from solvers.brute_force import best_partition
from solvers.partition import BlockOption, PartitionProblem, solve_partition
from solvers.partition_ranks import rank_graphs
from solvers.partition_spread import spread
from solvers.random_problems import random_mixed_shared_problem, random_shared_problem
from solvers.solution import Status


@pytest.fixture(autouse=True)
def _nothing_is_tried(monkeypatch):
    monkeypatch.setattr(partition_trials, "_MAX_TRIALS", 0)


def assert_exact(problem: PartitionProblem) -> Status:
    solution, best = solve_partition(problem, method="dp"), best_partition(problem)
    if math.isinf(best):
        assert solution.status is Status.INFEASIBLE
        assert all(short > 0 for _, short in solution.conflict) and solution.conflict
        return solution.status
    assert solution.status is Status.OPTIMAL
    assert solution.objective == pytest.approx(best, rel=1e-9, abs=1e-12)
    use = problem.use(solution.cuts, solution.options)
    assert solution.objective == problem.objective(use)
    assert solution.stage_bytes == use.used_bytes
    assert solution == solve_partition(problem, method="dp")
    return solution.status


@pytest.mark.parametrize("make", [random_shared_problem, random_mixed_shared_problem])
def test_ranks_of_two_stages_equal_brute_force(make):
    found = [
        assert_exact(problem)
        for problem in map(make, range(250))
        if problem.min_blocks == 1 or problem.fixed_cuts
    ]
    assert found.count(Status.OPTIMAL) > 100 and found.count(Status.INFEASIBLE) > 20


def two_runs(seed: int) -> PartitionProblem:
    """Up to 4 stages a rank, over a head, two runs of blocks alike, and a tail."""
    rng = np.random.default_rng(seed)
    ranks, chunks = ((1, 4), (2, 2), (2, 3))[int(rng.integers(0, 3))]
    stages = ranks * chunks
    first, second = (int(n) for n in rng.integers(1, 5, 2))
    blocks = (0, *(1,) * first, *(2,) * second, 3)[int(rng.integers(0, 2)) :]
    blocks += (blocks[-1],) * max(0, stages - len(blocks))
    inner = rng.random(4)
    return PartitionProblem(
        blocks=blocks,
        classes=tuple(
            tuple(
                BlockOption(
                    time_s=float(rng.integers(1, 9)),
                    static_bytes=float(rng.integers(0, 5)),
                    saved_bytes=float(rng.integers(0, 4)),
                    sync_s=float(rng.integers(0, 3)),
                    transient_bytes=float(rng.integers(0, 4)),
                )
                for _ in range(2)
            )
            for _ in range(4)
        ),
        num_stages=stages,
        in_flight=tuple(int(n) for n in rng.integers(1, 4, stages)),
        capacity_bytes=(float(rng.integers(8, 24) * chunks / 2),) * stages,
        num_micro_batches=4,
        boundary_s=tuple(float(inner[kind]) for kind in blocks[:-1]),
        max_weight=float(rng.choice([0.0, 1.5, 7.0])),
        sum_weight=float(rng.choice([0.25, 1.0])),
        stage_rank=tuple(range(ranks)) * chunks,
    )


def test_several_runs_of_blocks_alike_equal_brute_force():
    found = [assert_exact(two_runs(seed)) for seed in range(100)]
    assert found.count(Status.OPTIMAL) > 60 and found.count(Status.INFEASIBLE) > 10


def test_prices_by_a_knapsack_each_are_as_exact(monkeypatch):
    monkeypatch.setattr(partition_pricing, "_MAX_POINTS", 0)
    for seed in range(15):
        plain = tuple(
            tuple(dataclasses.replace(option, sync_s=0.0) for option in options)
            for options in two_runs(seed).classes
        )
        assert_exact(dataclasses.replace(two_runs(seed), classes=plain))


def chain(blocks: int, ranks: int, *options: BlockOption, **fields) -> PartitionProblem:
    fields.setdefault("in_flight", (1,) * 2 * ranks)
    return PartitionProblem(
        blocks=(0,) * blocks,
        classes=(options,),
        num_stages=2 * ranks,
        capacity_bytes=(fields.pop("capacity", 99.0),) * 2 * ranks,
        num_micro_batches=9,
        stage_rank=fields.pop("stage_rank", (*range(ranks), *reversed(range(ranks)))),
        **fields,
    )


PLAIN = BlockOption(time_s=1.0, static_bytes=1.0, saved_bytes=1.0)


def test_the_longest_rank_counts_not_the_longest_stage():
    head = BlockOption(time_s=3.0, static_bytes=0.0, saved_bytes=0.0)
    problem = dataclasses.replace(
        chain(11, 2, PLAIN), blocks=(0,) * 10 + (1,), classes=((PLAIN,), (head,))
    )
    solution = solve_partition(problem, method="dp")
    # 13 over two ranks: 6 and 7, the head with the first stage
    assert solution.objective == 13 + 8 * 7
    times = solution.stage_time_s
    assert sorted([times[0] + times[3], times[1] + times[2]]) == [6, 7]


def test_stages_of_a_rank_are_as_equal_as_fits():
    solution = solve_partition(chain(12, 2, PLAIN), method="dp")
    assert solution.stage_time_s == (3, 3, 3, 3)
    # the first stage holds 4 micro-batches: of 6 blocks a rank it can have but 1 in 6 + 4 + 5
    tight = chain(12, 2, PLAIN, in_flight=(4, 1, 1, 1), capacity=15.0)
    assert solve_partition(tight, method="dp").stage_time_s == (1, 3, 3, 5)


def test_ranks_have_their_longer_stages_in_the_same_chunk():
    """Of five blocks a rank one stage runs three: all in the chunk of the head, itself of three."""
    head = BlockOption(time_s=3.0, static_bytes=0.0, saved_bytes=0.0)
    problem = dataclasses.replace(
        chain(18, 4, PLAIN, stage_rank=(0, 1, 2, 3) * 2),
        blocks=(0,) * 17 + (1,),
        classes=((PLAIN,), (head,)),
    )
    cuts, options = (3, 5, 7, 9, 11, 14, 17), (0,) * 18
    even = spread(problem, (cuts, options))
    assert even == ((2, 4, 6, 8, 11, 14, 17), options)
    use = [problem.use(cuts, options) for cuts, options in ((cuts, options), even)]
    assert problem.objective(use[0]) == problem.objective(use[1])


def test_a_rank_trades_memory_between_its_stages():
    """Dealt out evenly beforehand, neither stage of a rank has room for what the other spares."""
    lean = BlockOption(time_s=2.0, static_bytes=1.0, saved_bytes=0.0)
    problem = chain(8, 2, PLAIN, lean, in_flight=(5, 3, 2, 1), capacity=13.0)
    solution = solve_partition(problem, method="dp")
    assert solution.status is Status.OPTIMAL
    assert solution.objective == best_partition(problem)


def test_chains_that_change_too_often_are_left_to_others(monkeypatch):
    assert rank_graphs(chain(12, 2, PLAIN), math.inf)
    assert not rank_graphs(chain(12, 2, PLAIN, min_blocks=2), math.inf)
    zigzag = dataclasses.replace(
        chain(24, 4, PLAIN), blocks=(0, 1) * 12, classes=((PLAIN,), (PLAIN,))
    )
    assert not rank_graphs(zigzag, math.inf)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_ranks_alike_are_priced_once_for_all_layouts(monkeypatch, share):
    """The third of the blocks is of a class of its own: cuts are before or behind it."""
    made = []
    for name in ("Pricer", "SplitPricer"):
        pricer = getattr(partition_ranks, name)
        monkeypatch.setattr(
            partition_ranks,
            name,
            lambda pricer=pricer, **given: made.append(given) or pricer(**given),
        )
    problem = dataclasses.replace(
        chain(16, 4, PLAIN, stage_rank=(0, 1, 2, 3) * 2, stage_share=share),
        blocks=(0, 0, 1, *(0,) * 13),
        classes=((PLAIN,), (dataclasses.replace(PLAIN, time_s=2.0),)),
    )
    graphs = rank_graphs(problem, math.inf)
    assert len(graphs) > 2
    assert len(made) <= sum(len(graph.table.pricer.kinds) for graph in graphs) / 2


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_ranks_alike_of_different_runs_are_told_apart(share):
    """Cuts in the middle of the chain cost more, so that there are two runs of it; over every hop
    they cost nothing, so that its ranks are alike."""
    problem = dataclasses.replace(
        chain(9, 2, PLAIN, stage_rank=(0, 0, 1, 1), stage_share=share),
        boundary_s=(1.0,) * 3 + (2.0,) + (1.0,) * 4,
        hop_scale=(0.0,) * 3,
    )
    assert_exact(problem)


def with_share(problem: PartitionProblem, seed: int) -> PartitionProblem:
    share = float(np.random.default_rng(seed).choice([0.25, 0.5, 1.0]))
    return dataclasses.replace(problem, stage_share=share)


@pytest.mark.parametrize("make", [random_shared_problem, random_mixed_shared_problem, two_runs])
def test_longest_stages_are_bounded_and_nearly_always_exact(make):
    proven, excess = 0, []
    for seed in range(60):
        problem = with_share(make(seed), seed)
        if problem.min_blocks > 1 and not problem.fixed_cuts:
            continue
        solution, best = solve_partition(problem, method="dp"), best_partition(problem)
        if math.isinf(best):
            assert solution.status is Status.INFEASIBLE
            continue
        assert solution.bound <= best * (1 + 1e-9) <= solution.objective * (1 + 2e-9)
        use = problem.use(solution.cuts, solution.options)
        assert solution.objective == problem.objective(use)
        proven += solution.status is Status.OPTIMAL
        excess.append(solution.objective / best - 1 if best else 0.0)
    assert proven > 0.7 * len(excess) and len(excess) > 20
    assert sum(more > 1e-9 for more in excess) < 0.1 * len(excess)


@pytest.mark.parametrize("make", [random_shared_problem, random_mixed_shared_problem, two_runs])
def test_longest_stages_of_many_blocks_are_bounded(monkeypatch, make):
    """Few splits are gone through, and none is priced exactly, as where ranks have many blocks."""
    monkeypatch.setattr(partition_splits, "_FEW_BLOCKS", 0)
    monkeypatch.setattr(partition_splits, "_PRICED", 1)
    for reader in (partition_dealing, partition_splits):
        monkeypatch.setattr(
            reader, "most_of_one", lambda blocks, stages: -(-blocks // max(1, stages))
        )
    near, found = 0, 0
    for seed in range(60):
        problem = with_share(make(seed), seed)
        if problem.min_blocks > 1 and not problem.fixed_cuts:
            continue
        solution, best = solve_partition(problem, method="dp"), best_partition(problem)
        if math.isinf(best):
            assert not solution.status.has_solution
            continue
        assert solution.bound <= best * (1 + 1e-9)
        found += 1
        if solution.status.has_solution:
            use = problem.use(solution.cuts, solution.options)
            assert problem.objective(use) == solution.objective >= best * (1 - 1e-9)
            near += solution.objective <= best * 1.1
    assert near > 0.6 * found and found > 20


@pytest.mark.parametrize("make", [random_shared_problem, two_runs])
def test_longest_stages_are_exact_where_all_can_be_tried(monkeypatch, make):
    monkeypatch.setattr(partition_trials, "_MAX_TRIALS", 20_000)
    for seed in range(40):
        problem = with_share(make(seed), seed)
        best = best_partition(problem)
        if math.isfinite(best):
            solution = solve_partition(problem, method="dp")
            if solution.status is Status.OPTIMAL:
                assert solution.objective == pytest.approx(best, rel=1e-9, abs=1e-12)


def test_a_stage_that_waits_for_no_other_keeps_stages_even():
    """By the sum of a rank alone all blocks may be in the stages that hold less at once."""
    slow = BlockOption(time_s=1.3, static_bytes=1.0, saved_bytes=0.5)
    fast = BlockOption(time_s=1.0, static_bytes=1.0, saved_bytes=4.0)
    end = BlockOption(time_s=0.2, static_bytes=1.0, saved_bytes=0.0)
    problem = PartitionProblem(
        blocks=(0, *(1,) * 40, 0),
        classes=((end,), (fast, slow)),
        num_stages=4,
        in_flight=(3, 2, 2, 1),
        capacity_bytes=(170.0,) * 4,
        num_micro_batches=32,
        max_weight=15.5,
        sum_weight=0.5,
        stage_rank=(0, 1, 0, 1),
    )
    by_sum = solve_partition(problem, method="dp")
    even = solve_partition(dataclasses.replace(problem, stage_share=1 / 3), method="dp")
    assert max(by_sum.stage_time_s) > 3 * min(by_sum.stage_time_s)
    assert max(even.stage_time_s) < 1.1 * min(even.stage_time_s)
    assert even.gap < 0.01
