"""Expert parallelism: the strategies of a batch axis that split experts instead of samples.

An axis that splits the samples may, between two points of a block, split the experts: every rank
then holds the weights of some experts and runs them on what the samples of all ranks send there.
Which nodes that concerns follows from the weights: a product whose letter `e` stands in a weight,
in what it is multiplied with and in the result is run by one expert for each `e`, and so are the
ops between two such products.

Experts with a capacity have slots as a dim, `[samples, e, ...]`: samples are exchanged for experts
by the move of any value between two splits. Dropless ones hold rows sorted by expert, whose number
the routing decides: the exchange is part of the ops that send rows and bring them back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from autopar.ir.collective import CollectiveOp
from autopar.ir.graph import OpGraph, OpNode, Ref, SourceKind, TensorSpec
from autopar.ir.placement import BY_EXPERT, P, Placement, Shard
from autopar.ir.size import Size
from autopar.ir.strategy import AxisStrategy, BatchAxis, InnerCollective
from autopar.rules.attention import ATTENTION_DROPOUT
from autopar.rules.dropout import DROPOUT
from autopar.rules.expressions import Expressions
from autopar.rules.index_expr import IndexExpr
from autopar.rules.registry import axis_strategies

ROUTE, SEND, BRING = "route_exchange", "to_experts_exchange", "from_experts_exchange"
EXCHANGES = frozenset((ROUTE, SEND, BRING))
"""Kernels that exchange counts and rows over the axis."""

_PROBE = 2
_ROWS = Shard(0)
_RANDOM = frozenset((DROPOUT.name, ATTENTION_DROPOUT.name))
_SHAPED = frozenset(("aten.view", "aten.reshape", "aten.expand", "aten._unsafe_view"))
"""Ops printed with the shape of their result; any other with a size that grows with the batch would
take that of this rank's samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertStrategy:
    """The strategy that splits a node's experts, of which there are `experts`."""

    strategy: AxisStrategy
    experts: int


def expert_strategies(
    graph: OpGraph, batch: BatchAxis, expressions: Expressions | None = None
) -> dict[str, ExpertStrategy]:
    """By node; empty for a graph without experts, or whose samples cannot be split."""
    if batch.coupled:
        return {}
    specs = graph.specs()
    expressions = expressions or Expressions(specs)
    finder = _Finder(graph=graph, batch=batch, specs=specs, expressions=expressions)
    finder.run()
    return finder.found


