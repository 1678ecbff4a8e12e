"""How one op may be split along one mesh axis: a table from op to index expression.

`axis_strategies(node, specs, size=4, batch=8)` lists the legal strategies of a node, as in

    R, R -> R           R*, R* -> R*
    S(0), R* -> S(0)    batch: each rank has its samples, the weight's gradient is a partial sum
    R*, S(0) -> S(1)    column parallel
    S(1), S(1) -> P(sum)    row parallel

for `aten.linear`. `piece_hints` finds packed projections, `batch_axis` settles the one strategy per
node for splitting samples. Add a rule in the file of its family, or with `register_rule` and
`register_elementwise` from outside. Every rule is checked by execution.

The `local` kernel is the op itself on local parts, with the arguments that hold sizes taken from
its local outputs: shapes of views, expansions and filled tensors, sizes of splits, repeats, and the
group counts of `group_norm` and convolutions.
"""

from __future__ import annotations

from autopar.rules import (
    attention,
    conv,
    creation,
    dropout,
    embedding,
    experts,
    loss,
    matmul,
    norm,
    pointwise,
    reduction,
    view,
)
from autopar.rules.batch import batch_axis
from autopar.rules.facts import GraphFacts
from autopar.rules.pieces import piece_hints
from autopar.rules.pointwise import register_elementwise
from autopar.rules.registry import (
    RULES,
    axis_strategies,
    has_rule,
    register,
    register_rule,
)

_FAMILIES = (
    attention, conv, creation, dropout, embedding, experts, loss, matmul, norm, pointwise,
    reduction, view,
)  # fmt: skip

_BUILT_IN = dict(RULES)


def is_extended() -> bool:
    """Whether rules were registered from outside, which another process does not have."""
    return RULES != _BUILT_IN


__all__ = [
    "RULES",
    "GraphFacts",
    "axis_strategies",
    "batch_axis",
    "has_rule",
    "is_extended",
    "piece_hints",
    "register",
    "register_elementwise",
    "register_rule",
]
