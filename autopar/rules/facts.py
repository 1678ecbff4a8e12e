"""What follows from a graph alone, worked out once and looked up by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from autopar.ir.graph import OpGraph, OpNode, Ref, Source, SourceKind, TensorSpec
from autopar.ir.mesh import CONTEXT, MeshAxis
from autopar.ir.strategy import AxisStrategy, BatchAxis
from autopar.rules.attention import CAUSAL_ROWS
from autopar.rules.batch import batch_axis
from autopar.rules.context import ATTENTION, along_sequence, ring_attention
from autopar.rules.expert_axis import ExpertStrategy, expert_strategies
from autopar.rules.pieces import piece_hints
from autopar.rules.registry import axis_strategies
from autopar.rules.sequence import sequence_dims

STRATEGY_BATCH = 2
"""Samples for which the strategies of the axes that do not split samples are listed.

They do not depend on it; 1 would let a dim of batch times heads pass for one of heads.
"""


@dataclass(frozen=True)
class GraphFacts:
    """A captured graph with its look-ups, its settled data axis and its packed dims."""

    graph: OpGraph

    @cached_property
    def nodes(self) -> Mapping[str, OpNode]:
        """Op nodes by name."""
        return {node.name: node for node in self.graph.nodes}

    @cached_property
    def sources(self) -> Mapping[str, Source]:
        """Sources by name."""
        return {source.name: source for source in self.graph.sources}

    @cached_property
    def specs(self) -> Mapping[Ref, TensorSpec]:
        """Spec of every value."""
        return self.graph.specs()

    @cached_property
    def updated(self) -> frozenset[Ref]:
        """Buffers that a forward updates in place."""
        return self.graph.updated()

    @cached_property
    def differentiable(self) -> frozenset[Ref]:
        """Values that carry a gradient."""
        return self.graph.differentiable()

    @cached_property
    def batch(self) -> BatchAxis:
        """The settled strategies of the data axis."""
        return batch_axis(self.graph)

    @cached_property
    def sequence(self) -> Mapping[Ref, int]:
        """The sequence dim of the values that have one."""
        return sequence_dims(self.graph)

    @cached_property
    def has_causal_attention(self) -> bool:
        """Whether some attention lets a query see only the keys before it."""
        return any(
            node.op == ATTENTION and bool(node.arg(5, "is_causal", False))
            for node in self.graph.nodes
        )

    def strategies(self, node: OpNode, axis: MeshAxis) -> tuple[AxisStrategy, ...]:
        """Every way to run a node over a mesh axis."""
        if axis.splits_samples:
            return self._by_sample_or_expert(node, axis)
        key = (node.name, axis)
        if key not in self._strategies:
            self._strategies[key] = self._offered(node, axis)
        return self._strategies[key]

    @cached_property
    def _strategies(self) -> dict[object, tuple[AxisStrategy, ...]]:
        return {}

    def _offered(self, node: OpNode, axis: MeshAxis) -> tuple[AxisStrategy, ...]:
        found = axis_strategies(
            node, self.specs, size=axis.size, batch=STRATEGY_BATCH, hints=self.hints
        )
        if axis.size == 1:
            return found[:1]
        if axis.name != CONTEXT:
            # Causal queries are split where the sequence can be dealt out in a balanced order.
            return tuple(s for s in found if s.kernel != CAUSAL_ROWS.name)
        fitting = along_sequence(
            node,
            found,
            axis,
            specs=self.specs,
            sequence=self.sequence,
            parameters=self.parameters,
        )
        return (*fitting, *ring_attention(node, axis, self.specs, self.sequence))

    @cached_property
    def parameters(self) -> frozenset[Ref]:
        """The values that are parameters."""
        return frozenset(
            Ref(source.name) for source in self.graph.sources if source.kind is SourceKind.PARAMETER
        )

    @cached_property
    def experts(self) -> Mapping[str, ExpertStrategy]:
        """By node, the strategy of a batch axis that splits experts instead of samples."""
        return expert_strategies(self.graph, self.batch)

    def _by_sample_or_expert(self, node: OpNode, axis: MeshAxis) -> tuple[AxisStrategy, ...]:
        """The settled strategy, and the one that splits experts where there are enough."""
        settled, other = self.batch.strategies[node.name], self.experts.get(node.name)
        if other is None or not 1 < axis.size <= other.experts:
            return (settled,)
        return (settled, other.strategy)

    @cached_property
    def hints(self) -> Mapping[tuple[Ref, int], tuple[int, ...]]:
        """Pieces in which packed dims are cut."""
        return piece_hints(self.graph)
