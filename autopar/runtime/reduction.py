"""One bucket of gradients on its way to the ranks that keep its sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from autopar.plan.buckets import Bucket
from autopar.runtime import flat, primitives
from autopar.runtime.axes import Mesh
from autopar.runtime.parameters import Entry
from autopar.runtime.weights import cut_of


class Reduction:
    """Sums gradients over the axes of a bucket: begins at once, `finish` gives the sums.

    Along `scatter` axes each rank keeps its shards, and the reduce-scatter runs beside the rest of
    the backward. The gradients are no longer needed by the caller.
    """

    def __init__(self, bucket: Bucket, entries: Sequence[Entry], grads: list[Tensor]) -> None:
        self._bucket, self._entries, self._grads = bucket, entries, grads
        self._mesh: Mesh = entries[0].mesh
        self._recorder = entries[0].mesh.axes[entries[0].mesh.names[0]].recorder
        self._scattered: Callable[[], Tensor] | None = None
        if bucket.scatter:
            axis = self._mesh.along(bucket.scatter)
            self._cuts = [cut_of(entry) for entry in entries]
            rows = flat.rows(grads, self._cuts, axis.size)
            counts = flat.counts(self._cuts, axis.size)
            grads.clear()
            with self._recorder.during("sync"):
                self._scattered = primitives.start_reduce_rows(rows, counts, axis)

    @property
    def shard_nbytes(self) -> int:
        """What this rank keeps of a bucket that is scattered; others are not kept apart."""
        if self._scattered is None:
            return 0
        return sum(entry.stored.numel() * entry.grad_dtype.itemsize for entry in self._entries)

    def wait(self) -> None:
        """Let the reduce-scatter end, so that what it sends can be freed."""
        if self._scattered is not None:
            result = self._scattered()
            self._scattered = lambda: result

    def finish(self) -> Iterator[tuple[Entry, Tensor]]:
        """The summed gradients. Sums over all other axes first."""
        with self._recorder.during("sync"):
            sums = self._whole() if self._scattered is None else self._shards(self._scattered())
        yield from zip(self._entries, sums, strict=True)

    def _shards(self, part: Tensor) -> list[Tensor]:
        if self._bucket.rest:
            primitives.all_reduce_(part, self._mesh.along(self._bucket.rest))
        axis = self._mesh.along(self._bucket.scatter)
        return flat.unpack(part, self._cuts, axis.size, axis.rank)

    def _whole(self) -> list[Tensor]:
        axis = self._mesh.along(self._bucket.axes)
        if len(self._grads) == 1:
            return [primitives.all_reduce_(self._grads[0].contiguous(), axis)]
        shapes = [grad.shape for grad in self._grads]
        together = torch.cat([grad.reshape(-1) for grad in self._grads])
        self._grads.clear()
        primitives.all_reduce_(together, axis)
        parts = together.split([prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
