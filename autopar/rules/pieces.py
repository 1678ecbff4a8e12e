"""Where a dim is later taken apart, and so how it must be cut to be split without communication.

A packed query-key-value projection has one output dim of three stretches. Split in two halves, a
rank would hold all queries and half the keys; split stretch by stretch it holds its heads of each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import prod

from autopar.ir.graph import OpGraph, OpNode, Ref, TensorSpec
from autopar.rules.expressions import Expressions
from autopar.rules.index_expr import IndexExpr

_Key = tuple[Ref, int]


def piece_hints(
    graph: OpGraph, expressions: Expressions | None = None
) -> dict[_Key, tuple[int, ...]]:
    """(value, dim) to the sizes it is later cut into, for every value up to the weights.

    A dim is cut by `split`, `chunk`, `unbind`, or by `select` of each of its indices; from there
    the cut is followed backward along the same letter. Where two readers cut differently the later
    one is followed.
    """
    specs = graph.specs()
    expressions = expressions or Expressions(specs)
    hints: dict[_Key, tuple[int, ...]] = dict(_taken_apart(graph, specs))
    for node in reversed(graph.nodes):
        expr = expressions.of(node)
        if expr is None:
            continue
        for (ref, dim), pieces in _split_inputs(node, expr):
            hints[ref, dim] = pieces
        for index, dims in enumerate(expr.outputs):
            for out_dim in range(len(dims)):
                pieces = hints.get((Ref(node.name, index), out_dim), ())
                for key, scaled in _followed(node, expr, dims[out_dim], pieces):
                    hints.setdefault(key, scaled)
    return hints


def _split_inputs(node: OpNode, expr: IndexExpr) -> Iterator[tuple[_Key, tuple[int, ...]]]:
    """Dims a split op cuts itself."""
    for ref, dims in zip(node.inputs(), expr.inputs, strict=True):
        for dim, factors in enumerate(dims):
            if len(factors) == 1 and factors[0] in expr.parted:
                yield (ref, dim), expr.parted[factors[0]]


def _followed(
    node: OpNode, expr: IndexExpr, factors: tuple[str, ...], pieces: tuple[int, ...]
) -> Iterator[tuple[_Key, tuple[int, ...]]]:
    """The same cut on the inputs, where the letter leads the dim, scaled by what lies inside it."""
    if not factors or not pieces or factors[0] in expr.parted:
        return
    inner = _extent(expr, factors[1:])
    if inner == 0 or any(piece % inner for piece in pieces):
        return
    for ref, dims in zip(node.inputs(), expr.inputs, strict=True):
        for dim, candidate in enumerate(dims):
            scale = _extent(expr, candidate[1:])
            if candidate[:1] == factors[:1] and scale:
                yield (ref, dim), tuple(piece // inner * scale for piece in pieces)


def _extent(expr: IndexExpr, letters: tuple[str, ...]) -> int:
    """Product of fixed sizes; zero where one grows with the batch."""
    sizes = [expr.sizes[letter] for letter in letters]
    return 0 if any(size.is_batch for size in sizes) else prod(size.const for size in sizes)


def _taken_apart(
    graph: OpGraph, specs: dict[Ref, TensorSpec]
) -> Iterator[tuple[_Key, tuple[int, ...]]]:
    """Dims of which every single index is selected: pieces of one."""
    selected: defaultdict[_Key, set[int]] = defaultdict(set)
    for node in graph.nodes:
        if node.op not in ("aten.select", "aten.unbind"):
            continue
        ref = node.inputs()[0]
        rank = len(specs[ref].shape)
        dim = node.arg(1, "dim", 0)
        assert isinstance(dim, int)
        size = specs[ref].shape[dim % rank]
        if node.op == "aten.unbind":
            selected[ref, dim % rank].update(range(size.const))
        elif isinstance(index := node.arg(2, "index"), int) and not size.is_batch:
            selected[ref, dim % rank].add(index % size.const)
    for (ref, dim), indices in selected.items():
        size = specs[ref].shape[dim]
        if not size.is_batch and 1 < len(indices) == size.const:
            yield (ref, dim), (1,) * size.const


__all__ = ["piece_hints"]
