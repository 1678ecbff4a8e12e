"""Shards of several tensors in one flat buffer: what a reduce-scatter or all-gather moves at once.

The part of a rank is its shards of all tensors, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor

from autopar.ir.placement import chunk_offsets, chunk_sizes

Cut = tuple[tuple[int, ...], int]
"""Shape of a whole tensor, and the dim along which ranks hold chunks of it."""


def counts(cuts: Sequence[Cut], ranks: int) -> tuple[int, ...]:
    """Elements of every rank's part."""
    return tuple(sum(prod(_shape(cut, ranks, rank)) for cut in cuts) for rank in range(ranks))


def rows(tensors: Sequence[Tensor], cuts: Sequence[Cut], ranks: int) -> Tensor:
    """Every rank's part of whole tensors as a row, in one buffer: rows are as long as the longest
    part, with zeros behind the others."""
    lengths = counts(cuts, ranks)
    found = tensors[0].new_empty(ranks, max(lengths))
    for rank, length in enumerate(lengths):
        found[rank, length:].zero_()
        for own, x, cut in zip(
            unpack(found[rank, :length], cuts, ranks, rank), tensors, cuts, strict=True
        ):
            own.copy_(_chunk(x, cut, ranks, rank))
    return found


def unpack(part: Tensor, cuts: Sequence[Cut], ranks: int, rank: int) -> list[Tensor]:
    """The shards in one rank's part, as views of it."""
    shapes = [_shape(cut, ranks, rank) for cut in cuts]
    flat = part.split([prod(shape) for shape in shapes])
    return [x.view(shape) for x, shape in zip(flat, shapes, strict=True)]


def fill(wholes: Sequence[Tensor], rows: Tensor, cuts: Sequence[Cut]) -> None:
    """Write the parts of all ranks, the rows of `rows`, into whole tensors.

    Rows may be longer than the parts: what lies behind is padding.
    """
    ranks = len(rows)
    for rank, count in enumerate(counts(cuts, ranks)):
        shards = unpack(rows[rank, :count], cuts, ranks, rank)
        for whole, cut, shard in zip(wholes, cuts, shards, strict=True):
            _chunk(whole, cut, ranks, rank).copy_(shard)


def _shape(cut: Cut, ranks: int, rank: int) -> tuple[int, ...]:
    shape, dim = list(cut[0]), cut[1]
    shape[dim] = chunk_sizes(shape[dim], ranks)[rank]
    return tuple(shape)


def _chunk(x: Tensor, cut: Cut, ranks: int, rank: int) -> Tensor:
    shape, dim = cut
    start, length = chunk_offsets(shape[dim], ranks)[rank], chunk_sizes(shape[dim], ranks)[rank]
    return x.narrow(dim, start, length)
