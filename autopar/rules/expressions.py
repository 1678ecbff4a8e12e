"""The index expressions of a graph's nodes, of which those share one that no rule tells apart."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from autopar.ir.graph import Arg, OpNode, Ref, TensorSpec
from autopar.rules.index_expr import IndexExpr
from autopar.rules.registry import index_expr


class Expressions:
    """Index expressions by node, each found once: layers repeat, so few nodes need a rule."""

    def __init__(self, specs: Mapping[Ref, TensorSpec]) -> None:
        self._specs = specs
        self._forms: dict[str, int] = {}
        self._numbers: dict[Hashable, int] = {}
        self._found: dict[int, IndexExpr | None] = {}

    def __reduce__(self) -> tuple[type[Expressions], tuple[Mapping[Ref, TensorSpec]]]:
        """A copy finds them anew, if it is ever asked."""
        return Expressions, (self._specs,)

    def form(self, node: OpNode) -> int:
        """A number that nodes have in common which rules see alike."""
        if node.name not in self._forms:
            seen = (*_anonymous(node), tuple(self._specs[ref] for ref in node.inputs()))
            self._forms[node.name] = self._numbers.setdefault(seen, len(self._numbers))
        return self._forms[node.name]

    def of(self, node: OpNode) -> IndexExpr | None:
        """See `registry.index_expr`."""
        form = self.form(node)
        if form not in self._found:
            self._found[form] = index_expr(node, self._specs)
        return self._found[form]


def _anonymous(node: OpNode) -> tuple[Hashable, ...]:
    """What a rule sees of a node, without names."""
    refs = node.inputs()

    def nameless(arg: Arg) -> Hashable:
        if isinstance(arg, Ref):
            return ("input", refs.index(arg))
        # True, 1 and 1.0 are equal as keys but not as arguments
        return tuple(map(nameless, arg)) if isinstance(arg, tuple) else (type(arg), arg)

    kwargs = tuple((name, nameless(value)) for name, value in node.kwargs)
    return node.target, tuple(map(nameless, node.args)), kwargs, node.outputs
