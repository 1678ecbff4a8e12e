"""Repetition in a sequence of segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    """A sequence of segments: a digest and a number of weight matmuls for each.

    `boundary_cost(i)` tells how unnatural it is to cut before segment `i` (less is better): a cost
    that is worth a repetition, and one that only decides between equals.
    """

    digests: Sequence[str]
    matmuls: Sequence[int]
    boundary_cost: Callable[[int], tuple[tuple[float, ...], int]]

    def weight(self, start: int, end: int) -> int:
        """Weight matmuls of segments `start` to `end - 1`."""
        return sum(self.matmuls[start:end])


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """`count` equal blocks of `period` segments each, the first at segment `start`."""

    start: int
    period: int
    count: int

    @property
    def end(self) -> int:
        """The first segment after the run."""
        return self.start + self.period * self.count


def find_runs(segments: Segments, least_matmuls: int) -> list[Run]:
    """Disjoint runs in order: the one that covers most weight matmuls, then likewise on each side.

    A block holds at least `least_matmuls` where that leaves two blocks.
    """
    return _runs_between(segments, 0, len(segments.digests), least_matmuls)


def _runs_between(segments: Segments, low: int, high: int, least_matmuls: int) -> list[Run]:
    best = _best_run(segments, low, high, least_matmuls)
    if best is None:
        return []
    before = _runs_between(segments, low, best.start, least_matmuls)
    return [*before, best, *_runs_between(segments, best.end, high, least_matmuls)]


def _best_run(segments: Segments, low: int, high: int, least_matmuls: int) -> Run | None:
    """Most weight matmuls covered, then the shortest period, then the first."""
    best: tuple[int, int, int] | None = None
    for period in range(1, (high - low) // 2 + 1):
        for start, end in _stretches(segments.digests, low, high, period):
            count = (end - start) // period
            covered = count * segments.weight(start, start + period)
            if covered and (best is None or covered > best[0]):
                best = (covered, period, start)
    if best is None:
        return None
    _, period, start = best
    end = next(e for s, e in _stretches(segments.digests, low, high, period) if s == start)
    return _placed(segments, start, end, period, least_matmuls)


def _stretches(digests: Sequence[str], low: int, high: int, period: int) -> list[tuple[int, int]]:
    """Maximal ranges of two periods or more in which every segment equals the one a period on."""
    found, start = [], low
    for i in range(low, high - period + 1):
        if i < high - period and digests[i] == digests[i + period]:
            continue
        if i - start >= period:
            found.append((start, i + period))
        start = i + 1
    return found


def _placed(segments: Segments, start: int, end: int, period: int, least_matmuls: int) -> Run:
    """The run within a stretch: as many periods to a block as it needs, at the best offset.

    A natural boundary is worth a repetition less, so offsets of a whole block are tried.
    """
    weight = segments.weight(start, start + period)
    merged = period * -(-least_matmuls // weight)
    if (end - start) // merged < 2:
        merged = period

    def run(offset: int) -> Run:
        first = start + offset
        return Run(start=first, period=merged, count=(end - first) // merged)

    def cost(candidate: Run) -> tuple[tuple[float, ...], int, int, int]:
        nbytes_and_weightless, path = segments.boundary_cost(candidate.start + merged)
        return nbytes_and_weightless, -candidate.count, path, candidate.start

    offsets = range(min(merged, end - start - 2 * merged + 1))
    return min((run(offset) for offset in offsets), key=cost)
