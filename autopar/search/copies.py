"""What a block holds where values are moved: a value brought to another placement is a copy.

An op keeps for backward what it reads, and so the copy. A weight that is stored in shards and
gathered for a product is held whole until the block's backward is done.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod

from autopar.costs.saved import SavedSet
from autopar.costs.strides import StorageMap
from autopar.ir.graph import OpNode, Ref
from autopar.ir.placement import Layout
from autopar.plan.flow import BlockFlow, moves_between
from autopar.plan.plan import NodeChoice
from autopar.search.prices import Prices

_IN_PLACE = frozenset({"sum_gradient"})
"""Moves that give the same storage."""

Storage = tuple[Ref, Layout]


class BlockStorages:
    """The storages behind the values that the ops of a block read, at the placements chosen."""

    def __init__(
        self,
        nodes: Sequence[OpNode],
        choices: Mapping[str, NodeChoice],
        flow: BlockFlow,
        prices: Prices,
        storage: StorageMap,
    ) -> None:
        self._flow, self._prices, self._storage = flow, prices, storage
        self._read: dict[tuple[str, Ref], Storage] = {}
        self._layouts: dict[tuple[str, Ref], Layout] = {}
        self._owner: dict[Ref, Storage] = {}
        self.copied_bytes = 0
        """The most that the copies which one op reads take together."""
        for node in nodes:
            self._visit(node, choices[node.name])

    def _visit(self, node: OpNode, choice: NodeChoice) -> None:
        copies: set[Storage] = set()
        for ref, layout in zip(node.inputs(), choice.inputs, strict=True):
            own = self._of(ref)
            moved = self._is_copy(ref, layout)
            self._read[node.name, ref] = (ref, layout) if moved else own
            self._layouts[node.name, ref] = layout
            copies |= {(ref, layout)} if moved else set()
        self.copied_bytes = max(self.copied_bytes, sum(map(self._nbytes, copies)))
        for index, layout in enumerate(choice.outputs):
            output = Ref(node.name, index)
            self._layouts[node.name, output] = layout
            base = self._storage.base(output)
            viewed = [r for r in node.inputs() if base != output and self._storage.base(r) == base]
            self._owner[output] = self._read[node.name, viewed[0]] if viewed else (output, layout)
            self._read[node.name, output] = self._owner[output]

    def _of(self, ref: Ref) -> Storage:
        """The storage of a value; one from outside the block lies as it is given."""
        base = self._storage.base(ref)
        known = self._owner.get(ref) or self._owner.get(base)
        return known or (base, self._flow.produced.get(base, self._flow.produced[ref]))

    def _is_copy(self, ref: Ref, layout: Layout) -> bool:
        path = moves_between(
            ref, self._flow.produced[ref], layout, differentiable=ref in self._prices.differentiable
        )
        sizes = self._prices.sizes
        return any(sizes[m.axis] > 1 and m.transition.function not in _IN_PLACE for m in path)

    def _nbytes(self, storage: Storage) -> int:
        return self._prices.local_bytes(*storage)

    def kept_bytes(self, saved: SavedSet, held: Collection[Ref]) -> int:
        """Bytes kept for backward, each storage once, without those of the values in `held`."""
        own = {(ref, self._flow.produced[ref]) for ref in held if ref in self._flow.produced}
        kept = {self._read[reader] for reader in saved.kept} - own
        extras = sum(
            prod(self._prices.local_shape(e.like, self._layouts[e.node, e.like]))
            * e.bytes_per_element
            for e in saved.extras
        )
        return sum(map(self._nbytes, kept)) + round(extras)
