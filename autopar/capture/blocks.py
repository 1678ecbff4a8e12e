"""The graph as a chain of blocks: narrow cuts, then the repetition between them.

A block is one repetition (a transformer layer) with at least two weight matmuls where the
repetition allows, so that a column-split and a row-split weight meet in one block. What stands
before, between and after repetitions (embedding; final norm, head and loss) becomes blocks of its
own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from autopar.capture.chain import build_chain
from autopar.capture.cuts import MAX_WIDTH, Span, narrow_spans, segments, wide_spans
from autopar.capture.digest import digest
from autopar.capture.flow import Flow
from autopar.capture.repeats import find_runs
from autopar.ir.blocks import BlockChain
from autopar.ir.graph import OpGraph

_MATMULS_PER_BLOCK = 2


def find_blocks(graph: OpGraph, *, min_blocks: int = 1) -> BlockChain:
    """The chain of blocks, with at least `min_blocks` of them where the graph allows.

    To reach that number blocks are first made smaller (one weight matmul), then cut where up to
    four values cross. A graph that cannot be cut so often gives the longest chain found.
    """
    flow = Flow(graph)
    longest: list[Span] = []
    for spans, matmuls in _attempts(flow):
        blocks = _grouped(flow, spans, matmuls)
        if len(blocks) >= min_blocks:
            return build_chain(flow, blocks)
        longest = max(longest, blocks, key=len)
    return build_chain(flow, longest)


def _attempts(flow: Flow) -> Iterator[tuple[list[Span], int]]:
    """Segments and least matmuls of a block, from coarse to fine."""
    spans = narrow_spans(flow)
    yield spans, _MATMULS_PER_BLOCK
    yield spans, 1
    for width in range(2, MAX_WIDTH + 1):
        yield wide_spans(flow, spans, width), 1
    yield spans, 0


def _grouped(flow: Flow, spans: Sequence[Span], least_matmuls: int) -> list[Span]:
    """The segments put together to blocks."""
    if not least_matmuls:
        return list(spans)
    grouping = _Grouping(flow, spans, least_matmuls)
    blocks: list[Span] = []
    at = 0
    for run in grouping.runs:
        blocks += grouping.gap(at, run.start)
        for start in range(run.start, run.end, run.period):
            blocks += grouping.repetition(start, start + run.period)
        at = run.end
    return blocks + grouping.gap(at, len(spans))


class _Grouping:
    """Puts segments together: those of a repetition, and those in the gaps between repetitions."""

    def __init__(self, flow: Flow, spans: Sequence[Span], least_matmuls: int) -> None:
        self._flow = flow
        self._spans = spans
        self._parts = segments(flow, spans)
        self._least = least_matmuls
        self.runs = find_runs(self._parts, least_matmuls)
        self._starters = {self._parts.digests[run.start]: run.period for run in self.runs}
        whole = [self._span(run.start, run.start + run.period) for run in self.runs]
        self._templates = {digest(flow, *span): span[1] - span[0] for span in whole}

    def repetition(self, low: int, high: int) -> list[Span]:
        """One repetition, cut where its first segment occurs again and both sides are heavy enough.

        Layers that alternate (dense and sparse, say) repeat with the period of their pattern; the
        pattern is cut back into its layers.
        """
        edges = [low]
        for i in range(low + 1, high):
            again = self._parts.digests[i] == self._parts.digests[low]
            lighter = min(self._parts.weight(edges[-1], i), self._parts.weight(i, high))
            if again and lighter >= self._least:
                edges.append(i)
        return self._joined([*edges, high])

    def gap(self, low: int, high: int) -> list[Span]:
        """Blocks of the segments between two runs.

        Segments that together equal a run's block are one (a value that ends in them gave them
        other cuts than the run has). Elsewhere a block ends once it has its matmuls and the next
        segment has parameters, or before a segment that equals the first of a run's block; one
        that begins with such a segment is as long as the run's.
        """
        edges, matched, i = [low], {low}, low
        while i < high:
            if edges[-1] < i and self._ends_before(edges[-1], i):
                edges.append(i)
            match = self._template_end(i, high)
            if match is not None:
                edges += [i] * (edges[-1] < i) + [match] * (match < high)
                matched.add(match)
                i = match
            else:
                i += 1
        if edges[-1] not in matched and not self._parts.weight(edges[-1], high):
            edges.pop()  # no weight matmul: goes with the block before
        return self._joined([*edges, high]) if low < high else []

    def _ends_before(self, start: int, index: int) -> bool:
        long = index - start >= self._starters.get(self._parts.digests[start], 1)
        heavy = self._parts.weight(start, index) >= self._least
        full = long and heavy and self._flow.has_parameters(*self._spans[index])
        starts = self._parts.digests[index] in self._starters
        return full or (starts and self._flow.has_parameters(*self._span(start, index)))

    def _template_end(self, start: int, high: int) -> int | None:
        """The segment after the ones from `start` on that together equal a run's block."""
        for own, length in self._templates.items():
            first = self._spans[start][0]
            for end in range(start + 1, high + 1):
                span = self._span(start, end)
                if span[1] - first >= length:
                    if span[1] - first == length and digest(self._flow, *span) == own:
                        return end
                    break
        return None

    def _span(self, low: int, high: int) -> Span:
        return self._spans[low][0], self._spans[high - 1][1]

    def _joined(self, edges: Sequence[int]) -> list[Span]:
        return [self._span(low, high) for low, high in pairwise(edges)]
