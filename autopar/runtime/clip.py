"""Gradient norm and clipping over data, tensor and pipeline parallel ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.ir.placement import Shard
from autopar.runtime import primitives
from autopar.runtime.layouts import local_part
from autopar.runtime.parameters import Entry, ParameterStore

_EPSILON = 1e-6
"""Added to the norm before dividing, as `torch.nn.utils.clip_grad_norm_` does."""


def grad_norm(store: ParameterStore, norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients of the model, a float64 scalar, the same on every rank.

    Every element counts once, however often it is replicated, and a tied parameter once. `inf`
    gives the largest absolute value. One all-reduce over all ranks; all of them must call.
    """
    largest = norm_type == float("inf")
    total = torch.zeros((), dtype=torch.float64, device=store.world.device)
    for entry in store.trainable():
        if entry.shared.grad is not None and _counts_here(entry, store.world.stages):
            grad = local_part(entry.shared.grad)
            if not grad.numel():
                continue
            wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
            norm = torch.linalg.vector_norm(grad, norm_type, dtype=wide).double()
            total = torch.maximum(total, norm) if largest else total + norm**norm_type
    reduction = "max" if largest else "sum"
    total = primitives.all_reduce(total, store.world.everyone, reduction=reduction)
    return total if largest else total ** (1.0 / norm_type)


def _counts_here(entry: Entry, stages: tuple[int, ...]) -> bool:
    """Whether this rank counts its part: the first rank of each axis that replicates it, on the
    first stage that owns it."""
    axes = zip(entry.mesh.names, entry.spec.at_rest, strict=True)
    first = all(
        isinstance(placement, Shard) or entry.mesh.axes[name].rank == 0 for name, placement in axes
    )
    return first and entry.stages[0] in stages


def clip_grad_norm_(store: ParameterStore, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients so that their norm is at most `max_norm`; the norm before.

    All ranks must call.
    """
    norm = grad_norm(store, norm_type)
    scale = torch.clamp(max_norm / (norm + _EPSILON), max=1.0)
    for entry in store.trainable():
        if entry.shared.grad is not None:
            grad = local_part(entry.shared.grad)
            grad.mul_(scale.to(grad.dtype))
    return norm
