"""The parameters of this rank: DTensors under their original names for optimizers and checkpoints,
and the local tensors that the generated code computes with, which share their memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from autopar.errors import PlanMismatch
from autopar.ir.placement import R_STAR, Layout, Partial, Shard, local_shape
from autopar.runtime import primitives, shards
from autopar.runtime.axes import Mesh, World


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterSpec:
    """A parameter or buffer of one stage. `layout` has one placement per axis of the stage's mesh.

    `R*` on an axis says that the gradient is a partial sum there, to be added after the backward.
    `tied` lists further names of the same tensor. A parameter on several stages has one spec with
    the same `fqn` and layout on each.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    layout: Layout
    trainable: bool = True
    is_buffer: bool = False
    persistent: bool = True
    tied: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the tensor in the original model."""
        return (self.fqn, *self.tied)


class ParameterTree(nn.Module):
    """Modules without code, nested as the original's, that hold parameters under their names."""

    def attach(self, name: str, value: nn.Parameter | Tensor, *, persistent: bool = True) -> None:
        """Register a parameter, or a buffer where `value` is a plain tensor."""
        *path, leaf = name.split(".")
        module: nn.Module = self
        for part in path:
            if part not in module._modules:
                module.add_module(part, ParameterTree())
            module = module.get_submodule(part)
        if isinstance(value, nn.Parameter):
            module.register_parameter(leaf, value)
        else:
            module.register_buffer(leaf, value, persistent=persistent)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Entry:
    """One tensor on this rank. `local` is a leaf; `shared` (a DTensor; the same plain tensor for a
    buffer) has its memory. `stages` are all stages that own it, on any rank."""

    spec: ParameterSpec
    mesh: Mesh
    stages: tuple[int, ...]
    local: Tensor
    shared: Tensor

    @property
    def partial_axes(self) -> tuple[str, ...]:
        """Axes with several ranks on which the gradient is a partial sum."""
        axes = zip(self.mesh.names, self.mesh.sizes, self.spec.layout, strict=True)
        return tuple(name for name, size, placement in axes if placement == R_STAR and size > 1)


