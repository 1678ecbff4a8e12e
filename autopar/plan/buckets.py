"""Which gradients are summed in one collective: the list that is counted in plans and executed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

DEFAULT_CAP_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientEntry:
    """A gradient that is partial on `axes`: each rank along them holds one summand.

    `nbytes` are those of the summand. `scatter` are the axes among `axes` along which each rank
    keeps its shard of the sum, of `shard_nbytes` on this rank. `early` gradients are summed as soon
    as they are there, not after the whole backward.
    """

    name: str
    nbytes: int
    dtype: str
    axes: tuple[str, ...]
    scatter: tuple[str, ...] = ()
    shard_nbytes: int = 0
    early: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Gradients of one dtype that are summed together over the same axes.

    Those with `scatter` axes are reduce-scattered along them, then all-reduced as shards along the
    `rest`: in the flat buffer the part of a rank is its shards of all gradients, one after the
    other.
    """

    names: tuple[str, ...]
    nbytes: int
    dtype: str
    axes: tuple[str, ...]
    scatter: tuple[str, ...] = ()
    shard_nbytes: int = 0
    early: bool = False

    @property
    def rest(self) -> tuple[str, ...]:
        """The axes along which the sum, or the shard of it, is the same on every rank."""
        return tuple(axis for axis in self.axes if axis not in self.scatter)


def buckets(
    entries: Iterable[GradientEntry], cap_bytes: int = DEFAULT_CAP_BYTES
) -> tuple[Bucket, ...]:
    """Fill buckets in the order of the entries, each up to `cap_bytes`.

    An entry larger than the cap has a bucket to itself; none is split. Axes, dtypes and so on come
    in the order they first occur in. Entries without axes need no sum and are left out.
    """
    groups: dict[tuple[object, ...], list[GradientEntry]] = {}
    for entry in entries:
        if entry.axes:
            key = (entry.axes, entry.dtype, entry.scatter, entry.early)
            groups.setdefault(key, []).append(entry)
    return tuple(
        Bucket(
            names=tuple(entry.name for entry in part),
            nbytes=sum(entry.nbytes for entry in part),
            dtype=part[0].dtype,
            axes=part[0].axes,
            scatter=part[0].scatter,
            shard_nbytes=sum(entry.shard_nbytes for entry in part),
            early=part[0].early,
        )
        for group in groups.values()
        for part in _filled(group, cap_bytes)
    )


def _filled(group: list[GradientEntry], cap_bytes: int) -> list[list[GradientEntry]]:
    parts: list[list[GradientEntry]] = []
    room = 0
    for entry in group:
        if not parts or entry.nbytes > room:
            parts.append([])
            room = cap_bytes
        parts[-1].append(entry)
        room -= entry.nbytes
    return parts
