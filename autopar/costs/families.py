"""What two ops must share for the time of one to say something of the other's, and by how much
they differ.

Ops of one family run the same kernel with the same attributes on tensors of the same dtypes and
ranks; only extents differ. `work` orders them: the operations of a matrix product or of attention,
else the bytes of all tensors, which is what other ops are bound by.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.costs.attention import is_attention
from autopar.costs.flops import contraction, op_flops
from autopar.costs.local_op import LocalOp, LocalShape
from autopar.ir.graph import Arg

SIZE_ARGUMENT = dict.fromkeys(
    ("view", "reshape", "_unsafe_view", "expand", "new_zeros", "new_ones", "new_full", "new_empty"),
    1,
) | dict.fromkeys(("zeros", "ones", "full", "empty"), 0)
"""Ops with the size of their result as an argument, which sharding changes, and its position."""


def family(op: LocalOp) -> str:
    """Text that ops share which differ in nothing but extents."""
    position = SIZE_ARGUMENT.get(op.name)
    args: tuple[Arg, ...] = op.args
    if position is not None and position < len(args):
        args = (*args[:position], "size", *args[position + 1 :])
    unsized = replace(
        op,
        args=args,
        input_shapes=tuple(_rank(shape) for shape in op.input_shapes),
        output_shapes=tuple(_rank(shape) for shape in op.output_shapes),
    )
    return unsized.key


def _rank(shape: LocalShape) -> LocalShape:
    return (0,) * len(shape)


def extents(op: LocalOp) -> tuple[int, ...]:
    """The extents of all inputs and outputs, in one row; ops of a family have equally many."""
    return tuple(size for shape in (*op.input_shapes, *op.output_shapes) for size in shape)


def work(op: LocalOp) -> float:
    """Operations of the forward of a contraction or attention, else bytes of all tensors."""
    if is_attention(op.name) or contraction(op):
        return op_flops(op).forward_flops
    return float(op.total_input_bytes + op.total_output_bytes)
