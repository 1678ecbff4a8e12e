"""What follows from a graph alone, worked out once and looked up by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

from autopar.ir.graph import OpGraph, OpNode, Ref, Source, SourceKind, TensorSpec
from autopar.ir.mesh import CONTEXT, MeshAxis
from autopar.ir.strategy import AxisStrategy, BatchAxis
from autopar.rules.attention import CAUSAL_ROWS
from autopar.rules.batch import batch_axis
from autopar.rules.context import ATTENTION, along_sequence, ring_attention
from autopar.rules.expert_axis import ExpertStrategy, expert_strategies
from autopar.rules.expressions import Expressions
from autopar.rules.pieces import piece_hints
from autopar.rules.registry import axis_strategies
from autopar.rules.sequence import sequence_dims

STRATEGY_BATCH = 2
"""Samples for which the strategies of the axes that do not split samples are listed.

They do not depend on it; 1 would let a dim of batch times heads pass for one of heads.
"""

T = TypeVar("T")


class fact(Generic[T]):  # noqa: N801  it is used as `cached_property` is
    """A property that is worked out once for a graph, for all that share `worked_out`."""

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make = make
        self.__doc__ = make.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, facts: GraphFacts | None, owner: type | None = None) -> T:
        if facts is None:
            return cast(T, self)
        known = facts.worked_out.setdefault(id(facts.graph), {"graph": facts.graph})
        if self._name not in known:
            known[self._name] = self._make(facts)
        found = vars(facts)[self._name] = cast(T, known[self._name])
        return found


@dataclass(frozen=True)
class GraphFacts:
    """A captured graph with its look-ups, its settled data axis and its packed dims."""

    graph: OpGraph
    worked_out: dict[int, dict[str, object]] = field(
        default_factory=dict, kw_only=True, compare=False, repr=False
    )
    """What is known of a graph, by its id: given on to others who look at the same graph."""

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        known = {id(each["graph"]): each for each in self.worked_out.values()}
        vars(self)["worked_out"] = known  # the graph of a copy is another object

    @fact
    def nodes(self) -> Mapping[str, OpNode]:
        """Op nodes by name."""
        return {node.name: node for node in self.graph.nodes}

    @fact
    def sources(self) -> Mapping[str, Source]:
        """Sources by name."""
        return {source.name: source for source in self.graph.sources}

    @fact
    def specs(self) -> Mapping[Ref, TensorSpec]:
        """Spec of every value."""
        return self.graph.specs()

    @fact
    def updated(self) -> frozenset[Ref]:
        """Buffers that a forward updates in place."""
        return self.graph.updated()

    @fact
    def differentiable(self) -> frozenset[Ref]:
        """Values that carry a gradient."""
        return self.graph.differentiable()

    @fact
    def batch(self) -> BatchAxis:
        """The settled strategies of the data axis."""
        return batch_axis(self.graph, self._expressions)

    @fact
    def sequence(self) -> Mapping[Ref, int]:
        """The sequence dim of the values that have one."""
        return sequence_dims(self.graph, self._expressions)

    @fact
    def _expressions(self) -> Expressions:
        return Expressions(self.specs)

    @fact
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

    @fact
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

    @fact
    def parameters(self) -> frozenset[Ref]:
        """The values that are parameters."""
        return frozenset(
            Ref(source.name) for source in self.graph.sources if source.kind is SourceKind.PARAMETER
        )

    @fact
    def experts(self) -> Mapping[str, ExpertStrategy]:
        """By node, the strategy of a batch axis that splits experts instead of samples."""
        return expert_strategies(self.graph, self.batch, self._expressions)

    def _by_sample_or_expert(self, node: OpNode, axis: MeshAxis) -> tuple[AxisStrategy, ...]:
        """The settled strategy, and the one that splits experts where there are enough."""
        settled, other = self.batch.strategies[node.name], self.experts.get(node.name)
        if other is None or not 1 < axis.size <= other.experts:
            return (settled,)
        return (settled, other.strategy)

    @fact
    def hints(self) -> Mapping[tuple[Ref, int], tuple[int, ...]]:
        """Pieces in which packed dims are cut."""
        return piece_hints(self.graph, self._expressions)
