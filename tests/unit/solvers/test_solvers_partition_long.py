"""Long chains of equal blocks: dealt out by their number, filled into ranks, bounded as whole."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from solvers import partition, partition_even, partition_trials
from solvers.backends import get_backend
from solvers.brute_force import best_partition
from solvers.partition import BlockOption, PartitionProblem, solve_partition
from solvers.partition_arcs import Boxed, Dealt
from solvers.partition_filled import filled
from solvers.partition_longest import least_longest
from solvers.partition_ranks import rank_graphs
from solvers.partition_relaxation import relaxed_bound
from solvers.random_problems import (
    random_mixed_problem,
    random_mixed_shared_problem,
    random_partition_problem,
    random_shared_problem,
)
from solvers.solution import Status

HIGHS = get_backend("highs")


@pytest.mark.parametrize("seed", range(40))
def test_costs_by_number_are_those_of_pairs_of_positions(seed):
    rng = np.random.default_rng(seed)
    last = int(rng.integers(1, 9))
    costs = np.where(rng.random(last + 1) < 0.3, np.inf, rng.integers(0, 5, last + 1))
    position = np.arange(last + 1)
    number = position[None, :] - position[:, None]
    everywhere = slice(0, last + 1)
    pairs = Boxed(np.where(number >= 0, costs[number], np.inf), (everywhere, everywhere))
    dealt = Dealt(costs)
    sides = [np.sort(rng.integers(0, last + 1, 2)) for _ in range(2)]
    window = starts, ends = tuple(slice(int(a), int(b) + 1) for a, b in sides)
    before = np.where(rng.random(last + 1) < 0.2, np.inf, rng.integers(0, 5, last + 1))
    after = np.where(rng.random(last + 1) < 0.2, np.inf, rng.integers(0, 5, last + 1))
    for join in (np.add, np.maximum):
        wanted, found = (each.onward(before, window, join) for each in (pairs, dealt))
        np.testing.assert_array_equal(found[0], wanted[0])
        reached = np.isfinite(wanted[0])
        np.testing.assert_array_equal(found[1][reached], wanted[1][reached])
    np.testing.assert_array_equal(dealt.backward(after, window), pairs.backward(after, window))
    around = pairs.around(before, after, window) + pairs.within(window)
    by_number = dealt.around(before, after, window) + dealt.within(window)
    here = number[starts, ends]
    for blocks, least in enumerate(by_number.tolist()):
        assert least == around[here == blocks].min(initial=np.inf)


@pytest.mark.parametrize("make", [random_partition_problem, random_mixed_problem])
def test_stages_of_long_chains_are_dealt_out_exactly(monkeypatch, make):
    monkeypatch.setattr(partition_even, "LONG", 1)
    monkeypatch.setattr(partition_trials, "_MAX_TRIALS", 0)
    monkeypatch.setattr(partition, "filled", lambda problem: None)
    by_number = 0
    for problem in map(make, range(150)):
        solution, best = solve_partition(problem, method="dp"), best_partition(problem)
        by_number += bool(rank_graphs(problem.scaled(), math.inf)) and problem.fixed_cuts is None
        if math.isinf(best):
            assert solution.status is Status.INFEASIBLE
        else:
            assert solution.status is Status.OPTIMAL
            assert solution.objective == pytest.approx(best, rel=1e-9, abs=1e-12)
    assert by_number > 10


MAKERS = (
    random_partition_problem,
    random_mixed_problem,
    random_shared_problem,
    random_mixed_shared_problem,
)


@pytest.mark.parametrize("make", MAKERS)
def test_ranks_that_are_filled_hold_what_they_have_room_for(make):
    """Not all that fits is found; what is found fits, and is about as good as it gets."""
    found, close = 0, 0
    for seed in range(200):
        problem = dataclasses.replace(make(seed), fixed_cuts=None, min_blocks=1)
        partition = filled(problem)
        if partition is None:
            continue
        objective = problem.objective(problem.use(*partition))
        best = best_partition(problem)
        assert best <= objective * (1 + 1e-9) < math.inf
        found, close = found + 1, close + (objective <= 1.3 * best)
    assert found > 40
    assert close > 0.7 * found


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_no_longest_rank_is_below_the_bound(make, share):
    """All that matters is the longest rank."""
    bounded = 0
    for seed in range(120):
        shared = make(seed)
        kinds = shared.classes[shared.blocks[0]], shared.classes[shared.blocks[-1]]
        problem = dataclasses.replace(
            shared,
            blocks=(0,) * (len(shared.blocks) - 1) + (1,),
            classes=kinds,
            max_weight=1e6,
            stage_share=share if shared.shares_ranks else 0.0,
        )
        best, least = best_partition(problem), least_longest(problem.scaled())
        assert least <= best / 1e6 * (1 + 1e-9)
        if math.isfinite(best):
            bounded += least > 0.8 * best / 1e6
    assert bounded > 10


def chain(layers: int, ranks: int, chunks: int) -> PartitionProblem:
    """A GPT on ranks that hold a dozen micro-batches of their first stage and one of their last."""
    stages = ranks * chunks
    ways = ((1.0, 4.0), (1.05, 3.0), (1.2, 1.0), (1.3, 0.5))
    return PartitionProblem(
        blocks=(0, *(1,) * layers, 2),
        classes=(
            (BlockOption(time_s=0.1, static_bytes=10.0, saved_bytes=0.0),),
            tuple(BlockOption(time_s=t, static_bytes=2.0, saved_bytes=s) for t, s in ways),
            (
                BlockOption(time_s=3.0, static_bytes=10.0, saved_bytes=8.0),
                BlockOption(time_s=4.0, static_bytes=10.0, saved_bytes=1.0),
            ),
        ),
        num_stages=stages,
        in_flight=tuple(max(1, 2 * ranks - stage) for stage in range(stages)),
        capacity_bytes=(24.0 * layers / ranks,) * stages,
        num_micro_batches=64,
        boundary_s=(0.01,) * (layers + 1),
        boundary_in_max=False,
        stage_rank=tuple(range(ranks)) * chunks,
        stage_share=0.9 if chunks > 1 else 0.0,
        sum_weight=1 / chunks,
    )


@pytest.mark.parametrize(
    ("ranks", "chunks", "gap"), [(4, 1, 0.006), (16, 1, 0.006), (4, 4, 0.006), (16, 4, 0.03)]
)
def test_a_thousand_layers_are_cut_close_to_the_best(ranks, chunks, gap):
    problem = chain(1000, ranks, chunks)
    known = relaxed_bound(problem, HIGHS)
    solution = solve_partition(problem, method="dp", known=known)
    assert solution.status is Status.FEASIBLE
    assert solution.bound == known
    assert solution.gap < gap
    use = problem.use(solution.cuts, solution.options)
    assert not problem.lacking(use)
    assert problem.objective(use) == solution.objective


def test_whole_blocks_tell_more_than_parts_of_them():
    """Of 20 blocks some of 8 ranks has three; there is room for two that are fast."""
    fast = BlockOption(time_s=1.0, static_bytes=2.0, saved_bytes=0.0)
    slow = BlockOption(time_s=2.0, static_bytes=1.0, saved_bytes=0.0)
    problem = PartitionProblem(
        blocks=(0,) * 20,
        classes=((fast, slow),),
        num_stages=8,
        in_flight=(1,) * 8,
        capacity_bytes=(4.0,) * 8,
        num_micro_batches=9,
    )
    # one of the three fast, two slow
    assert least_longest(problem) == pytest.approx(5.0)
    assert relaxed_bound(problem, HIGHS) > 8 * 5.0
    assert solve_partition(problem, method="dp").bound >= relaxed_bound(problem, HIGHS)


def test_what_is_not_equal_to_others_is_left_to_the_chain(monkeypatch):
    """Blocks of two classes in turn are no run, and are cut all the same."""
    monkeypatch.setattr(partition_even, "LONG", 8)
    problem = dataclasses.replace(chain(10, 4, 1), blocks=(0, 1) * 6)
    assert filled(problem) is None
    solution = solve_partition(problem, method="dp")
    assert solution.status is Status.OPTIMAL
    assert partition.is_long(problem)
