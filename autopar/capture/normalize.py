"""Losses in a form that can be split: a sum over samples, a count, and their quotient.

A mean over the batch is not the mean of the means of its shards where labels are ignored, and a
reduction inside a loss op hides what is added up. So a reduction is written out:

    cross_entropy_loss(mean)  ->  cross_entropy_sum / count_valid
    nll_loss_nd(mean)         ->  sum(nll_loss_nd(none)) / count_valid
    mse_loss(mean), ...       ->  mean(mse_loss(none))

`autopar.cross_entropy_sum(logits, target, ignore_index, label_smoothing)` is
`torch.nn.functional.cross_entropy` with reduction "sum" (class dim 1, or 0 for one sample), and
`autopar.count_valid(target, ignore_index)` the number of labels that are not `ignore_index`, as a
float32 scalar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from autopar.ir.graph import Arg, OpNode, Ref, TensorSpec
from autopar.ir.size import Shape, Size

NONE, MEAN, SUM = 0, 1, 2
"""ATen's codes of a reduction."""

ELEMENTWISE_LOSSES: dict[str, int] = {
    "aten.mse_loss.default": 2,
    "aten.l1_loss.default": 2,
    "aten.smooth_l1_loss.default": 2,
    "aten.huber_loss.default": 2,
    "aten.soft_margin_loss.default": 2,
    "aten.kl_div.default": 2,
    "aten.binary_cross_entropy.default": 3,
    "aten.binary_cross_entropy_with_logits.default": 4,
    "aten.poisson_nll_loss.default": 5,
}
"""Loss to the position of its reduction; the loss of an element depends on that element only."""

_REDUCERS = {MEAN: "aten.mean.default", SUM: "aten.sum.default"}
_WIDER = {"float16": "float32", "bfloat16": "float32"}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Context:
    specs: dict[Ref, TensorSpec]
    taken: set[str]

    def name(self, wanted: str) -> str:
        """A name no node has yet."""
        unique, count = wanted, 1
        while unique in self.taken:
            unique, count = f"{wanted}_{count}", count + 1
        self.taken.add(unique)
        return unique


def normalize(nodes: list[OpNode], specs: dict[Ref, TensorSpec]) -> list[OpNode]:
    """Write out the reductions of losses. The last node made for a loss keeps the loss's name."""
    context = _Context(specs=specs, taken={ref.name for ref in specs})
    return [made for node in nodes for made in _rewritten(node, context)]


def _rewritten(node: OpNode, context: _Context) -> Iterator[OpNode]:
    rewrite = _REWRITES.get(node.target)
    made = rewrite(node, context) if rewrite else None
    yield from made or [node]


def _elementwise(node: OpNode, context: _Context) -> list[OpNode] | None:
    position = ELEMENTWISE_LOSSES[node.target]
    reduction = node.arg(position, "reduction", MEAN)
    if reduction not in _REDUCERS:
        return None
    first, second = (context.specs[ref].shape for ref in node.inputs()[:2])
    shape = _broadcast(first, second)
    if shape is None:
        return None
    return _none_then(node, context, position, shape)


def _none_then(node: OpNode, context: _Context, position: int, shape: Shape) -> list[OpNode]:
    """The loss without its reduction, then the reduction."""
    reduction = node.arg(position, "reduction", MEAN)
    defaults: dict[int, Arg] = dict(enumerate(node.args))
    args = tuple(NONE if i == position else defaults.get(i) for i in range(_length(node, position)))
    each = replace(
        node,
        name=context.name(f"{node.name}_each"),
        args=args,
        kwargs=tuple((k, v) for k, v in node.kwargs if k != "reduction"),
        outputs=(TensorSpec(shape=shape, dtype=node.outputs[0].dtype),),
    )
    assert isinstance(reduction, int)
    reduced = replace(node, target=_REDUCERS[reduction], args=(Ref(each.name),), kwargs=())
    return [each, reduced]


def _length(node: OpNode, position: int) -> int:
    return max(len(node.args), position + 1)


