"""The least memory that a chain cut into stages can run in, whatever it takes in time."""

from __future__ import annotations

import math

from solvers.partition_graph import chain_graph
from solvers.partition_problem import PartitionProblem
from solvers.partition_ranks import rank_graphs
from solvers.partition_shared import least_excess_together


def least_excess(problem: PartitionProblem) -> float:
    """Bytes beyond its capacity that some rank needs at the least; below 0 what is left to spare.

    The minimum over partitions of the maximum over ranks. Exact, but where ranks are shared by
    chains that are not searched rank by rank (`partition_ranks`): then a lower bound, what all
    ranks need together, evenly. Infinite with too few blocks.
    """
    if len(problem.blocks) < problem.num_stages * problem.min_blocks:
        return math.inf
    if not problem.shares_ranks:
        return chain_graph(problem, math.inf).least_excess()
    graphs = rank_graphs(problem, math.inf)
    if not graphs:
        return least_excess_together(problem)
    return min(graph.least_excess() for graph in graphs)
