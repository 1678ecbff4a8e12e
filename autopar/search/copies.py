"""Where the values of a block lie: which of its steps makes which storage, and what is kept.

A value brought to another placement is a copy. An op keeps for backward what it reads, and so the
copy. A weight that is stored in shards and gathered for a product is held whole until the block's
backward is done.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from autopar.costs.saved import SavedExtra, SavedSet
from autopar.costs.strides import StorageMap
from autopar.ir.graph import OpNode, Ref
from autopar.ir.placement import Layout
from autopar.plan.flow import BlockFlow, Move
from autopar.plan.plan import NodeChoice
from autopar.search.prices import Prices

Storage = tuple[Ref, Layout]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One op or move of a block, by its name in the plan.

    `reads` are the storages of what it reads, `lies` those of what it gives: a view lies in the
    storage of its base.
    """

    name: str
    reads: tuple[Storage, ...]
    lies: tuple[Storage, ...]


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
        self._lies: dict[Storage, Storage] = {}
        self.steps: list[Step] = []
        """Ops, and the moves that take effect, in execution order."""
        for node in nodes:
            for move in flow.before[node.name]:
                self._move(move)
            self._node(node, choices[node.name])
        for move in flow.at_end:
            self._place(move)

    def _move(self, move: Move) -> None:
        source, after = self._at(move.value, move.before), self._place(move)
        if self._prices.sizes[move.axis] > 1:
            self.steps.append(Step(name=move.name, reads=(source,), lies=(after,)))

    def _place(self, move: Move) -> Storage:
        """Where a moved value lies: a copy of its own, or where it was."""
        source, after = self._at(move.value, move.before), (move.value, move.after)
        self._lies[after] = after if move.copies(self._prices.sizes) else source
        return self._lies[after]

    def _node(self, node: OpNode, choice: NodeChoice) -> None:
        for ref, layout in zip(node.inputs(), choice.inputs, strict=True):
            self._read[node.name, ref] = self._at(ref, layout)
            self._layouts[node.name, ref] = layout
        reads = tuple(dict.fromkeys(self._read[node.name, ref] for ref in node.inputs()))
        lies = []
        for index, layout in enumerate(choice.outputs):
            output = Ref(node.name, index)
            base = self._storage.base(output)
            viewed = [r for r in node.inputs() if base != output and self._storage.base(r) == base]
            place = self._read[node.name, viewed[0]] if viewed else (output, layout)
            self._lies[output, layout] = self._read[node.name, output] = place
            self._layouts[node.name, output] = layout
            lies.append(place)
        self.steps.append(Step(name=node.name, reads=reads, lies=tuple(dict.fromkeys(lies))))

    def _at(self, ref: Ref, layout: Layout) -> Storage:
        """The storage of a value; one from outside the block lies as it is given."""
        produced = self._flow.produced
        for known in ((ref, layout), (ref, produced[ref])):
            if known in self._lies:
                return self._lies[known]
        base = self._storage.base(ref)
        given = (base, produced.get(base, produced[ref]))
        return self._lies.get(given, given)

    def lies(self, ref: Ref, layout: Layout) -> Storage:
        """The storage that a value lies in, at a layout it is given, made or moved to."""
        return self._lies.get((ref, layout)) or self._at(ref, layout)

    def read(self, node: str, ref: Ref) -> Storage:
        """The storage of what a node reads, or makes."""
        return self._read[node, ref]

    def nbytes(self, storage: Storage) -> int:
        """Local bytes of a storage."""
        return self._prices.local_bytes(*storage)

    def extra_bytes(self, extra: SavedExtra) -> float:
        """Local bytes of a tensor that is kept but is no value of the graph."""
        shape = self._prices.local_shape(extra.like, self._layouts[extra.node, extra.like])
        return prod(shape) * extra.bytes_per_element

    def kept(self, saved: SavedSet, held: Collection[Ref]) -> set[Storage]:
        """Storages kept for backward, without those of the values in `held`."""
        return {self._read[reader] for reader in saved.kept} - self.held(held)

    def held(self, values: Collection[Ref]) -> set[Storage]:
        """Storages of values that are held anyway."""
        produced = self._flow.produced
        return {(ref, layout) for ref, layout in produced.items() if ref in values}
