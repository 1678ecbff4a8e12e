"""The strategies of a context axis: those of any axis that leave weights whole.

Where the axis deals the sequence out in zig-zag, every split along the sequence is in that order: a
local op does not see it, and attention is told which queries it has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from autopar.ir.graph import OpNode, Ref, TensorSpec
from autopar.ir.mesh import MeshAxis
from autopar.ir.placement import Shard, zigzag
from autopar.ir.strategy import AxisStrategy


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


__all__ = ["along_sequence"]
