"""Gradients between the last backward of a step and the optimizer."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.plan.buckets import DEFAULT_CAP_BYTES, Bucket, GradientEntry, buckets
from autopar.runtime import primitives
from autopar.runtime.axes import AxisGroup
from autopar.runtime.parameters import Entry, ParameterStore, label_gradient, local_part


class GradientSync:
    """Adds up gradients after the backward and hands them to the parameters.

    A step adds to the `.grad` that a parameter has, as in plain PyTorch. With `accumulate` a step
    leaves its sums on the ranks; the next step without it communicates once for all of them.
    """

    def __init__(self, store: ParameterStore, cap_bytes: int = DEFAULT_CAP_BYTES) -> None:
        self._store = store
        self._cap_bytes = cap_bytes
        self._earlier: dict[str, Tensor] = {}
        self._pending = False

    def begin(self) -> None:
        """Before the first forward: set aside gradients of earlier steps that are complete."""
        if self._pending:
            return
        self._earlier = {}
        for entry in self._store.trainable():
            if entry.shared.grad is not None:
                self._earlier[entry.spec.fqn] = local_part(entry.shared.grad)
            entry.local.grad = None

    def discard(self) -> None:
        """Forget a step that failed, and what was accumulated before it."""
        self._pending, self._earlier = False, {}
        for entry in self._store.trainable():
            entry.local.grad = None

    def finish(self, *, accumulate: bool = False) -> None:
        """After the last backward: sum over ranks and set `.grad` of every parameter."""
        self._pending = accumulate
        if accumulate:
            return
        entries = [entry for entry in self._store.trainable() if entry.local.grad is not None]
        for bucket in gradient_buckets(entries, self._cap_bytes):
            self._reduce(bucket)
        for entry in sorted(entries, key=lambda entry: entry.spec.fqn):
            tie = self._store.world.ties.get(entry.stages)
            if len(entry.stages) > 1 and tie is not None:
                _all_reduce_(entry, tie)
        for entry in entries:
            grad = entry.local.grad
            assert grad is not None
            earlier = self._earlier.pop(entry.spec.fqn, None)
            if earlier is not None:
                grad.add_(earlier)
            entry.shared.grad = label_gradient(entry, grad)

    def _reduce(self, bucket: Bucket) -> None:
        entries = [self._store.entries[name] for name in bucket.names]
        axis = entries[0].mesh.along(bucket.axes)
        if len(entries) == 1:
            _all_reduce_(entries[0], axis)
            return
        grads = [_gradient(entry) for entry in entries]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        primitives.all_reduce_(flat, axis)
        parts = flat.split([grad.numel() for grad in grads])
        for grad, part in zip(grads, parts, strict=True):
            grad.copy_(part.view_as(grad))


def gradient_buckets(entries: list[Entry], cap_bytes: int) -> tuple[Bucket, ...]:
    """The buckets that a step sums over axes."""
    return buckets(
        (
            GradientEntry(
                name=entry.spec.fqn,
                nbytes=entry.local.nbytes,
                dtype=entry.spec.dtype,
                axes=entry.partial_axes,
            )
            for entry in entries
        ),
        cap_bytes,
    )


def _gradient(entry: Entry) -> Tensor:
    assert entry.local.grad is not None
    return entry.local.grad


def _all_reduce_(entry: Entry, axis: AxisGroup) -> None:
    entry.local.grad = primitives.all_reduce_(_gradient(entry).contiguous(), axis)
