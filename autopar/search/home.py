"""Where stages run: on which devices, over which links. Stages on equal homes take equal times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm

from autopar.ir.cluster import Cluster, DeviceSpec
from autopar.search.grid import Grid


@dataclass(frozen=True, kw_only=True, slots=True)
class Home:
    """The kinds of `devices` that share the work of a stage, and the part of the cluster whose
    links join them, in which they are the ranks from `first` on.

    Memory and price of a device, which change no time, are left out of `devices` and `links`.
    """

    devices: tuple[DeviceSpec, ...]
    links: Cluster
    first: int = 0


def whole_home(cluster: Cluster) -> Home:
    """That of a stage which may lie anywhere: as slow as the slowest device and link."""
    if len(cluster.groups) == 1:
        return Home(devices=(cluster.groups[0].device,), links=cluster)
    return _home(cluster, cluster, range(cluster.num_devices), 0)


def stage_home(cluster: Cluster, ranks: Sequence[int]) -> Home:
    """That of a stage on consecutive ranks; in a cluster of one group all homes count as alike."""
    if len(cluster.groups) == 1:
        return whole_home(cluster)
    part, start = cluster.around(ranks)
    first = ranks[0] - start
    if len(part.groups) == 1 or not any(group.links for group in part.groups):
        first %= lcm(*(level.span for level in part.links[:-1]))
    return _home(cluster, part, ranks, first)


def place_homes(cluster: Cluster, grid: Grid) -> tuple[Home, ...]:
    """The home of every rank of the pipeline."""
    size = grid.stage_devices
    if len(cluster.groups) == 1:
        return (whole_home(cluster),) * grid.pipeline
    return tuple(
        stage_home(cluster, range(place * size, (place + 1) * size))
        for place in range(grid.pipeline)
    )


def _home(cluster: Cluster, part: Cluster, ranks: Sequence[int], first: int) -> Home:
    devices, start = dict[DeviceSpec, None](), 0
    for group in cluster.groups:
        if ranks[0] < start + group.num_devices and start <= ranks[-1]:
            devices[_timed(group.device)] = None
        start += group.num_devices
    groups = tuple(replace(group, device=_timed(group.device)) for group in part.groups)
    return Home(devices=tuple(devices), links=Cluster(groups=groups, links=part.links), first=first)


def _timed(device: DeviceSpec) -> DeviceSpec:
    """The device by what makes its times."""
    return replace(device, memory_bytes=0, price_per_hour=None)
