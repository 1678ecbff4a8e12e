"""Dropless expert layers in a form that can be split: by tokens, or by experts.

A sort of all tokens mixes samples in its positions, though no token's result depends on another's.
So the sort and what follows from it are written as ops that say what happens to rows:

    order, counts, held = autopar.route(chosen, E)      choices [..., k] of E experts, N in all
    autopar.to_experts(rows, order, counts, held)       rows [N / r, ...] -> slots [N, ...]
    autopar.expert_mm(slots, weight, held)              [N, m], [E, m, f] -> [N, f]
    autopar.expert_rows(table, held)                    [E, ...] -> [N, ...], one row a slot
    autopar.from_experts(slots, order, counts, held)    slots [N, ...] -> rows [N, ...]

`order` [N] lists the choices sorted by expert, the earlier first; `counts` [E] how many chose each
expert, `held` [E] how many slots of each the slots value holds. Whole, `held` is `counts`. Split by
tokens, a rank's slots are those of its tokens, and both are its share of the counts. Split by
experts, its slots are those of its experts, whosever tokens they are, and `held` says whose.

A routing is rewritten as a whole or, where one of its values is used in a way that is not known
here, left as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.capture.routing import SORTS, Fact, Facts, Meaning, keeps_rows
from autopar.ir.graph import Arg, OpNode, Ref, TensorSpec
from autopar.ir.size import Size

_PLACES = (Meaning.ORDER, Meaning.TOKEN, Meaning.INVERSE)
"""Positions among all rows: what a split cannot keep, so every use must be understood."""

GROUPED = frozenset(
    ("autopar.grouped_mm.default", "aten._grouped_mm.default",
     "transformers.grouped_mm_fallback.default")
)  # fmt: skip


@dataclass(kw_only=True, slots=True)
class _Routing:
    """One sort of choices: the nodes that replace it, and what is known to stand in its order."""

    chosen: Ref
    experts: int
    rows: Size
    name: str = ""
    slots: set[Ref] = field(default_factory=set)

    @property
    def refs(self) -> tuple[Ref, Ref, Ref]:
        """`order`, `counts`, `held`."""
        return Ref(self.name, 0), Ref(self.name, 1), Ref(self.name, 2)


def canonical_dispatch(
    nodes: Sequence[OpNode], specs: Mapping[Ref, TensorSpec], outputs: Iterable[Ref]
) -> list[OpNode]:
    """The nodes with every routing that is understood in its canonical form.

    Nodes that nothing reads any more are left in.
    """
    facts = Facts(nodes, specs)
    routings = _routings(facts, specs)
    read = set(outputs)
    while routings:
        walk = _Walk(facts, specs, routings, {ref.name for ref in specs})
        made = walk.run(nodes)
        walk.refused |= {f.chosen for r in read if (f := facts.of(r, *_PLACES))}
        if not walk.refused:
            return made
        routings = {k: _fresh(r) for k, r in routings.items() if k not in walk.refused}
    return list(nodes)


def _fresh(routing: _Routing) -> _Routing:
    return _Routing(chosen=routing.chosen, experts=routing.experts, rows=routing.rows)


def _routings(facts: Facts, specs: Mapping[Ref, TensorSpec]) -> dict[Ref, _Routing]:
    """Sorted choices whose number of experts is known, by the tensor of choices."""
    found: dict[Ref, _Routing] = {}
    experts: dict[Ref, set[int]] = {}
    for fact in facts.known.values():
        if fact.meaning is Meaning.COUNTS:
            experts.setdefault(fact.chosen, set()).add(fact.number)
    for ref, fact in facts.known.items():
        numbers = experts.get(fact.chosen, set())
        if fact.meaning is Meaning.ORDER and not fact.spread and len(numbers) == 1:
            found[fact.chosen] = _Routing(
                chosen=fact.chosen, experts=min(numbers), rows=specs[ref].shape[0]
            )
    return found


class _Walk:
    """One pass that rewrites the given routings and notes those that cannot be."""

    def __init__(
        self,
        facts: Facts,
        specs: Mapping[Ref, TensorSpec],
        routings: dict[Ref, _Routing],
        taken: set[str],
    ) -> None:
        self.facts, self.specs, self.routings, self.taken = facts, specs, routings, taken
        self.refused: set[Ref] = set()
        self.renamed: dict[Ref, Ref] = {}
        self.made: list[OpNode] = []

    def run(self, nodes: Sequence[OpNode]) -> list[OpNode]:
        """The rewritten nodes, in order."""
        by_node: dict[str, list[_Routing]] = {}
        for routing in self.routings.values():
            by_node.setdefault(routing.chosen.name, []).append(routing)
        names = {node.name for node in nodes}
        for chosen_by, waiting in by_node.items():
            if chosen_by not in names:
                self._start(waiting, nodes[0])
        for node in nodes:
            self._visit(node)
            self._start(by_node.get(node.name, ()), node)
        return self.made

    def _start(self, routings: Iterable[_Routing], like: OpNode) -> None:
        """The route op, right behind what makes the choices."""
        for routing in routings:
            routing.name = self._name("route")
            count = TensorSpec(shape=(Size(routing.experts),), dtype="int64")
            self.made.append(
                replace(
                    like,
                    name=routing.name,
                    target="autopar.route.default",
                    args=(routing.chosen, routing.experts),
                    kwargs=(),
                    outputs=(TensorSpec(shape=(routing.rows,), dtype="int64"), count, count),
                    requires_grad=False,
                )
            )

    def _name(self, wanted: str) -> str:
        unique, count = wanted, 1
        while unique in self.taken:
            unique, count = f"{wanted}_{count}", count + 1
        self.taken.add(unique)
        return unique

    def _visit(self, node: OpNode) -> None:
        made = self._rewritten(node)
        if made is None:
            self._refuse_uses(node)
            self._follow_slots(node)
            made = [node]
        self.made += [self._with_new_names(item) for item in made]

    def _refuse_uses(self, node: OpNode) -> None:
        """A kept node reads no position, unless it makes another of it or takes its shape."""
        makes_position = Ref(node.name, len(node.outputs) - 1) in self.facts.known
        if makes_position or node.op.endswith("_like"):
            return
        for ref in node.inputs():
            if (fact := self.facts.of(ref, *_PLACES)) and fact.chosen in self.routings:
                self.refused.add(fact.chosen)

    def _follow_slots(self, node: OpNode) -> None:
        """Row by row, slots give slots."""
        refs = node.inputs()
        for routing in self.routings.values():
            sorted_rows = [ref for ref in refs if ref in routing.slots]
            if not sorted_rows or not keeps_rows(node, [self.specs[r].shape for r in sorted_rows]):
                continue
            rank = len(self.specs[sorted_rows[0]].shape)
            others = (self.specs[ref].shape for ref in refs if ref not in routing.slots)
            if all(len(s) < rank or s[0] == Size(1) or node.op == "aten.linear" for s in others):
                routing.slots |= {Ref(node.name, i) for i in range(len(node.outputs))}

    def _with_new_names(self, node: OpNode) -> OpNode:
        if not any(ref in self.renamed for ref in node.inputs()):
            return node

        def new(arg: Arg) -> Arg:
            if isinstance(arg, Ref):
                return self.renamed.get(arg, arg)
            return tuple(map(new, arg)) if isinstance(arg, tuple) else arg

        kwargs = tuple((name, new(value)) for name, value in node.kwargs)
        return replace(node, args=tuple(map(new, node.args)), kwargs=kwargs)

    def _routing(self, fact: Fact | None) -> _Routing | None:
        return self.routings.get(fact.chosen) if fact else None

    def _rewritten(self, node: OpNode) -> list[OpNode] | None:
        """What a node becomes; None where it stays."""
        if node.target in GROUPED:
            return self._product(node)
        own = self.facts.of(Ref(node.name))
        if (routing := self._routing(own)) and own:
            if own.meaning is Meaning.SORTED and node.target in SORTS:
                return self._sorted(node, routing)
            if own.meaning is Meaning.COUNTS and node.op not in ("aten.to", "aten.clone"):
                return self._counts(node, routing)
            return None
        if (read := _gather(node)) is not None:
            return self._gathered(node, *read)
        if (write := _scatter(node)) is not None:
            return self._scattered(node, write)
        return None

    def _sorted(self, node: OpNode, routing: _Routing) -> list[OpNode]:
        made = replace(
            node,
            name=self._name(f"{node.name}_experts"),
            target="autopar.to_experts.default",
            args=(node.inputs()[0], *routing.refs),
            kwargs=(),
            outputs=node.outputs[:1],
        )
        self.renamed[Ref(node.name)] = Ref(made.name)
        routing.slots.add(Ref(node.name))
        return [made]

    def _counts(self, node: OpNode, routing: _Routing) -> list[OpNode]:
        dtype = node.outputs[0].dtype
        if dtype == "int64":
            self.renamed[Ref(node.name)] = routing.refs[1]
            return []
        args = (routing.refs[1], f"dtype:{dtype}")
        return [replace(node, target="aten.to.dtype", args=args, kwargs=())]

    def _gathered(self, node: OpNode, source: Ref, index: Ref) -> list[OpNode] | None:
        """Rows read in an order: to the experts, from them, or of a table with a row an expert."""
        fact, rows = self.facts.of(index), self.facts.rows(source)
        routing = self._routing(fact)
        if routing is None or fact is None:
            return None
        if fact.meaning is Meaning.INVERSE and source in routing.slots and rows == routing.rows:
            return [self._moved(node, "from_experts", source, routing)]
        if fact.meaning is Meaning.SORTED and rows == Size(routing.experts):
            routing.slots.add(Ref(node.name))
            target = "autopar.expert_rows.default"
            args = (source, routing.refs[2], routing.refs[0])
            return [replace(node, target=target, args=args, kwargs=())]
        if fact.meaning not in (Meaning.ORDER, Meaning.TOKEN) or source in routing.slots:
            return None
        if _times(rows, fact.number or 1) != routing.rows:
            return None
        routing.slots.add(Ref(node.name))
        return [self._moved(node, "to_experts", source, routing)]

    def _moved(self, node: OpNode, op: str, rows: Ref, routing: _Routing) -> OpNode:
        args = (rows, *routing.refs)
        return replace(node, target=f"autopar.{op}.default", args=args, kwargs=())

    def _product(self, node: OpNode) -> list[OpNode] | None:
        rows, weight, offsets = node.inputs()[:3]
        routing = self._routing(self.facts.of(offsets, Meaning.OFFSETS))
        if routing is None or len(node.inputs()) != 3 or len(self.specs[weight].shape) != 3:
            return None
        if rows not in routing.slots or self.facts.rows(weight) != Size(routing.experts):
            self.refused.add(routing.chosen)
            return None
        routing.slots.add(Ref(node.name))
        args = (rows, weight, routing.refs[2])
        return [replace(node, target="autopar.expert_mm.default", args=args, kwargs=())]

    def _scattered(self, node: OpNode, write: _Write) -> list[OpNode] | None:
        """Slots written where their choice or token stands: put back, then added up by token."""
        fact = self.facts.of(write.index, Meaning.ORDER, Meaning.TOKEN)
        routing = self._routing(fact)
        if routing is None or fact is None or write.rows not in routing.slots:
            return None
        number = fact.number or 1
        if fact.meaning is Meaning.TOKEN and not write.adds:
            return None
        if _times(self.facts.rows(write.base), number) != routing.rows:
            return None
        spec = self.specs[write.rows]
        back = replace(
            self._moved(node, "from_experts", write.rows, routing),
            name=self._name(f"{node.name}_rows"),
            outputs=(spec,),
        )
        made = [back]
        if fact.meaning is Meaning.TOKEN:
            made += self._by_token(node, Ref(back.name), number, write)
        value = Ref(made[-1].name)
        if write.adds and not self.facts.blank(write.base):
            add = replace(node, target="aten.add.Tensor", args=(write.base, value), kwargs=())
            return [*made, add]
        self.renamed[Ref(node.name)] = value
        return made

    def _by_token(self, node: OpNode, rows: Ref, number: int, write: _Write) -> list[OpNode]:
        """Rows of the choices of a token, added up."""
        spec, base = self.specs[write.rows], self.specs[write.base]
        shape = (base.shape[0], Size(number), *spec.shape[1:])
        sizes = tuple(s if s.is_batch else s.const for s in shape)
        parted = replace(
            node,
            name=self._name(f"{node.name}_tokens"),
            target="aten.view.default",
            args=(rows, sizes),
            kwargs=(),
            outputs=(TensorSpec(shape=shape, dtype=spec.dtype),),
        )
        total = replace(
            node,
            name=self._name(f"{node.name}_sum"),
            target="aten.sum.dim_IntList",
            args=(Ref(parted.name), (1,)),
            kwargs=(),
        )
        return [parted, total]


def _times(size: Size, number: int) -> Size:
    return Size(size.const * number, size.per_sample * number)


def _gather(node: OpNode) -> tuple[Ref, Ref] | None:
    """Source and index of an op that reads rows."""
    refs = node.inputs()
    if node.target == "aten.index.Tensor":
        slots = node.arg(1, "indices")
        single = isinstance(slots, tuple) and len(slots) == 1 and isinstance(slots[0], Ref)
        return (refs[0], refs[1]) if single else None
    if node.op in ("aten.index_select", "aten.gather") and node.arg(1, "dim") == 0:
        return refs[0], refs[1]
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Write:
    """An op that writes rows at an index; `adds` to what stands there, or replaces it."""

    base: Ref
    index: Ref
    rows: Ref
    adds: bool


def _scatter(node: OpNode) -> _Write | None:
    refs = node.inputs()
    if len(refs) != 3:
        return None
    base, index, rows = refs
    if node.op == "aten.index_put" and node.args[1] == (index,):
        return _Write(base=base, index=index, rows=rows, adds=bool(node.arg(3, "accumulate")))
    if node.arg(1, "dim") != 0 or node.arg(4, "alpha", 1) != 1:
        return None
    if node.op in ("aten.index_add", "aten.scatter_add"):
        return _Write(base=base, index=index, rows=rows, adds=True)
    if node.op in ("aten.index_copy", "aten.scatter"):
        return _Write(base=base, index=index, rows=rows, adds=False)
    return None


__all__ = ["canonical_dispatch"]
