"""Which gradients are summed in one collective: the list that is counted in plans and executed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

DEFAULT_CAP_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientEntry:
    """A gradient that is partial on `axes`: each rank along them holds one summand."""

    name: str
    nbytes: int
    dtype: str
    axes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Gradients of one dtype that are summed together over the same axes."""

    names: tuple[str, ...]
    nbytes: int
    dtype: str
    axes: tuple[str, ...]


def buckets(
    entries: Iterable[GradientEntry], cap_bytes: int = DEFAULT_CAP_BYTES
) -> tuple[Bucket, ...]:
    """Fill buckets in the order of the entries, each up to `cap_bytes`.

    An entry larger than the cap has a bucket to itself; none is split. Axes and dtypes come in the
    order they first occur in. Entries without axes need no sum and are left out.
    """
    groups: dict[tuple[tuple[str, ...], str], list[GradientEntry]] = {}
    for entry in entries:
        if entry.axes:
            groups.setdefault((entry.axes, entry.dtype), []).append(entry)
    return tuple(
        Bucket(
            names=tuple(entry.name for entry in part),
            nbytes=sum(entry.nbytes for entry in part),
            dtype=dtype,
            axes=axes,
        )
        for (axes, dtype), group in groups.items()
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
