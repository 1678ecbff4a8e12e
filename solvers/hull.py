"""Outer hulls: what is known of cost and size by the least of some weighted sums of both.

With L(p) the least of cost + p * size over all there is, a line for every price p that was asked
about, everything lies above these lines; the corners of what does are no worse than it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Line = tuple[float, float]
"""A price of size, and the least of the cost and so much for the size."""

Corner = tuple[float, float]
"""A cost and a size."""

_SAME = 1e-9


def corners(lines: Iterable[Line], least_size: float) -> list[Corner]:
    """The corners of {cost + price * size >= least for all lines, size >= least_size}, from the
    smallest on: whatever weighs cost and size is least at one of them."""
    found: list[Corner] = []
    left = sorted(dict(sorted(lines)).items())
    size = least_size
    while left:
        cost, price = max((least - each * size, -each) for each, least in left)
        found.append((cost, size))
        # along this line to where one that falls less takes over
        left = [line for line in left if line[0] < -price]
        least = cost - price * size
        meets = [(least - other) / (-price - each) for each, other in left]
        size = max([size, *([min(meets)] if meets else [])])
    return _apart(found)


def _apart(found: Sequence[Corner]) -> list[Corner]:
    kept: list[Corner] = []
    for corner in found:
        if not kept or corner[1] > kept[-1][1] * (1 + _SAME):
            kept.append(corner)
    return kept


def lower_hull(points: Iterable[Corner]) -> list[Corner]:
    """The corners of the convex lower boundary of points, by their first coordinate."""
    hull: list[Corner] = []
    for x, y in sorted(points):
        if hull and x == hull[-1][0]:
            continue
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (x - hull[-2][0]) >= (
            y - hull[-2][1]
        ) * (hull[-1][0] - hull[-2][0]):
            hull.pop()
        hull.append((x, y))
    return hull
