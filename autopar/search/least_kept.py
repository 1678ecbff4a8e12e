"""What a block keeps for its backward at the least, however it is sharded: as `copies` has it for
one sharding, but with every value in the layout of the fewest bytes, and moved for free.

Any way to run parts of a sharded block again is one of this too, that takes and keeps no more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from autopar.costs.saved import SavedExtra, SavedSet
from autopar.costs.strides import StorageMap
from autopar.ir.graph import DTYPE_BYTES, Ref, TensorSpec
from autopar.ir.mesh import batch_count
from autopar.ir.placement import Layout
from autopar.search.block import BlockSpace
from autopar.search.copies import Step, Storage
from autopar.search.footprints import Footprints
from autopar.search.node_costs import is_sized
from autopar.search.prices import Prices
from autopar.search.recompute import StepSeconds


class LeastStorages:
    """The storages of a block in any sharding. Steps that make none are left out: views."""

    def __init__(self, space: BlockSpace, storage: StorageMap) -> None:
        self._storage, self._specs = storage, space.specs
        self._offered = {ref: tuple(layouts) for ref, layouts in _offered(space).items()}
        self._least = Footprints([(space.specs[ref], x) for ref, x in self._offered.items()])
        self._sized: bool | None = None
        self.steps: list[Step] = []
        for node in space.nodes:
            outputs = [Ref(node.name, index) for index in range(len(node.outputs))]
            fresh = tuple(self._at(ref) for ref in outputs if storage.base(ref) == ref)
            if fresh:
                reads = tuple(dict.fromkeys(self._at(ref) for ref in node.inputs()))
                self.steps.append(Step(name=node.name, reads=reads, lies=fresh))

    def sized(self, prices: Prices) -> bool:
        """Whether bytes of any depend on the sizes of the axes that split samples, for which the
        prices on any mesh with these axes do."""
        if self._sized is None:
            samples = batch_count(prices.names)
            self._sized = any(
                is_sized(self._specs[ref].shape, placed)
                for ref, layouts in self._offered.items()
                for placed in {layout[:samples] for layout in layouts}
            )
        return self._sized

    def at(self, prices: Prices) -> PricedStorages:
        """The same with their least bytes on a mesh. A storage may hold a copy of any of the values
        that lie in it: a view that moves is a copy by itself."""
        values = dict(zip(self._offered, self._least.nbytes(prices).tolist(), strict=True))
        sizes: dict[Ref, int] = {}
        for ref, nbytes in values.items():
            base = self._storage.base(ref)
            sizes[base] = min(nbytes, sizes.get(base, nbytes))
        return PricedStorages(
            steps=self.steps,
            sizes=sizes,
            values=values,
            storage=self._storage,
            specs=self._specs,
        )

    def _at(self, ref: Ref) -> Storage:
        return self._storage.base(ref), ()


class PricedStorages:
    """What `RecomputeProblem` asks of storages, each at its least."""

    def __init__(
        self,
        steps: list[Step],
        sizes: dict[Ref, int],
        values: dict[Ref, int],
        storage: StorageMap,
        specs: Mapping[Ref, TensorSpec],
    ) -> None:
        self.steps = steps
        self._sizes, self._values, self._storage, self._specs = sizes, values, storage, specs

    @property
    def sizes(self) -> tuple[int, ...]:
        """The bytes of all values."""
        return tuple(self._values.values())

    def nbytes(self, storage: Storage) -> int:
        """Local bytes of a storage."""
        return self._sizes.get(storage[0], 0)

    def value_bytes(self, ref: Ref) -> int:
        """Local bytes of a value by itself, or of its gradient."""
        return self._values.get(ref, 0)

    def extra_bytes(self, extra: SavedExtra) -> float:
        """Local bytes of a tensor that is kept but is no value of the graph."""
        if extra.like not in self._values:
            return 0.0
        itemsize = DTYPE_BYTES[self._specs[extra.like].dtype]
        return extra.bytes_per_element * self._values[extra.like] / itemsize

    def kept(self, saved: SavedSet, held: Collection[Ref]) -> set[Storage]:
        """Storages kept for backward, without those of the values in `held`."""
        bases = {self._storage.base(ref) for _, ref in saved.kept}
        return {(ref, ()) for ref in bases if ref not in held}

    def held(self, values: Collection[Ref]) -> set[Storage]:
        """Storages of values that are held anyway."""
        return {(ref, ()) for ref in self._sizes if ref in values}


def least_seconds(space: BlockSpace, prices: Prices) -> dict[str, StepSeconds]:
    """What it takes at the least to run every step of a block again on a mesh."""
    seconds = {}
    for node, options in zip(space.nodes, space.options, strict=True):
        least = float(prices.option_s(node, options)[:, 0].min())
        seconds[node.name] = StepSeconds(least, least)
    return seconds


def _offered(space: BlockSpace) -> dict[Ref, set[Layout]]:
    """The layouts in which the ops of a block make and read every value."""
    found: dict[Ref, set[Layout]] = {ref: {layout} for ref, layout in space.given.items()}
    for node, options in zip(space.nodes, space.options, strict=True):
        for index in range(len(node.outputs)):
            layouts = {option.outputs[index] for option in options}
            found.setdefault(Ref(node.name, index), set()).update(layouts)
        for index, ref in enumerate(node.inputs()):
            found.setdefault(ref, set()).update(option.inputs[index] for option in options)
    return found
