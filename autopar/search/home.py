"""Where stages run: on which devices, over which links. Stages on equal homes take equal times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import lcm, prod
from typing import NamedTuple

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
    """That of a stage on consecutive ranks, by where they are between the links."""
    part, start = cluster.around(ranks)
    first = ranks[0] - start
    if len(part.groups) == 1 or not any(group.links for group in part.groups):
        first %= lcm(*(level.span for level in part.links[:-1]))
    return _home(cluster, part, ranks, first)


class Spot(NamedTuple):
    """What makes a stage's times: where it is, and the grid as it sees it."""

    home: Home
    grid: Grid


@dataclass(kw_only=True, slots=True)
class Places:
    """Where the ranks of pipelines are in a cluster; every distinct way is worked out once."""

    cluster: Cluster
    _homes: dict[object, tuple[Home, ...]] = field(default_factory=dict)
    _kinds: dict[object, tuple[int, ...]] = field(default_factory=dict)

    def homes(self, grid: Grid) -> tuple[Home, ...]:
        """The home of every rank of a grid's pipeline."""
        key = (grid.pipeline, grid.stage_devices, grid.own)
        if key not in self._homes:
            self._homes[key] = self._found(grid)
        return self._homes[key]

    def _found(self, grid: Grid) -> tuple[Home, ...]:
        counts = {prod(sizes) for sizes in grid.own}
        if len(self.cluster.groups) == 1 and len(counts) < 2:  # all homes count as alike
            return (whole_home(self.cluster),) * grid.pipeline
        return tuple(stage_home(self.cluster, grid.ranks(p)) for p in range(grid.pipeline))

    def kinds(self, grid: Grid) -> tuple[int, ...]:
        """Which of the `spots` every rank of the pipeline is on."""
        key = (grid.pipeline, grid.stage_devices, grid.own)
        if key not in self._kinds:
            seen: dict[object, int] = {}
            both = zip(self.homes(grid), grid.own or ((),) * grid.pipeline, strict=True)
            self._kinds[key] = tuple(seen.setdefault(each, len(seen)) for each in both)
        return self._kinds[key]

    def spots(self, grid: Grid) -> tuple[Spot, ...]:
        """The distinct spots of a grid's stages, in the order of the first stage on each."""
        homes, kinds = self.homes(grid), self.kinds(grid)
        firsts = [kinds.index(kind) for kind in range(max(kinds) + 1)]
        return tuple(Spot(homes[place], grid.at(place)) for place in firsts)


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
