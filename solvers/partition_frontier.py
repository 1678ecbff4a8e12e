"""Pareto frontiers of stages: time against memory against sync, grown one block at a time."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solvers.partition_problem import BlockOption

Array = NDArray[np.float64]

_PARETO_BLOCK = 256


class ClassTable:
    """The options of one block class as arrays."""

    def __init__(self, options: tuple[BlockOption, ...]) -> None:
        self.time = np.array([o.time_s for o in options])
        self.static = np.array([o.static_bytes for o in options])
        self.saved = np.array([o.saved_bytes for o in options])
        self.sync = np.array([o.sync_s for o in options])
        self.transient = np.array([o.transient_bytes for o in options])
        self.device = np.array([o.device for o in options])

    def times(self, factor: float) -> ClassTable:
        """The same with times by a factor."""
        table = copy.copy(self)
        table.time = factor * self.time
        return table

    @staticmethod
    def joined(tables: Sequence[ClassTable]) -> ClassTable:
        """The options of some tables in one."""
        joined = ClassTable(())
        for name in ("time", "static", "saved", "sync", "transient", "device"):
            setattr(joined, name, np.concatenate([getattr(table, name) for table in tables]))
        return joined

    def allowed(self, device: int, threshold: float) -> NDArray[np.bool_]:
        """The options for a kind of device whose transient bytes are at most `threshold`."""
        return np.asarray((self.device == device) & (self.transient <= threshold))

    def used(self, in_flight: int) -> Array:
        """Bytes held by each option for the whole step."""
        return self.static + in_flight * self.saved

    def least(self, values: Array, device: int, thresholds: Array) -> Array:
        """The least of the values [option, case] of the options `allowed` under each threshold:
        [threshold, case], infinite without any."""
        own = np.flatnonzero(self.device == device)
        order = own[np.argsort(self.transient[own])]
        least = np.full((len(own) + 1, values.shape[1]), np.inf)
        np.minimum.accumulate(values[order], axis=0, out=least[1:])
        return np.asarray(least[self.transient[order].searchsorted(thresholds, side="right")])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Frontier:
    """Pareto-optimal ways to run some blocks, ascending by time.

    Way w is way `parent[w]` of the `previous` frontier and one block more, of class
    `block_class`, in its option `option[w]`.
    """

    time: Array
    used: Array
    sync: Array
    previous: Frontier | None
    block_class: int
    parent: NDArray[np.intp]
    option: NDArray[np.intp]

    def options(self, way: int) -> list[tuple[int, int]]:
        """(class, option) of every block of a way."""
        chosen = []
        frontier = self
        while frontier.previous is not None:
            chosen.append((frontier.block_class, int(frontier.option[way])))
            way = int(frontier.parent[way])
            frontier = frontier.previous
        return chosen


def empty_frontier() -> Frontier:
    """The one way to run no block."""
    zero, none = np.zeros(1), np.zeros(1, dtype=np.intp)
    return Frontier(
        time=zero, used=zero, sync=zero, previous=None, block_class=0, parent=none, option=none
    )


def extend(
    frontier: Frontier,
    block_class: int,
    table: ClassTable,
    *,
    device: int,
    in_flight: int,
    threshold: float,
    largest: float,
    weight: float,
) -> Frontier:
    """The frontier with one block more, of what fits into `largest` bytes.

    Options of other devices and those whose transient bytes exceed `threshold` are left out. A
    second more costs at least `weight`, and a second of sync at most 1, so a way is beaten by one
    that needs no more time, no more memory and no more of weight * time + sync.
    """
    allowed = np.flatnonzero(table.allowed(device, threshold))
    points = np.repeat(np.arange(len(frontier.time)), len(allowed))
    choices = np.tile(allowed, len(frontier.time))
    used = frontier.used[points] + table.used(in_flight)[choices]
    fitting = np.flatnonzero(used <= largest)
    points, choices, used = points[fitting], choices[fitting], used[fitting]
    time = frontier.time[points] + table.time[choices]
    sync = frontier.sync[points] + table.sync[choices]
    kept = pareto(time, used, sync + weight * time)
    return Frontier(
        time=time[kept],
        used=used[kept],
        sync=sync[kept],
        previous=frontier,
        block_class=block_class,
        parent=points[kept],
        option=choices[kept],
    )


def last_class(counts: tuple[int, ...]) -> int:
    """The last class that has blocks."""
    return max(index for index, count in enumerate(counts) if count)


def one_less(counts: tuple[int, ...]) -> tuple[int, ...]:
    """A block less of the last class."""
    last = last_class(counts)
    return (*counts[:last], counts[last] - 1, *counts[last + 1 :])


def pareto(first: Array, second: Array, third: Array) -> NDArray[np.intp]:
    """Indices of the points that no other matches or beats in all three, ascending by `first`."""
    order = np.lexsort((third, second, first))
    if len(order) == 0:
        return order
    ordered = second[order]
    before = np.concatenate([[np.inf], np.minimum.accumulate(ordered)[:-1]])
    front = ordered < before  # beaten by none in the first two
    rival = order[np.maximum.accumulate(np.where(front, np.arange(len(order)), 0))]
    order = order[front | (third[order] < third[rival])]
    if len(order) == front.sum():
        return order
    kept = order[:0]
    for start in range(0, len(order), _PARETO_BLOCK):
        block = order[start : start + _PARETO_BLOCK]
        block = block[~_beats(kept, block, second, third).any(axis=1)]
        earlier = np.tri(len(block), k=-1, dtype=bool)  # sorted: only those before can beat
        beaten = (_beats(block, block, second, third) & earlier).any(axis=1)
        kept = np.concatenate([kept, block[~beaten]])
    return kept


def _beats(
    rivals: NDArray[np.intp], points: NDArray[np.intp], second: Array, third: Array
) -> NDArray[np.bool_]:
    """[point, rival]: whether the rival needs no more of either."""
    no_more = second[rivals] <= second[points][:, None]
    return np.asarray(no_more & (third[rivals] <= third[points][:, None]))
