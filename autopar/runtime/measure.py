"""The memory that parameters and their state really take on a rank, in the terms of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

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


class PeakBytes(TorchDispatchMode):
    """The most bytes that tensors made inside hold at once; they are looked at after every op."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an op, and count what there is after it."""
        before = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if _is_plain(x)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if _is_plain(x) and x.untyped_storage()._cdata not in before:
                ref = StorageWeakRef(x.untyped_storage())
                self._live[ref.cdata] = (ref, x.untyped_storage().nbytes())
        self._live = {key: held for key, held in self._live.items() if not held[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._live.values()))
        return result


def _is_plain(x: Any) -> bool:
    """Whether a tensor has memory of its own, which a DTensor has in its local part."""
    return isinstance(x, Tensor) and not is_traceable_wrapper_subclass(x)
