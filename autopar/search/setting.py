"""What is searched for: the model, the cluster, the training setup, the pins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING

from autopar.costs.compute import Profile
from autopar.costs.execution import Execution
from autopar.costs.fusion import fused_values
from autopar.costs.memory import StateBytes, Training, state_bytes, total_bytes
from autopar.costs.narrow import last_products
from autopar.costs.strides import StorageMap, trace_storage
from autopar.ir.blocks import Block, BlockChain
from autopar.ir.cluster import Cluster
from autopar.ir.graph import OpNode, Ref, Source, SourceKind
from autopar.ir.mesh import MeshAxis
from autopar.ir.placement import Layout, Shard
from autopar.plan.flow import Split, shared_layouts, value_splits
from autopar.rules import GraphFacts
from autopar.search.pins import Pins
from autopar.search.store import Store

if TYPE_CHECKING:
    from autopar.search.team import Team


@dataclass(frozen=True, kw_only=True)
class Setting(GraphFacts):
    """One planning request. `price_pins` asks what the pins cost against the free optimum,
    `memory_limit_bytes` caps what a device offers; `backend` and `time_limit_s` are the solver's.
    `objective` is what is least, see `search.objective`. `gap` ends the search once a plan is
    proven to be that close to the best, `top` has it go on until so many other techniques are
    solved too. With `all_devices` the plan uses each, in the given order. `execution` is what runs
    the plan, `team` helps with searches that are long, `store` has what others
    found.
    """

    name: str
    chain: BlockChain
    cluster: Cluster
    global_batch: int
    training: Training
    pins: Pins = field(default_factory=Pins)
    price_pins: bool = True
    memory_limit_bytes: int | None = None
    profile: Profile | None = None
    execution: Execution = field(default_factory=Execution)
    backend: str = "highs"
    time_limit_s: float = 120.0
    objective: str = "time"
    gap: float = 0.0
    top: int | None = None
    all_devices: bool = False
    team: Team | None = field(default=None, compare=False, repr=False)
    store: Store | None = field(default=None, compare=False, repr=False)

    def on(self, cluster: Cluster, pins: Pins | None = None) -> Setting:
        """The same on another cluster, or under other pins, keeping what is worked out about the
        graph."""
        other = replace(self, cluster=cluster, pins=pins or self.pins)
        given = {each.name for each in fields(self)}
        other.__dict__.update({k: v for k, v in self.__dict__.items() if k not in given})
        return other

    @cached_property
    def whole_state(self) -> StateBytes:
        """State of all parameters, each whole."""
        return total_bytes(
            state_bytes(s.spec.numel(0), s.trainable, s.spec.dtype, self.training)
            for s in self.graph.sources
            if s.kind is SourceKind.PARAMETER
        )

    def state_bytes(self, source: Source, numel: int) -> StateBytes:
        """State of so many local elements of a parameter or buffer."""
        key = (numel, source.trainable, source.spec.dtype)
        if key not in self._state_bytes:
            self._state_bytes[key] = state_bytes(*key, self.training)
        return self._state_bytes[key]

    @cached_property
    def _state_bytes(self) -> dict[tuple[int, bool, str], StateBytes]:
        return {}

    @cached_property
    def weighted_blocks(self) -> int:
        """Blocks that have parameters."""
        return sum(1 for block in self.chain.blocks if block.parameters)

    @cached_property
    def expert_state(self) -> StateBytes:
        """The part of it that is experts', which axes that split samples may split."""
        owned = {
            ref.name
            for name, found in self.experts.items()
            for ref, placement in zip(self.nodes[name].inputs(), found.strategy.inputs, strict=True)
            if isinstance(placement, Shard)
        }
        return total_bytes(
            state_bytes(s.spec.numel(0), s.trainable, s.spec.dtype, self.training)
            for s in self.graph.sources
            if s.kind is SourceKind.PARAMETER and s.name in owned
        )

    @cached_property
    def most_experts(self) -> int:
        """The most ranks that experts can be split over; 1 where there are none."""
        return max((found.experts for found in self.experts.values()), default=1)

    @cached_property
    def source_refs(self) -> frozenset[Ref]:
        """What the model is given: parameters, buffers and inputs, which are held anyway."""
        return frozenset(Ref(source.name) for source in self.graph.sources)

    @cached_property
    def num_parameters(self) -> int:
        """Elements of all parameters."""
        return sum(
            source.spec.numel(0)
            for source in self.graph.sources
            if source.kind is SourceKind.PARAMETER
        )

    def shared(self, mesh: tuple[MeshAxis, ...]) -> Mapping[Ref, Layout]:
        """Layouts of values between blocks on a mesh. Sizes matter to zig-zag alone."""
        key = tuple((a.name, a.sequence, a.size if a.zigzag else None) for a in mesh)
        if key not in self._shared:
            self._shared[key] = shared_layouts(self._splits, mesh)
        return self._shared[key]

    @cached_property
    def _splits(self) -> Mapping[Ref, Split]:
        return value_splits(self.graph, self.batch, self.sequence)

    @cached_property
    def _shared(self) -> dict[object, Mapping[Ref, Layout]]:
        return {}

    @cached_property
    def storage(self) -> StorageMap:
        """Which values share storage."""
        kind = self.cluster.device(0).kind
        return trace_storage(self.graph.nodes, self.specs, device_kind=kind)

    @cached_property
    def block_paths(self) -> tuple[str, ...]:
        """The module that every block starts at, for people and for pinned boundaries."""
        return tuple(
            block.module_path or self.nodes[block.nodes[0]].module_path
            for block in self.chain.blocks
        )

    @cached_property
    def boundary_kinds(self) -> tuple[tuple[int, ...], tuple[tuple[Ref, ...], ...]]:
        """For every boundary of the chain which of the distinct ones it is, and these: others have
        values of the same specs that carry gradients alike."""
        kinds: dict[object, int] = {}
        distinct: list[tuple[Ref, ...]] = []
        found = []
        for refs in self.chain.boundaries:
            alike = tuple((self.specs[ref], ref in self.differentiable) for ref in refs)
            found.append(kinds.setdefault(alike, len(kinds)))
            if found[-1] == len(distinct):
                distinct.append(refs)
        return tuple(found), tuple(distinct)

    @cached_property
    def sequence_length(self) -> int:
        """Extent of the sequence of the values between blocks; 0 where they have none."""
        crossing = [ref for refs in self.chain.boundaries for ref in refs]
        carried = [ref for ref in crossing if ref in self.differentiable]
        if not carried or any(ref not in self.sequence for ref in carried):
            return 0
        return min(self.specs[ref].shape[self.sequence[ref]].const for ref in carried)

    @cached_property
    def shared_parameters(self) -> Mapping[Ref, frozenset[int]]:
        """Parameters that are read by more than one block, with the classes of the blocks."""
        readers: dict[Ref, list[int]] = {}
        for block in self.chain.blocks:
            for ref in block.parameters:
                readers.setdefault(ref, []).append(block.class_index)
        return {
            ref: frozenset(classes)
            for ref, classes in readers.items()
            if len(classes) > 1 and self.sources[ref.name].kind is SourceKind.PARAMETER
        }

    @cached_property
    def shared_positions(self) -> tuple[frozenset[int], ...]:
        """For every class the positions of parameters that some other block than its own reads."""
        return tuple(
            frozenset(
                position
                for index in block_class.members
                for position, ref in enumerate(self.chain.blocks[index].parameters)
                if ref in self.shared_parameters
            )
            for block_class in self.chain.classes
        )

    @cached_property
    def fused(self) -> frozenset[Ref]:
        """Values between blocks' ops that never reach memory."""
        return fused_values(self.graph.nodes) if self.execution.fuses else frozenset()

    @cached_property
    def wide(self) -> frozenset[str]:
        """Products that keep their dtype where those of linear layers are narrower."""
        if not self.training.precision.product_dtype:
            return frozenset()
        return last_products(self.graph.nodes, self.graph.loss)

    def block_nodes(self, block: Block) -> tuple[OpNode, ...]:
        """The op nodes of a block."""
        return tuple(self.nodes[name] for name in block.nodes)

    def least_memory_bytes(self, ranks: range) -> int:
        """Memory that every one of consecutive ranks may use."""
        return min(self.memory_bytes(rank) for rank, _ in self.cluster.counts(ranks))

    def memory_bytes(self, rank: int) -> int:
        """Memory a rank may use."""
        available = self.cluster.device(rank).memory_bytes
        return min(available, self.memory_limit_bytes or available)
