"""Ways to split equal blocks among the stages of a rank, those that leave none much longer."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

_MOST_SPLITS = 48
"""Ways to split so many blocks that are gone through at the most."""
_WIDEST = 8
"""Blocks that a stage may have more than the mean in these."""


@functools.cache
def most_of_one(blocks: int, stages: int) -> int:
    """The most blocks that a stage has in a split that is gone through."""
    if stages <= 1:
        return blocks
    mean = -(-blocks // stages)
    for wider in range(_WIDEST, 0, -1):
        if _number(blocks, stages, mean + wider) <= _MOST_SPLITS:
            return mean + wider
    return mean + 1


def _number(blocks: int, stages: int, most: int) -> int:
    """Ways to split blocks among stages of at most so many: by what each lacks of the most, no
    more than all of it, by inclusion and exclusion."""
    lacking = stages * most - blocks
    return sum(
        (-1) ** full
        * math.comb(stages, full)
        * math.comb(lacking - full * (most + 1) + stages - 1, stages - 1)
        for full in range(stages + 1)
        if lacking >= full * (most + 1)
    )


def near_even(blocks: int, places: tuple[int, ...], width: int) -> list[tuple[int, ...]]:
    """The splits of blocks among some of so many stages that are gone through."""
    if not places:
        return [] if blocks else [(0,) * width]
    found = []
    for parts in _parts(blocks, len(places), most_of_one(blocks, len(places))):
        row = [0] * width
        for place, own in zip(places, parts, strict=True):
            row[place] = own
        found.append(tuple(row))
    return found


def _parts(blocks: int, stages: int, most: int) -> Iterator[tuple[int, ...]]:
    if stages == 1:
        if blocks <= most:
            yield (blocks,)
        return
    for own in range(max(0, blocks - (stages - 1) * most), min(blocks, most) + 1):
        for rest in _parts(blocks - own, stages - 1, most):
            yield (own, *rest)
