"""From stored parameters to the leaves that the program reads, after they were changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from autopar.plan.buckets import DEFAULT_CAP_BYTES, Bucket, GradientEntry, buckets
from autopar.runtime import flat, primitives
from autopar.runtime.axes import World
from autopar.runtime.layouts import local_part

if TYPE_CHECKING:
    from autopar.runtime.parameters import Entry


class WeightUpdate:
    """Casts and all-gathers stored parameters into their leaves.

    Runs after every step of an optimizer that was bound, and before the next forward where the
    stored parameters may have been changed by others: another optimizer, or a checkpoint.
    """

    def __init__(
        self, entries: Mapping[str, Entry], world: World, cap_bytes: int = DEFAULT_CAP_BYTES
    ) -> None:
        self.is_hooked = False
        """Whether the optimizer calls `refresh`."""
        self._world, self._handed_out = world, False
        self._apart = {name: e for name, e in entries.items() if not e.is_one_memory}
        self._versions = {name: _version(e) for name, e in self._apart.items()}
        self._local = [e for e in self._apart.values() if e.split is None or e.spec.zero == 3]
        self._buckets = weight_buckets(self._apart.values(), cap_bytes)

    def fresh(self, name: str) -> None:
        """The leaf of a parameter was written together with its stored part."""
        if name in self._apart:
            self._versions[name] = _version(self._apart[name])

    def hand_out(self) -> None:
        """Gradients were set: an optimizer may step now."""
        self._handed_out = True

    def catch_up(self) -> None:
        """Refresh the leaves unless they are known to be fresh."""
        changed = any(_version(e) != self._versions[name] for name, e in self._apart.items())
        if changed or (self._handed_out and not self.is_hooked):
            self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Write every leaf from its stored part. All ranks call."""
        with self._world.recorder.during("update"):
            for entry in self._local:
                entry.local.copy_(entry.stored)
            for bucket in self._buckets:
                self._gather([self._apart[name] for name in bucket.names])
        for name, entry in self._apart.items():
            self._versions[name] = _version(entry)
        self._handed_out = False

    def _gather(self, entries: list[Entry]) -> None:
        first = entries[0].split
        assert first is not None
        axis, cuts = first.axis, [cut_of(entry) for entry in entries]
        own = torch.cat([e.stored.to(e.local.dtype).reshape(-1) for e in entries])
        rows = primitives.all_gather(own, axis, 0, flat.counts(cuts, axis.size))
        flat.fill([entry.local for entry in entries], rows, cuts)


def cut_of(entry: Entry) -> flat.Cut:
    """How the stored part is cut out of what ops read."""
    assert entry.split is not None
    return entry.read_shape, entry.split.dim


def weight_buckets(entries: Iterable[Entry], cap_bytes: int) -> tuple[Bucket, ...]:
    """The buckets in which weights are gathered after a step: levels 1 and 2; those of a rank's
    stages are apart."""
    homes: dict[int, list[GradientEntry]] = {}
    for entry in entries:
        if entry.split is not None and entry.spec.zero < 3:
            homes.setdefault(entry.home, []).append(
                GradientEntry(
                    name=entry.spec.fqn,
                    nbytes=entry.local.nbytes,
                    dtype=entry.spec.dtype,
                    axes=entry.split.axis.axes,
                )
            )
    return tuple(bucket for home in sorted(homes) for bucket in buckets(homes[home], cap_bytes))


def _version(entry: Entry) -> int:
    """Grows whenever the stored part is written in place: through the DTensor, or through the
    tensor in it, as checkpoints do."""
    inner: Tensor = local_part(entry.shared)
    return entry.shared._version + inner._version
