"""Ops that make a tensor from its shape alone."""

from __future__ import annotations

from autopar.rules.index_expr import IndexExpr, Op
from autopar.rules.letters import name_dims, sizes_of
from autopar.rules.registry import register

FILLED = ("aten.zeros", "aten.ones", "aten.full", "aten.empty")
UNREAD = ("aten.new_zeros", "aten.new_ones", "aten.new_full", "aten.new_empty")
"""Ops that take only dtype and device from their tensor input: however it lies is right."""


@register(*FILLED, *UNREAD)
def _filled(op: Op) -> IndexExpr:
    """The same number everywhere: each rank makes its share.

    The input is not read; its dims follow the output's where they can, so that it need not move.
    """
    shape = op.outputs[0].shape
    dims = name_dims(shape)
    return IndexExpr(
        inputs=tuple(
            tuple(
                dims[i] if shape[i : i + 1] == (size,) else () for i, size in enumerate(spec.shape)
            )
            for spec in op.inputs
        ),
        outputs=(dims,),
        sizes=sizes_of((dims, shape)),
    )


@register(
    "aten.arange", "aten.linspace", "aten.eye", "aten.scalar_tensor", "aten._assert_tensor_metadata"
)
def _positional(op: Op) -> None:
    """Values follow from the global position: left whole."""
