"""Dropless experts: rows sent to experts, multiplied there, and put back (`capture.dispatch`).

Split by tokens, every rank sorts its own: what `route` says of them is no part of what it says of
all, but each rank's rows come back to it, and the counts of all ranks add up. So the letter of the
tokens splits rows, order and slots, and the counts are partial sums.
"""

from __future__ import annotations

from autopar.ir.size import Size
from autopar.rules.index_expr import IndexExpr, Op
from autopar.rules.letters import GENERIC_BATCH, from_generic, match_factors, name_dims, sizes_of
from autopar.rules.registry import register

_TOKEN, _CHOICE = "t", "k"


@register("autopar.route")
def _route(op: Op) -> IndexExpr:
    """`chosen[t..., k] -> order[(t... k)], counts[e], held[e]`."""
    source, target, sizes, blocked = match_factors(op.inputs[0].shape, op.outputs[0].shape)
    return IndexExpr(inputs=(source,), outputs=(target, ((),), ((),)), sizes=sizes, blocked=blocked)


@register("autopar.to_experts")
def _to_experts(op: Op) -> IndexExpr:
    """`rows[t, m], order[(t k)], counts[e], held[e] -> slots[(t k), m]`."""
    rows, slots = op.inputs[0].shape, op.outputs[0].shape
    times = from_generic(slots[0].at(GENERIC_BATCH) // rows[0].at(GENERIC_BATCH))
    tail = name_dims(rows[1:], prefix="m")
    place = (_TOKEN,) if times == Size(1) else (_TOKEN, _CHOICE)
    return IndexExpr(
        inputs=(((_TOKEN,), *tail), (place,), ((),), ((),)),
        outputs=((place, *tail),),
        sizes=sizes_of((tail, rows[1:])) | {_TOKEN: rows[0], _CHOICE: times},
        blocked=frozenset(_CHOICE),
        linear=(frozenset((0,)),),
        shared={_TOKEN: frozenset((2, 3))},
    )


@register("autopar.from_experts")
def _from_experts(op: Op) -> IndexExpr:
    """`slots[t, m], order[t], counts[e], held[e] -> rows[t, m]`."""
    shape = op.inputs[0].shape
    dims = ((_TOKEN,), *name_dims(shape[1:], prefix="m"))
    return IndexExpr(
        inputs=(dims, ((_TOKEN,),), ((),), ((),)),
        outputs=(dims,),
        sizes=sizes_of((dims, shape)),
        linear=(frozenset((0,)),),
        shared={_TOKEN: frozenset((2, 3))},
    )


@register("autopar.expert_mm")
def _expert_mm(op: Op) -> IndexExpr:
    """`slots[t, i], weight[e, i, o], held[e] -> [t, o]`."""
    shape, weight = op.inputs[0].shape, op.inputs[1].shape
    return IndexExpr(
        inputs=(((_TOKEN,), ("i",)), ((), ("i",), ("o",)), ((),)),
        outputs=(((_TOKEN,), ("o",)),),
        sizes={_TOKEN: shape[0], "i": weight[1], "o": weight[2]},
        shared={_TOKEN: frozenset((2,))},
    )


@register("autopar.expert_rows")
def _expert_rows(op: Op) -> IndexExpr:
    """`table[e, m], held[e], order[t] -> [t, m]`."""
    table = op.inputs[0].shape
    tail = name_dims(table[1:], prefix="m")
    return IndexExpr(
        inputs=(((), *tail), ((),), ((_TOKEN,),)),
        outputs=(((_TOKEN,), *tail),),
        sizes=sizes_of((tail, table[1:])) | {_TOKEN: op.outputs[0].shape[0]},
        linear=(frozenset((0,)),),
        shared={_TOKEN: frozenset((1,))},
    )
