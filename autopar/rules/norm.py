"""Normalisation: the dims whose statistics are taken stay whole."""

from __future__ import annotations

from autopar.ir.size import Size
from autopar.rules.index_expr import IndexExpr, Op
from autopar.rules.letters import name_dims, sizes_of
from autopar.rules.registry import register


@register("aten.layer_norm", "aten.rms_norm", "aten.native_layer_norm", "aten._fused_rms_norm")
def _trailing_norm(op: Op) -> IndexExpr:
    """Statistics over the trailing dims; scale and shift have just these."""
    shape = op.inputs[0].shape
    lead = len(shape) - len(op.integers(1, "normalized_shape"))
    dims = name_dims(shape, skip=range(lead, len(shape)))
    whole = ((),) * (len(shape) - lead)
    return IndexExpr(
        inputs=(dims, *((whole,) * (len(op.inputs) - 1))),
        outputs=tuple(dims[: len(spec.shape)] for spec in op.outputs),
        sizes=sizes_of((dims, shape)),
    )


@register("aten.group_norm")
def _group_norm(op: Op) -> IndexExpr:
    """Statistics per group of channels: whole groups may be split (the local op has fewer)."""
    shape, groups = op.inputs[0].shape, op.integer(1, "num_groups", 1)
    channel = ("g", "c")
    dims = (*name_dims(shape[:1]), channel, *(((),) * (len(shape) - 2)))
    return IndexExpr(
        inputs=(dims, *(((channel,),) * (len(op.inputs) - 1))),
        outputs=(dims,),
        sizes=sizes_of((dims[:1], shape[:1]))
        | {"g": Size(groups), "c": Size(shape[1].const // groups)},
        even=frozenset("g"),
        blocked=frozenset("c"),
    )


@register("aten.batch_norm", "aten.instance_norm")
def _batch_norm(op: Op) -> IndexExpr:
    """Statistics per channel: over all samples when training, given when not."""
    shape = op.inputs[0].shape
    uses_batch = bool(op.arg(5, "training"))
    instance = op.node.op == "aten.instance_norm"
    skip = [i for i in range(len(shape)) if i != 1 and uses_batch and not (instance and i == 0)]
    dims = name_dims(shape, skip=skip)
    return IndexExpr(
        inputs=(dims, *((dims[1:2],) * (len(op.inputs) - 1))),
        outputs=(dims,),
        sizes=sizes_of((dims, shape)),
        filled=True,
    )
