"""Which pipeline rank runs which stage: a tuple with the rank of every stage."""

from __future__ import annotations

import functools


@functools.lru_cache(maxsize=4096)
def looped(num_ranks: int, chunks: int) -> tuple[int, ...]:
    """Stage s on rank s mod num_ranks: every rank holds one stage of each round."""
    return tuple(range(num_ranks)) * chunks


@functools.lru_cache(maxsize=4096)
def vee(num_ranks: int, chunks: int) -> tuple[int, ...]:
    """There and back: every other round runs through the ranks in reverse.

    Neighbouring stages at a turn are on one rank and exchange no message. With two chunks the first
    and the last stage are both on rank 0.
    """
    there = tuple(range(num_ranks))
    return tuple(rank for i in range(chunks) for rank in (there if i % 2 == 0 else there[::-1]))
