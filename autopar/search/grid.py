"""One point of the outer search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import ceil, prod

from autopar.ir.cluster import Axis
from autopar.ir.mesh import TENSOR, MeshAxis, batch_size, sized
from autopar.search.pipelines import Pipeline


@dataclass(frozen=True, kw_only=True)
class Grid:
    """One point of the outer search: mesh of a stage, micro-batch per data rank, schedule.

    Where ranks of the pipeline have meshes of other sizes, `own` has those of each; the micro-batch
    is that of a data rank of `mesh`, and `at` tells what a rank of the pipeline sees.
    Grids are the keys of all that is remembered, so what follows from one is worked out once.
    """

    pipeline: int
    mesh: tuple[MeshAxis, ...]
    micro_batch: int
    micro_batches: int
    schedule: str
    chunks: int = 1
    own: tuple[tuple[int, ...], ...] = ()

    def at(self, place: int) -> Grid:
        """The grid as the stages of a rank of the pipeline see it: on their own mesh."""
        return self._seen[self.own[place]] if self.own else self

    @cached_property
    def _seen(self) -> dict[tuple[int, ...], Grid]:
        """What a rank of the pipeline sees, by the sizes of its mesh."""
        samples = self.micro_batch * self.batch_ranks
        return {
            sizes: replace(
                self,
                mesh=sized(self.mesh, sizes),
                micro_batch=ceil(samples / batch_size(self.names, sizes)),
                own=(),
            )
            for sizes in dict.fromkeys(self.own)
        }

    def ranks(self, place: int) -> range:
        """The devices of a rank of the pipeline: consecutive ones, in its order."""
        if not self.own:
            return range(place * self.stage_devices, (place + 1) * self.stage_devices)
        first = sum(map(prod, self.own[:place]))
        return range(first, first + prod(self.own[place]))

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, object]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @cached_property
    def _hash(self) -> int:
        mesh = (self.pipeline, self.mesh, self.micro_batch, self.micro_batches)
        return hash((*mesh, self.schedule, self.chunks, self.own))

    @cached_property
    def pipe(self) -> Pipeline:
        """The schedule at its sizes."""
        return Pipeline(
            schedule=self.schedule,
            ranks=self.pipeline,
            chunks=self.chunks,
            micro_batches=self.micro_batches,
        )

    @cached_property
    def base(self) -> Grid:
        """The grid without its schedule, on which no block's shardings depend."""
        return replace(self, schedule="", chunks=1)

    @cached_property
    def technique(self) -> tuple[object, ...]:
        """What makes a grid another answer, not the same one with another micro-batch."""
        return self.pipeline, self.mesh, self.own, self.schedule, self.chunks

    def degree(self, name: str) -> int:
        """Size of a mesh axis; 1 where the mesh has no such axis."""
        return next((axis.size for axis in self.mesh if axis.name == name), 1)

    @cached_property
    def tensor(self) -> int:
        """Tensor-parallel degree."""
        return self.degree(TENSOR)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the mesh axes."""
        return tuple(axis.name for axis in self.mesh)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the mesh axes."""
        return tuple(axis.size for axis in self.mesh)

    @cached_property
    def block_mesh(self) -> tuple[MeshAxis, ...]:
        """The mesh without the sizes of the axes that split samples, which no op's options depend
        on."""
        return tuple(replace(a, size=2) if a.splits_samples else a for a in self.mesh)

    @cached_property
    def batch_ranks(self) -> int:
        """Data-parallel degree: the ranks that the samples are split over."""
        return batch_size(self.names, self.sizes)

    @cached_property
    def communicators(self) -> int:
        """Groups that a rank is in: of every axis with several ranks, of neighbouring stages in
        either direction, and of all ranks."""
        several = sum(axis.size > 1 for axis in self.mesh) + 2 * (self.pipeline > 1)
        return several + 1 if several else 0

    @cached_property
    def stage_devices(self) -> int:
        """Devices of one stage."""
        return prod(self.sizes)

    def axes(self) -> tuple[Axis, ...]:
        """Mesh axes of a stage on the devices: tensor innermost, pipeline outermost."""
        strides = [prod(self.sizes[i + 1 :]) for i in range(len(self.sizes))]
        return tuple(
            Axis(name=axis.name, size=axis.size, stride=stride)
            for axis, stride in zip(self.mesh, strides, strict=True)
        )

    def joined_axes(self, names: Sequence[str]) -> list[Axis]:
        """The same with those in `names`, which are neighbours, made one."""
        axes = self.axes()
        inner = next(axis for axis in axes if axis.name == names[-1])
        size = prod(axis.size for axis in axes if axis.name in names)
        joined = Axis(name="+".join(names), size=size, stride=inner.stride)
        return [joined, *(axis for axis in axes if axis.name not in names)]

    def pipeline_axis(self) -> Axis:
        """The axis along the stages."""
        return Axis(name="pipeline", size=self.pipeline, stride=self.stage_devices)
