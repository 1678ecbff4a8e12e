"""Whole tensors, the parts of them that ranks hold, and parts labelled as DTensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from autopar.ir.placement import Layout, Shard, local_shape
from autopar.runtime import primitives, shards
from autopar.runtime.axes import Mesh


def take_layout(whole: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
    """This rank's part of a whole tensor; a view where it is one range of every dim."""
    for name, placement in zip(mesh.names, layout, strict=True):
        if isinstance(placement, Shard):
            axis = mesh.axes[name]
            whole = shards.take(whole, placement.dim, placement.pieces, axis.size, axis.rank)
    return whole


def gather_layout(local: Tensor, shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> Tensor:
    """The whole tensor of `shape` of local parts that lie as `layout` says.

    All ranks of the mesh must call.
    """
    axes = tuple(mesh.axes[name] for name in mesh.names)
    for i in reversed(range(len(axes))):
        placement, axis = layout[i], axes[i]
        if isinstance(placement, Shard) and axis.size > 1:
            outer = tuple(axis.size for axis in axes[:i])
            at = tuple(axis.rank for axis in axes[:i])
            dim, pieces = placement.dim, placement.pieces
            size = local_shape(shape, layout[:i], outer, at)[dim]
            extents = shards.sizes(size, pieces, axis.size)
            stacked = primitives.all_gather(local, axis, dim, extents)
            local = shards.join_stacked(stacked, dim, size, pieces)
    return local


def local_part(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor, or a plain tensor itself; shares memory."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def label(
    local: Tensor, shape: tuple[int, ...], layout: Layout, mesh: Mesh, device_mesh: DeviceMesh
) -> DTensor:
    """A rank's part as a DTensor over the axes of several ranks; shares memory.

    DTensor has no pieces: a packed dim is labelled as cut, and only we can put it together.
    """
    placements: list[TorchPlacement] = []
    for i in mesh.wide:
        placement = layout[i]
        placements.append(
            TorchShard(placement.dim) if isinstance(placement, Shard) else TorchReplicate()
        )
    stride, strides = 1, []
    for extent in reversed(shape):
        strides.append(stride)
        stride *= extent
    return DTensor.from_local(
        local,
        device_mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(reversed(strides)),
    )


def label_like(local: Tensor, other: Tensor) -> DTensor:
    """A rank's part as a DTensor that lies as another one does; shares memory."""
    assert isinstance(other, DTensor)
    return DTensor.from_local(
        local,
        other.device_mesh,
        other.placements,
        run_check=False,
        shape=other.shape,
        stride=other.stride(),
    )
