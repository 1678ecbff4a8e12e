"""Reductions: sums become partial sums when split; others keep the dims they reduce whole."""

from __future__ import annotations

from autopar.rules.index_expr import LOCAL, IndexExpr, Kernel, Op
from autopar.rules.letters import name_dims, sizes_of
from autopar.rules.registry import register

PARTIAL_MEAN = Kernel(name="partial_mean")
"""The mean of the local elements times the local over the global number of elements: a summand of
the mean over all."""

_WHOLE_DIM_POSITION = {
    "aten.all": 1, "aten.amax": 1, "aten.amin": 1, "aten.any": 1, "aten.argmax": 1,
    "aten.argmin": 1, "aten.linalg_vector_norm": 2, "aten.logsumexp": 1, "aten.max": 1,
    "aten.median": 1, "aten.min": 1, "aten.norm": 2, "aten.prod": 1, "aten.std": 1,
    "aten.std_mean": 1, "aten.var": 1, "aten.var_mean": 1,
}  # fmt: skip


def _reduced(op: Op, position: int) -> set[int]:
    """The dims reduced; all, where none are named."""
    rank = len(op.inputs[0].shape)
    dims = {dim % rank for dim in op.integers(position, "dim") if rank}
    return dims or set(range(rank))


def _reduction(op: Op, reduced: set[int], *, adds: bool, kernel: Kernel = LOCAL) -> IndexExpr:
    shape = op.inputs[0].shape
    dims = name_dims(shape, skip=() if adds else reduced)
    keep_dim = len(op.outputs[0].shape) == len(shape)
    out = tuple(
        () if i in reduced else dim for i, dim in enumerate(dims) if keep_dim or i not in reduced
    )
    summed = (letter for i in reduced for letter in dims[i])
    return IndexExpr(
        inputs=(dims,),
        outputs=(out,) * len(op.outputs),
        sizes=sizes_of((dims, shape)),
        linear=(frozenset((0,)),) if adds else (),
        kernels=dict.fromkeys(summed, kernel),
    )


@register("aten.sum", "aten.nansum", "aten.count_nonzero")
def _sum(op: Op) -> IndexExpr:
    expr = _reduction(op, _reduced(op, 1), adds=True)
    return expr if op.node.op == "aten.sum" else _without_partial(expr)


@register("aten.mean")
def _mean(op: Op) -> IndexExpr:
    return _reduction(op, _reduced(op, 1), adds=True, kernel=PARTIAL_MEAN)


@register(*_WHOLE_DIM_POSITION)
def _whole(op: Op) -> IndexExpr:
    return _reduction(op, _reduced(op, _WHOLE_DIM_POSITION[op.node.op]), adds=False)


def _without_partial(expr: IndexExpr) -> IndexExpr:
    """Counting is additive over parts, but not linear in the values."""
    return IndexExpr(
        inputs=expr.inputs, outputs=expr.outputs, sizes=expr.sizes, kernels=expr.kernels
    )


__all__ = ["PARTIAL_MEAN"]
