"""Which attention kernel runs: it decides what is saved, how the result lies, and the traffic."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.costs.local_op import LocalOp, op_name
from autopar.ir.graph import OpNode

FUSED = "fused"
"""Scores never reach memory; the log-sum-exp of each row is kept for the backward pass."""

MATH = "math"
"""Scores are written out, in scaled copies of query and key, as torch's fallback does."""

DROPOUT = "dropout"
"""As `MATH`, with a dropout mask that the program draws itself so that it can be reproduced."""

_FUSED_DTYPES: dict[str, frozenset[str]] = {
    "cuda": frozenset({"float32", "bfloat16", "float16"}),
    "cpu": frozenset({"float64", "float32", "bfloat16", "float16"}),
}
_SAME_HEAD_DIM_KINDS = frozenset({"cpu"})
"""Device kinds whose fused kernel needs values as wide as keys (torch 2.13 `sdp_utils`)."""


def is_attention(name: str) -> bool:
    """Whether an op (no namespace, no overload) is scaled dot product attention."""
    return name == "scaled_dot_product_attention"


def attention_kernel(
    node: OpNode | LocalOp, shapes: Sequence[Sequence[int]], dtype: str, device_kind: str
) -> str:
    """`FUSED`, `MATH` or `DROPOUT`; `shapes` are those of query, key and value."""
    if not is_attention(op_name(node.target)):
        raise ValueError(f"{node.target} is not attention")
    if node.arg(4, "dropout_p", 0.0):
        return DROPOUT
    query, _, value = shapes
    if len(query) != 4 or dtype not in _FUSED_DTYPES.get(device_kind, frozenset()):
        return MATH
    if device_kind in _SAME_HEAD_DIM_KINDS and query[-1] != value[-1]:
        return MATH
    return FUSED
