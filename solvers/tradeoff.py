"""Solutions that are best for some price of a byte: the supported trade-offs of cost for size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

_TIE = 1e-6


class Point(Protocol):
    """A solution with what it costs and what it takes, both to be small."""

    @property
    def cost(self) -> float: ...  # noqa: D102
    @property
    def size(self) -> float: ...  # noqa: D102


P = TypeVar("P", bound=Point)


def between(
    solve: Callable[[float], P | None], dear: P, small: P, *, depth: int, worth: float = 0.0
) -> list[P]:
    """Supported points between two, in order of size from the largest, both ends left out.

    `solve(price)` minimises cost plus `price` times size. Each call halves a gap between
    neighbours (the dichotomic scheme of Aneja and Nair 1979), `depth` times; a gap of less than
    `worth` of the larger size is left alone.
    """

    def search(large: P, lean: P, depth: int) -> list[P]:
        saved = large.size - lean.size
        if not depth or saved <= max(worth * large.size, _TIE * dear.size):
            return []
        middle = solve((lean.cost - large.cost) / saved)
        if middle is None:
            return []
        if min(large.size - middle.size, middle.size - lean.size) <= _TIE * large.size:
            return []
        return [*search(large, middle, depth - 1), middle, *search(middle, lean, depth - 1)]

    return search(dear, small, depth)
