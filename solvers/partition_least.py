"""The least memory that a chain cut into stages can run in, whatever it takes in time."""

from __future__ import annotations

import math

import numpy as np

from solvers.partition_dp import ChainSearch
from solvers.partition_pricing import Pricer
from solvers.partition_problem import PartitionProblem
from solvers.partition_shared import least_excess_together


def least_excess(problem: PartitionProblem) -> float:
    """Bytes beyond its capacity that some rank needs at the least; below 0 what is left to spare.

    The minimum over partitions of the maximum over ranks. Exact where no ranks are shared; else a
    lower bound: what all ranks need together, evenly. Infinite with too few blocks.
    """
    if len(problem.blocks) < problem.num_stages * problem.min_blocks:
        return math.inf
    if problem.shares_ranks:
        return least_excess_together(problem)
    pricer = Pricer.of(problem, math.inf)
    search = ChainSearch.of(problem, pricer.kind_of_stage, math.inf)
    position = np.arange(len(problem.blocks) + 1)
    is_run = position[None, :] - position[:, None] >= problem.min_blocks
    base = max(problem.capacity_bytes)  # a bottleneck is sought of numbers from 0
    needs = [
        np.where(is_run, pricer.least_bytes(kind)[pricer.run] - stage.free_bytes + base, np.inf)
        for kind, stage in enumerate(pricer.kinds)
    ]
    return search.least_bottleneck(needs) - base
