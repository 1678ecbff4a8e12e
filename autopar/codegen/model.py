"""What code generation knows of the model: graph, chain, settled placements, by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar, cast

from autopar.codegen.draws import is_random
from autopar.codegen.local import LocalNode, Mesh
from autopar.costs.saved import kept_parameters
from autopar.costs.strides import StorageMap, trace_storage
from autopar.errors import PlanMismatch
from autopar.ir.blocks import Block, BlockChain
from autopar.ir.graph import OpNode, Ref, SourceKind
from autopar.ir.mesh import MeshAxis
from autopar.ir.placement import Layout, Placement, R
from autopar.ir.strategy import AxisStrategy
from autopar.plan.flow import (
    BlockFlow,
    block_edges,
    block_flow,
    setup_closure,
    shared_layouts,
    value_splits,
)
from autopar.plan.pipeline import splits_backward
from autopar.plan.plan import NodeChoice, ParameterPlan, Plan, StagePlan, Variant
from autopar.plan.split import Product, split_products
from autopar.plan.zero import ZeroShard, zero_shard
from autopar.rules import GraphFacts

T = TypeVar("T")


@dataclass(frozen=True)
class ModelView(GraphFacts):
    """Graph and chain of a model with what follows from them and a plan's mesh."""

    chain: BlockChain
    plan: Plan

    def at(self, stage: StagePlan) -> ModelView:
        """The model on the mesh of a stage, as everything that is emitted for that one sees it."""
        mesh = self.plan.mesh(stage)
        if mesh == self.plan.axes:
            return self
        if mesh not in self._views:
            self._views[mesh] = replace(self, plan=self.plan.on(stage))
        return self._views[mesh]

    def running(self, variant: Variant) -> ModelView:
        """The model on the mesh of the stages that run a variant."""
        runs = (s for s in self.plan.stages if any(b.variant == variant.name for b in s.blocks))
        stage = next(runs, None)
        return self if stage is None else self.at(stage)

    @cached_property
    def _views(self) -> dict[tuple[MeshAxis, ...], ModelView]:
        return {}

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh axes of the stages that are looked at."""
        axes = self.plan.axes
        return Mesh(axes=tuple(a.name for a in axes), sizes=tuple(a.size for a in axes))

    @cached_property
    def shared(self) -> Mapping[Ref, Layout]:
        """Layouts of values between blocks."""
        splits = value_splits(self.graph, self.batch, self.sequence)
        return shared_layouts(splits, self.plan.axes)

    @cached_property
    def random_numbers(self) -> Mapping[str, int]:
        """Number of every random node, in execution order over the whole graph."""
        random = [node.name for node in self.graph.nodes if is_random(node)]
        return {name: number for number, name in enumerate(random)}

    @cached_property
    def parameter_plans(self) -> Mapping[str, ParameterPlan]:
        """What the plan says of every parameter and buffer, by source name: on this mesh, where
        some of its stages have it."""
        plan = self.plan
        stages = sorted(plan.stages, key=lambda stage: plan.mesh(stage) == plan.axes)
        by_fqn = {p.fqn: p for stage in stages for p in stage.parameters}
        return {s.name: by_fqn[s.fqn] for s in self.graph.sources if s.fqn in by_fqn}

    def gathers(self, block: Block) -> dict[Ref, ZeroShard]:
        """The weights of a block that lie in shards, which it gathers when it runs."""
        found = {}
        for ref in block.parameters:
            parameter = self.parameter_plans.get(ref.name)
            if parameter is not None and parameter.zero == 3:
                shard = zero_shard(parameter, self.mesh.axes)
                if shard is not None:
                    found[ref] = shard
        return found

    def gathered_again(self, block: Block) -> frozenset[Ref]:
        """The weights among `gathers` that the block's backward reads."""
        return kept_parameters(
            [self.nodes[name] for name in block.nodes],
            self.specs,
            self.differentiable,
            self.gathers(block),
            storage=self._storage,
            device_kind=self.plan.cluster.device(0).kind,
        )

    def read_by(self, variant: Variant, steps: Collection[str]) -> frozenset[Ref]:
        """Parameters that `steps` of a variant read as the block is given them, not copies."""
        block, flow = self.variant_flow(variant)
        given = {(ref, flow.produced[ref]) for ref in block.parameters}
        read = set()
        for move in flow.moves():
            if not move.copies(self.mesh.sizes) and (move.value, move.before) in given:
                given.add((move.value, move.after))
            elif move.name in steps:
                read.add((move.value, move.before))
        for choice in variant.choices:
            if choice.node in steps:
                read |= set(zip(self.nodes[choice.node].inputs(), choice.inputs, strict=True))
        return frozenset(ref for ref, layout in read if (ref, layout) in given)

    @cached_property
    def _storage(self) -> StorageMap:
        kind = self.plan.cluster.device(0).kind
        return trace_storage(self.graph.nodes, self.specs, device_kind=kind)

    @cached_property
    def parameter_layouts(self) -> Mapping[str, Layout]:
        """Layout of every parameter and buffer, by source name."""
        plans, whole = self.parameter_plans, (R,) * len(self.mesh.axes)
        return {
            source.name: plans[source.name].layout if source.name in plans else whole
            for source in self.graph.sources
            if source.kind is not SourceKind.INPUT
        }

    def first_random(self, nodes: Iterable[str]) -> int:
        """Number of the first random node among `nodes`; 0 if there is none."""
        return min((self.random_numbers[n] for n in nodes if n in self.random_numbers), default=0)

    def setup_closure(self, wanted: Iterable[Ref], *, stop: Iterable[str] = ()) -> tuple[str, ...]:
        """Set-up nodes needed for `wanted`, in order; nodes in `stop` are taken as given."""
        return setup_closure(self.nodes, self.chain.setup, wanted, stop=stop)

    def setup_choices(self, names: Sequence[str]) -> dict[str, NodeChoice]:
        """Choices of set-up nodes: split by sample where the axis splits samples, else whole."""

        def spread(placement: Placement) -> Layout:
            return tuple(placement if axis.splits_samples else R for axis in self.plan.axes)

        choices = {}
        for name in names:
            strategy = self.batch.strategies[name]
            choices[name] = NodeChoice(
                node=name,
                inputs=tuple(map(spread, strategy.inputs)),
                outputs=tuple(map(spread, strategy.outputs)),
            )
        return choices

    def chosen(self, node: OpNode, choice: NodeChoice) -> tuple[AxisStrategy, ...]:
        """The strategy on each axis, found again in the rules from the placements chosen."""
        found = []
        for axis in range(len(self.mesh.axes)):
            inputs = tuple(layout[axis] for layout in choice.inputs)
            outputs = tuple(layout[axis] for layout in choice.outputs)
            found.append(self._strategy(node, axis, inputs, outputs))
        return tuple(found)

    def stage_shared(self, stage: StagePlan) -> tuple[Ref, ...]:
        """Set-up values and inputs that the blocks of a stage read, in order of first use."""
        seen: dict[Ref, None] = {}
        for use in stage.blocks:
            seen.update(dict.fromkeys(self.chain.blocks[use.index].shared))
        return tuple(seen)

    def stage_sums(self, stage: StagePlan) -> tuple[str, ...]:
        """Values summed over all samples beforehand that a stage needs."""
        shared = self.stage_shared(stage)
        read = {ref.name for ref in shared} | {
            ref.name
            for name in self.setup_closure(shared, stop=self.batch.setup_sums)
            for ref in self.nodes[name].inputs()
        }
        return tuple(name for name in self.batch.setup_sums if name in read)

    def _strategy(
        self,
        node: OpNode,
        axis: int,
        inputs: tuple[Placement, ...],
        outputs: tuple[Placement, ...],
    ) -> AxisStrategy:
        if all(p == R for p in (*inputs, *outputs)):
            return AxisStrategy(inputs=inputs, outputs=outputs)
        size = self.mesh.sizes[axis]
        for strategy in self.strategies(node, self.plan.axes[axis]):
            if strategy.inputs == inputs and strategy.outputs == outputs:
                return strategy
        placed = f"{', '.join(map(str, inputs))} -> {', '.join(map(str, outputs))}"
        raise PlanMismatch(
            f"the plan runs {node.name} ({node.target}) as {placed} over {size} ranks of axis "
            f"{self.mesh.axes[axis]}, which no sharding rule allows; make the plan again"
        )

    def local_nodes(
        self, names: Sequence[str], choices: Mapping[str, NodeChoice]
    ) -> tuple[LocalNode, ...]:
        """Nodes with choices and kernels, ready to print."""
        first = self.first_random(names)
        return tuple(
            LocalNode(
                node=self.nodes[name],
                choice=choices[name],
                kernels=tuple(s.kernel for s in self.chosen(self.nodes[name], choices[name])),
                random_index=(
                    self.random_numbers[name] - first if name in self.random_numbers else None
                ),
                specs=self.specs,
                mesh=self.mesh,
                split=self.split_products.get(name),
            )
            for name in names
        )

    @cached_property
    def split_products(self) -> Mapping[str, Product]:
        """The ops whose weight gradients are computed apart; none unless the schedule asks it."""
        if not splits_backward(self.plan):
            return {}
        found: dict[str, Product] = {}
        for block_class in self.chain.classes:
            block = self.chain.representative(block_class.index)
            nodes = [self.nodes[name] for name in block.nodes]
            found.update(split_products(nodes, block.parameters, self.specs))
        return found

    @cached_property
    def _users(self) -> Mapping[str, int]:
        """A block that each variant runs: its parameters lie as the variant needs them."""
        return {use.variant: use.index for stage in self.plan.stages for use in stage.blocks}

    def variant_user(self, variant: Variant) -> Block:
        """A block that runs a variant, whose parameters lie as those of all that do."""
        return self.chain.blocks[self._users[variant.name]]

    @cached_property
    def _worked_out(self) -> dict[Hashable, object]:
        return {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gives, made once for all that ask with the same key.

        Blocks of a variant are alike, so what follows from the variant is asked for many times.
        """
        if key not in self._worked_out:
            self._worked_out[key] = make()
        return cast(T, self._worked_out[key])

    def variant_flow(self, variant: Variant) -> tuple[Block, BlockFlow]:
        """The first block of a variant's class and its moves."""
        return self.once(("flow", variant.name), lambda: self._variant_flow(variant))

    def _variant_flow(self, variant: Variant) -> tuple[Block, BlockFlow]:
        block = self.chain.representative(variant.class_index)
        given, required = block_edges(self.chain, block, self.shared)
        user = self.variant_user(variant)
        given |= {
            ref: self.parameter_layouts[own.name]
            for ref, own in zip(block.parameters, user.parameters, strict=True)
        }
        flow = block_flow(
            [self.nodes[name] for name in block.nodes],
            {choice.node: choice for choice in variant.choices},
            given,
            required,
            self.differentiable,
        )
        return block, flow
