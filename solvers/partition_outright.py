"""The best ways to run a few blocks on the stages of a rank, of all that there are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations_with_replacement

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_MOST_WAYS = 100_000
_SLACK = 1e-12


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Choice:
    """Options of `count` blocks of a stage, all alike: seconds, once a step besides, bytes held,
    and bytes that the rank holds while the one runs that holds most."""

    stage: int
    count: int
    time: Array
    sync: Array
    used: Array
    transient: Array


@dataclass(frozen=True, kw_only=True, slots=True)
class Outright:
    """A way to run blocks: its seconds, what they count for, and the (choice, option) of each."""

    time_s: float
    sync_s: float
    count_s: float
    options: list[tuple[int, int]]


def outright(
    choices: Sequence[Choice], stages: int, free: float, counts: Callable[[Array], Array]
) -> list[Outright] | None:
    """The ways that fit into `free` of which no other takes and `counts` (by times [..., stage]) no
    more, and takes no more with its sync; None where there are too many to go through."""
    shape = [math.comb(len(each.time) + each.count - 1, each.count) for each in choices]
    if math.prod(shape) > _MOST_WAYS:
        return None
    ways = [_ways(len(each.time), each.count) for each in choices]
    work_s, sync_s = np.zeros((*shape, stages)), np.zeros(shape)
    used, running = np.zeros(shape), np.zeros(shape)
    for axis, (each, rows) in enumerate(zip(choices, ways, strict=True)):
        at = [1] * len(shape)
        at[axis] = -1
        work_s[..., each.stage] += each.time[rows].sum(axis=1).reshape(at)
        sync_s += each.sync[rows].sum(axis=1).reshape(at)
        used += each.used[rows].sum(axis=1).reshape(at)
        np.maximum(running, each.transient[rows].max(axis=1).reshape(at), out=running)
    fits = np.nonzero(used + running <= free)
    time_s, sync_s, count_s = work_s[fits].sum(axis=-1), sync_s[fits], counts(work_s[fits])
    return [
        Outright(
            time_s=float(time_s[way]),
            sync_s=float(sync_s[way]),
            count_s=float(count_s[way]),
            options=[
                (number, int(option))
                for number, (rows, row) in enumerate(zip(ways, fits, strict=True))
                for option in rows[row[way]]
            ],
        )
        for way in _unbeaten(np.stack([count_s, time_s, time_s + sync_s], axis=1))
    ]


@lru_cache(maxsize=256)
def _ways(options: int, count: int) -> NDArray[np.intp]:
    """Every way to choose so many of the options, with any as often as wanted: [way, block]."""
    found = list(combinations_with_replacement(range(options), count))
    return np.array(found, dtype=np.intp).reshape(len(found), count)


def _unbeaten(points: Array) -> list[int]:
    """The rows of which no other is as low in all."""
    left = np.lexsort(points.T[::-1])
    found = []
    while len(left):
        first = left[0]
        found.append(int(first))
        left = left[(points[left] < points[first] * (1 - _SLACK)).any(axis=1)]
    return found
