"""The least memory of partitions against all of them, one by one."""

from itertools import combinations, pairwise, product
from math import fsum, inf

import pytest

from solvers.partition_least import least_excess
from solvers.partition_ranks import rank_graphs
from solvers.random_problems import random_partition_problem, random_shared_problem


def smallest(problem):
    """By trying all cuts with all options."""
    length, stages = len(problem.blocks), problem.num_stages
    offered = [range(len(problem.classes[kind])) for kind in problem.blocks]
    least = inf
    cuts = [problem.fixed_cuts] if problem.fixed_cuts is not None else []
    for cut in cuts or combinations(range(1, length), stages - 1):
        if min(b - a for a, b in pairwise((0, *cut, length))) < problem.min_blocks:
            continue
        for options in product(*offered):
            used = problem.use(cut, options).used_bytes
            excess = [
                fsum(used[k] for k in own) - problem.capacity_bytes[own[0]]
                for own in problem.rank_stages()
            ]
            least = min(least, max(excess))
    return least


@pytest.mark.parametrize("seed", range(25))
def test_least_excess_is_that_of_the_best_partition(seed):
    problem = random_partition_problem(seed)
    assert least_excess(problem) == pytest.approx(smallest(problem), abs=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_where_ranks_are_shared_it_is_that_or_a_bound(seed):
    problem = random_shared_problem(seed)
    found, least = least_excess(problem), smallest(problem)
    assert found <= least + 1e-6
    if rank_graphs(problem, inf):
        assert found == pytest.approx(least, abs=1e-6)
    else:
        assert found == least or found > least - max(problem.capacity_bytes)
