"""Linear layers that multiply in a narrower dtype than they are kept in: what casting takes.

The operands are cast before each product, the gradient of the result before the products of the
backward. A cast reads an element and writes it twice as one byte, once transposed: float8 products
take both operands with the summed dim last (NVIDIA Transformer Engine user guide, "Using FP8 with
Transformer Engine"). Its scale is that of earlier steps. The layer that makes the logits stays as
it is, as recipes have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from autopar.costs.flops import CONTRACTIONS
from autopar.costs.local_op import LocalOp, op_name
from autopar.costs.traffic import Traffic
from autopar.ir.graph import OpNode, Ref

_GROUPED = ("_grouped_mm", "grouped_mm", "grouped_mm_fallback", "expert_mm")
_LINEAR = frozenset({"linear", "mm", "matmul", "addmm", *_GROUPED})
_WRITTEN_BYTES = 2
"""Bytes written per element: as it lies, and transposed."""


def is_linear(op: LocalOp) -> bool:
    """Whether `op` multiplies rows by one matrix for all, or by an expert's.

    Attention's products, of one activation with another, stay as they are.
    """
    if op.wide or op.name not in _LINEAR:
        return False
    return op.name != "matmul" or len(op.input_shapes[1]) == 2


def last_products(nodes: Sequence[OpNode], loss: Ref | None) -> frozenset[str]:
    """The products that a loss is made of without another product between; none without a loss."""
    by_name = {node.name: node for node in nodes}
    found: set[str] = set()
    seen = left = set() if loss is None else {loss.name}
    while left:
        made = [by_name[name] for name in left if name in by_name]
        products = {node.name for node in made if op_name(node.target) in CONTRACTIONS}
        found |= products
        read = {ref.name for node in made if node.name not in products for ref in node.inputs()}
        left = read - seen
        seen = seen | left
    return frozenset(found)


def cast_traffic(op: LocalOp) -> Traffic:
    """What casting for a linear layer moves: two operands forward, one gradient backward."""
    first = CONTRACTIONS[op.name][1]
    forward = sum(
        op.input_bytes(i) + _WRITTEN_BYTES * prod(op.input_shapes[i]) for i in (first, first + 1)
    )
    if not op.requires_grad:
        return Traffic(forward_bytes=forward, forward_kernels=2, backward_kernels=0)
    backward = op.total_output_bytes + _WRITTEN_BYTES * prod(op.output_shapes[0])
    return Traffic(
        forward_bytes=forward, backward_bytes=backward, forward_kernels=2, backward_kernels=1
    )
