"""What the parameter store knows of a tensor: how its code reads it and how it lies between steps.

A parameter exists twice. Its *stored* part, which optimizers and checkpoints see, lies as `stored`
in `stored_dtype`; the program computes with a *leaf*, which lies as `layout` in `dtype`. Where both
are alike they are one memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.errors import PlanMismatch
from autopar.ir.placement import R_STAR, Layout, Partial, Shard, local_shape
from autopar.runtime.axes import AxisGroup, Mesh


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterSpec:
    """A parameter or buffer of one stage. `layout` has one placement per axis of the stage's mesh.

    `R*` on an axis says that the gradient is a partial sum there, to be added after the backward.
    `tied` lists further names of the same tensor. A parameter on several stages has one spec with
    the same `fqn` and layout on each.

    `zero` and `stored` are those of `ParameterPlan`: an empty `stored` is the same as `layout`. An
    empty `stored_dtype` or `grad_dtype` (in which gradients are added up and reduced) is the same
    as `dtype`.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    layout: Layout
    trainable: bool = True
    is_buffer: bool = False
    persistent: bool = True
    tied: tuple[str, ...] = ()
    zero: int = 0
    stored: Layout = ()
    stored_dtype: str = ""
    grad_dtype: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the tensor in the original model."""
        return (self.fqn, *self.tied)

    @property
    def at_rest(self) -> Layout:
        """The layout between steps."""
        return self.stored or self.layout

    @property
    def leaf_layout(self) -> Layout:
        """The layout of what the program is given: at level 3 the shard, which it gathers."""
        return self.at_rest if self.zero == 3 else self.layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """A leaf's `dim`, of `size` on this rank, is split over `axis` between steps."""

    axis: AxisGroup
    dim: int
    size: int


def check_spec(spec: ParameterSpec, mesh: Mesh) -> None:
    """Raise PlanMismatch where a layout does not fit the mesh."""
    for layout in (spec.layout, spec.at_rest):
        if len(layout) != len(mesh.names) or any(isinstance(p, Partial) for p in layout):
            raise PlanMismatch(
                f"parameter {spec.fqn!r} has layout ({', '.join(map(str, layout))}); expected "
                f"S(dim), R or R* for each of the axes {', '.join(mesh.names)}"
            )


def partial_axes(spec: ParameterSpec, mesh: Mesh) -> tuple[str, ...]:
    """Axes with several ranks on which the gradient is a partial sum."""
    axes = zip(mesh.names, mesh.sizes, spec.layout, strict=True)
    return tuple(name for name, size, placement in axes if placement == R_STAR and size > 1)


def split_at_rest(spec: ParameterSpec, mesh: Mesh) -> Split | None:
    """How the stored part is split further than what ops read; None where it is not.

    Raises PlanMismatch where it is along two dims, or along one that an axis splits already.
    """
    names, dims = [], set()
    for name, size, used, stored in zip(
        mesh.names, mesh.sizes, spec.layout, spec.at_rest, strict=True
    ):
        if isinstance(stored, Shard) and stored != used and size > 1:
            names.append(name)
            dims.add(stored.dim)
    if not names:
        return None
    taken = {p.dim for p in spec.layout if isinstance(p, Shard)}
    if len(dims) != 1 or dims & taken:
        raise PlanMismatch(
            f"parameter {spec.fqn!r} is kept as ({', '.join(map(str, spec.at_rest))}); expected "
            f"one dim that ({', '.join(map(str, spec.layout))}) does not split yet"
        )
    dim = dims.pop()
    shape = local_shape(spec.shape, spec.layout, mesh.sizes, mesh.coordinate or ())
    return Split(axis=mesh.along(tuple(names)), dim=dim, size=shape[dim])


def owners_of(
    specs: Mapping[int, Sequence[ParameterSpec]], sizes: Sequence[tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """The stages that own each tensor; `sizes` are those of every stage's mesh. Raises PlanMismatch
    where stages of equal meshes see a tensor differently."""
    owners: dict[str, tuple[int, ...]] = {}
    first: dict[tuple[str, tuple[int, ...]], tuple[int, ParameterSpec]] = {}
    for stage, group in specs.items():
        for spec in group:
            other, known = first.setdefault((spec.fqn, sizes[stage]), (stage, spec))
            if _lie(known) != _lie(spec):
                raise PlanMismatch(
                    f"tied parameter {spec.fqn!r} lies as {tuple(map(str, spec.layout))} on stage "
                    f"{stage} and as {tuple(map(str, known.layout))} on stage {other}; both must "
                    "be alike"
                )
            owners[spec.fqn] = (*owners.get(spec.fqn, ()), stage)
    return owners


def _lie(spec: ParameterSpec) -> tuple[object, ...]:
    return (spec.shape, spec.dtype, spec.layout, spec.at_rest, spec.stored_dtype, spec.grad_dtype)
