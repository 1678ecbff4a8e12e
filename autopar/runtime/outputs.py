"""Putting the model's loss and outputs together from the parts of ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.ir.mesh import BATCH_AXES
from autopar.ir.placement import Partial, Shard, chunk_sizes, nested_chunk
from autopar.ir.size import Size, shape_at
from autopar.runtime import primitives, shards
from autopar.runtime.axes import Mesh, World
from autopar.runtime.data import Span
from autopar.runtime.executor import StepResult
from autopar.runtime.program import OutputSpec


def collect_outputs(
    result: StepResult,
    specs: Sequence[OutputSpec],
    world: World,
    spans: Sequence[Span],
    samples: int,
) -> dict[str, Tensor]:
    """The whole outputs by name, on every rank. All ranks must call.

    Samples are in the order of the batch. An output without samples is the sum over micro-batches
    where it is a partial sum on the data axis, else that of the first micro-batch. A stage returns
    its outputs in the order of the specs.
    """
    whole: dict[str, Tensor] = {}
    for spec in specs:
        position = [other.name for other in specs if other.stage == spec.stage].index(spec.name)
        if spec.stage in world.stages:
            parts = [
                _gather(result.outputs[spec.stage, m][position], spec, world, span)
                for m, span in enumerate(spans)
                if span.of
            ]
            value = _join(parts, spec, world.meshes[spec.stage])
        else:
            shape = shape_at(spec.shape, samples)
            value = torch.empty(shape, dtype=spec.torch_dtype, device=world.device)
        if world.size > len(world.meshes[spec.stage].ranks):
            value = value.contiguous()
            dist.broadcast(value, world.meshes[spec.stage].ranks[0])
        whole[spec.name] = value
    return whole


def share_loss(
    result: StepResult, world: World, partial_axes: Sequence[str] = BATCH_AXES
) -> Tensor:
    """The loss of the whole batch, in float64, on every rank: one all-reduce over all ranks.

    `partial_axes` are those on which the loss contributions of the last stage are partial sums; on
    other axes they are equal, and counted once.
    """
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    if result.loss is not None:
        axes = world.meshes[-1].axes
        if all(axis.rank == 0 for name, axis in axes.items() if name not in partial_axes):
            total = result.loss
    return primitives.all_reduce(total, world.everyone)


def _batch_dim(spec: OutputSpec) -> tuple[int, Size] | None:
    return next(((dim, size) for dim, size in enumerate(spec.shape) if size.is_batch), None)


def _gather(part: Tensor, spec: OutputSpec, world: World, span: Span) -> Tensor:
    """One micro-batch's output over all ranks of the stage."""
    mesh, batch_dim = world.meshes[spec.stage], _batch_dim(spec)
    for i in reversed(range(len(mesh.names))):
        axis, placement = mesh.axes[mesh.names[i]], spec.layout[i]
        if axis.size == 1:
            continue
        if isinstance(placement, Partial):
            part = primitives.all_reduce(part, axis)
        elif isinstance(placement, Shard):
            dim, pieces = placement.dim, placement.pieces
            if axis.name in BATCH_AXES and batch_dim is not None and dim == batch_dim[0]:
                held = _samples_before(mesh, i, span.of)
                extents = [batch_dim[1].at(n) for n in chunk_sizes(held, axis.size)]
                stacked = primitives.all_gather(part, axis, dim, extents)
                cut = [s.narrow(dim, 0, n) for s, n in zip(stacked, extents, strict=True)]
                part = torch.cat(cut, dim)
            else:
                size = spec.shape[dim].at(span.of)
                extents = list(shards.sizes(size, pieces, axis.size))
                stacked = primitives.all_gather(part, axis, dim, extents)
                part = shards.join_stacked(stacked, dim, size, pieces)
    return part


def _samples_before(mesh: Mesh, index: int, samples: int) -> int:
    """Samples of a micro-batch that the ranks along axis `index` hold together."""
    outer = [mesh.axes[name] for name in mesh.names[:index] if name in BATCH_AXES]
    return nested_chunk(samples, [a.size for a in outer], [a.rank for a in outer])[1]


def _join(parts: Sequence[Tensor], spec: OutputSpec, mesh: Mesh) -> Tensor:
    """One output over all micro-batches."""
    batch_dim = _batch_dim(spec)
    if batch_dim is not None:
        return torch.cat(list(parts), batch_dim[0])
    split = [spec.layout[i] for i, name in enumerate(mesh.names) if name in BATCH_AXES]
    if any(isinstance(placement, Partial) for placement in split):
        return torch.stack(list(parts)).sum(0)
    return parts[0]
