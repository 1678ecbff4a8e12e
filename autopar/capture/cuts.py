"""Where the line of main nodes may be cut: points that few values cross."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from autopar.capture.digest import digest
from autopar.capture.flow import Flow
from autopar.capture.repeats import Segments, find_runs

MAX_WIDTH = 4
"""Most values that may cross a cut."""

Span = tuple[int, int]
"""Main nodes `start` to `end - 1`."""

_HEAVY = 4
"""Weight matmuls from which on a segment is looked into for a repetition."""


def narrow_spans(flow: Flow) -> list[Span]:
    """The segments between all points that one value crosses, refined where that shows layers.

    A value that every layer reads (an encoder's output, a time embedding) makes all points wide;
    there, points of width 2 to 4 are taken if the segments between them repeat.
    """
    spans = _between(0, len(flow), (p for p in range(1, len(flow)) if flow.width(p) <= 1))
    return _refined(flow, spans, 2)


def wide_spans(flow: Flow, spans: Sequence[Span], width: int) -> list[Span]:
    """`spans`, cut further at the narrowest point between any two weight matmuls if that is at
    most `width` wide."""
    found: list[Span] = []
    for start, end in spans:
        matmuls = [i for i in range(start, end) if flow.matmuls(i, i + 1)]
        points = []
        for before, after in pairwise(matmuls):
            best = min(
                range(before + 1, after + 1), key=lambda p: (flow.crossing_bytes(p), flow.width(p))
            )
            if flow.width(best) <= width:
                points.append(best)
        found += _between(start, end, points)
    return found


def segments(flow: Flow, spans: Sequence[Span]) -> Segments:
    """The spans as a sequence to find repetitions in."""

    def boundary_cost(index: int) -> tuple[tuple[float, ...], int]:
        start, end = spans[index]
        weightless = not flow.has_parameters(start, end)
        return (flow.crossing_bytes(start), weightless), flow.shared_path(start)

    return Segments(
        digests=[digest(flow, start, end) for start, end in spans],
        matmuls=[flow.matmuls(start, end) for start, end in spans],
        boundary_cost=boundary_cost,
    )


def _between(start: int, end: int, points: Iterable[int]) -> list[Span]:
    edges = [start, *points, end]
    return [(a, b) for a, b in pairwise(edges) if a < b]


def _refined(flow: Flow, spans: list[Span], width: int) -> list[Span]:
    """Heavy segments that occur once, cut at points up to `width` wide where that shows layers."""
    if width > MAX_WIDTH:
        return spans
    digests = [digest(flow, start, end) for start, end in spans]
    counts = Counter(digests)
    found: list[Span] = []
    for (start, end), own in zip(spans, digests, strict=True):
        if counts[own] > 1 or flow.matmuls(start, end) < _HEAVY:
            found.append((start, end))
            continue
        inner = _between(start, end, (p for p in range(start + 1, end) if flow.width(p) <= width))
        found += _refined(flow, inner if _repeats(flow, inner) else [(start, end)], width + 1)
    return found


def _repeats(flow: Flow, spans: Sequence[Span]) -> bool:
    parts = segments(flow, spans)
    return any(parts.weight(run.start, run.start + run.period) >= 2 for run in find_runs(parts, 2))
