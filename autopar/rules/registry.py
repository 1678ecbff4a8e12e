"""The table of rules: op name to a function from the op to its index expression."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autopar.ir.graph import OpNode, Ref, TensorSpec
from autopar.ir.strategy import AxisStrategy
from autopar.rules.index_expr import Hints, IndexExpr, Op, derive, replicated
from autopar.rules.notation import parse_rule

Rule = Callable[[Op], IndexExpr | None]
"""None says: this call of the op cannot be split."""

RULES: dict[str, Rule] = {}


def _key(target: str) -> str:
    """`t::sq` and `t.sq` are one op."""
    return target.replace("::", ".")


def register(*targets: str) -> Callable[[Rule], Rule]:
    """Decorator: the rule of each target, an op (`aten.linear`) or one overload of it."""

    def add(rule: Rule) -> Rule:
        RULES.update({_key(target): rule for target in targets})
        return rule

    return add


def register_rule(target: str, text: str) -> None:
    """Give an op, your own for instance, a rule in one line.

    `register_rule("mylib::scale_rows", "rows cols, rows -> rows cols")`. Dims are words, tensors
    are separated by commas; `(h d)` is one dim of two factors, `[v]` a dim the op reads as a whole
    and that is never split, `...` any number of leading dims. A word that no output has is summed
    over, so it must be in brackets unless the op really adds up over it. Raises ValueError if the
    text is malformed.
    """
    RULES[_key(target)] = parse_rule(text)


def find_rule(target: str) -> Rule | None:
    """The rule of an overload, or of its op."""
    return RULES.get(_key(target)) or RULES.get(_key(target).rsplit(".", 1)[0])


def has_rule(target: str) -> bool:
    """Whether `target` (`aten.linear.default`) has a rule; without one it is only replicated."""
    return find_rule(target) is not None


def index_expr(node: OpNode, specs: Mapping[Ref, TensorSpec]) -> IndexExpr | None:
    """The index expression of a node, or None where it has no rule or cannot be split."""
    rule = find_rule(node.target)
    return rule(_op(node, specs)) if rule is not None and node.outputs else None


def axis_strategies(
    node: OpNode,
    specs: Mapping[Ref, TensorSpec],
    *,
    size: int,
    batch: int,
    hints: Hints | None = None,
) -> tuple[AxisStrategy, ...]:
    """Every legal way to run `node` over one mesh axis of `size` ranks, at `batch` samples.

    `specs` covers the node's inputs; `hints` comes from `piece_hints`. No duplicates; in a fixed
    order with all-replicated first. A node without rule has only its replicated strategies.
    """
    op = _op(node, specs)
    expr = index_expr(node, specs)
    if expr is None:
        return tuple(replicated(op))
    return derive(expr, op, size=size, batch=batch, hints=hints or {})


def _op(node: OpNode, specs: Mapping[Ref, TensorSpec]) -> Op:
    return Op(node=node, inputs=tuple(specs[ref] for ref in node.inputs()))


__all__ = [
    "RULES",
    "Rule",
    "axis_strategies",
    "find_rule",
    "has_rule",
    "index_expr",
    "register",
    "register_rule",
]
