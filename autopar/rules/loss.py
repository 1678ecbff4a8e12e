"""Losses: sums over elements, and the cross entropy over a split vocabulary."""

from __future__ import annotations

from collections.abc import Callable

from autopar.ir.collective import CollectiveOp
from autopar.ir.graph import DTYPE_BYTES
from autopar.ir.strategy import InnerCollective
from autopar.rules.index_expr import IndexExpr, Kernel, Op
from autopar.rules.letters import align, name_dims, sizes_of
from autopar.rules.registry import register

_NONE, _MEAN = 0, 1  # at::Reduction; 2 is sum


def _vocab_cross_entropy(op: Op) -> Kernel:
    """Two all-reduces of one number per token: the largest logit and the sum of exponentials.

    The picked logit stays on the rank that has it and the log-sum-exp counts on the first rank
    only, so the loss is a partial sum; backward needs no communication.
    """
    logits = op.inputs[0].dtype
    dtype = logits if DTYPE_BYTES[logits] >= DTYPE_BYTES["float32"] else "float32"
    reduce = InnerCollective(op=CollectiveOp.ALL_REDUCE, phase="forward", like_input=1, dtype=dtype)
    return Kernel(name="vocab_cross_entropy", collectives=(reduce, reduce))


@register("autopar.cross_entropy_sum")
def _cross_entropy_sum(op: Op) -> IndexExpr:
    """`logits[n, v, ...], target[n, ...] -> sum of the losses`; classes are dim 1, as in torch."""
    shape = op.inputs[0].shape
    classes = min(1, len(shape) - 1)
    dims = name_dims(shape)
    tokens = (*dims[:classes], *dims[classes + 1 :])
    dims = (*dims[:classes], ("v",), *dims[classes + 1 :])
    return IndexExpr(
        inputs=(dims, tokens),
        outputs=((),),
        sizes=sizes_of((dims, shape)),
        kernels={"v": _vocab_cross_entropy(op)},
    )


@register("autopar.count_valid")
def _count_valid(op: Op) -> IndexExpr:
    shape = op.inputs[0].shape
    dims = name_dims(shape)
    return IndexExpr(inputs=(dims,), outputs=((),), sizes=sizes_of((dims, shape)))


@register("aten.cross_entropy_loss", "aten.nll_loss_nd")
def _loss_per_token(op: Op) -> IndexExpr | None:
    """Without reduction `logits[n, v, ...], target[n, ...] -> [n, ...]`, over whole classes.

    The mean over valid labels of a share is no share of the mean: left whole.
    """
    logits, target, *weight = op.inputs
    if op.integer(3, "reduction", _MEAN) != _NONE or target.is_floating:
        return None
    classes = min(1, len(logits.shape) - 1)
    dims = name_dims(logits.shape, skip=(classes,))
    tokens = (*dims[:classes], *dims[classes + 1 :])
    return IndexExpr(
        inputs=(dims, tokens, *(((),) for _ in weight)),
        outputs=(tokens,),
        sizes=sizes_of((tokens, target.shape)),
    )


@register("aten.nll_loss", "aten.ctc_loss")
def _normalised(op: Op) -> None:
    """The mean over valid labels of a share is no share of the mean: left whole."""


def _elementwise_loss(position: int) -> Callable[[Op], IndexExpr | None]:
    """Rule of a loss with its `reduction` argument at `position`."""

    def rule(op: Op) -> IndexExpr | None:
        reduction = op.integer(position, "reduction", _MEAN)
        if reduction == _MEAN:
            return None  # capture makes it elementwise, followed by a mean, which has a rule
        shape = op.inputs[0].shape
        dims = name_dims(shape)
        sizes = sizes_of((dims, shape))
        return IndexExpr(
            inputs=tuple(align(spec.shape, dims, sizes) for spec in op.inputs),
            outputs=(dims if reduction == _NONE else (),),
            sizes=sizes,
        )

    return rule


register("aten.mse_loss", "aten.l1_loss", "aten.smooth_l1_loss", "aten.huber_loss", "aten.kl_div")(
    _elementwise_loss(2)
)
register("aten.soft_margin_loss")(_elementwise_loss(2))
register("aten.binary_cross_entropy")(_elementwise_loss(3))
register("aten.binary_cross_entropy_with_logits")(_elementwise_loss(4))
