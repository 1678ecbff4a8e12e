"""Times between measured ones: linear in the logarithms of time and work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log

FARTHEST = 4.0
"""How many times the work of the nearest measurement, or how small a part of it, a time is still
extrapolated to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """What was measured of an op with these `extents` and this `work`: seconds of each pass."""

    extents: tuple[int, ...]
    work: float
    times_s: tuple[float, ...]


def interpolate(
    samples: Sequence[Sample], extents: tuple[int, ...], work: float
) -> tuple[float, ...] | None:
    """Seconds at `work`, between the nearest samples with no more and with no less of it.

    Nearest is in shape: the sum over the extents of how many times they differ, in logarithms.
    Beyond the samples on one side times grow and shrink with the work, up to `FARTHEST` times it;
    None farther out, and without samples.
    """
    if not samples or work <= 0:
        return None

    def distance(sample: Sample) -> float:
        pairs = zip(sample.extents, extents, strict=True)
        return sum(abs(log(max(a, 1) / max(b, 1))) for a, b in pairs)

    below = min((s for s in samples if s.work <= work), key=distance, default=None)
    above = min((s for s in samples if s.work >= work), key=distance, default=None)
    if below is None or above is None:
        nearest = below or above
        assert nearest is not None
        factor = work / nearest.work if nearest.work else FARTHEST + 1
        if not 1 / FARTHEST <= factor <= FARTHEST:
            return None
        return tuple(factor * time_s for time_s in nearest.times_s)
    if above.work > below.work > 0:
        share = log(work / below.work) / log(above.work / below.work)
    else:
        apart = distance(below) + distance(above)
        share = distance(below) / apart if apart else 0.0
    pairs = zip(below.times_s, above.times_s, strict=True)
    return tuple(_between(a, b, share) for a, b in pairs)


def _between(low: float, high: float, share: float) -> float:
    """The geometric mean with weights, or the arithmetic one where a time is 0."""
    if share in (0, 1):
        return high if share else low
    if low <= 0 or high <= 0:
        return low + share * (high - low)
    return exp(log(low) + share * (log(high) - log(low)))
