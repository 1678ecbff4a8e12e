"""The parameters of this rank: DTensors under their original names for optimizers and checkpoints,
and the local leaves that the generated code computes with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import PlanMismatch
from autopar.ir.placement import Layout, local_shape
from autopar.plan.buckets import DEFAULT_CAP_BYTES
from autopar.runtime.axes import Mesh, World
from autopar.runtime.gather import Gathers, ShardedWeight
from autopar.runtime.layouts import gather_layout, label, local_part, take_layout
from autopar.runtime.parameter_spec import (
    ParameterSpec,
    Split,
    check_spec,
    owners_of,
    partial_axes,
    split_at_rest,
)
from autopar.runtime.weights import WeightUpdate

__all__ = ["Entry", "ParameterSpec", "ParameterStore", "ParameterTree"]


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
    """One tensor on this rank. `stages` are all stages that own it, on any rank, `home` the first
    of those on this rank.

    `local` is the leaf that the program is given. `stored` is the local part that stays between
    steps, and has the leaf's memory where both lie alike; `shared` is the same as a DTensor (for a
    buffer the plain tensor). `split` says how the stored part is split further than what ops read.
    """

    spec: ParameterSpec
    mesh: Mesh
    stages: tuple[int, ...]
    home: int
    local: Tensor
    stored: Tensor
    shared: Tensor
    split: Split | None

    @property
    def partial_axes(self) -> tuple[str, ...]:
        """Axes with several ranks on which the gradient is a partial sum."""
        return partial_axes(self.spec, self.mesh)

    @property
    def is_one_memory(self) -> bool:
        """Whether writing the stored part writes all of the leaf."""
        whole = self.split is None or self.spec.zero == 3
        return whole and self.local.dtype == self.stored.dtype

    @property
    def read_shape(self) -> tuple[int, ...]:
        """Local shape of what ops read."""
        sizes, at = self.mesh.sizes, self.mesh.coordinate or ()
        return local_shape(self.spec.shape, self.spec.layout, sizes, at)

    @property
    def grad_dtype(self) -> torch.dtype:
        """The dtype in which gradients are added up over micro-batches and ranks."""
        return getattr(torch, self.spec.grad_dtype or self.spec.dtype)


class ParameterStore:
    """All parameters and buffers of this rank, allocated and not initialised.

    `specs` has those of every stage, on every rank alike. Raises PlanMismatch where a layout does
    not fit the mesh, or the specs of a tied parameter differ between stages.
    """

    def __init__(
        self,
        specs: Mapping[int, Sequence[ParameterSpec]],
        world: World,
        cap_bytes: int = DEFAULT_CAP_BYTES,
    ) -> None:
        self.world = world
        self.specs = {stage: tuple(specs[stage]) for stage in sorted(specs)}
        self.tree = ParameterTree()
        self.entries: dict[str, Entry] = {}
        self.owners = owners_of(self.specs, [mesh.sizes for mesh in world.meshes])
        self.gathers = Gathers()
        meshes: dict[tuple[int, ...], DeviceMesh] = {}
        for stage in world.stages:
            mesh = world.meshes[stage]
            if mesh.ranks not in meshes:
                meshes[mesh.ranks] = mesh.device_mesh(world.device.type)
            for spec in self.specs.get(stage, ()):
                if spec.fqn not in self.entries:
                    self._add(spec, stage, meshes[mesh.ranks])
        self.update = WeightUpdate(self.entries, world, cap_bytes)

    def _add(self, spec: ParameterSpec, stage: int, device_mesh: DeviceMesh) -> None:
        mesh = self.world.meshes[stage]
        check_spec(spec, mesh)
        at, device = mesh.coordinate or (), self.world.device
        split = split_at_rest(spec, mesh)
        shape = local_shape(spec.shape, spec.leaf_layout, mesh.sizes, at)
        local = torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=device)
        stored_dtype = getattr(torch, spec.stored_dtype or spec.dtype)
        stored = local
        if stored_dtype != local.dtype or (split is not None and spec.zero < 3):
            rest = local_shape(spec.shape, spec.at_rest, mesh.sizes, at)
            stored = torch.zeros(rest, dtype=stored_dtype, device=device)
        shared = stored
        if not spec.is_buffer:
            dtensor = label(stored, spec.shape, spec.at_rest, mesh, device_mesh)
            shared = nn.Parameter(dtensor, spec.trainable)
            local = local.detach()
            if split is not None and spec.zero == 3:
                local = ShardedWeight.of(local, spec.fqn, self.gathers)
            local.requires_grad_(spec.trainable)
        for name in spec.names:
            self.tree.attach(name, shared, persistent=spec.persistent)
        self.entries[spec.fqn] = Entry(
            spec=spec,
            mesh=mesh,
            stages=self.owners[spec.fqn],
            home=stage,
            local=local,
            stored=stored,
            shared=shared,
            split=split,
        )

    def weights(self, stage: int) -> dict[str, Tensor]:
        """The local tensors of one stage under all their names: what its code computes with."""
        return {
            name: self.entries[spec.fqn].local
            for spec in self.specs.get(stage, ())
            for name in spec.names
        }

    def layouts_of(self, fqn: str) -> dict[int, tuple[tuple[int, ...], Layout]]:
        """Shape and layout between steps of a parameter, by the stages that own it."""
        return {
            stage: (spec.shape, spec.at_rest)
            for stage in self.owners[fqn]
            for spec in self.specs[stage]
            if spec.fqn == fqn
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
        whole, spec, mesh = tensor.detach(), entry.spec, entry.mesh
        with torch.no_grad():
            entry.local.copy_(take_layout(whole, spec.leaf_layout, mesh))
            entry.stored.copy_(take_layout(whole, spec.at_rest, mesh))
        self.update.fresh(spec.fqn)

    def gather_full(self, name: str) -> Tensor:
        """The whole stored tensor, on every rank of its stage; all of them must call."""
        entry = self._entry(name)
        spec = entry.spec
        return gather_layout(entry.stored.detach(), spec.shape, spec.at_rest, entry.mesh)

    def gather_gradient(self, name: str) -> Tensor | None:
        """The whole gradient after a step, on every rank of its stage; None where there is none."""
        entry = self._entry(name)
        grad, spec = entry.shared.grad, entry.spec
        if grad is None:
            return None
        return gather_layout(local_part(grad).detach(), spec.shape, spec.at_rest, entry.mesh)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Every persistent tensor of the model, whole, on the CPU of rank 0; empty elsewhere.

        In mixed precision the master weights. All ranks must call. One tensor is gathered at a
        time. Tied names share one tensor.
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
            dtype = getattr(torch, spec.stored_dtype or spec.dtype)
            whole = torch.empty(spec.shape, dtype=dtype, device=self.world.device)
            dist.recv(whole, source)
        assert whole is not None
        return whole.cpu().clone()

    def _entry(self, name: str) -> Entry:
        for entry in self.entries.values():
            if name in entry.spec.names:
                return entry
        raise KeyError(name)
