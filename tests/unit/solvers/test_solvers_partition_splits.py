"""Splits of a rank's blocks among its stages that are not gone through are bounded all the same."""

from __future__ import annotations

import math

import pytest

from solvers import partition_dealing, partition_splits
from solvers.brute_force import best_partition
from solvers.partition import BlockOption, PartitionProblem, solve_partition
from solvers.partition_ranks import rank_graphs


def of_one_rank(blocks: int, capacity: float, share: float) -> PartitionProblem:
    """Two stages, of which the first holds four micro-batches where the second holds one; what is
    fast holds four times as much as what is slow."""
    slow = BlockOption(time_s=2.0, static_bytes=0.0, saved_bytes=1.0)
    fast = BlockOption(time_s=1.0, static_bytes=0.0, saved_bytes=4.0)
    return PartitionProblem(
        blocks=(0,) * blocks,
        classes=((fast, slow),),
        num_stages=2,
        in_flight=(4, 1),
        capacity_bytes=(capacity,) * 2,
        num_micro_batches=9,
        stage_rank=(0, 0),
        stage_share=share,
    )


@pytest.fixture
def _even_splits_alone(monkeypatch):
    for reader in (partition_dealing, partition_splits):
        monkeypatch.setattr(reader, "most_of_one", lambda blocks, stages: -(-blocks // stages))


@pytest.mark.usefixtures("_even_splits_alone")
def test_a_split_that_is_left_out_may_be_the_best(monkeypatch):
    """With more blocks where less is held all are fast there."""
    monkeypatch.setattr(partition_splits, "_FEW_BLOCKS", 0)
    monkeypatch.setattr(partition_splits, "_MOVES", 0)
    problem = of_one_rank(8, 32.0, 0.5)
    solution = solve_partition(problem, method="dp")
    assert solution.cuts != (4,)
    assert solution.bound <= best_partition(problem) * (1 + 1e-9)


def test_what_is_left_out_has_a_long_stage():
    """All blocks are fast where less is held, but there are too many for one stage."""
    assert solve_partition(of_one_rank(40, 200.0, 0.5), method="dp").gap < 0.01


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_ranks_are_bounded_before_their_splits_are_priced(share):
    """A stage that holds less would take all blocks, were it not the longest then."""
    problem = of_one_rank(40, 100.0, share)
    (table,) = (graph.table for graph in rank_graphs(problem.scaled(), math.inf))
    whole = solve_partition(problem, method="dp")
    count_s = problem.counted(whole.stage_time_s)
    assert 0.95 * count_s < table.counts[0][:, -1].min() <= count_s


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_what_is_left_out_has_no_room_to_be_fast(share):
    """Where one stage is long it, or another, takes the more for its blocks."""
    assert solve_partition(of_one_rank(40, 100.0, share), method="dp").gap < 0.001


@pytest.mark.parametrize("capacity", [120.0, 130.0])
def test_a_long_stage_has_no_room_to_be_fast(capacity):
    """It takes the more for its blocks, or others do; neither alone tells as much."""
    assert solve_partition(of_one_rank(40, capacity, 1.0), method="dp").gap < 0.01


@pytest.mark.usefixtures("_even_splits_alone")
def test_splits_that_are_less_even_are_reached_by_moves():
    """Six blocks more are on the stage that holds less, where they are fast."""
    solution = solve_partition(of_one_rank(40, 200.0, 0.5), method="dp")
    assert solution.cuts == (14,)
    assert solution.stage_time_s == (25.0, 26.0)
