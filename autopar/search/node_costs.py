"""What the options of a node take to compute: once for all that has the same local shapes.

Of an option only the splits count, not whether what is whole is whole, a sum's part, or has a
partial gradient; and where every value that grows with the batch is split by sample, and nothing
else, on the axes that split samples, their sizes do not count either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autopar.ir.graph import OpNode, Ref
from autopar.ir.mesh import batch_count, batch_size
from autopar.ir.placement import ByExpert, Layout, Shard
from autopar.ir.size import Shape
from autopar.search.block import Option

if TYPE_CHECKING:
    from autopar.search.prices import Prices

Times = NDArray[np.float64]
"""Forward and backward seconds, a row for every option."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kinds:
    """Options alike: the first of each kind, and the kind of every one. Those with collectives
    inside are `inner`. `sized`: the sizes of the axes that split samples count. `options` are kept
    so that their id is not another's."""

    options: Sequence[Option]
    first: tuple[Option, ...]
    kind: NDArray[np.intp]
    inner: tuple[int, ...]
    sized: bool


@dataclass
class NodeCosts:
    """Remembers the times of nodes. Options are told apart by identity."""

    _kinds: dict[tuple[str, int], _Kinds] = field(default_factory=dict)
    _times: dict[object, Times] = field(default_factory=dict)

    def compute(self, node: OpNode, options: Sequence[Option], prices: Prices) -> Times:
        """Seconds of the node alone, both passes."""
        kinds = self._of(node, options, prices)
        samples = batch_count(prices.names)
        ranks = batch_size(prices.names, prices.sizes)
        sizes = prices.sizes if kinds.sized or prices.batch % ranks else prices.sizes[samples:]
        batch = prices.batch // ranks
        key = (node.name, id(options), prices.names, sizes, batch)
        if key not in self._times:
            each = [prices.compute(node, option, prices) for option in kinds.first]
            times = np.array(each, dtype=float).reshape(len(each), 2)
            self._times[key] = times[kinds.kind]
        return self._times[key]

    def inner(self, node: OpNode, options: Sequence[Option], prices: Prices) -> Times | None:
        """Seconds of the collectives inside the node, both passes; None where there are none."""
        found = self._of(node, options, prices).inner
        if not found:
            return None
        times = np.zeros((len(options), 2))
        for index in found:
            times[index] = prices.inner_s(node, options[index])
        return times

    def varies(self, node: OpNode, options: Sequence[Option], prices: Prices) -> bool:
        """Whether the sizes of the axes that split samples count for the node."""
        kinds, samples = self._of(node, options, prices), batch_count(prices.names)
        return kinds.sized or any(
            strategy.collectives
            for index in kinds.inner
            for strategy in options[index].strategies[:samples]
        )

    def _of(self, node: OpNode, options: Sequence[Option], prices: Prices) -> _Kinds:
        key = (node.name, id(options))
        if key not in self._kinds:
            self._kinds[key] = _kinds(node, options, prices)
        return self._kinds[key]


def _kinds(node: OpNode, options: Sequence[Option], prices: Prices) -> _Kinds:
    seen: dict[object, int] = {}
    first: list[Option] = []
    kind = np.empty(len(options), dtype=np.intp)
    for index, option in enumerate(options):
        splits = tuple(map(_splits, (*option.inputs, *option.outputs)))
        if splits not in seen:
            seen[splits] = len(first)
            first.append(option)
        kind[index] = seen[splits]
    inner = (i for i, o in enumerate(options) if any(s.collectives for s in o.strategies))
    return _Kinds(
        options=options,
        first=tuple(first),
        kind=kind,
        inner=tuple(inner),
        sized=any(_is_sized(node, option, prices) for option in first),
    )


def _splits(layout: Layout) -> Layout:
    return tuple(p if isinstance(p, (Shard, ByExpert)) else None for p in layout)  # type: ignore[misc]


def _is_sized(node: OpNode, option: Option, prices: Prices) -> bool:
    """Whether the local shapes depend on how many ranks share the samples."""
    samples = batch_count(prices.names)
    refs = [*node.inputs(), *(Ref(node.name, index) for index in range(len(node.outputs)))]
    placed = zip(refs, (*option.inputs, *option.outputs), strict=True)
    return any(is_sized(prices.specs[ref].shape, layout[:samples]) for ref, layout in placed)


def is_sized(shape: Shape, samples: Layout) -> bool:
    """Whether the local shape of a value depends on the sizes of the axes that split samples, on
    which it is placed so."""
    grown = [dim for dim, size in enumerate(shape) if size.is_batch]
    if len(grown) > 1 or any(shape[dim].const for dim in grown):
        return True
    if grown:
        return any(placement != Shard(grown[0]) for placement in samples)
    return any(isinstance(placement, (Shard, ByExpert)) for placement in samples)
