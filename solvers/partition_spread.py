"""Which stage of a rank runs which of its blocks, where that costs the same: equal stages keep a
schedule in step.

The objective knows how long a rank is, not in which of its stages. But ranks take turns chunk by
chunk, and a stage that is longer than those beside it is waited for. So blocks move between the
stages of a rank as long as these become more equal, and then, as equal as they are, as long as
stages of a chunk do: what a rank has too much goes to the chunk in which others have it too.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from solvers.partition_graph import Partition, in_order
from solvers.partition_problem import PartitionProblem
from solvers.solution import fits

_LEAST = 1e-9
"""Share of all time below which a gain is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Move:
    """One block (class, option) from a stage of a rank to another."""

    source: int
    target: int
    block: tuple[int, int]


def spread(problem: PartitionProblem, partition: Partition) -> Partition:
    """A partition of the same objective whose stages are as equal as single moves make them."""
    if problem.fixed_cuts is not None:
        return partition
    state = _State(problem, partition)
    for by_chunk in (False, True):
        while (move := state.best(by_chunk)) is not None:
            state.make(move)
    return state.partition()


class _State:
    """Cuts, the blocks of every stage, and how long stages and how full ranks are."""

    def __init__(self, problem: PartitionProblem, partition: Partition) -> None:
        cuts, options = partition
        self.problem = problem
        self.cuts = list(cuts)
        self.held = [
            Counter((problem.blocks[b], options[b]) for b in stage)
            for stage in problem.stages(cuts)
        ]
        use = problem.use(cuts, options)
        self.work_s = [t - c for t, c in zip(use.time_s, use.cuts_s, strict=True)]
        self.ranks = problem.rank_stages()
        self.used = [math.fsum(use.used_bytes[k] for k in stages) for stages in self.ranks]
        self.least_s = _LEAST * math.fsum(self.work_s)

    def partition(self) -> Partition:
        """What it has come to."""
        cuts = tuple(self.cuts)
        return cuts, in_order(self.problem, cuts, [list(own.elements()) for own in self.held])

    def best(self, by_chunk: bool) -> _Move | None:
        """The move that gains the most; None where none gains anything."""
        found, most = None, 0.0
        width = max(map(len, self.ranks))
        chunk_s = [
            math.fsum(self.work_s[stages[c]] for stages in self.ranks if c < len(stages))
            for c in range(width)
        ]
        for rank, stages in enumerate(self.ranks):
            for first, second in itertools.permutations(range(len(stages)), 2):
                for move in self._moves(rank, stages[first], stages[second]):
                    moved_s = self._time_s(move)
                    least = self.least_s * moved_s
                    # by how much the squares of times get less, of stages and within chunks
                    gain = self.work_s[move.source] - self.work_s[move.target] - moved_s
                    gain *= moved_s
                    if by_chunk:
                        heavier_s = chunk_s[second] - chunk_s[first] + moved_s
                        gain = moved_s * heavier_s if gain >= -least else 0.0
                    if gain > max(most, least):
                        found, most = move, gain
        return found

    def _moves(self, rank: int, source: int, target: int) -> Iterator[_Move]:
        """What of one stage can as well be run by another: all stages between shift by a block."""
        problem = self.problem
        scale = problem.time_scale
        if self.held[source].total() <= problem.min_blocks or scale[source] != scale[target]:
            return
        crossed = {
            problem.blocks[cut - 1 if source < target else cut]
            for cut in self._between(source, target)
        }
        if len(crossed) > 1 or not self._cuts_cost_the_same(source, target):
            return
        free = problem.capacity_bytes[source]
        for kind, option in self.held[source]:
            move = _Move(source=source, target=target, block=(kind, option))
            if kind in crossed and fits(self.used[rank] + self._more_bytes(move), free):
                yield move

    def _between(self, source: int, target: int) -> list[int]:
        """The cuts from one stage to another."""
        return self.cuts[min(source, target) : max(source, target)]

    def _cuts_cost_the_same(self, source: int, target: int) -> bool:
        cost_s, by = self.problem.boundary_s, -1 if source < target else 1
        return all(cost_s[cut - 1] == cost_s[cut + by - 1] for cut in self._between(source, target))

    def _time_s(self, move: _Move) -> float:
        kind, option = move.block
        return self.problem.time_scale[move.source] * self.problem.classes[kind][option].time_s

    def _more_bytes(self, move: _Move) -> float:
        kind, option = move.block
        held = self.problem.in_flight[move.target] - self.problem.in_flight[move.source]
        return held * self.problem.classes[kind][option].saved_bytes

    def make(self, move: _Move) -> None:
        """Carry a move out."""
        low, high = sorted((move.source, move.target))
        for cut in range(low, high):
            self.cuts[cut] += -1 if move.source < move.target else 1
        self.held[move.source] -= Counter([move.block])
        self.held[move.target][move.block] += 1
        moved_s = self._time_s(move)
        self.work_s[move.source] -= moved_s
        self.work_s[move.target] += moved_s
        rank = next(r for r, stages in enumerate(self.ranks) if move.source in stages)
        self.used[rank] += self._more_bytes(move)
