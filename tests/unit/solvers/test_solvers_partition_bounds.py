"""Lower bounds: below the exhaustive answer on random problems, and as sharp as they say."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from solvers import partition
from solvers.backends import get_backend
from solvers.brute_force import best_partition
from solvers.partition import BlockOption, PartitionProblem, lower_bound, solve_partition
from solvers.partition_fill import least_fill
from solvers.partition_loads import loaded_bound
from solvers.partition_pooled import pooled_bound
from solvers.partition_relaxation import relaxed_bound
from solvers.random_problems import (
    random_mixed_problem,
    random_mixed_shared_problem,
    random_partition_problem,
    random_shared_problem,
)

HIGHS = get_backend("highs")


@pytest.mark.parametrize("make", [random_partition_problem, random_shared_problem])
def test_no_partition_is_below_the_bounds(make):
    sharper = 0
    for seed in range(60):
        problem = make(np.random.default_rng(seed))
        best, cheap = best_partition(problem), lower_bound(problem)
        relaxed = relaxed_bound(problem, HIGHS)
        assert cheap <= relaxed <= best * (1 + 1e-9)
        sharper += relaxed > cheap * (1 + 1e-6)
    assert sharper > 10


def chain(blocks, stages, *options, **fields):
    return PartitionProblem(
        blocks=(0,) * blocks,
        classes=(options,),
        num_stages=stages,
        in_flight=fields.pop("in_flight", (1,) * stages),
        capacity_bytes=fields.pop("capacity", (100.0,) * stages),
        num_micro_batches=fields.pop("micro_batches", 11),
        **fields,
    )


def test_whole_blocks_cannot_be_shared_out_evenly():
    one = BlockOption(time_s=1.0, static_bytes=0.0, saved_bytes=0.0)
    # of 7 blocks some stage of 3 has three
    assert lower_bound(chain(7, 3, one)) == pytest.approx(7 + 10 * 3)
    assert best_partition(chain(7, 3, one)) == pytest.approx(7 + 10 * 3)
    # cuts that are given leave a longer one
    assert lower_bound(chain(7, 3, one, fixed_cuts=(1, 2))) == pytest.approx(7 + 10 * 5)


def test_a_stage_of_whole_blocks_takes_what_an_option_takes():
    fast = BlockOption(time_s=1.0, static_bytes=12.0, saved_bytes=0.0)
    lean = BlockOption(time_s=2.0, static_bytes=4.0, saved_bytes=0.0)
    problem = chain(4, 4, fast, lean, capacity=(10.0,) * 4)
    # three quarters of every block could run fast, but no whole one
    assert lower_bound(problem) == pytest.approx(14 * 1.25)
    assert relaxed_bound(problem, HIGHS) == pytest.approx(4 * 1.25 + 10 * 2, rel=1e-5)
    assert relaxed_bound(problem, HIGHS, enough=17) == pytest.approx(14 * 1.25)
    assert best_partition(problem) == pytest.approx(14 * 2)


def test_blocks_of_two_lengths_keep_their_order():
    slow, fast = (BlockOption(time_s=t, static_bytes=0.0, saved_bytes=0.0) for t in (3.0, 1.0))
    problem = dataclasses.replace(
        chain(4, 2, fast), blocks=(0, 1, 1, 0), classes=((fast,), (slow,))
    )
    assert lower_bound(problem) == pytest.approx(8 + 10 * 4)


def test_a_stage_that_holds_more_micro_batches_runs_the_leaner_way():
    """Pooled memory would do with the fast way alone; the first stage, by itself, cannot."""
    fast = BlockOption(time_s=1.0, static_bytes=0.0, saved_bytes=20.0)
    lean = BlockOption(time_s=2.0, static_bytes=0.0, saved_bytes=1.0)
    problem = chain(4, 4, fast, lean, in_flight=(6, 3, 2, 1), capacity=(60.0,) * 4)
    assert lower_bound(problem) == pytest.approx(4 + 10 * 1)
    exact = best_partition(problem)
    assert lower_bound(problem) < relaxed_bound(problem, HIGHS) <= exact == 5 + 10 * 2


def test_what_fits_no_stage_has_no_bound():
    wide = BlockOption(time_s=1.0, static_bytes=70.0, saved_bytes=0.0, transient_bytes=40.0)
    problem = chain(2, 2, wide)
    assert math.isinf(best_partition(problem))
    assert lower_bound(problem) < math.inf
    assert math.isinf(relaxed_bound(problem, HIGHS))


@pytest.mark.parametrize(
    "make", [random_partition_problem, random_shared_problem, random_mixed_problem]
)
def test_prices_for_all_memory_together_give_a_bound(make):
    sharper = 0
    for seed in range(150):
        problem = make(np.random.default_rng(seed))
        best, cheap, pooled = best_partition(problem), lower_bound(problem), pooled_bound(problem)
        assert cheap <= pooled <= best * (1 + 1e-9)
        sharper += pooled > cheap * (1 + 1e-6)
    assert sharper > 15


@pytest.mark.parametrize(
    "make",
    [
        random_partition_problem,
        random_shared_problem,
        random_mixed_problem,
        random_mixed_shared_problem,
    ],
)
def test_no_way_to_deal_blocks_out_to_ranks_is_below_their_loads(make):
    sharper = 0
    for seed in range(200):
        problem = make(np.random.default_rng(seed))
        if problem.shares_ranks:
            problem = dataclasses.replace(problem, stage_share=(0.0, 0.4, 1.0)[seed % 3])
        best, cheap, loaded = best_partition(problem), lower_bound(problem), loaded_bound(problem)
        assert cheap <= loaded <= best * (1 + 1e-9), seed
        sharper += loaded > max(cheap, pooled_bound(problem)) * (1 + 1e-6)
    assert sharper > 15


def test_ranks_with_less_room_are_dealt_fewer_blocks_or_take_longer():
    """The first has room for one block at full speed; of eight, some rank of four has two."""
    fast = BlockOption(time_s=1.0, static_bytes=6.0, saved_bytes=0.0)
    lean = BlockOption(time_s=2.0, static_bytes=4.0, saved_bytes=0.0)
    problem = chain(8, 4, fast, lean, capacity=(8.0, 12.0, 12.0, 12.0))
    # two lean ones on the first: three on another would all be lean too
    best = best_partition(problem)
    assert loaded_bound(problem) == pytest.approx(best) == pytest.approx(10 + 10 * 4)


def test_a_rank_may_have_far_more_blocks_than_others():
    """Two of three have room for one alone."""
    one = BlockOption(time_s=1.0, static_bytes=1.0, saved_bytes=0.0)
    problem = chain(9, 3, one, capacity=(1.0, 1.0, 99.0))
    assert loaded_bound(problem) == pytest.approx(best_partition(problem)) == pytest.approx(79)


def test_every_stage_has_a_block_however_much_it_holds():
    """There and back: the first stage holds 15 micro-batches, but has one block at the least."""
    keep = BlockOption(time_s=1.0, static_bytes=0.0, saved_bytes=1.0)
    again = BlockOption(time_s=3.0, static_bytes=0.0, saved_bytes=0.0)
    problem = chain(
        8,
        4,
        keep,
        again,
        in_flight=(15, 15, 1, 1),
        capacity=(6.0,) * 4,
        stage_rank=(0, 1, 1, 0),
    )
    best = best_partition(problem)
    assert best == pytest.approx(12 + 10 * 6)
    assert pooled_bound(problem) < 0.7 * best < 0.9 * best < loaded_bound(problem) <= best


def test_what_the_longest_stage_of_a_rank_counts_for_bounds_its_load():
    """Blocks are held least on the second stage of a rank, which counts twice if it is longer."""
    keep = BlockOption(time_s=1.0, static_bytes=0.0, saved_bytes=1.0)
    again = BlockOption(time_s=1.5, static_bytes=0.0, saved_bytes=0.0)
    problem = chain(
        8,
        4,
        keep,
        again,
        in_flight=(3, 3, 1, 1),
        capacity=(6.0,) * 4,
        stage_rank=(0, 1, 0, 1),
    )
    counted = dataclasses.replace(problem, stage_share=1.0)
    assert loaded_bound(problem) == pytest.approx(best_partition(problem)) == pytest.approx(48)
    assert 1.03 * best_partition(problem) < loaded_bound(counted) <= best_partition(counted)


def test_blocks_cannot_all_lie_where_they_are_held_least():
    """Of 8 in flight on the first stage and 1 on the last; all blocks on the last take as long."""
    one = BlockOption(time_s=1.0, static_bytes=0.0, saved_bytes=1.0)
    again = BlockOption(time_s=1.5, static_bytes=0.0, saved_bytes=0.0)
    problem = chain(8, 4, one, again, in_flight=(8, 6, 4, 2), capacity=(4.0,) * 4, micro_batches=8)
    best = best_partition(problem)
    assert lower_bound(problem) == pytest.approx(8 + 7 * 2)
    assert 25 < pooled_bound(problem) <= best


def test_whole_blocks_fill_ranks_that_have_room_for_them():
    """Of six blocks three ranks have two each, but the first has room for one at full speed."""
    fast = BlockOption(time_s=1.0, static_bytes=6.0, saved_bytes=0.0)
    lean = BlockOption(time_s=2.0, static_bytes=4.0, saved_bytes=0.0)
    roomy = chain(6, 3, fast, lean, capacity=(12.0,) * 3)
    assert least_fill(roomy) == pytest.approx(2.0)
    tight = dataclasses.replace(roomy, stage_fixed_bytes=(3.0, 0.0, 0.0))
    assert least_fill(tight) == pytest.approx(3.5)  # two on the first, of 4.5 bytes each
    assert least_fill(chain(6, 3, fast, capacity=(12.0, 6.0, 6.0))) == math.inf


def test_memory_that_does_not_suffice_anywhere_bounds_all():
    one = BlockOption(time_s=1.0, static_bytes=5.0, saved_bytes=0.0)
    assert pooled_bound(chain(4, 2, one, capacity=(9.0, 9.0))) == math.inf


@pytest.mark.parametrize("ranks", [(), (0, 1, 0, 1)])
def test_long_chains_are_cut_close_to_the_best_within_a_bound_that_holds(monkeypatch, ranks):
    rng = np.random.default_rng(3)
    options = tuple(
        BlockOption(
            time_s=time_s,
            static_bytes=float(rng.random()),
            saved_bytes=saved,
            sync_s=0.01 * float(rng.random()),
            transient_bytes=float(rng.integers(2)),
        )
        for time_s, saved in ((1.0, 4.0), (1.13, 2.4), (1.31, 0.5))
    )
    problem = PartitionProblem(
        blocks=(1, *[0] * 262, 1),
        classes=(options, (BlockOption(time_s=2.5, static_bytes=3.0, saved_bytes=1.0),)),
        num_stages=4,
        in_flight=(4, 3, 2, 1),
        capacity_bytes=(500.0,) * 4 if not ranks else (900.0,) * 4,
        num_micro_batches=6,
        stage_rank=ranks,
    )
    found = solve_partition(problem, method="dp")
    with monkeypatch.context() as patch:
        patch.setattr(partition, "_MANY", math.inf)
        exact = solve_partition(problem, method="dp")
    assert 0 < found.gap < 1e-3
    assert found.bound <= exact.objective * (1 + 1e-12)
    assert exact.bound <= found.objective * (1 + 1e-12)
    beaten = solve_partition(problem, method="dp", cutoff=0.99 * exact.bound)
    assert beaten.bound >= 0.99 * exact.bound * (1 - 1e-12)
    better = solve_partition(problem, method="dp", cutoff=1.01 * exact.objective)
    assert better.objective <= exact.objective * (1 + 1e-3)


def test_ranks_have_room_for_the_block_that_needs_the_most_to_run():
    """Some rank runs the wide block, and the other one some narrow block."""
    wide = BlockOption(time_s=1.0, static_bytes=1.0, saved_bytes=0.0, transient_bytes=10.0)
    narrow = dataclasses.replace(wide, transient_bytes=2.0)
    both = dataclasses.replace(chain(3, 2, wide), blocks=(1, 0, 1), classes=((wide,), (narrow,)))
    roomy = dataclasses.replace(both, capacity_bytes=(12.0,) * 2)
    assert pooled_bound(dataclasses.replace(both, capacity_bytes=(7.4,) * 2)) == math.inf
    assert pooled_bound(dataclasses.replace(both, capacity_bytes=(7.5,) * 2)) < math.inf
    assert pooled_bound(roomy) <= best_partition(roomy) < math.inf


def test_blocks_that_keep_little_need_room_to_run():
    """Two blocks that are kept are too large for a rank, and so is one beside one that runs."""
    keep = BlockOption(time_s=1.0, static_bytes=0.0, saved_bytes=6.0)
    again = BlockOption(time_s=2.0, static_bytes=0.0, saved_bytes=1.0, transient_bytes=8.0)
    freely = dataclasses.replace(again, transient_bytes=0.0)
    problem = chain(4, 2, keep, again, capacity=(10.5,) * 2)
    best = best_partition(problem)
    assert pooled_bound(problem) <= best == pytest.approx(best_partition(chain(4, 2, again)))
    free = chain(4, 2, keep, freely, capacity=(10.5,) * 2)
    assert pooled_bound(free) < 0.9 * pooled_bound(problem)
    alone = chain(3, 1, keep, again, capacity=(10.5,))
    assert pooled_bound(alone) == best_partition(alone) == math.inf
    assert pooled_bound(chain(3, 1, keep, freely, capacity=(10.5,))) < math.inf
