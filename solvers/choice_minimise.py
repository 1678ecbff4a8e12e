"""The least of a sum of cost tables over the options of one node, and where it is.

Large tables are mostly for what cannot be or is the same twice: options of a neighbour that all
tables take alike are looked at once, and where few options go together only those are added up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from solvers.choice_core import Factor, distinct
from solvers.choice_problem import Array

_WORTH_LESS = 2e5
_WORTH_MERGING = 1e6
_AT_ONCE = 2**20
_FEW = 0.6
"""Share of the options of a table that go together where it tells what to leave out."""

_SCATTERED = 8
"""What an entry takes that is looked up by itself, in entries of whole tables."""

Least = tuple[Array, NDArray[np.intp]]


def minimise(cost: Array, matrices: Sequence[Array]) -> Least:
    """min and argmin over i of cost[i] + matrices[0][i, j0] + matrices[1][i, j1] + ..., by j."""
    around = tuple(range(1, len(matrices) + 1))
    factors: list[Factor] = [((0,), cost)]
    factors += [((0, other), matrix) for other, matrix in zip(around, matrices, strict=True)]
    return minimise_factors(0, around, factors)


def minimise_factors(node: int, around: tuple[int, ...], factors: Sequence[Factor]) -> Least:
    """min and argmin over the options of `node` of the sum of its factors, as tables over `around`.

    Where nothing is possible the least is infinite, and the argmin any.
    """
    parts = [_node_last(node, around, factor) for factor in factors]
    sizes = [max(part.shape[axis] for part in parts) for axis in range(len(around))]
    if _work(parts, sizes) < _WORTH_LESS:
        return _minimise_all(parts, sizes)
    if len(sizes) * max(part.size for part in parts) > _work(parts, sizes) - _WORTH_MERGING:
        return _minimise_possible(parts, sizes)
    kinds = []
    for axis in range(len(around)):
        first, kind = _alike(parts, axis, sizes[axis])
        if len(first) < sizes[axis]:
            parts = [
                part if part.shape[axis] == 1 else part.take(first, axis=axis) for part in parts
            ]
        sizes[axis] = len(first)
        kinds.append(kind)
    least, best = _minimise_possible(parts, sizes)
    for axis, kind in reversed(list(enumerate(kinds))):
        if len(kind) > sizes[axis]:
            least, best = least.take(kind, axis=axis), best.take(kind, axis=axis)
    return least, best


def _node_last(node: int, around: tuple[int, ...], factor: Factor) -> Array:
    """A view of a factor's table with a dim for each of `around`, of size 1 where it does not
    depend on that, and the node as its last dim."""
    nodes, table = factor
    order = [other for other in (*around, node) if other in nodes]
    moved = table.transpose([nodes.index(other) for other in order])
    return moved[tuple(slice(None) if other in nodes else None for other in (*around, node))]


def _work(parts: Sequence[Array], sizes: Sequence[int]) -> int:
    return parts[0].shape[-1] * math.prod(sizes)


def _alike(parts: Sequence[Array], axis: int, size: int) -> tuple[list[int], NDArray[np.intp]]:
    """Options of a neighbour, by their axis, that all parts take alike: the first of each kind, and
    the kind of each."""
    rows = [
        np.moveaxis(part, axis, 0).reshape(size, -1) for part in parts if part.shape[axis] == size
    ]
    return distinct(rows[0] if len(rows) == 1 else np.concatenate(rows, axis=1))


def _minimise_possible(parts: Sequence[Array], sizes: Sequence[int]) -> Least:
    """The least over what goes together, as far as tables tell in which little does."""
    finite = [np.isfinite(part) for part in parts]
    possible = np.ones((1,) * (len(sizes) + 1), dtype=bool)
    for each in finite:
        if each.mean() < _FEW:
            possible = possible & each
    tied = [axis for axis in range(len(sizes)) if possible.shape[axis] > 1]
    free = [axis for axis in range(len(sizes)) if axis not in tied]
    entries = np.count_nonzero(possible) * math.prod(sizes[axis] for axis in free)
    if not tied or not entries or entries * _SCATTERED > _work(parts, sizes):
        return _minimise_all(parts, sizes)
    return _minimise_scattered(parts, sizes, possible, free, tied)


def _minimise_scattered(
    parts: Sequence[Array],
    sizes: Sequence[int],
    possible: NDArray[np.bool_],
    free: list[int],
    tied: list[int],
) -> Least:
    """The same where only what is `possible` counts, which says something about the axes in `tied`
    and nothing about those in `free`."""
    order, count = [*free, *tied], possible.shape[-1]
    shape = tuple(sizes[axis] for axis in order)
    places, options = np.nonzero(possible.reshape(-1, count))
    at = np.unravel_index(places, tuple(sizes[axis] for axis in tied))
    total = np.zeros((*shape[: len(free)], len(places)))
    for part in parts:
        moved = part.transpose((*order, len(order)))
        index = (each if moved.shape[axis] > 1 else 0 for axis, each in enumerate(at, len(free)))
        total += moved[(*itertools.repeat(slice(None), len(free)), *index, options)]
    starts = np.flatnonzero(np.diff(places, prepend=-1))
    lowest = np.minimum.reduceat(total, starts, axis=-1)
    ties = total == lowest.repeat(np.diff(starts, append=len(places)), axis=-1)
    first = np.minimum.reduceat(np.where(ties, options, count), starts, axis=-1)
    least = np.full((*shape[: len(free)], math.prod(shape[len(free) :])), np.inf)
    best = np.zeros(least.shape, dtype=np.intp)
    least[..., places[starts]], best[..., places[starts]] = lowest, first
    back = np.argsort(order)
    return (
        np.ascontiguousarray(least.reshape(shape).transpose(back)),
        np.ascontiguousarray(best.reshape(shape).transpose(back)),
    )


def _minimise_all(parts: Sequence[Array], sizes: Sequence[int]) -> Least:
    count = parts[0].shape[-1]
    if count * math.prod(sizes) <= _AT_ONCE:
        whole = np.zeros((*sizes, count))
        for part in parts:
            whole += part
        return whole.min(axis=-1), whole.argmin(axis=-1)
    # One option at a time, so that no table with a dim for it is made.
    parts = [np.ascontiguousarray(np.moveaxis(part, -1, 0)) for part in parts]
    least, best = np.full(sizes, np.inf), np.zeros(sizes, dtype=np.intp)
    total, better = np.empty(sizes), np.empty(sizes, dtype=bool)
    for i in range(count):
        total[...] = parts[0][i]
        for part in parts[1:]:
            total += part[i]
        np.less(total, least, out=better)
        np.minimum(total, least, out=least)
        np.putmask(best, better, i)
    return least, best
