"""Splitting the samples: the one strategy of every node, or what stands in the way.

Data parallelism and micro-batches both give each part of the program some of the samples. Inputs
are split along their batch dim, weights are whole, and every node follows: there is nothing to
choose, so this axis is settled once for the whole graph.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from math import prod

from autopar.ir.graph import OpGraph, OpNode, Ref, Source, SourceKind, TensorSpec
from autopar.ir.placement import R_STAR, P, Placement, R, Shard
from autopar.ir.strategy import AxisStrategy, BatchAxis
from autopar.rules.attention import ATTENTION_DROPOUT
from autopar.rules.creation import UNREAD
from autopar.rules.dropout import DROPOUT
from autopar.rules.embedding import index_layout
from autopar.rules.expressions import Expressions
from autopar.rules.index_expr import Hints, Op
from autopar.rules.norm import BATCH_NORM
from autopar.rules.registry import axis_strategies

_PROBE = 2
"""Ranks and samples of the probe: every batch dim divides. Letters tell dims apart, so no other dim
of extent two is mistaken for it."""

_FREE, _ADDED_ONCE, _SETUP_SUM = 1, 100, 10_000
"""Preference among strategies that fit: as few moves as possible, setup sums last."""

_KEEPS_ROWS = frozenset(
    f"aten.{name}"
    for name in (
        "view", "reshape", "unsqueeze", "squeeze", "slice", "expand", "clone", "contiguous", "to",
        "detach", "alias",
    )
)  # fmt: skip


def batch_axis(graph: OpGraph, expressions: Expressions | None = None) -> BatchAxis:
    """The strategy of every node when the samples are split; see `BatchAxis`.

    A node that mixes samples so that no split exists is named in `coupled` with the reason, and the
    walk goes on as if it did not, so that only causes are named, not what follows from them. The
    strategies then leave every value whole.
    """
    setup_sums: list[str] = []
    known: dict[Hashable, AxisStrategy | None] = {}
    specs = graph.specs()
    expressions = expressions or Expressions(specs)
    while True:
        walk = _Walk(
            graph=graph,
            specs=specs,
            expressions=expressions,
            summed=frozenset(setup_sums),
            known=known,
        )
        walk.run()
        fresh = [name for name in walk.wanted_sums if name not in setup_sums]
        if not fresh:
            break
        setup_sums += fresh
    if walk.coupled:
        return BatchAxis(
            strategies={node.name: _whole(node) for node in graph.nodes},
            coupled=tuple(walk.coupled),
        )
    order = {node.name: i for i, node in enumerate(graph.nodes)}
    return BatchAxis(
        strategies={name: _plain(strategy) for name, strategy in walk.strategies.items()},
        setup_sums=tuple(sorted(setup_sums, key=order.__getitem__)),
        at_once=tuple(
            (node.name, f"{node.target} is computed over all samples of the batch together")
            for node in graph.nodes
            if walk.strategies[node.name].kernel == BATCH_NORM
        ),
    )


def _whole(node: OpNode) -> AxisStrategy:
    """Every rank has all samples."""
    return AxisStrategy(inputs=(R,) * len(node.inputs()), outputs=(R,) * len(node.outputs))


@dataclass(kw_only=True)
class _Walk:
    """One pass over the nodes. `summed` are the setup sums known so far, `wanted_sums` new ones.

    `known` has the strategies found so far: layers repeat, so few nodes need a search.
    """

    graph: OpGraph
    specs: dict[Ref, TensorSpec]
    expressions: Expressions
    summed: frozenset[str]
    known: dict[Hashable, AxisStrategy | None]
    values: dict[Ref, Placement] = field(default_factory=dict)
    setup: set[str] = field(default_factory=set)
    rows: set[Ref] = field(default_factory=set)
    strategies: dict[str, AxisStrategy] = field(default_factory=dict)
    coupled: list[tuple[str, str]] = field(default_factory=list)
    wanted_sums: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Settle every node, then look at the loss."""
        for source in self.graph.sources:
            self.values[Ref(source.name)] = _source_placement(source)
            if source.kind is not SourceKind.PARAMETER:
                self.setup.add(source.name)
        for node in self.graph.nodes:
            if all(ref.name in self.setup for ref in node.inputs()):
                self.setup.add(node.name)
            self._settle(node)
        for ref in self.graph.outputs:
            placement = self.values[ref]
            if isinstance(placement, Shard) and placement.pieces:
                reason = "the model returns a dim in which samples lie inside another factor"
                self.coupled.append((ref.name, reason))
        loss = self.graph.loss
        if loss is not None and self.values[loss] != P and loss.name not in dict(self.coupled):
            self.coupled.append((loss.name, "the loss is not a sum or mean over the samples"))

    def _settle(self, node: OpNode) -> None:
        if not node.outputs:
            inputs = tuple(self.values[ref] for ref in node.inputs())
            self.strategies[node.name] = AxisStrategy(inputs=inputs, outputs=())
            return
        if _is_row_numbers(node):
            self.rows.add(Ref(node.name))
            self._take(node, AxisStrategy(inputs=(), outputs=(Shard(0),)))
            return
        if any(ref in self.rows for ref in node.inputs()):
            self._follow_rows(node)
            return
        if node.op in UNREAD:
            self._fill(node)
            return
        self._choose(node)

    def _fill(self, node: OpNode) -> None:
        """A tensor of one number, made where its samples are."""
        dims = map(_batch_dim, node.outputs)
        outputs = tuple(R if dim is None else Shard(dim) for dim in dims)
        inputs = tuple(self.values[ref] for ref in node.inputs())
        self._take(node, AxisStrategy(inputs=inputs, outputs=outputs))

    def _choose(self, node: OpNode) -> None:
        """The strategy that fits the values at hand with the fewest moves."""
        refs = node.inputs()
        key = (
            self.expressions.form(node),
            tuple((self.values[ref], ref.name in self.setup) for ref in refs),
        )
        if key not in self.known:
            self.known[key] = self._best(node)
        strategy = self.known[key]
        if strategy is None:
            self._couple(node, self._reason(node))
            return
        for ref, wanted in zip(refs, strategy.inputs, strict=True):
            if self.values[ref] == P and wanted != P and ref.name not in self.wanted_sums:
                self.wanted_sums.append(ref.name)
        self._take(node, strategy)

    def _best(self, node: OpNode) -> AxisStrategy | None:
        candidates = axis_strategies(
            node, self.specs, size=_PROBE, batch=_PROBE, hints=self._interleaved(node)
        )
        priced = [
            (cost, position)
            for position, strategy in enumerate(candidates)
            if _keeps_samples_apart(node, strategy)
            and (cost := self._moves(node, strategy)) is not None
        ]
        return candidates[min(priced)[1]] if priced else None

    def _interleaved(self, node: OpNode) -> Hints:
        """Pieces of dims in which samples lie inside another factor, as in `(seq batch)`.

        A rank then holds its samples of every position: a share of each stretch of a batch.
        """
        hints = {
            (ref, placement.dim): placement.pieces
            for ref in node.inputs()
            if isinstance(placement := self.values[ref], Shard) and placement.pieces
        }
        expr = self.expressions.of(node)
        for index, dims in enumerate(expr.outputs if expr else ()):
            for dim, factors in enumerate(dims):
                sizes = [expr.sizes[f] for f in factors] if expr else []
                at = next((i for i, size in enumerate(sizes) if size.is_batch), 0)
                if at:
                    outer = prod(size.const for size in sizes[:at])
                    stretch = prod(size.at(_PROBE) for size in sizes[at:])
                    hints[Ref(node.name, index), dim] = (stretch,) * outer
        return hints

    def _moves(self, node: OpNode, strategy: AxisStrategy) -> int | None:
        """Cost of bringing the inputs where the strategy wants them; None where that would move
        data."""
        total = 0
        for ref, wanted in zip(node.inputs(), strategy.inputs, strict=True):
            have = self.values[ref]
            if have == wanted:
                continue
            if (have, wanted) == (R, R_STAR):
                total += _FREE
            elif (have, wanted) == (R, P):
                total += _ADDED_ONCE
            elif have == P and wanted in (R, R_STAR) and ref.name in self.setup:
                total += _SETUP_SUM
            else:
                return None
        return total

    def _take(self, node: OpNode, strategy: AxisStrategy) -> None:
        self.strategies[node.name] = strategy
        for index, placement in enumerate(strategy.outputs):
            known = placement == P and node.name in self.summed
            self.values[Ref(node.name, index)] = R if known else placement

    def _couple(self, node: OpNode, reason: str) -> None:
        self.coupled.append((node.name, reason))
        self.strategies[node.name] = _whole(node)
        for index, spec in enumerate(node.outputs):
            dim = _batch_dim(spec)
            self.values[Ref(node.name, index)] = R if dim is None else Shard(dim)

    def _reason(self, node: OpNode) -> str:
        """Why no strategy fits, in terms of the inputs."""
        have = ", ".join(f"{ref} {self.values[ref]}" for ref in node.inputs())
        if any(self.values[ref] == P for ref in node.inputs()):
            return (
                f"{node.target} needs the whole of a value that is summed over the samples and "
                f"depends on a parameter ({have})"
            )
        return f"{node.target} mixes samples, or has no rule that splits them ({have})"

    def _follow_rows(self, node: OpNode) -> None:
        """Row numbers may be reshaped, and may pick each sample's own row; nothing else."""
        source = node.inputs()[0]
        if node.op in _KEEPS_ROWS and source in self.rows and len(node.inputs()) == 1:
            if (dim := _batch_dim(node.outputs[0])) is not None:
                self.rows.add(Ref(node.name))
                have = self.values[source]
                self._take(node, AxisStrategy(inputs=(have,), outputs=(Shard(dim),)))
                return
        elif (strategy := self._own_rows(node)) is not None:
            self._take(node, strategy)
            return
        self._couple(node, f"{node.target} computes with the positions of samples in the batch")

    def _own_rows(self, node: OpNode) -> AxisStrategy | None:
        """`x[arange(batch), i]`: on local rows of `x` the local row numbers are the right ones."""
        slots = node.arg(1, "indices")
        if node.target != "aten.index.Tensor" or not isinstance(slots, tuple):
            return None
        source, *indices = node.inputs()
        if slots[0] not in self.rows or indices[0] != slots[0] or self.values[source] != Shard(0):
            return None
        op = Op(node=node, inputs=tuple(self.specs[ref] for ref in node.inputs()))
        rows, layout = self.specs[indices[0]].shape, index_layout(op)
        same_rows = any(size == self.specs[source].shape[0] for size in rows)
        out_dim = _batch_dim(node.outputs[0])
        if layout is None or not same_rows or out_dim is None:
            return None
        _, index_dims, out, _ = layout
        letter = out[out_dim]
        placements = [self.values[source]]
        for ref, dims in zip(indices, index_dims, strict=True):
            at = dims.index(letter) if letter in dims else None
            if self.values[ref] != (R if at is None else Shard(at)):
                return None
            placements.append(self.values[ref])
        return AxisStrategy(inputs=tuple(placements), outputs=(Shard(out_dim),))