class ParameterStore:
    """All parameters and buffers of this rank, allocated and not initialised.

    `specs` has those of every stage, on every rank alike. Raises PlanMismatch where a layout does
    not fit the mesh, or the specs of a tied parameter differ between stages.
    """

    def __init__(self, specs: Mapping[int, Sequence[ParameterSpec]], world: World) -> None:
        self.world = world
        self.specs = {stage: tuple(specs[stage]) for stage in sorted(specs)}
        self.tree = ParameterTree()
        self.entries: dict[str, Entry] = {}
        self.owners = _owners(self.specs)
        meshes: dict[tuple[int, ...], DeviceMesh] = {}
        for stage in world.stages:
            mesh = world.meshes[stage]
            if mesh.ranks not in meshes:
                meshes[mesh.ranks] = mesh.device_mesh(world.device.type)
            for spec in self.specs.get(stage, ()):
                if spec.fqn not in self.entries:
                    self._add(spec, mesh, meshes[mesh.ranks])

    def _add(self, spec: ParameterSpec, mesh: Mesh, device_mesh: DeviceMesh) -> None:
        if len(spec.layout) != len(mesh.names) or any(isinstance(p, Partial) for p in spec.layout):
            raise PlanMismatch(
                f"parameter {spec.fqn!r} has layout ({', '.join(map(str, spec.layout))}); expected "
                f"S(dim), R or R* for each of the axes {', '.join(mesh.names)}"
            )
        dtype = getattr(torch, spec.dtype)
        shape = local_shape(spec.shape, spec.layout, mesh.sizes, mesh.coordinate or ())
        local = torch.zeros(shape, dtype=dtype, device=self.world.device)
        if spec.is_buffer:
            shared = local
        else:
            shared = nn.Parameter(_dtensor(local, spec, mesh, device_mesh), spec.trainable)
            local = local.detach().requires_grad_(spec.trainable)
        for name in spec.names:
            self.tree.attach(name, shared, persistent=spec.persistent)
        self.entries[spec.fqn] = Entry(
            spec=spec, mesh=mesh, stages=self.owners[spec.fqn], local=local, shared=shared
        )

    def weights(self, stage: int) -> dict[str, Tensor]:
        """The local tensors of one stage under all their names: what its code computes with."""
        return {
            name: self.entries[spec.fqn].local
            for spec in self.specs.get(stage, ())
            for name in spec.names
        }

    def trainable(self) -> Iterator[Entry]:
        """The parameters that an optimizer updates, in the order of the stages' specs."""
        return (entry for entry in self.entries.values() if entry.spec.trainable)

    def load_full(self, name: str, tensor: Tensor) -> None:
        """Take this rank's part of a whole tensor, under any of its names.

        Raises KeyError if this rank has no such tensor, PlanMismatch if the shape differs.
        """
        entry = self._entry(name)
        if tuple(tensor.shape) != entry.spec.shape:
            raise PlanMismatch(
                f"{name!r} has shape {tuple(tensor.shape)}; the plan has {entry.spec.shape}"
            )
        part = tensor.detach()
        for axis, placement in zip(entry.mesh.axes.values(), entry.spec.layout, strict=True):
            if isinstance(placement, Shard):
                part = shards.take(part, placement.dim, placement.pieces, axis.size, axis.rank)
        with torch.no_grad():
            entry.local.copy_(part)

    def gather_full(self, name: str) -> Tensor:
        """The whole tensor, on every rank of its stage; all of them must call."""
        entry = self._entry(name)
        return gather_layout(entry.local.detach(), entry.spec, entry.mesh)

    def gather_gradient(self, name: str) -> Tensor | None:
        """The whole gradient after a step, on every rank of its stage; None where there is none."""
        entry = self._entry(name)
        grad = entry.shared.grad
        if grad is None:
            return None
        return gather_layout(local_part(grad).detach(), entry.spec, entry.mesh)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Every persistent tensor of the model, whole, on the CPU of rank 0; empty elsewhere.

        All ranks must call. One tensor is gathered at a time. Tied names share one tensor.
        """
        result: dict[str, Tensor] = {}
        for fqn, stages in self.owners.items():
            spec = next(s for s in self.specs[stages[0]] if s.fqn == fqn)
            whole = self._to_first_rank(spec, stages[0]) if spec.persistent else None
            if whole is not None:
                result.update(dict.fromkeys(spec.names, whole))
        return result

    def _to_first_rank(self, spec: ParameterSpec, stage: int) -> Tensor | None:
        source, rank = self.world.meshes[stage].ranks[0], self.world.rank
        whole = None
        if stage in self.world.stages:
            whole = self.gather_full(spec.fqn)
        if source != 0 and rank == source:
            assert whole is not None
            dist.send(whole, 0)
        if rank != 0:
            return None
        if source != 0:
            dtype = getattr(torch, spec.dtype)
            whole = torch.empty(spec.shape, dtype=dtype, device=self.world.device)
            dist.recv(whole, source)
        assert whole is not None
        return whole.cpu().clone()

    def _entry(self, name: str) -> Entry:
        for entry in self.entries.values():
            if name in entry.spec.names:
                return entry
        raise KeyError(name)


def gather_layout(local: Tensor, spec: ParameterSpec, mesh: Mesh) -> Tensor:
    """The whole tensor of local parts that lie as `spec.layout` says."""
    axes = tuple(mesh.axes[name] for name in mesh.names)
    for i in reversed(range(len(axes))):
        placement, axis = spec.layout[i], axes[i]
        if isinstance(placement, Shard) and axis.size > 1:
            outer = tuple(axis.size for axis in axes[:i])
            at = tuple(axis.rank for axis in axes[:i])
            dim, pieces = placement.dim, placement.pieces
            size = local_shape(spec.shape, spec.layout[:i], outer, at)[dim]
            extents = shards.sizes(size, pieces, axis.size)
            stacked = primitives.all_gather(local, axis, dim, extents)
            local = shards.join(stacked.unbind(0), dim, size, pieces)
    return local


def local_part(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor, or a plain tensor itself; shares memory."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def label_gradient(entry: Entry, grad: Tensor) -> DTensor:
    """A local gradient as a DTensor that lies as its parameter does; shares memory."""
    assert isinstance(entry.shared, DTensor)
    return DTensor.from_local(
        grad,
        entry.shared.device_mesh,
        entry.shared.placements,
        run_check=False,
        shape=entry.shared.shape,
        stride=entry.shared.stride(),
    )


def _dtensor(local: Tensor, spec: ParameterSpec, mesh: Mesh, device_mesh: DeviceMesh) -> DTensor:
    """DTensor has no pieces: a packed dim is labelled as cut, and only we can put it together."""
    placements: list[TorchPlacement] = []
    for i in mesh.wide:
        placement = spec.layout[i]
        placements.append(
            TorchShard(placement.dim) if isinstance(placement, Shard) else TorchReplicate()
        )
    stride, strides = 1, []
    for extent in reversed(spec.shape):
        strides.append(stride)
        stride *= extent
    return DTensor.from_local(
        local,
        device_mesh,
        placements,
        run_check=False,
        shape=torch.Size(spec.shape),
        stride=tuple(reversed(strides)),
    )


def _owners(specs: Mapping[int, Sequence[ParameterSpec]]) -> dict[str, tuple[int, ...]]:
    """The stages that own each tensor."""
    owners: dict[str, tuple[int, ...]] = {}
    first: dict[str, ParameterSpec] = {}
    for stage, group in specs.items():
        for spec in group:
            known = first.setdefault(spec.fqn, spec)
            if (known.shape, known.dtype, known.layout) != (spec.shape, spec.dtype, spec.layout):
                raise PlanMismatch(
                    f"tied parameter {spec.fqn!r} lies as {tuple(map(str, spec.layout))} on stage "
                    f"{stage} and as {tuple(map(str, known.layout))} on stage "
                    f"{owners[spec.fqn][0]}; both must be alike"
                )
            owners[spec.fqn] = (*owners.get(spec.fqn, ()), stage)
    return owners
