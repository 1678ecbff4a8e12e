"""Local sizes as source text: what `ir.placement.local_shape` computes, written down for a rank."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from autopar.ir.graph import TensorSpec
from autopar.ir.mesh import BATCH_AXES
from autopar.ir.placement import ByExpert, Layout, Shard
from autopar.ir.size import Size


def size_text(size: Size) -> str:
    """A size in terms of `batch`, the samples of this micro-batch on this rank."""
    return str(size).replace("*", " * ").replace("+", " + ") if size.is_batch else str(size.const)


def dim_text(
    size: Size, dim: int, layout: Layout, axes: Sequence[str], sizes: Sequence[int]
) -> str:
    """Local extent of one dim."""
    if size.is_batch:
        return _samples_text(size, dim, layout, axes, sizes)
    split = [
        (name, parts, placement)
        for name, parts, placement in zip(axes, sizes, layout, strict=True)
        if isinstance(placement, Shard) and placement.dim == dim and parts > 1
    ]
    if not split:
        return str(size.const)
    degree = prod(parts for _, parts, _ in split)
    pieces = split[0][2].pieces or (size.const,)
    if all(piece % degree == 0 for piece in pieces):
        return str(size.const // degree)
    text = str(size.const)
    for name, _, placement in split:
        text = f"{name}.share({text}{f', {placement.pieces}' if placement.pieces else ''})"
    return text


def _samples_text(
    size: Size, dim: int, layout: Layout, axes: Sequence[str], sizes: Sequence[int]
) -> str:
    """A batch-sized dim: of this rank's samples, or, where an axis splits another dim instead, of
    those of all ranks along it; -1 for rows by expert, whose number is not known before."""
    for name, parts, placement in zip(axes, sizes, layout, strict=True):
        if isinstance(placement, ByExpert) and dim == 0:
            return "-1"
        elsewhere = isinstance(placement, Shard) and placement.dim != dim
        if name in BATCH_AXES and parts > 1 and elsewhere:
            return size_text(size).replace("batch", f"sum(ctx.sample_shares({name}))")
    return size_text(size)


def shape_text(
    spec: TensorSpec, layout: Layout, axes: Sequence[str], sizes: Sequence[int]
) -> tuple[str, ...]:
    """Local extents of all dims of a tensor."""
    return tuple(dim_text(size, dim, layout, axes, sizes) for dim, size in enumerate(spec.shape))
