"""How few elements of values a rank can hold, each in the best of some layouts: worked out for all
of them together on every mesh that is asked about."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.ir.graph import DTYPE_BYTES, TensorSpec
from autopar.ir.placement import ByExpert, Layout, Shard
from autopar.search.prices import Prices

Counts = NDArray[np.int64]


class Footprints:
    """The least local elements of `values`, each with the layouts that it may have, as
    `ir.placement.largest_shape` counts them. Only how a layout splits a value counts."""

    def __init__(self, values: Sequence[tuple[TensorSpec, Collection[Layout]]]) -> None:
        self._itemsize = np.array([DTYPE_BYTES[spec.dtype] for spec, _ in values], dtype=np.int64)
        rows = [(spec, split) for spec, layouts in values for split in _splits(layouts)]
        counts = [len(_splits(layouts)) for _, layouts in values]
        self._first = np.cumsum([0, *counts])[:-1]
        dims = max((len(spec.shape) for spec, _ in rows), default=0)
        self._const = np.ones((len(rows), dims), dtype=np.int64)
        self._grown = np.zeros_like(self._const)
        for row, (spec, _) in enumerate(rows):
            for dim, size in enumerate(spec.shape):
                self._const[row, dim], self._grown[row, dim] = size.const, size.per_sample
        axes = max((len(split) for _, split in rows), default=0)
        self._whole = [_whole([split[axis] for _, split in rows]) for axis in range(axes)]
        self._pieces = [_pieces([split[axis] for _, split in rows]) for axis in range(axes)]

    def numel(self, prices: Prices) -> Counts:
        """By value, the elements on the rank that holds the most, in the layout with the fewest."""
        extents = self._const + self._grown * prices.batch
        for parts, whole, pieces in zip(prices.sizes, self._whole, self._pieces, strict=False):
            extents[whole] = -(-extents[whole] // parts)
            for at, lengths in pieces:
                extents[at] = (-(-lengths // parts)).sum()
        least: Counts = np.minimum.reduceat(extents.prod(axis=1), self._first)
        return least

    def nbytes(self, prices: Prices) -> Counts:
        """The same in bytes."""
        return self.numel(prices) * self._itemsize


_Split = tuple[Shard | None, ...]


def _splits(layouts: Collection[Layout]) -> list[_Split]:
    """The distinct ways in which layouts split a value. Rows by expert are split as rows are."""
    return list(dict.fromkeys(tuple(map(_split, layout)) for layout in layouts))


def _split(placement: object) -> Shard | None:
    if isinstance(placement, ByExpert):
        return Shard(0)
    return placement if isinstance(placement, Shard) else None


def _whole(column: Sequence[Shard | None]) -> tuple[list[int], list[int]]:
    """The rows and dims that an axis splits as a whole."""
    found = [(row, s.dim) for row, s in enumerate(column) if s is not None and not s.pieces]
    return [row for row, _ in found], [dim for _, dim in found]


def _pieces(column: Sequence[Shard | None]) -> list[tuple[tuple[int, int], Counts]]:
    """The rows and dims that an axis splits piece by piece, with the lengths of the pieces."""
    return [
        ((row, s.dim), np.abs(np.array(s.pieces, dtype=np.int64)))
        for row, s in enumerate(column)
        if s is not None and s.pieces
    ]
