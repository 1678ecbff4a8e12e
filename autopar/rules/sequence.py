"""Which dim of every value runs over the sequence.

Dims that an op's index expression gives one letter run together. Of the groups of dims so linked,
the sequence is the one that most values carry, among those that no matrix product contracts or
makes with a weight: a hidden dim has weights, a dim of samples grows with the batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from autopar.ir.graph import OpGraph, OpNode, Ref, SourceKind
from autopar.rules.expressions import Expressions
from autopar.rules.index_expr import Dims, IndexExpr

_Spot = tuple[Ref, int]

_ADDED = frozenset({"aten.add", "aten.sub", "aten.mul", "aten.slice", "aten.expand"})
"""Ops in which a weight may run along the sequence, as a learned position does."""


def sequence_dims(graph: OpGraph, expressions: Expressions | None = None) -> dict[Ref, int]:
    """The sequence dim of every value that has just one; empty where the model has no sequence."""
    specs = graph.specs()
    expressions = expressions or Expressions(specs)
    groups = _Groups()
    weighted: set[_Spot] = set()
    parameters = {
        Ref(source.name) for source in graph.sources if source.kind is SourceKind.PARAMETER
    }
    for node in graph.nodes:
        for letter_spots in _letters(node, expressions.of(node)):
            groups.join(letter_spots)
        if node.op not in _ADDED:
            read = (ref for ref in node.inputs() if ref in parameters)
            weighted |= {(ref, dim) for ref in read for dim in range(len(specs[ref].shape))}
    members = groups.members()
    barred = {groups.root(spot) for spot in weighted}
    carried: Counter[_Spot] = Counter()
    differentiable = graph.differentiable() - parameters
    for root, spots in members.items():
        extents = {specs[ref].shape[dim] for ref, dim in spots}
        whole = not any(size.is_batch or size.const == 1 for size in extents)
        if root not in barred and whole:
            carried[root] = len({ref for ref, _ in spots if ref in differentiable})
    if not carried or max(carried.values()) == 0:
        return {}
    best = max(carried, key=lambda root: carried[root])
    dims = Counter(ref for ref, _ in members[best])
    return {ref: dim for ref, dim in members[best] if dims[ref] == 1}


def _letters(node: OpNode, expr: IndexExpr | None) -> Iterator[list[_Spot]]:
    """The dims that every letter of an op stands for by itself."""
    if expr is None:
        return
    refs = [*node.inputs(), *(Ref(node.name, i) for i in range(len(node.outputs)))]
    found: dict[str, list[_Spot]] = {}
    tensors: list[Dims] = [*expr.inputs, *expr.outputs]
    for ref, dims in zip(refs, tensors, strict=True):
        for dim, factors in enumerate(dims):
            if len(factors) == 1 and factors[0] not in expr.parted:
                found.setdefault(factors[0], []).append((ref, dim))
    yield from found.values()


class _Groups:
    """Disjoint sets of dims."""

    def __init__(self) -> None:
        self._parent: dict[_Spot, _Spot] = {}

    def root(self, spot: _Spot) -> _Spot:
        """The one dim that stands for its set."""
        self._parent.setdefault(spot, spot)
        while self._parent[spot] != spot:
            self._parent[spot] = self._parent[self._parent[spot]]
            spot = self._parent[spot]
        return spot

    def join(self, spots: list[_Spot]) -> None:
        """Make one set of those the dims are in; the earliest dim stands for it."""
        first = self.root(spots[0])
        for spot in spots[1:]:
            self._parent[self.root(spot)] = first

    def members(self) -> dict[_Spot, list[_Spot]]:
        """All sets, by what stands for them."""
        found: dict[_Spot, list[_Spot]] = {}
        for spot in self._parent:
            found.setdefault(self.root(spot), []).append(spot)
        return found


__all__ = ["sequence_dims"]