def _source_placement(source: Source) -> Placement:
    dim = _batch_dim(source.spec)
    if source.kind is SourceKind.INPUT and dim is not None:
        return Shard(dim)
    return R_STAR if source.kind is SourceKind.PARAMETER and source.trainable else R


def _batch_dim(spec: TensorSpec) -> int | None:
    """The first dim that grows with the batch."""
    return next((i for i, size in enumerate(spec.shape) if size.is_batch), None)


def _keeps_samples_apart(node: OpNode, strategy: AxisStrategy) -> bool:
    """Whether outputs that grow with the batch are split there, and no other output is split."""
    for spec, placement in zip(node.outputs, strategy.outputs, strict=True):
        dims = [i for i, size in enumerate(spec.shape) if size.is_batch]
        at = placement.dim if isinstance(placement, Shard) else None
        if len(dims) > 1 or at != (dims[0] if dims else None):
            return False
    # masks are drawn by position in the whole, which interleaved samples do not keep in a row
    interleaved = any(isinstance(p, Shard) and p.pieces for p in strategy.inputs)
    return not (interleaved and strategy.kernel in (DROPOUT.name, ATTENTION_DROPOUT.name))


def _plain(strategy: AxisStrategy) -> AxisStrategy:
    """The strategy as an op on local samples, which is the same however they lie in a dim."""

    def plain(placement: Placement) -> Placement:
        return Shard(placement.dim) if isinstance(placement, Shard) else placement

    return replace(
        strategy,
        inputs=tuple(map(plain, strategy.inputs)),
        outputs=tuple(map(plain, strategy.outputs)),
    )


def _is_row_numbers(node: OpNode) -> bool:
    """`arange(batch)`."""
    if node.op != "aten.arange" or _batch_dim(node.outputs[0]) is None:
        return False
    size = node.outputs[0].shape[0]
    return node.args in ((size,), (0, size), (0, size, 1))


__all__ = ["batch_axis"]
