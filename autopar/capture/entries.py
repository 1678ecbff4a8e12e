"""The example batch: which entries are tensors, which fixed values, and what counts samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.errors import CaptureError

Batch = Mapping[str, Any] | tuple[Any, ...]
"""Keyword or positional arguments of a model's forward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entries:
    """A batch taken apart.

    `tensors` and `constants` hold the entries by key (the position, for a positional batch);
    `sampled` are the tensor entries whose dim 0 counts samples; `samples` is that count.
    """

    tensors: dict[str, Tensor]
    constants: dict[str, Any]
    sampled: frozenset[str]
    samples: int
    positional: bool

    def batch(self, tensors: Mapping[str, Tensor]) -> Batch:
        """The batch in its original form, with other tensors in it."""
        values = {**self.constants, **tensors}
        if not self.positional:
            return values
        return tuple(values[str(i)] for i in range(len(values)))

    def notes(self) -> tuple[str, ...]:
        """What the graph fixes that the batch could have varied."""
        return tuple(f"batch entry {k} is fixed to {v!r}" for k, v in self.constants.items())


def read_entries(batch: object) -> Entries:
    """Take a batch apart. Raises CaptureError when it has no samples to count."""
    if isinstance(batch, Mapping):
        items = {str(key): value for key, value in batch.items()}
    elif isinstance(batch, (tuple, list)):
        items = {str(i): value for i, value in enumerate(batch)}
    else:
        raise CaptureError(
            f"the batch is a {type(batch).__name__}; give a dict of keyword arguments or a tuple "
            "of positional arguments of the model's forward"
        )
    tensors = {key: value for key, value in items.items() if isinstance(value, Tensor)}
    constants = {key: value for key, value in items.items() if key not in tensors}
    for key, value in constants.items():
        if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value)):
            raise CaptureError(
                f"batch entry {key} is a {type(value).__name__} that holds tensors; "
                "make each tensor an entry of its own"
            )
    samples = _count_samples(tensors)
    return Entries(
        tensors=tensors,
        constants=constants,
        sampled=frozenset(k for k, t in tensors.items() if t.ndim and t.shape[0] == samples),
        samples=samples,
        positional=not isinstance(batch, Mapping),
    )


def _count_samples(tensors: Mapping[str, Tensor]) -> int:
    counts = [tensor.shape[0] for tensor in tensors.values() if tensor.ndim]
    if not counts or counts[0] == 0:
        raise CaptureError(
            "the example batch has no samples: its first tensor entry needs a dim 0 of at least 1"
        )
    return counts[0]


def model_device(model: nn.Module) -> torch.device:
    """Where the model's parameters are: the device its batch is moved to. CPU if it has none."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")


def example_tensors(entries: Entries, samples: int, device: torch.device) -> dict[str, Tensor]:
    """The tensor entries on `device`, samples repeated or dropped to make `samples` of them.

    Every tensor is a new one: torch.export would take two entries that are the same tensor
    (labels given as input_ids) for one input.
    """
    return {
        key: _resized(tensor, samples if key in entries.sampled else None, device)
        for key, tensor in entries.tensors.items()
    }


def _resized(tensor: Tensor, samples: int | None, device: torch.device) -> Tensor:
    tensor = tensor.detach()
    if device.type == "meta" or tensor.device.type == "meta":
        shape = tensor.shape if samples is None else (samples, *tensor.shape[1:])
        return torch.empty(shape, dtype=tensor.dtype, device=device)
    if samples is None:
        return tensor.to(device, copy=True)
    rows = torch.arange(samples, device=tensor.device) % tensor.shape[0]
    return tensor[rows].to(device)