def _broadcast(first: Shape, second: Shape) -> Shape | None:
    """The broadcast shape of two; None where they do not line up."""
    rank = max(len(first), len(second))
    one = Size(1)
    pairs = zip(
        (one,) * (rank - len(first)) + first, (one,) * (rank - len(second)) + second, strict=True
    )
    shape = tuple(b if a == one else a if b in (one, a) else None for a, b in pairs)
    return tuple(s for s in shape if s is not None) if None not in shape else None


def _nll(node: OpNode, context: _Context) -> list[OpNode] | None:
    """Class indices, no class weights: sum over elements, divided by the count for a mean."""
    target = node.args[1]
    reduction, ignore = node.arg(3, "reduction", MEAN), node.arg(4, "ignore_index", -100)
    if node.arg(2, "weight") is not None or reduction not in _REDUCERS:
        return None
    assert isinstance(target, Ref)
    each, total = _none_then(node, context, 3, context.specs[target].shape)
    total = replace(total, target=_REDUCERS[SUM])
    if reduction == SUM:
        return [each, total]
    return [each, *_divided(node, total, target, ignore, context)]


def _cross_entropy(node: OpNode, context: _Context) -> list[OpNode] | None:
    """Class indices, no class weights: `cross_entropy_sum`, divided by the count for a mean.

    Low-precision logits are widened first: a sum over thousands of labels overflows float16 and
    their count is not a bfloat16 number.
    """
    logits, target = node.args[0], node.args[1]
    assert isinstance(logits, Ref)
    assert isinstance(target, Ref)
    reduction, ignore = node.arg(3, "reduction", MEAN), node.arg(4, "ignore_index", -100)
    probabilities = context.specs[target].is_floating
    if node.arg(2, "weight") is not None or reduction not in _REDUCERS or probabilities:
        return None
    made: list[OpNode] = []
    dtype, narrow = node.outputs[0].dtype, node.outputs[0].dtype
    if dtype in _WIDER:
        dtype = _WIDER[dtype]
        made.append(_cast(node, context, logits, dtype, f"{node.name}_logits"))
        logits = Ref(made[0].name)
    total = replace(
        node,
        target="autopar.cross_entropy_sum.default",
        args=(logits, target, ignore, node.arg(5, "label_smoothing", 0.0)),
        kwargs=(),
        outputs=(TensorSpec(shape=(), dtype=dtype),),
    )
    made += [total] if reduction == SUM else _divided(total, total, target, ignore, context)
    if dtype != narrow:
        made[-1] = replace(made[-1], name=context.name(f"{node.name}_wide"))
        made.append(
            replace(
                node,
                target="aten.to.dtype",
                args=(Ref(made[-1].name), f"dtype:{narrow}"),
                kwargs=(),
            )
        )
    return made


def _divided(
    node: OpNode, total: OpNode, target: Ref, ignore: Arg, context: _Context
) -> list[OpNode]:
    """`total` over the number of valid labels, as the node that takes `node`'s place."""
    total = replace(total, name=context.name(f"{node.name}_sum"))
    count = replace(
        node,
        name=context.name("count_valid"),
        target="autopar.count_valid.default",
        args=(target, ignore),
        kwargs=(),
        outputs=(TensorSpec(shape=(), dtype="float32"),),
        requires_grad=False,
    )
    quotient = replace(
        node, target="aten.div.Tensor", args=(Ref(total.name), Ref(count.name)), kwargs=()
    )
    return [total, count, quotient]


def _cast(node: OpNode, context: _Context, ref: Ref, dtype: str, name: str) -> OpNode:
    return replace(
        node,
        name=context.name(name),
        target="aten.to.dtype",
        args=(ref, f"dtype:{dtype}"),
        kwargs=(),
        outputs=(TensorSpec(shape=context.specs[ref].shape, dtype=dtype),),
    )


_REWRITES: dict[str, Callable[[OpNode, _Context], list[OpNode] | None]] = {
    **dict.fromkeys(ELEMENTWISE_LOSSES, _elementwise),
    "aten.nll_loss_nd.default": _nll,
    "aten.cross_entropy_loss.default": _cross_entropy,
}