@dataclass(kw_only=True)
class _Finder:
    """`weights` are values made of parameters alone; `split` the dim of the experts of a value, or
    None for rows sorted by expert; `experts` how many it has."""

    graph: OpGraph
    batch: BatchAxis
    specs: Mapping[Ref, TensorSpec]
    expressions: Expressions
    found: dict[str, ExpertStrategy] = field(default_factory=dict)
    weights: set[Ref] = field(default_factory=set)
    split: dict[Ref, int | None] = field(default_factory=dict)
    experts: dict[Ref, int] = field(default_factory=dict)
    makers: dict[Ref, OpNode] = field(default_factory=dict)

    def run(self) -> None:
        self.weights = {Ref(s.name) for s in self.graph.sources if s.kind is SourceKind.PARAMETER}
        for node in self.graph.nodes:
            refs, outputs = node.inputs(), [Ref(node.name, i) for i in range(len(node.outputs))]
            self.makers.update(dict.fromkeys(outputs, node))
            if refs and all(ref in self.weights for ref in refs):
                self.weights.update(outputs)
            elif node.op in _DROPLESS:
                _DROPLESS[node.op](self, node)
            else:
                self._product(node)
                self._passed_on(node)

    def _take(self, node: OpNode, strategy: AxisStrategy, experts: int) -> None:
        self.found[node.name] = ExpertStrategy(strategy=strategy, experts=experts)

    # --- rows sorted by expert ---------------------------------------------------------------

    def route(self, node: OpNode) -> None:
        experts = node.outputs[1].shape[0].const
        counts = InnerCollective(
            op=CollectiveOp.ALL_TO_ALL, phase="forward", like_input=0, dtype="int64", numel=experts
        )
        settled = self.batch.strategies[node.name]
        if settled.inputs != (_ROWS,):
            return
        self._take(
            node,
            replace(settled, outputs=(_ROWS, P, BY_EXPERT), kernel=ROUTE, collectives=(counts,)),
            experts,
        )
        self.split[Ref(node.name, 2)], self.experts[Ref(node.name, 2)] = None, experts

    def send(self, node: OpNode) -> None:
        rows, _, _, held = node.inputs()
        if held in self.split and self.batch.strategies[node.name].inputs[:2] == (_ROWS, _ROWS):
            first, out = self.specs[rows].shape[0], node.outputs[0].shape[0]
            times = (out.const or out.per_sample) // (first.const or first.per_sample)
            self._exchange(node, SEND, (_ROWS, _ROWS, P, BY_EXPERT), BY_EXPERT, times)
            self._holds(Ref(node.name), None, self.experts[held])

    def bring(self, node: OpNode) -> None:
        slots, _, _, held = node.inputs()
        if held in self.split and slots in self.split:
            self._exchange(node, BRING, (BY_EXPERT, _ROWS, P, BY_EXPERT), _ROWS, 1)

    def _exchange(
        self,
        node: OpNode,
        kernel: str,
        inputs: tuple[Placement, ...],
        output: Placement,
        times: int,
    ) -> None:
        rows = node.inputs()[0]
        phases = ("forward", "backward") if node.requires_grad else ("forward",)
        collectives = tuple(
            InnerCollective(
                op=CollectiveOp.ALL_TO_ALL,
                phase=phase,
                like_input=0,
                dtype=self.specs[rows].dtype,
                times=times,
            )
            for phase in phases
        )
        strategy = AxisStrategy(
            inputs=inputs, outputs=(output,), kernel=kernel, collectives=collectives
        )
        self._take(node, strategy, self.experts[node.inputs()[3]])

    def multiply(self, node: OpNode) -> None:
        slots, weight, held = node.inputs()
        if held in self.split and slots in self.split and self._split_weight(weight, 0):
            strategy = AxisStrategy(inputs=(BY_EXPERT, Shard(0), BY_EXPERT), outputs=(BY_EXPERT,))
            self._take(node, strategy, self.experts[held])
            self._holds(Ref(node.name), None, self.experts[held])

    def table(self, node: OpNode) -> None:
        table, held, _ = node.inputs()
        if held in self.split and self._split_weight(table, 0):
            strategy = AxisStrategy(inputs=(Shard(0), BY_EXPERT, _ROWS), outputs=(BY_EXPERT,))
            self._take(node, strategy, self.experts[held])
            self._holds(Ref(node.name), None, self.experts[held])

    def _holds(self, ref: Ref, dim: int | None, experts: int) -> None:
        self.split[ref], self.experts[ref] = dim, experts

    # --- experts as a dim -----------------------------------------------------------------------

    def _product(self, node: OpNode) -> None:
        """A product of a weight and a value over a letter that the result has too."""
        if (expr := self.expressions.of(node)) is None or len(node.outputs) != 1:
            return
        refs = node.inputs()
        weights = [i for i, ref in enumerate(refs) if ref in self.weights]
        values = [i for i, ref in enumerate(refs) if ref not in self.weights]
        if not weights or len(values) != 1 or not self._by_sample(refs[values[0]]):
            return
        for letter in _batch_letters(expr, [*weights, *values]):
            if expr.sizes[letter].const < _PROBE or _is_broadcast(expr, weights, letter):
                continue
            self._split_letter(node, expr, letter, values)
            return

    def _passed_on(self, node: OpNode) -> None:
        """An op between products: all it reads that has samples is split by experts."""
        refs = node.inputs()
        held = [i for i, ref in enumerate(refs) if ref in self.split]
        grown = [i for i, ref in enumerate(refs) if _grows(self.specs[ref])]
        if node.name in self.found or not held or set(grown) - set(held):
            return
        if any(self.split[refs[i]] is None for i in held):
            self._rows_passed_on(node, held)
            return
        if (expr := self.expressions.of(node)) is None:
            return
        letters = {expr.inputs[i][self._dim(refs[i])] for i in held}
        if len(letters) == 1 and len(factors := letters.pop()) == 1:
            self._split_letter(node, expr, factors[0], held)

    def _dim(self, ref: Ref) -> int:
        dim = self.split[ref]
        assert dim is not None
        return dim

    def _rows_passed_on(self, node: OpNode, held: list[int]) -> None:
        """Row by row: the settled strategy, on other rows."""
        settled, refs = self.batch.strategies[node.name], node.inputs()
        rows = {self.specs[refs[i]].shape[0] for i in held}
        same = rows == {spec.shape[0] for spec in node.outputs if spec.shape}
        local = settled.kernel == "local" and not _takes_batch(node)
        placed = all(settled.inputs[i] == _ROWS for i in held)
        if not (same and local and placed and all(p == _ROWS for p in settled.outputs)):
            return
        if any(p == _ROWS for i, p in enumerate(settled.inputs) if i not in held):
            return
        inputs = tuple(BY_EXPERT if i in held else p for i, p in enumerate(settled.inputs))
        experts = self.experts[refs[held[0]]]
        outputs = (BY_EXPERT,) * len(node.outputs)
        self._take(node, AxisStrategy(inputs=inputs, outputs=outputs), experts)
        for index in range(len(node.outputs)):
            self._holds(Ref(node.name, index), None, experts)

    def _split_letter(self, node: OpNode, expr: IndexExpr, letter: str, values: list[int]) -> None:
        """Take the strategy of a node that splits one letter, if the weights can follow."""
        if expr.sizes[letter].is_batch or _takes_batch(node):
            return
        refs = node.inputs()
        strategy = _splitting(node, expr, letter, self.specs)
        if strategy is None or strategy.kernel in _RANDOM:
            return
        for i, (ref, placement) in enumerate(zip(refs, strategy.inputs, strict=True)):
            if not isinstance(placement, Shard):
                continue
            if ref in self.weights:
                if not self._split_weight(ref, placement.dim):
                    return
            elif i not in values:
                return
        experts = expr.sizes[letter].const
        self._take(node, strategy, experts)
        for index, placement in enumerate(strategy.outputs):
            if isinstance(placement, Shard):
                self._holds(Ref(node.name, index), placement.dim, experts)

    def _by_sample(self, ref: Ref) -> bool:
        """Whether a value has whole samples along one dim, and lies so on a batch axis."""
        grown = [d for d, size in enumerate(self.specs[ref].shape) if size.is_batch]
        maker = self.makers.get(ref)
        if len(grown) != 1 or self.specs[ref].shape[grown[0]].const or maker is None:
            return False
        return self.batch.strategies[maker.name].outputs[ref.index] == Shard(grown[0])

    # --- weights ----------------------------------------------------------------------------

    def _split_weight(self, ref: Ref, dim: int) -> bool:
        """Let the ops between a parameter and `ref` split this dim; False if one cannot."""
        node = self.makers.get(ref)
        if node is None:
            return ref in self.weights
        if ref not in self.weights:
            return False
        expr = self.expressions.of(node)
        factors = expr.outputs[ref.index][dim] if expr else ()
        if expr is None or len(factors) != 1:
            return False
        strategy = _splitting(node, expr, factors[0], self.specs)
        if strategy is None:
            return False
        fits = all(
            self._split_weight(source, placement.dim)
            for source, placement in zip(node.inputs(), strategy.inputs, strict=True)
            if isinstance(placement, Shard)
        )
        if fits:
            self._take(node, strategy, expr.sizes[factors[0]].const)
        return fits


