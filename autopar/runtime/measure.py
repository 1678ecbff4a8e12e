"""The memory that parameters and their state really take on a rank, in the terms of a plan."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from autopar.runtime.layouts import local_part
from autopar.runtime.parameters import ParameterStore
from autopar.runtime.sync import GradientSync


def state_bytes(
    store: ParameterStore, sync: GradientSync, optimizer: Optimizer | None
) -> dict[str, int]:
    """Bytes of weights and buffers, master weights, gradients and optimizer state on this rank.

    Memory that two tensors share counts once, as weights. `gradients` is the most they took in a
    backward. Scalars of an optimizer, such as its step count, are left out.
    """
    entries = list(store.entries.values())
    weights = _distinct(entry.local for entry in entries)
    both = _distinct([*(e.local for e in entries), *(e.stored for e in entries)])
    states: list[Tensor] = []
    if optimizer is not None:
        for state in optimizer.state.values():
            states += [local_part(x) for x in state.values() if isinstance(x, Tensor) and x.dim()]
    return {
        "weights": weights,
        "master": both - weights,
        "gradients": sync.peak_bytes,
        "optimizer": _distinct(states),
    }


def _distinct(tensors: Iterable[Tensor]) -> int:
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
    return sum(storage.nbytes() for storage in storages.values())
