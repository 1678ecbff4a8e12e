"""The moves from any layout to any other, which depend on no shape and no size: found once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.ir.graph import Ref
from autopar.ir.placement import Layout
from autopar.plan.flow import Move, moves_between

NO_MOVE, IMPOSSIBLE = 0, 1
"""What `Paths.table` has where a path has no further move, and where there is no path."""

_ANY = Ref("")

_Layouts = Sequence[Layout]


@dataclass
class Paths:
    """Remembers the paths between layouts. `moves` are all moves on them, by the index that tables
    have; the value they name is no value of a graph."""

    moves: list[Move | None] = field(default_factory=lambda: [None, None])
    _index: dict[Move, int] = field(default_factory=dict)
    _found: dict[tuple[Layout, Layout, bool], list[int]] = field(default_factory=dict)
    _tables: dict[object, NDArray[np.intp]] = field(default_factory=dict)
    _asked: dict[object, tuple[_Layouts, _Layouts, NDArray[np.intp]]] = field(default_factory=dict)
    """The same by the ids of the layouts, which are kept so that no others have these."""

    def table(self, have: _Layouts, want: _Layouts, *, differentiable: bool) -> NDArray[np.intp]:
        """Indices of the moves from every layout of `have` to every one of `want`, in order."""
        asked = (id(have), id(want), differentiable)
        if asked not in self._asked:
            self._asked[asked] = have, want, self._table(have, want, differentiable)
        return self._asked[asked][2]

    def _table(self, have: _Layouts, want: _Layouts, differentiable: bool) -> NDArray[np.intp]:
        key = (tuple(have), tuple(want), differentiable)
        if key not in self._tables:
            paths = [[self._path(x, y, differentiable) for y in want] for x in have]
            longest = max((len(path) for row in paths for path in row), default=0)
            table = np.full((len(have), len(want), longest), NO_MOVE, dtype=np.intp)
            for row, found in zip(table, paths, strict=True):
                for cell, path in zip(row, found, strict=True):
                    cell[: len(path)] = path
            self._tables[key] = table
        return self._tables[key]

    def _path(self, src: Layout, dst: Layout, differentiable: bool) -> list[int]:
        key = (src, dst, differentiable)
        if key not in self._found:
            self._found[key] = self._find(*key)
        return self._found[key]

    def _find(self, src: Layout, dst: Layout, differentiable: bool) -> list[int]:
        try:
            moves = moves_between(_ANY, src, dst, differentiable=differentiable)
        except KeyError:
            return [IMPOSSIBLE]
        for move in moves:
            if move not in self._index:
                self._index[move] = len(self.moves)
                self.moves.append(move)
        return [self._index[move] for move in moves]
