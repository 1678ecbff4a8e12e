"""A partition problem as arcs between positions, each a stage, or a rank with all of its stages."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from solvers.partition_compositions import compositions
from solvers.partition_dp import ChainSearch
from solvers.partition_even import even_positions, is_long, longest_stage
from solvers.partition_pricing import Pricer
from solvers.partition_problem import PartitionProblem
from solvers.partition_table import PriceTable, chain_arcs

Ways = list[list[tuple[int, int]]]
"""Per arc of a path, (class, option) of its blocks."""

Partition = tuple[tuple[int, ...], tuple[int, ...]]
"""Cuts, and the option of every block."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ArcGraph:
    """What prices arcs, what finds paths, and which partition a path with its ways stands for.

    Where positions are many numbers of blocks, `even` are those of arcs of about equal time, else
    empty, and `longest` tells from an objective how many blocks an arc has at the most in a
    partition that is as good.
    """

    table: PriceTable
    search: ChainSearch
    partition: Callable[[tuple[int, ...], Ways], Partition]
    even: tuple[int, ...]
    longest: Callable[[float], int]

    def least_lacking(self) -> tuple[float, Partition]:
        """The fewest bytes in total that arcs lack, and the partition that does."""
        pricer = self.table.pricer
        lacking = [
            place.lay(np.maximum(0.0, pricer.least_bytes(kind) - pricer.kinds[kind].free_bytes))
            for kind, place in enumerate(self.table.places)
        ]
        found = self.search.shortest(lacking)
        if found is None:  # unreachable: any cut positions are a path
            raise AssertionError("no cut positions")
        total, positions = found
        ways = [
            pricer.least_options(kind, self.table.places[kind].composition(start, end))
            for kind, (start, end) in zip(
                pricer.kind_of_stage, itertools.pairwise(positions), strict=True
            )
        ]
        return total, self.partition(positions, ways)

    def least_excess(self) -> float:
        """Bytes beyond what is free that the fullest arc of a path needs at the least."""
        pricer = self.table.pricer
        base = max(abs(stage.free_bytes) for stage in pricer.kinds)
        needs = [  # a bottleneck is sought of numbers from 0
            place.lay(pricer.least_bytes(kind) - pricer.kinds[kind].free_bytes + base)
            for kind, place in enumerate(self.table.places)
        ]
        return self.search.least_bottleneck(needs) - base


def chain_graph(problem: PartitionProblem, deadline: float) -> ArcGraph:
    """Arcs are stages, positions are cuts. Times have `sum_weight` in them."""
    run, counts = compositions(problem.blocks, len(problem.classes))
    pricer = Pricer.of(problem, counts, deadline)
    search = ChainSearch.of(problem, pricer.kind_of_stage, deadline)
    table = PriceTable(
        pricer,
        search,
        places=chain_arcs(problem, pricer.kinds, run),
        boundary_in_max=problem.boundary_in_max,
    )

    def partition(positions: tuple[int, ...], ways: Ways) -> Partition:
        cuts = positions[1:-1]
        return cuts, in_order(problem, cuts, ways)

    return ArcGraph(
        table=table,
        search=search,
        partition=partition,
        even=even_positions(problem) if is_long(problem) else (),
        longest=partial(longest_stage, problem),
    )


def in_order(
    problem: PartitionProblem, cuts: tuple[int, ...], ways: Sequence[Sequence[tuple[int, int]]]
) -> tuple[int, ...]:
    """The option of every block, the lowest first among blocks of a class on a stage; `ways` are
    (class, option) of the blocks of every stage, in any order."""
    chosen: list[int] = []
    for stage, way in zip(problem.stages(cuts), ways, strict=True):
        queues: dict[int, list[int]] = defaultdict(list)
        for block_class, option in sorted(way, reverse=True):
            queues[block_class].append(option)
        chosen += [queues[problem.blocks[b]].pop() for b in stage]
    return tuple(chosen)
