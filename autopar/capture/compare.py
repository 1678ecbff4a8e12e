"""Whether one graph serves both training and evaluation."""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.graph import Arg, OpGraph, OpNode

MODE_ARGS: dict[str, tuple[tuple[int, str, Arg], ...]] = {
    "aten.dropout.default": ((2, "train", True),),
    "aten.feature_dropout.default": ((2, "train", True),),
    "aten.alpha_dropout.default": ((2, "train", True),),
    "aten.scaled_dot_product_attention.default": ((4, "dropout_p", 0.0),),
    "aten.batch_norm.default": ((5, "training", True),),
    "aten.instance_norm.default": ((5, "use_input_stats", True),),
}
"""Arguments that tell training from evaluation: op to (position, name, value put in for both)."""


def same_when_evaluating(train: OpGraph, evaluation: OpGraph) -> bool:
    """Whether the graphs differ in nothing but the arguments of `MODE_ARGS`."""
    return first_difference(train, evaluation) is None


def first_difference(train: OpGraph, evaluation: OpGraph) -> str | None:
    """What first differs between the graph in training and in eval mode; None if nothing does."""
    for field in ("sources", "loss", "outputs", "output_tree"):
        if getattr(train, field) != getattr(evaluation, field):
            return field
    for ours, theirs in zip(train.nodes, evaluation.nodes, strict=False):
        if _without_mode(ours) != _without_mode(theirs):
            return f"node {ours.name} ({ours.target}) against {theirs.name} ({theirs.target})"
    if len(train.nodes) != len(evaluation.nodes):
        return f"{len(train.nodes)} nodes against {len(evaluation.nodes)}"
    return None


def _without_mode(node: OpNode) -> OpNode:
    args = list(node.args)
    kwargs = dict(node.kwargs)
    for position, name, value in MODE_ARGS.get(node.target, ()):
        if position < len(args):
            args[position] = value
        kwargs.pop(name, None)
    return replace(node, args=_without_tail(node, args), kwargs=tuple(kwargs.items()))


def _without_tail(node: OpNode, args: list[Arg]) -> tuple[Arg, ...]:
    """sdpa is called with and without its trailing dropout argument, which is 0.0 by default."""
    if node.target == "aten.scaled_dot_product_attention.default":
        while len(args) > 3 and args[-1] in (0.0, None) and args[-1] is not False:
            args.pop()
    return tuple(args)
