"""Random numbers in the program: which ops draw them by position, and which cannot be run.

A mask drawn by position is the same whatever the plan. Any other op would draw from each rank's own
generator: replicas would hold different values, and a recomputed block would draw anew.
"""

from __future__ import annotations

from autopar.errors import InputError
from autopar.ir.graph import OpGraph, OpNode

_NAMES = """
    rand randn randint randperm rand_like randn_like randint_like bernoulli normal normal_functional
    multinomial poisson exponential uniform
"""
_ALWAYS = frozenset(f"aten.{name}" for name in _NAMES.split())
_IN_TRAINING = {
    "aten.feature_dropout": (1, 2),
    "aten.alpha_dropout": (1, 2),
    "aten.feature_alpha_dropout": (1, 2),
    **dict.fromkeys(("aten.lstm", "aten.gru", "aten.rnn_tanh", "aten.rnn_relu"), (5, 6)),
}
"""Position of the probability and of the training flag."""


def is_random(node: OpNode) -> bool:
    """Whether a node draws a dropout mask, by position."""
    if node.op == "aten.dropout":
        return bool(node.arg(2, "train", True)) and node.arg(1, "p", 0.5) != 0.0
    return node.op.endswith("scaled_dot_product_attention") and node.arg(4, "dropout_p", 0.0) != 0.0


def refuse_other_draws(graph: OpGraph) -> None:
    """Raise InputError naming op and line of a random op other than dropout and attention."""
    for node in graph.nodes:
        if _draws_otherwise(node):
            raise InputError(
                f"{node.source or node.name}: {node.target} draws random numbers that would differ "
                "from rank to rank; expected no random op but dropout and attention with dropout: "
                "draw them outside of the model and give them to it with the batch"
            )


def _draws_otherwise(node: OpNode) -> bool:
    if node.op in _ALWAYS:
        return True
    p, train = _IN_TRAINING.get(node.op, (0, 0))
    return bool(p) and node.arg(p, "", 0.0) != 0.0 and bool(node.arg(train, "", False))
