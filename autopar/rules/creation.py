"""Ops that make a tensor from its shape alone."""

from __future__ import annotations

from autopar.rules.index_expr import IndexExpr, Op
from autopar.rules.letters import name_dims, sizes_of
from autopar.rules.registry import register


@register(
    "aten.zeros", "aten.ones", "aten.full", "aten.empty", "aten.new_zeros", "aten.new_ones",
    "aten.new_full", "aten.new_empty",
)  # fmt: skip
def _filled(op: Op) -> IndexExpr:
    """The same number everywhere: each rank makes its share."""
    shape = op.outputs[0].shape
    dims = name_dims(shape)
    return IndexExpr(
        inputs=tuple(((),) * len(spec.shape) for spec in op.inputs),
        outputs=(dims,),
        sizes=sizes_of((dims, shape)),
    )


@register(
    "aten.arange", "aten.linspace", "aten.eye", "aten.scalar_tensor", "aten._assert_tensor_metadata"
)
def _positional(op: Op) -> None:
    """Values follow from the global position: left whole."""
