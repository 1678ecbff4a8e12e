"""Normalisation: the dims whose statistics are taken stay whole."""

from __future__ import annotations

from autopar.ir.collective import CollectiveOp
from autopar.ir.size import Size
from autopar.ir.strategy import InnerCollective
from autopar.rules.index_expr import IndexExpr, Kernel, Op
from autopar.rules.letters import name_dims, sizes_of
from autopar.rules.registry import register

BATCH_NORM = "batch_norm"
"""The kernel whose ranks sum over their samples while it runs."""


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
def _given_statistics(op: Op) -> IndexExpr:
    """Statistics per channel: given, or of each sample, or else over dims that stay whole."""
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


@register("autopar.batch_norm")
def _batch_norm(op: Op) -> IndexExpr:
    """Statistics per channel over all other dims, any of which may be split: the kernel sums.

    Two numbers per channel are all-reduced forward (in float64, so that the variance is exact
    however far the mean is from zero) and two backward. A counter, if there is one, is a scalar.
    """
    shape = op.inputs[0].shape
    dims = name_dims(shape)
    channel = dims[1:2]
    sizes = sizes_of((dims, shape))
    wide = "float64" if op.inputs[0].dtype == "float64" else "float32"
    sums = (("forward", "float64"), ("backward", wide))
    kernel = Kernel(
        name=BATCH_NORM,
        collectives=tuple(
            InnerCollective(
                op=CollectiveOp.ALL_REDUCE,
                phase=phase,
                like_input=0,
                dtype=dtype,
                dims=(1,),
                times=2,
            )
            for phase, dtype in sums
        ),
    )
    return IndexExpr(
        inputs=(dims, *(channel if spec.shape else () for spec in op.inputs[1:])),
        outputs=(dims,),
        sizes=sizes,
        filled=True,
        kernels={letter: kernel for letter in sizes if (letter,) not in channel},
    )
