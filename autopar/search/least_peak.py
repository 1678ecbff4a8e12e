"""What the backward of a block holds at the least, however it is sharded: as `costs.transient`
walks it for one sharding, but with every value and gradient in the layout of the fewest bytes.

When the backward of an op runs, all is there that it and the ops before it have saved, kept or made
again; so are the gradients that it takes and gives, and those that wait for ops before it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from autopar.costs.saved import SavedExtra, SavedSet
from autopar.costs.strides import StorageMap
from autopar.costs.transient import workspaces
from autopar.ir.graph import OpNode, Ref
from autopar.search.block import BlockSpace
from autopar.search.footprints import Footprints
from autopar.search.least_kept import PricedStorages
from autopar.search.prices import Prices


@dataclass(frozen=True, kw_only=True, slots=True)
class _Moment:
    """The backward of a node: what is let go of after it, and whose gradients are there while it
    runs. Where it makes no gradients it does `run` nothing."""

    node: OpNode
    runs: bool
    frees: tuple[Ref, ...]
    gradients: tuple[Ref, ...]
    extras: tuple[SavedExtra, ...]


class LeastPeak:
    """The moments of a block's backward; `sources` are parameters and such, whose values are held
    anyway."""

    def __init__(
        self, space: BlockSpace, saved: SavedSet, storage: StorageMap, sources: Collection[Ref]
    ) -> None:
        self._specs = space.specs
        keeps: dict[str, set[Ref]] = {}
        for name, ref in saved.kept:
            keeps.setdefault(name, set()).add(storage.base(ref))
        waits, kept = _waits(space, storage, sources), set(sources)
        self._moments: list[_Moment] = []
        for node, gradients in zip(space.nodes, waits, strict=True):
            frees = keeps.get(node.name, set()) - kept
            kept |= frees
            outputs = (Ref(node.name, index) for index in range(len(node.outputs)))
            self._moments.append(
                _Moment(
                    node=node,
                    runs=node.requires_grad and any(ref in space.differentiable for ref in outputs),
                    frees=tuple(sorted(frees, key=str)),
                    gradients=tuple(gradients),
                    extras=tuple(extra for extra in saved.extras if extra.node == node.name),
                )
            )
        firsts = {
            node.name: (node.inputs()[0], {option.inputs[0] for option in options})
            for node, options in zip(space.nodes, space.options, strict=True)
            if node.inputs() and options
        }
        self._firsts = Footprints([(space.specs[ref], x) for ref, x in firsts.values()])
        self._read_first = tuple(firsts)

    def nbytes(self, prices: Prices, storages: PricedStorages) -> int:
        """The most that any moment holds on a mesh."""
        firsts = dict(zip(self._read_first, self._firsts.numel(prices).tolist(), strict=True))
        held = peak = 0.0
        for moment in self._moments:
            held += sum(storages.nbytes((ref, ())) for ref in moment.frees)
            held += sum(map(storages.extra_bytes, moment.extras))
            if moment.runs:
                there = sum(map(storages.value_bytes, moment.gradients))
                works = self._works_bytes(moment.node, firsts, prices.fuses_loss)
                peak = max(peak, held + there + works)
        return round(peak)

    def _works_bytes(self, node: OpNode, firsts: Mapping[str, int], fuses_loss: bool) -> int:
        """Temporaries inside the kernel of a backward, from the elements of first inputs."""
        if node.name not in firsts:
            return 0
        numel = firsts[node.name]
        return workspaces(node, lambda _: numel, self._specs, fuses_loss=fuses_loss)[1]


def _waits(
    space: BlockSpace, storage: StorageMap, sources: Collection[Ref]
) -> list[dict[Ref, None]]:
    """By node, the values whose gradients are there when its backward runs. Of a value and its
    views, which may share one, the value alone counts; that of a parameter is added at once."""
    made = {ref: 0 for ref in space.given if ref not in sources}
    last: dict[Ref, int] = {}
    found: list[dict[Ref, None]] = [{} for _ in space.nodes]
    for index, node in enumerate(space.nodes):
        outputs = (Ref(node.name, output) for output in range(len(node.outputs)))
        for ref in outputs if node.requires_grad else ():
            if storage.base(ref) == ref:
                made[ref] = last[ref] = index
        for ref in node.inputs() if node.requires_grad else ():
            last[ref] = index
            if ref in sources and ref in space.differentiable:
                found[index][ref] = None
    for ref, first in made.items():
        if ref in space.differentiable:
            for index in range(first, last.get(ref, first - 1) + 1):
                found[index][ref] = None
    return found
