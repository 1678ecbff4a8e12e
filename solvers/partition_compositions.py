"""Which runs of a chain have the same number of blocks of each class."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.intp]

_LARGEST = 2**62


def compositions(blocks: Sequence[int], classes: int) -> tuple[Numbers, Numbers]:
    """Composition index of every run [start, end), and the block counts of every composition.

    Compositions are in the order of their counts, those of the first class first.
    """
    length = len(blocks)
    before = np.zeros((length + 1, classes), dtype=np.intp)
    before[np.arange(1, length + 1), list(blocks)] = 1
    before = before.cumsum(axis=0)
    starts, ends = np.triu_indices(length + 1, k=1)
    code, size = np.zeros(len(starts), dtype=np.intp), 1
    for own in before.T[before[-1] > 0]:
        base = int(own[-1]) + 1
        if size > _LARGEST // base:
            code, size = _ranked(code, size)
        code, size = code * base + (own[ends] - own[starts]), size * base
    code, size = _ranked(code, size)
    example = np.zeros(size, dtype=np.intp)
    example[code] = np.arange(len(code))
    run = np.zeros((length + 1, length + 1), dtype=np.intp)
    run[starts, ends] = code
    return run, before[ends[example]] - before[starts[example]]


def _ranked(code: Numbers, size: int) -> tuple[Numbers, int]:
    """The place of each of the numbers below `size` among those that there are; how many are."""
    if size > 16 * len(code):
        values, places = np.unique(code, return_inverse=True)
        return places.reshape(-1), len(values)
    there = np.zeros(size, dtype=bool)
    there[code] = True
    return (np.cumsum(there) - 1)[code], int(there.sum())
