"""Where arcs between positions are, and costs of arcs laid out so that paths are looked for.

An arc is a run of blocks, which costs what its composition (how many blocks of each class) does. In
a chain arcs are pairs of positions. Where equal blocks are dealt out to ranks, a position is how
many are dealt out, and an arc costs what its number of blocks does wherever it starts: as many
costs as there are blocks, not pairs of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Array = NDArray[np.float64]
Numbers = NDArray[np.intp]
Mask = NDArray[np.bool_]

Box = tuple[slice, slice]
"""Where arcs start and end."""

Join = Callable[[Array, Array], Array]
"""What a path costs with an arc more."""


class Laid(Protocol):
    """Costs of the arcs of one kind, one in `own` for each that is told from others."""

    @property
    def own(self) -> Array:
        """The costs."""

    def like(self, own: Array) -> Laid:
        """Other costs of the same arcs."""

    def within(self, window: Box) -> Array:
        """The costs of the arcs in a window."""

    def around(self, before: Array, after: Array, window: Box) -> Array:
        """What is least before the start and after the end of each of these arcs together."""

    def onward(self, before: Array, window: Box, join: Join) -> tuple[Array, Numbers]:
        """The least to every end in a window, from what is least before every position; and the
        start of the arc that does it, of several the first."""

    def backward(self, after: Array, window: Box) -> Array:
        """The least sum from every start in a window."""


@dataclass(frozen=True, slots=True, eq=False)
class Boxed:
    """Costs [start, end] of the arcs in a box alone."""

    own: Array
    box: Box

    def like(self, own: Array) -> Boxed:
        """See `Laid`."""
        return Boxed(own, self.box)

    def within(self, window: Box) -> Array:
        """See `Laid`."""
        starts, ends = (
            slice(at.start - side.start, at.stop - side.start)
            for at, side in zip(window, self.box, strict=True)
        )
        return self.own[starts, ends]

    def around(self, before: Array, after: Array, window: Box) -> Array:
        """See `Laid`."""
        starts, ends = window
        return np.asarray(before[starts, None] + after[None, ends])

    def onward(self, before: Array, window: Box, join: Join) -> tuple[Array, Numbers]:
        """See `Laid`."""
        starts, _ = window
        through = join(before[starts, None], self.within(window))
        origin = through.argmin(axis=0)
        return np.take_along_axis(through, origin[None, :], axis=0)[0], origin + starts.start

    def backward(self, after: Array, window: Box) -> Array:
        """See `Laid`."""
        return np.asarray((self.within(window) + after[None, window[1]]).min(axis=1))


@dataclass(frozen=True, slots=True, eq=False)
class Dealt:
    """Costs of arcs by their number of blocks."""

    own: Array

    def like(self, own: Array) -> Dealt:
        """See `Laid`."""
        return Dealt(own)

    def within(self, window: Box) -> Array:
        """See `Laid`."""
        starts, ends = window
        number = np.arange(len(self.own))
        some = (number > ends.start - starts.stop) & (number < ends.stop - starts.start)
        return np.where(some, self.own, np.inf)

    def around(self, before: Array, after: Array, window: Box) -> Array:
        """See `Laid`."""
        least = np.full(len(self.own), np.inf)
        numbers = self._numbers()
        if len(numbers):
            met = self._starts(before, window) + after[window[1], None]
            least[numbers] = met.min(axis=0)[::-1]
        return least

    def onward(self, before: Array, window: Box, join: Join) -> tuple[Array, Numbers]:
        """See `Laid`."""
        starts, ends = window
        numbers = self._numbers()
        if not len(numbers):
            nowhere = np.full(ends.stop - ends.start, starts.start)
            return np.full(len(nowhere), np.inf), nowhere
        through = join(self._starts(before, window), self.own[numbers][::-1])
        chosen = through.argmin(axis=1)
        least = np.take_along_axis(through, chosen[:, None], axis=1)[:, 0]
        return least, np.arange(ends.start, ends.stop) - (numbers[-1] - chosen)

    def backward(self, after: Array, window: Box) -> Array:
        """See `Laid`."""
        starts, ends = window
        numbers = self._numbers()
        if not len(numbers):
            return np.full(starts.stop - starts.start, np.inf)
        met = _window(after, ends, starts.start + numbers[0], starts.stop + numbers[-1])
        return np.asarray((sliding_window_view(met, len(numbers)) + self.own[numbers]).min(axis=1))

    def _numbers(self) -> Numbers:
        """The numbers from the least that there is to the most."""
        some = np.flatnonzero(np.isfinite(self.own))
        return np.arange(some[0], some[-1] + 1) if len(some) else some

    def _starts(self, before: Array, window: Box) -> Array:
        """What is least before the start of an arc, by its end and, most first, its number."""
        starts, ends = window
        numbers = self._numbers()
        met = _window(before, starts, ends.start - numbers[-1], ends.stop - numbers[0])
        return np.asarray(sliding_window_view(met, len(numbers)))


def _window(values: Array, side: slice, first: int, stop: int) -> Array:
    """The values at positions `first` to `stop` - 1; infinite outside of a side."""
    found = np.full(stop - first, np.inf)
    low, high = max(side.start, first), min(side.stop, stop)
    if low < high:
        found[low - first : high - first] = values[low:high]
    return found


class Arcs(Protocol):
    """The arcs of one kind of stage: which there are, and what their cuts cost, in the same order
    as costs that are laid out of them."""

    @property
    def allowed(self) -> Mask:
        """Which there are."""

    @property
    def cuts_s(self) -> Array:
        """What their cuts cost."""

    def only(self, allowed: Mask) -> Arcs:
        """No others than these."""

    def narrowed(self, box: Box, longest: int) -> Arcs:
        """Those in a box, of at most so many blocks as far as that is quick to tell."""

    def composition(self, start: int, end: int) -> int:
        """The composition of an arc."""

    def cut_s(self, start: int, end: int) -> float:
        """What the cuts of an arc cost."""

    def compositions(self) -> Numbers:
        """Those of all that there are."""

    def lay(self, costs: Array, more: Array | float = 0.0) -> Laid:
        """Costs by composition, and more by arc, as costs of arcs."""

    def mask(self, window: Box, some: Mask) -> Mask:
        """Those of a window that `some` says, as `allowed` has them."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChainArcs:
    """Arcs [start, end] of which each composition is `run`."""

    run: Numbers
    allowed: Mask
    boundary_s: Array
    box: Box

    @staticmethod
    def of(run: Numbers, allowed: Mask, boundary_s: Array) -> ChainArcs:
        """All that are allowed."""
        everywhere = slice(0, len(run))
        return ChainArcs(
            run=run, allowed=allowed, boundary_s=boundary_s, box=(everywhere, everywhere)
        )

    @property
    def cuts_s(self) -> Array:
        """See `Arcs`."""
        return self.boundary_s[self.box]

    def only(self, allowed: Mask) -> ChainArcs:
        """See `Arcs`."""
        return dataclasses.replace(self, allowed=allowed)

    def narrowed(self, box: Box, longest: int) -> ChainArcs:
        """See `Arcs`."""
        return dataclasses.replace(self, box=box)

    def composition(self, start: int, end: int) -> int:
        """See `Arcs`."""
        return int(self.run[start, end])

    def cut_s(self, start: int, end: int) -> float:
        """See `Arcs`."""
        return float(self.boundary_s[start, end])

    def compositions(self) -> Numbers:
        """See `Arcs`."""
        return np.unique(self.run[self.allowed])

    def lay(self, costs: Array, more: Array | float = 0.0) -> Boxed:
        """See `Arcs`."""
        own = costs[self.run[self.box]] + more
        return Boxed(np.where(self.allowed[self.box], own, np.inf), self.box)

    def mask(self, window: Box, some: Mask) -> Mask:
        """See `Arcs`."""
        mask = np.zeros(self.allowed.shape, dtype=bool)
        mask[window] = some
        return mask


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DealtArcs:
    """Arcs by their number of blocks, which is the number of their composition, with the same cuts
    wherever they start."""

    allowed: Mask
    once_s: float

    @property
    def cuts_s(self) -> Array:
        """See `Arcs`."""
        return np.full(len(self.allowed), self.once_s)

    def only(self, allowed: Mask) -> DealtArcs:
        """See `Arcs`."""
        return dataclasses.replace(self, allowed=allowed)

    def narrowed(self, box: Box, longest: int) -> DealtArcs:
        """See `Arcs`."""
        return self.only(self.allowed & (np.arange(len(self.allowed)) <= longest))

    def composition(self, start: int, end: int) -> int:
        """See `Arcs`."""
        return end - start

    def cut_s(self, start: int, end: int) -> float:
        """See `Arcs`."""
        return self.once_s

    def compositions(self) -> Numbers:
        """See `Arcs`."""
        return np.flatnonzero(self.allowed)

    def lay(self, costs: Array, more: Array | float = 0.0) -> Dealt:
        """See `Arcs`."""
        return Dealt(np.where(self.allowed, costs + more, np.inf))

    def mask(self, window: Box, some: Mask) -> Mask:
        """See `Arcs`."""
        return some
