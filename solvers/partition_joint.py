"""Prices of ranks that each have a pricer of their own, which other layouts may ask as well."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from solvers.partition_pricing import Array, Price, Pricer


class JointPricer:
    """What a table asks of a `Pricer`, of kinds with one each that knows no other kind.

    `rows` have the places of compositions in each, -1 where that kind cannot have them.
    """

    def __init__(
        self,
        *,
        pricers: Sequence[Pricer],
        rows: Sequence[NDArray[np.intp]],
        kind_of_stage: Sequence[int],
    ) -> None:
        self._pricers, self._rows = pricers, rows
        self.kinds = [pricer.kinds[0] for pricer in pricers]
        self.kind_of_stage = list(kind_of_stage)

    def least_bytes(self, kind: int) -> Array:
        """See `Pricer`."""
        return self._laid(kind, self._pricers[kind].least_bytes(0))

    def least_options(self, kind: int, composition: int) -> list[tuple[int, int]]:
        """See `Pricer`."""
        return self._pricers[kind].least_options(0, int(self._rows[kind][composition]))

    def least_sync(self, kind: int) -> Array:
        """See `Pricer`."""
        return self._laid(kind, self._pricers[kind].least_sync(0))

    def bounds(self, kind: int) -> tuple[Array, Array | None]:
        """See `Pricer`."""
        time_s, counts_s = self._pricers[kind].bounds(0)
        return self._laid(kind, time_s), None if counts_s is None else self._laid(kind, counts_s)

    def price(self, kind: int, composition: int) -> tuple[Price, ...]:
        """See `Pricer`."""
        row = int(self._rows[kind][composition])
        return self._pricers[kind].price(0, row) if row >= 0 else ()

    def _laid(self, kind: int, values: Array) -> Array:
        """Values [..., composition] of a kind by the compositions here."""
        rows = self._rows[kind]
        return np.where(rows >= 0, values[..., rows], np.inf)
