"""Whether one graph serves both training and evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopar.capture.arguments import op_overload
from autopar.capture.norms import BATCH_NORM
from autopar.ir.graph import Arg, OpGraph, OpNode, Ref

ATTENTION = "aten.scaled_dot_product_attention.default"

MODE_ARGS: dict[str, tuple[str, ...]] = {
    "aten.feature_dropout.default": ("train",),
    "aten.alpha_dropout.default": ("train",),
    ATTENTION: ("dropout_p",),
    "aten.batch_norm.default": ("training", "cudnn_enabled"),
    "aten.instance_norm.default": ("use_input_stats",),
}
"""The arguments that tell training from evaluation."""

DROPOUT = "aten.dropout.default"
"""Runs in training alone, as programs do: a graph for evaluation may have it turned off or not at
all. One that is on (`F.dropout(x)`, whose `training` is True) makes a difference."""

MEMORY_ONLY = frozenset(["aten.contiguous.default"])
"""Ops that move memory but change no value. Whether a model needs one depends on the strides of
their input, which dropout changes."""


def same_when_evaluating(train: OpGraph, evaluation: OpGraph) -> bool:
    """Whether the graphs differ in nothing but the arguments of `MODE_ARGS`."""
    return first_difference(train, evaluation) is None


def first_difference(train: OpGraph, evaluation: OpGraph) -> str | None:
    """What first differs between the graph in training and in eval mode; None if nothing does.

    Names of nodes do not count, nor do dropout and ops that only move memory.
    """
    for field in ("sources", "output_tree"):
        if getattr(train, field) != getattr(evaluation, field):
            return field
    for node in evaluation.nodes:
        if _drops(node):
            return f"{_place(node)} drops in evaluation"
    ours, theirs = list(_canonical(train)), list(_canonical(evaluation))
    for (node, form), (other, other_form) in zip(ours, theirs, strict=False):
        if form != other_form:
            return f"{_place(node)} in training, {_place(other)} in evaluation"
    if len(ours) != len(theirs):
        return f"{len(ours)} ops in training, {len(theirs)} in evaluation"
    return None


def _place(node: OpNode) -> str:
    return f"{node.target} ({node.name}, {node.source})"


def _drops(node: OpNode) -> bool:
    if node.target == DROPOUT:
        return bool(node.arg(2, "train", True)) and node.arg(1, "p", 0.5) != 0.0
    return node.target == ATTENTION and node.arg(4, "dropout_p", 0.0) != 0.0


def _canonical(graph: OpGraph) -> Iterator[tuple[OpNode, object]]:
    """Each node with a form that is equal for equal nodes; the results come last."""
    names: dict[Ref, Ref] = {}
    count, last = 0, None
    for node in map(_without_state, graph.nodes):
        if node.target in MEMORY_ONLY or node.target == DROPOUT:
            source = node.inputs()[0]
            names[Ref(node.name)] = names.get(source, source)
            continue
        args = tuple(_renamed(value, names) for value in _mode_free(node))
        kwargs = tuple((key, _renamed(value, names)) for key, value in node.kwargs)
        outputs = range(len(node.outputs))
        names |= {Ref(node.name, j): Ref(f"#{count}", j) for j in outputs}
        yield node, replace(node, name="", args=args, kwargs=kwargs, module_path="", source="")
        count, last = count + 1, node
    if last is not None:
        results = (graph.loss, *graph.outputs)
        yield last, tuple(_renamed(ref, names) for ref in results)


def _without_state(node: OpNode) -> OpNode:
    """A batch norm of training as the op of evaluation, which updates nothing."""
    if node.target != BATCH_NORM:
        return node
    tensors, (_, momentum, eps) = node.args[:5], node.args[5:]
    args = (*tensors, True, momentum, eps, False)
    return replace(node, target="aten.batch_norm.default", args=args)


def _mode_free(node: OpNode) -> tuple[Arg, ...]:
    """The arguments, all of them given where some depend on the mode, without those."""
    if node.target not in MODE_ARGS:
        return node.args
    schema = [a for a in op_overload(node.target)._schema.arguments if not a.kwarg_only]
    return tuple(
        None if a.name in MODE_ARGS[node.target] else node.arg(i, a.name, a.default_value)
        for i, a in enumerate(schema)
    )


def _renamed(value: Arg, names: dict[Ref, Ref]) -> Arg:
    if isinstance(value, Ref):
        return names.get(value, value)
    if isinstance(value, tuple):
        return tuple(_renamed(item, names) for item in value)
    return value
