"""What follows from a graph alone, worked out once and looked up by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from autopar.ir.graph import OpGraph, OpNode, Ref, Source, TensorSpec
from autopar.ir.strategy import BatchAxis
from autopar.rules.batch import batch_axis
from autopar.rules.pieces import piece_hints
from autopar.rules.sequence import sequence_dims


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
    def hints(self) -> Mapping[tuple[Ref, int], tuple[int, ...]]:
        """Pieces in which packed dims are cut."""
        return piece_hints(self.graph)
