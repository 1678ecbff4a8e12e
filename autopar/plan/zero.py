"""How the state of a parameter is split over the ranks that hold the same weight (ZeRO).

The levels are those of Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training
trillion parameter models": 1 splits master weight and optimizer state, 2 also the gradient, 3 also
the weight itself (FSDP; Zhao et al. 2023). `layout` is how the ops of a block read a weight,
`stored` how it lies between steps. Over the inner one of two batch axes alone it is hybrid
sharding (HSDP): the shards are replicated along the outer axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from autopar.ir.mesh import BATCH_AXES
from autopar.ir.placement import R_STAR, Layout, R, Shard
from autopar.plan.plan import ParameterPlan

LEVELS = {
    1: "optimizer state",
    2: "optimizer state and gradients",
    3: "weights and all their state",
}
"""What each level splits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroShard:
    """Dim `dim` of the local weight is split over `axes` together, the outermost first."""

    axes: tuple[str, ...]
    dim: int


def stored_layout(parameter: ParameterPlan) -> Layout:
    """The layout in which master weight and optimizer state lie between steps."""
    return parameter.stored or parameter.layout


def zero_shard(parameter: ParameterPlan, names: Sequence[str]) -> ZeroShard | None:
    """How a parameter's state is split further than the parameter; None where it is not.

    `names` are those of the mesh axes.
    """
    axes, dim = [], 0
    for name, used, stored in zip(names, parameter.layout, stored_layout(parameter), strict=True):
        if stored != used and isinstance(stored, Shard):
            axes.append(name)
            dim = stored.dim
    return ZeroShard(axes=tuple(axes), dim=dim) if axes else None


def shard_layout(
    shape: Sequence[int],
    layout: Layout,
    sizes: Sequence[int],
    over: Sequence[int],
    *,
    trainable: bool = True,
) -> Layout:
    """The layout of a weight's state split over the mesh axes `over` (indices); empty if it cannot.

    The dim is the largest that no axis splits yet, the first of equals. Over several axes it has to
    divide evenly, so that chunks of chunks are the chunks of all ranks together; where no dim does,
    the innermost axis splits alone. An axis of one rank, or one on which the weight's gradients are
    not to be summed, splits nothing.
    """
    whole = R_STAR if trainable else R
    axes = [axis for axis in over if sizes[axis] > 1 and layout[axis] == whole]
    taken = {placement.dim for placement in layout if isinstance(placement, Shard)}
    free = [dim for dim, extent in enumerate(shape) if dim not in taken and extent > 1]
    if not axes or not free:
        return ()
    degree = prod(sizes[axis] for axis in axes)
    if len(axes) > 1:
        even = [dim for dim in free if shape[dim] % degree == 0]
        axes, free = (axes, even) if even else (axes[-1:], free)
    dim = max(free, key=lambda dim: (shape[dim], -dim))
    return tuple(Shard(dim) if axis in axes else placement for axis, placement in enumerate(layout))


def zero_problems(parameter: ParameterPlan, names: Sequence[str]) -> Iterator[str]:
    """What contradicts itself in a parameter's level and stored layout."""
    if parameter.zero not in (0, *LEVELS):
        yield f"zero: expected a level of 0 to 3, found {parameter.zero}"
    if (parameter.zero > 0) != bool(parameter.stored):
        found = ", ".join(map(str, parameter.stored)) or "none"
        yield f"zero {parameter.zero} with the stored layout {found}"
    if parameter.zero and (parameter.buffer or not (parameter.trainable or parameter.zero == 3)):
        kind = "a buffer" if parameter.buffer else "a frozen weight"
        yield f"zero {parameter.zero} of {kind}, which has no such state"
    if not parameter.stored:
        return
    if len(parameter.stored) != len(parameter.layout) or len(names) != len(parameter.layout):
        yield f"stored: expected {len(names)} placements, found {len(parameter.stored)}"
        return
    dims = set()
    whole = R_STAR if parameter.trainable else R
    for name, used, stored in zip(names, parameter.layout, parameter.stored, strict=True):
        if stored == used:
            continue
        if name not in BATCH_AXES or used != whole or not isinstance(stored, Shard):
            yield f"stored: {used} is kept as {stored} on {name}; expected {whole} kept as S(dim)"
        elif stored.pieces or stored.dim >= len(parameter.shape):
            yield f"stored: {stored} of a tensor of shape {list(parameter.shape)}"
        else:
            dims.add(stored.dim)
    taken = {p.dim for p in parameter.layout if isinstance(p, Shard)}
    if len(dims) != 1 or dims & taken:
        listed = ", ".join(map(str, parameter.stored))
        yield f"stored: expected one dim that no axis splits yet, split further, found {listed}"
