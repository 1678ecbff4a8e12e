"""The strategies of a context axis: those of any axis that leave weights whole.

Where the axis deals the sequence out in zig-zag, every split along the sequence is in that order: a
local op does not see it, and attention is told which queries it has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from autopar.ir.collective import CollectiveOp
from autopar.ir.graph import DTYPE_BYTES, OpNode, Ref, TensorSpec
from autopar.ir.mesh import MeshAxis
from autopar.ir.placement import Layout, R, Shard, zigzag
from autopar.ir.strategy import AxisStrategy, InnerCollective

ATTENTION = "aten.scaled_dot_product_attention"

RING_ATTENTION = "ring_attention"


def along_sequence(
    node: OpNode,
    found: Iterable[AxisStrategy],
    axis: MeshAxis,
    *,
    specs: Mapping[Ref, TensorSpec],
    sequence: Mapping[Ref, int],
    parameters: Collection[Ref],
) -> Iterator[AxisStrategy]:
    """The strategies among `found` that fit a context axis, in the axis's order of the sequence.

    A parameter is split along the sequence or not at all. A strategy that splits some tensors along
    the sequence, and others where the sequence is a part of a longer dim, has no zig-zag order.
    """
    inputs = node.inputs()
    refs = [*inputs, *(Ref(node.name, index) for index in range(len(node.outputs)))]
    shapes = [spec.shape for spec in (*(specs[ref] for ref in inputs), *node.outputs)]
    for strategy in found:
        placed = list(zip(refs, (*strategy.inputs, *strategy.outputs), strict=True))
        along = [_runs_along(ref, p, sequence) for ref, p in placed if isinstance(p, Shard)]
        split = [(ref, p) for ref, p in placed if isinstance(p, Shard) and ref in parameters]
        if any(sequence.get(ref) != p.dim for ref, p in split) or (any(along) and not all(along)):
            continue
        if not (axis.zigzag and any(along)):
            yield strategy
        else:
            order = [
                Shard(p.dim, zigzag(shape[p.dim].const, axis.size)) if isinstance(p, Shard) else p
                for (_, p), shape in zip(placed, shapes, strict=True)
            ]
            count = len(inputs)
            yield replace(strategy, inputs=tuple(order[:count]), outputs=tuple(order[count:]))


def _runs_along(ref: Ref, placement: Shard, sequence: Mapping[Ref, int]) -> bool:
    return sequence.get(ref) == placement.dim and not placement.pieces


def ring_attention(
    node: OpNode, axis: MeshAxis, specs: Mapping[Ref, TensorSpec], sequence: Mapping[Ref, int]
) -> Iterator[AxisStrategy]:
    """Attention whose keys and values stay split along the sequence and go round the ranks.

    Offered for plain self-attention over a sequence that the axis cuts evenly. Forward keys and
    values move `n - 1` times; backward again, and their gradients `n` times, in float32 at least.
    """
    refs = (*node.inputs(), Ref(node.name))
    if node.op != ATTENTION or len(refs) != 4 or node.arg(4, "dropout_p", 0.0):
        return
    shapes = [*(specs[ref].shape for ref in refs[:3]), node.outputs[0].shape]
    dims = [len(shape) - 2 for shape in shapes]
    extents = {shape[dim] for shape, dim in zip(shapes, dims, strict=True)}
    along = all(sequence.get(ref) == dim for ref, dim in zip(refs, dims, strict=True))
    parts = (2 if axis.zigzag else 1) * axis.size
    if not along or len(extents) > 1 or min(extents).const % parts:
        return
    pieces = zigzag(min(extents).const, axis.size) if axis.zigzag else ()
    placed = tuple(Shard(dim, pieces) for dim in dims)
    dtype = specs[refs[1]].dtype
    wide = dtype if DTYPE_BYTES[dtype] >= DTYPE_BYTES["float32"] else "float32"
    turns = (("forward", dtype, 1), ("backward", dtype, 1), ("backward", wide, 2))
    yield AxisStrategy(
        inputs=placed[:3],
        outputs=placed[3:],
        kernel=RING_ATTENTION,
        collectives=tuple(
            InnerCollective(
                op=CollectiveOp.SEND_RECV, phase=phase, like_input=value, dtype=kind, turns=count
            )
            for phase, kind, count in turns
            for value in (1, 2)
        ),
    )


def attention_kind(node: OpNode, strategy: AxisStrategy) -> str:
    """How an axis splits attention: keys `gather`ed, a `ring`, by `heads`, or another way (empty).

    Batch dims stand before the heads, which stand before the sequence.
    """
    query, key = strategy.inputs[:2]
    if strategy.kernel == RING_ATTENTION:
        return "ring"
    if not isinstance(query, Shard):
        return ""
    return "heads" if isinstance(key, Shard) else "gather"


def whole_keys(
    node: OpNode, layouts: tuple[Layout, ...], specs: Mapping[Ref, TensorSpec]
) -> tuple[Layout, ...]:
    """The layouts an op's work is counted for: queries meet all keys, though a ring brings them."""
    if node.op != ATTENTION:
        return layouts
    rows = [len(specs[ref].shape) - 2 for ref in node.inputs()]
    return (
        layouts[0],
        *(
            tuple(R if isinstance(p, Shard) and p.dim == dim else p for p in layout)
            for layout, dim in zip(layouts[1:3], rows[1:3], strict=True)
        ),
        *layouts[3:],
    )


__all__ = ["RING_ATTENTION", "along_sequence", "attention_kind", "ring_attention", "whole_keys"]
