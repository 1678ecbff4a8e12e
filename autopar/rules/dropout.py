"""Dropout: the numbers drawn must not depend on the plan."""

from __future__ import annotations

from autopar.rules.index_expr import IndexExpr, Kernel, Op
from autopar.rules.pointwise import elementwise
from autopar.rules.registry import register

DROPOUT = Kernel(name="dropout")
"""Dropout whose mask is cut from the one a single device would draw, by global index."""


@register("aten.dropout")
def _dropout(op: Op) -> IndexExpr:
    """Elementwise; no partial sums, for each rank would need the mask of the whole."""
    active = bool(op.arg(2, "train")) and op.arg(1, "p") != 0
    if not active:
        return elementwise(op, linear=(frozenset((0,)),))
    return elementwise(op, kernel=DROPOUT)
