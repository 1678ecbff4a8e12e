"""What a generated stage gives the executor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.ir.placement import Layout, Partial, Replicate, Shard, local_size
from autopar.ir.size import Shape, Size, shape_at
from autopar.runtime.axes import Mesh
from autopar.runtime.context import StepContext
from autopar.runtime.data import InputSpec

Tensors = tuple[Tensor, ...]
Named = Mapping[str, Tensor]
Forward = Callable[[Named, StepContext, Tensors, Named, Named], Tensors]
"""`forward(w, ctx, received, inputs, setup)`: local weights by name, boundary tensors of the stage
before, this rank's slice of the batch, the summed setup values. Returns the boundary tensors of the
next stage, then outputs of the model that this stage makes; the last stage returns
`(loss_contribution, *outputs)`. A value that a later stage needs is passed on as received."""

Setup = Callable[[Named, StepContext, Named], Mapping[str, Tensor]]
"""`setup(w, ctx, inputs)`: one micro-batch's summands of the values that are summed beforehand."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundarySpec:
    """One value that crosses to the next stage.

    `shape` is in local samples, so that the data axis is in its batch dims; `layout` has the other
    axes that cut the value, `(axis name, placement)`. Both stages know from `requires_grad` whether
    a gradient comes back.
    """

    name: str
    shape: Shape
    dtype: str
    requires_grad: bool
    layout: tuple[tuple[str, Shard], ...] = ()

    def local_shape(self, batch: int, mesh: Mesh) -> tuple[int, ...]:
        """Shape on this rank when it holds `batch` samples."""
        shape = list(shape_at(self.shape, batch))
        for axis_name, placement in self.layout:
            axis = mesh.axes[axis_name]
            extent = shape[placement.dim]
            shape[placement.dim] = local_size(extent, placement, axis.size, axis.rank)
        return tuple(shape)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch's."""
        return getattr(torch, self.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageProgram:
    """The code of one stage and the values at its two ends. `inputs` are the batch keys it reads.

    `setup` may be None; where it is not, its values are summed over the micro-batches and the data
    axis before the first micro-batch.
    """

    index: int
    forward: Forward
    receives: tuple[BoundarySpec, ...] = ()
    sends: tuple[BoundarySpec, ...] = ()
    inputs: tuple[str, ...] = ()
    setup: Setup | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputSpec:
    """One output of the model besides the loss. `shape` counts the samples of the whole batch,
    `layout` has a placement for every axis of the mesh."""

    name: str
    stage: int
    shape: Shape
    dtype: str
    layout: Layout

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch's."""
        return getattr(torch, self.dtype)


def pick(w: Named, keys: Iterable[str], prefix: str) -> dict[str, Tensor]:
    """The tensors of one block by the names its code has for them.

    A key is relative to `prefix`, the block's module path, or else the whole name.
    """
    return {key: w[prefix + key] if prefix + key in w else w[key] for key in keys}


__all__ = [
    "BoundarySpec",
    "InputSpec",
    "OutputSpec",
    "Partial",
    "Replicate",
    "Shard",
    "Size",
    "StageProgram",
    "pick",
]
