"""Giving letters to shapes: one per dim, by broadcasting, or by matching the factors of a view."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import gcd

from autopar.ir.size import Shape, Size
from autopar.rules.index_expr import Dims

FROZEN_ONE = Size(1)

GENERIC_BATCH = 2**61 - 1
"""A prime that no model dim contains. Sizes taken at this batch factor as their formulas do, so a
batch of 16 is never mistaken for a sequence of 16."""

_MIXED_PRIMES = tuple(2**k - 1 for k in (89, 107, 127, 521, 607, 1279, 2203, 2281))
"""The same for sizes such as `batch+1`: each is one prime, for it has no factors to speak of."""


def from_generic(extent: int) -> Size:
    """The size whose value at `GENERIC_BATCH` is `extent`."""
    per_sample, const = divmod(extent, GENERIC_BATCH)
    return Size(const, per_sample)


def name_dims(shape: Shape, prefix: str = "d", skip: Iterable[int] = ()) -> Dims:
    """One letter per dim. Dims of size one, which broadcast, and those in `skip` have none."""
    skipped = set(skip)
    return tuple(
        () if size == FROZEN_ONE or i in skipped else (f"{prefix}{i}",)
        for i, size in enumerate(shape)
    )


def sizes_of(*tensors: tuple[Dims, Shape]) -> dict[str, Size]:
    """Sizes of the letters that are whole dims."""
    return {
        dim[0]: size
        for dims, shape in tensors
        for dim, size in zip(dims, shape, strict=True)
        if len(dim) == 1
    }


def align(shape: Shape, dims: Dims, sizes: Mapping[str, Size]) -> Dims:
    """Letters of a tensor that broadcasts to one with `dims`: by position from the right."""
    offset = len(dims) - len(shape)
    return tuple(
        dims[i + offset]
        if i + offset >= 0 and dims[i + offset] and sizes[dims[i + offset][0]] == size
        else ()
        for i, size in enumerate(shape)
    )


def match_factors(
    source: Shape, target: Shape
) -> tuple[Dims, Dims, dict[str, Size], frozenset[str]]:
    """Common factors of two shapes of one row-major tensor: both as letters, sizes, blocked.

    Walks both from the major side and takes out the largest common factor. Where the next factors
    share none ((3, 2) against (2, 3)) what is left up to the next common edge is blocked.
    """
    matcher = _Matcher(source, target)
    matcher.run()
    return (
        tuple(map(tuple, matcher.dims[0])),
        tuple(map(tuple, matcher.dims[1])),
        matcher.sizes,
        frozenset(matcher.blocked),
    )


def _base(size: Size) -> Size:
    """A size without its constant factor: `batch+1` of `8*batch+8`."""
    common = gcd(size.const, size.per_sample)
    return Size(size.const // common, size.per_sample // common)


class _Matcher:
    """State of one walk: per side the dims done so far and what is left of the current one."""

    def __init__(self, source: Shape, target: Shape) -> None:
        shapes = (source, target)
        mixed = sorted({_base(s) for shape in shapes for s in shape if s.const and s.is_batch})
        self.mixed = dict(zip(mixed, _MIXED_PRIMES, strict=False))
        self.extents = tuple([self._generic(size) for size in shape] for shape in shapes)
        self.dims: tuple[list[list[str]], ...] = tuple([[] for _ in shape] for shape in shapes)
        self.position = [0, 0]
        self.sizes: dict[str, Size] = {}
        self.blocked: set[str] = set()

    def run(self) -> None:
        """Match until both shapes are used up."""
        while self._skip_used(0) and self._skip_used(1):
            common = gcd(self._left(0), self._left(1))
            if common > 1:
                letter = self._new_letter(common)
                for side in (0, 1):
                    self._take(side, letter, common)
            else:
                self._block_to_next_edge()

    def _generic(self, size: Size) -> int:
        if size.const and size.is_batch:
            return gcd(size.const, size.per_sample) * self.mixed[_base(size)]
        return size.at(GENERIC_BATCH)

    def _size(self, extent: int) -> Size:
        for size, prime in self.mixed.items():
            if extent % prime == 0:
                times = extent // prime
                return Size(size.const * times, size.per_sample * times)
        return from_generic(extent)

    def _left(self, side: int) -> int:
        return self.extents[side][self.position[side]]

    def _skip_used(self, side: int) -> bool:
        """Move on to a dim with something left; False at the end."""
        while self.position[side] < len(self.extents[side]) and self._left(side) == 1:
            self.position[side] += 1
        return self.position[side] < len(self.extents[side])

    def _new_letter(self, extent: int) -> str:
        letter = f"f{len(self.sizes)}"
        self.sizes[letter] = self._size(extent)
        return letter

    def _take(self, side: int, letter: str, extent: int) -> None:
        position = self.position[side]
        self.dims[side][position].append(letter)
        self.extents[side][position] //= extent

    def _block_to_next_edge(self) -> None:
        """Give blocked letters to dims on both sides until their products agree."""
        products = [1, 1]
        while products[0] != products[1] or products[0] == 1:
            side = 0 if products[0] <= products[1] else 1
            if not self._skip_used(side):
                return
            extent = self._left(side)
            letter = self._new_letter(extent)
            self.blocked.add(letter)
            self._take(side, letter, extent)
            products[side] *= extent


__all__ = [
    "FROZEN_ONE",
    "GENERIC_BATCH",
    "align",
    "from_generic",
    "match_factors",
    "name_dims",
    "sizes_of",
]
