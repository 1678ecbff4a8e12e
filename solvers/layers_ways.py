"""The ways in which one stage can run so many equal layers within its bytes, without the beaten."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solvers.partition_frontier import pareto

Array = NDArray[np.float64]

_ROUNDING = 1e-12


class OutOfTime(Exception):
    """The time limit was reached."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """Times of a stage's layers without and with gradient sync, and how many run by each option."""

    time_s: float
    synced_s: float
    counts: tuple[int, ...]


def hull(used: Array, seconds: Array) -> tuple[Array, Array]:
    """The lower convex hull of seconds over bytes, as far as it falls: bytes and seconds, by bytes.

    A layer with so many bytes on average takes no less.
    """
    points: list[tuple[float, float]] = []
    for index in np.lexsort((seconds, used)):
        x, y = float(used[index]), float(seconds[index])
        if points and y >= points[-1][1]:
            continue
        while len(points) > 1 and _is_above(points[-2], points[-1], (x, y)):
            points.pop()
        points.append((x, y))
    nbytes, least = zip(*points, strict=True)
    return np.array(nbytes), np.array(least)


def _is_above(
    left: tuple[float, float], middle: tuple[float, float], right: tuple[float, float]
) -> bool:
    """Whether a point lies on or above the line between its neighbours."""
    rise = (middle[1] - left[1]) * (right[0] - left[0])
    return rise >= (right[1] - left[1]) * (middle[0] - left[0])


def stage_ways(
    times: Array, synced: Array, used: Array, layers: int, free: float, *, deadline: float
) -> list[Way]:
    """Every way to run `layers` within `free` bytes that no other matches or beats in both times.

    Layer by layer, a part of a way is dropped where another part needs no more of either time nor
    of bytes, or where the hulls say that a way known to fit beats whatever it can grow to. Raises
    OutOfTime.
    """
    known = [way for s in (times, synced) if (way := _filled(s, used, layers, free)) is not None]
    known_times = np.array([[row @ times, row @ synced] for row in known])
    hulls = hull(used, times), hull(used, synced)
    options = np.unique(pareto(times, used, synced))
    least = float(used.min())
    counts = np.zeros((1, len(times)), dtype=np.intp)
    part = np.zeros((1, 3))
    step = np.stack([times, synced, used], axis=1)[options]
    for left in range(layers - 1, -1, -1):
        if time.perf_counter() > deadline:
            raise OutOfTime
        grown = (part[:, None, :] + step).reshape(-1, 3)
        fitting = np.flatnonzero(grown[:, 2] + left * least <= free)
        fitting = fitting[~_beaten(grown[fitting], known_times, hulls, left, free)]
        kept = fitting[pareto(grown[fitting, 0], grown[fitting, 2], grown[fitting, 1])]
        part = grown[kept]
        counts = counts[kept // len(options)]
        counts[np.arange(len(kept)), options[kept % len(options)]] += 1
    rows = [*counts, *known]
    found = sorted((float(row @ times), float(row @ synced), tuple(row.tolist())) for row in rows)
    ways: list[Way] = []
    for time_s, synced_s, row in found:
        if not ways or synced_s < ways[-1].synced_s:
            ways.append(Way(time_s=time_s, synced_s=synced_s, counts=row))
    return ways


def _beaten(
    parts: Array,
    known: Array,
    hulls: tuple[tuple[Array, Array], tuple[Array, Array]],
    left: int,
    free: float,
) -> NDArray[np.bool_]:
    """Whether parts that `left` more layers complete are no better then than a known way."""
    least = parts[:, :2].copy()
    if left:
        share = (free - parts[:, 2]) / left
        for column, (nbytes, seconds) in enumerate(hulls):
            least[:, column] += left * np.interp(share, nbytes, seconds)
    least *= 1 + _ROUNDING  # a part that only rounding keeps is a known way itself
    beaten = np.zeros(len(parts), dtype=bool)
    for time_s, synced_s in known:
        beaten |= (least[:, 0] >= time_s) & (least[:, 1] >= synced_s)
    return beaten


def _filled(seconds: Array, used: Array, layers: int, free: float) -> NDArray[np.intp] | None:
    """A good way that fits: the leanest option for all, then, while bytes are left, whichever
    exchange gains the most seconds; None where not even the leanest fits."""
    order = np.lexsort((seconds, used))
    counts = np.zeros(len(used), dtype=np.intp)
    counts[order[0]] = layers
    spare = free - layers * float(used[order[0]])
    if spare < 0:
        return None
    while True:
        more, gain = used - used[:, None], seconds[:, None] - seconds
        possible = (counts[:, None] > 0) & (gain > 0) & (more <= spare)
        if not possible.any():
            return counts
        rate = np.where(possible, gain / np.maximum(more, 1e-300), -np.inf)
        source, target = np.unravel_index(int(rate.argmax()), rate.shape)
        taken = counts[source]
        if more[source, target] > 0:
            taken = min(taken, max(1, int(spare / more[source, target])))
        counts[source] -= taken
        counts[target] += taken
        spare -= taken * float(more[source, target])