_DROPLESS = {
    "autopar.route": _Finder.route,
    "autopar.to_experts": _Finder.send,
    "autopar.from_experts": _Finder.bring,
    "autopar.expert_mm": _Finder.multiply,
    "autopar.expert_rows": _Finder.table,
}


def _splitting(
    node: OpNode, expr: IndexExpr, letter: str, specs: Mapping[Ref, TensorSpec]
) -> AxisStrategy | None:
    """The strategy that splits exactly the dims of one letter, each a whole dim."""

    def dims(tensor: tuple[tuple[str, ...], ...]) -> list[int]:
        return [dim for dim, factors in enumerate(tensor) if factors == (letter,)]

    wanted = [dims(tensor) for tensor in (*expr.inputs, *expr.outputs)]
    if not any(wanted[: len(expr.inputs)]):
        return None
    for strategy in axis_strategies(node, specs, size=_PROBE, batch=_PROBE):
        placed = (*strategy.inputs, *strategy.outputs)
        if P not in placed and all(
            placement == Shard(found[0]) if found else not isinstance(placement, Shard)
            for placement, found in zip(placed, wanted, strict=True)
        ):
            return strategy
    return None


def _batch_letters(expr: IndexExpr, inputs: list[int]) -> Iterator[str]:
    """Letters that are a whole dim of each of these inputs and of the output."""
    tensors = [*(expr.inputs[i] for i in inputs), expr.outputs[0]]
    for letter in expr.letters():
        if all((letter,) in tensor for tensor in tensors):
            yield letter


def _is_broadcast(expr: IndexExpr, weights: list[int], letter: str) -> bool:
    """Whether a weight has no other letter: a scale or a bias, not a matrix."""
    return all(sum(map(len, expr.inputs[i])) < 3 for i in weights)


def _grows(spec: TensorSpec) -> bool:
    return any(size.is_batch for size in spec.shape)


def _takes_batch(node: OpNode) -> bool:
    """Whether a node is given a size that grows with the batch, other than its result's shape."""
    if node.op in _SHAPED:
        return False
    pending = [*node.args, *(value for _, value in node.kwargs)]
    while pending:
        arg = pending.pop()
        if isinstance(arg, Size) and arg.is_batch:
            return True
        if isinstance(arg, tuple):
            pending += arg
    return False


__all__ = ["EXCHANGES", "ExpertStrategy", "expert_strategies"]
