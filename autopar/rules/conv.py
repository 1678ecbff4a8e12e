"""Convolutions and pooling: split over samples and channels, not where a window moves."""

from __future__ import annotations

from autopar.ir.size import Size
from autopar.rules.index_expr import Dims, IndexExpr, Op
from autopar.rules.letters import name_dims, sizes_of
from autopar.rules.pointwise import walk
from autopar.rules.registry import register

_WINDOW_DIMS = {
    "aten.max_pool1d": 1, "aten.max_pool2d": 2, "aten.max_pool3d": 3,
    "aten.max_pool2d_with_indices": 2, "aten.adaptive_max_pool2d": 2,
}  # fmt: skip
_LINEAR_WINDOW_DIMS = {
    "aten.avg_pool1d": 1, "aten.avg_pool2d": 2, "aten.avg_pool3d": 3,
    "aten.adaptive_avg_pool1d": 1, "aten.adaptive_avg_pool2d": 2, "aten.adaptive_avg_pool3d": 3,
    "aten.upsample_nearest2d": 2, "aten.upsample_bilinear2d": 2,
}  # fmt: skip


@register(*_WINDOW_DIMS, *_LINEAR_WINDOW_DIMS)
def _window(op: Op) -> IndexExpr:
    linear = op.node.op in _LINEAR_WINDOW_DIMS
    count = (_LINEAR_WINDOW_DIMS if linear else _WINDOW_DIMS)[op.node.op]
    rank = len(op.inputs[0].shape)
    dims = range(rank - count, rank)
    return walk(op, dims, linear=(frozenset((0,)),) if linear else (), filled=True)


@register("aten.conv1d", "aten.conv2d", "aten.conv3d", "aten.convolution")
def _convolution(op: Op) -> IndexExpr | None:
    """`n (g c) ..., (g o) c ... + (g o) -> n (g o) ...` with g groups.

    Input channels of one group are summed over. Splitting groups leaves each rank fewer of them.
    """
    general = op.node.op == "aten.convolution"
    if general and op.arg(6, "transposed"):
        return None
    groups = op.integer(8 if general else 6, "groups", 1)
    shape, weight = op.inputs[0].shape, op.inputs[1].shape
    window: Dims = ((),) * (len(weight) - 2)
    lead = name_dims(shape[: len(shape) - len(weight) + 1], prefix="n")
    group = () if groups == 1 else ("g",)
    out = (*lead, (*group, "o"), *window)
    inputs: tuple[Dims, ...] = ((*lead, (*group, "c"), *window), ((*group, "o"), ("c",), *window))
    return IndexExpr(
        inputs=(*inputs, ((*group, "o"),))[: len(op.inputs)],
        outputs=(out,),
        sizes=sizes_of((lead, shape[: len(lead)]))
        | {"g": Size(groups), "c": weight[1], "o": Size(weight[0].const // groups)},
        even=frozenset("g"),
        filled=True,
        additive=frozenset((2,)),
    )
