"""The mesh of a stage: named axes of ranks, outermost first.

| axis      | what it splits between blocks                                          |
|-----------|------------------------------------------------------------------------|
| `data`    | the samples                                                            |
| `shard`   | the samples too; state and experts may be sharded on it alone           |
| `context` | the sequence                                                           |
| `tensor`  | nothing, or the sequence (Megatron's sequence parallelism)              |

Inside a block every op may be split otherwise. `data` and `tensor` are always there, the others
where they have more than one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

DATA, SHARD, CONTEXT, TENSOR = "data", "shard", "context", "tensor"

AXES = (DATA, SHARD, CONTEXT, TENSOR)
"""All axes, outermost first."""

BATCH_AXES = (DATA, SHARD)
"""Axes that split the samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshAxis:
    """A named axis of every stage's mesh and its size.

    `sequence` tells whether the values that pass between blocks are split along the sequence,
    `zigzag` that every rank holds an early and a late part of it, as causal attention asks for.
    """

    name: str
    size: int
    sequence: bool = False
    zigzag: bool = False

    @property
    def splits_samples(self) -> bool:
        """Whether every value that grows with the batch is split by sample on this axis."""
        return self.name in BATCH_AXES


def stage_mesh(
    *,
    data: int = 1,
    shard: int = 1,
    context: int = 1,
    tensor: int = 1,
    sequence: bool = False,
    zigzag: bool = False,
) -> tuple[MeshAxis, ...]:
    """The axes of a mesh with these degrees; `sequence` is that of the tensor axis, `zigzag` that
    of the context axis."""
    axes = (
        MeshAxis(name=DATA, size=data),
        MeshAxis(name=SHARD, size=shard),
        MeshAxis(name=CONTEXT, size=context, sequence=True, zigzag=zigzag),
        MeshAxis(name=TENSOR, size=tensor, sequence=sequence),
    )
    return tuple(axis for axis in axes if axis.size > 1 or axis.name in (DATA, TENSOR))


def sized(axes: Sequence[MeshAxis], sizes: Sequence[int]) -> tuple[MeshAxis, ...]:
    """The same axes with other sizes; as they are where none are given."""
    if not sizes:
        return tuple(axes)
    return tuple(replace(axis, size=size) for axis, size in zip(axes, sizes, strict=True))


def place_of(position: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Where a rank stands on axes of these sizes, by its position in the mesh."""
    place = []
    for size in reversed(sizes):
        position, at = divmod(position, size)
        place.append(at)
    return tuple(reversed(place))


def position_of(place: Sequence[int], sizes: Sequence[int]) -> int:
    """Inverse of `place_of`."""
    position = 0
    for at, size in zip(place, sizes, strict=True):
        position = position * size + at
    return position


def batch_size(axes: Sequence[str], sizes: Sequence[int]) -> int:
    """Number of ranks that the samples are split over."""
    return prod(size for name, size in zip(axes, sizes, strict=True) if name in BATCH_AXES)


def batch_count(axes: Sequence[str]) -> int:
    """How many axes, all outermost, split the samples."""
    return sum(name in BATCH_AXES for name in axes)
