"""Cutting one tensor into the shards of an axis and putting them together again; all local."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.ir.placement import Shard, chunk_sizes, local_size, local_slices

Pieces = tuple[int, ...]


def sizes(size: int, pieces: Pieces, parts: int) -> tuple[int, ...]:
    """Extent of the cut dim on each rank."""
    return tuple(local_size(size, Shard(0, pieces), parts, rank) for rank in range(parts))


def take(x: Tensor, dim: int, pieces: Pieces, parts: int, rank: int) -> Tensor:
    """The shard of `rank`; a view where it is one range of the dim."""
    ranges = local_slices(x.shape[dim], Shard(dim, pieces), parts, rank)
    cuts = [x.narrow(dim, start, length) for start, length in ranges]
    return cuts[0] if len(cuts) == 1 else torch.cat(cuts, dim)


def split(x: Tensor, dim: int, pieces: Pieces, parts: int) -> list[Tensor]:
    """The shards of all ranks, in order."""
    return [take(x, dim, pieces, parts, rank) for rank in range(parts)]


def join(shards: Sequence[Tensor], dim: int, size: int, pieces: Pieces) -> Tensor:
    """Inverse of `split`; `size` is the extent of the whole dim.

    Shards may be longer than theirs: what lies behind (padding of a collective) is dropped.
    """
    parts, runs, taken = len(shards), [], [0] * len(shards)
    for piece in pieces or (size,):
        ranks = range(parts) if piece >= 0 else reversed(range(parts))
        for rank, length in zip(ranks, chunk_sizes(abs(piece), parts), strict=True):
            runs.append(shards[rank].narrow(dim, taken[rank], length))
            taken[rank] += length
    return torch.cat(runs, dim)


def join_stacked(stacked: Tensor, dim: int, size: int, pieces: Pieces) -> Tensor:
    """`join` of shards that are stacked in a new first dim, as an all-gather leaves them."""
    if dim == 0 and not pieces and stacked.shape[0] * stacked.shape[1] == size:
        return stacked.flatten(0, 1)
    return join(stacked.unbind(0), dim, size, pieces)


def place(shard: Tensor, dim: int, size: int, pieces: Pieces, parts: int, rank: int) -> Tensor:
    """A whole tensor that is zero outside the shard of `rank`."""
    shape = list(shard.shape)
    shape[dim] = size
    whole, taken = shard.new_zeros(shape), 0
    for start, length in local_slices(size, Shard(dim, pieces), parts, rank):
        whole.narrow(dim, start, length).copy_(shard.narrow(dim, taken, length))
        taken += length
    return whole


def positions(size: int, pieces: Pieces, parts: int, rank: int) -> Tensor:
    """Indices along the whole dim of the elements that `rank` holds, in their local order."""
    ranges = local_slices(size, Shard(0, pieces), parts, rank)
    return torch.cat([torch.arange(start, start + length) for start, length in ranges])
