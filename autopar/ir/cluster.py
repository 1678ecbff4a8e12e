"""The machines a program trains on: devices, groups of them, links between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpec:
    """One kind of accelerator. `peak_flops` maps dtype to dense FLOP/s of the matrix units.

    `matmul_efficiency` is the fraction of the peak that the best large matmul was measured at.
    `kind` is torch's device type. `price_per_hour` is what one costs, in whatever currency the
    user reckons in; there is no default.
    """

    name: str
    kind: str
    memory_bytes: int
    memory_bandwidth_bytes_s: float
    peak_flops: tuple[tuple[str, float], ...]
    matmul_efficiency: float
    kernel_launch_s: float
    source: str
    price_per_hour: float | None = None

    def flops(self, dtype: str) -> float:
        """Peak FLOP/s for a dtype; the slowest listed rate for a dtype that is not listed."""
        rates = dict(self.peak_flops)
        return rates.get(dtype, min(rates.values()))


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkLevel:
    """One level of links. Ranks within `span` consecutive devices reach each other through it.

    `bandwidth_bytes_s` is per device and direction, as measured for large messages where known;
    `latency_s` is the fixed cost of one step of a collective.
    """

    name: str
    span: int
    bandwidth_bytes_s: float
    latency_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceGroup:
    """Equal nodes: `nodes` times `devices_per_node` devices of one kind.

    `cores` are the processor cores that the devices of a node share, where they are its processes;
    0 where each computes by itself. Rates of the device are its share of them. `links` are the
    levels inside the group, where they are its own: the last spans all its devices.
    """

    device: DeviceSpec
    nodes: int
    devices_per_node: int
    cores: int = 0
    links: tuple[LinkLevel, ...] = ()

    @property
    def num_devices(self) -> int:
        """Devices in the group."""
        return self.nodes * self.devices_per_node

    @property
    def slowdown(self) -> float:
        """How many times as long compute takes where all devices of a node compute, against one
        that computes alone."""
        return max(1.0, self.devices_per_node / self.cores) if self.cores else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Device groups in rank order, and link levels from the fastest to the slowest.

    Devices are numbered group by group, node by node. The last level spans all devices. Devices of
    a group that has links of its own reach each other through those.
    """

    groups: tuple[DeviceGroup, ...]
    links: tuple[LinkLevel, ...]
    spec: str = ""

    @property
    def num_devices(self) -> int:
        """Devices in the cluster."""
        return sum(group.num_devices for group in self.groups)

    def device(self, rank: int) -> DeviceSpec:
        """The device that rank number `rank` runs on."""
        return self._group(rank)[0].device

    def _group(self, rank: int) -> tuple[DeviceGroup, int]:
        """The group of a rank, and the first rank of the group."""
        first = 0
        for group in self.groups:
            if rank < first + group.num_devices:
                return group, first
            first += group.num_devices
        raise IndexError(f"rank {rank} is beyond the {self.num_devices} devices of the cluster")

    def around(self, ranks: Sequence[int]) -> tuple[Cluster, int]:
        """The part of the cluster whose links join `ranks`, and its first rank: their group, where
        that has links of its own, else the cluster."""
        group, first = self._group(min(ranks))
        if group.links and max(ranks) < first + group.num_devices:
            return Cluster(groups=(group,), links=group.links), first
        return self, 0

    def counts(self, ranks: range) -> list[tuple[int, int]]:
        """Of ranks in even steps, the first in every device group that has any, and how many."""
        found, start = [], 0
        for group in self.groups:
            end = start + group.num_devices
            first = max(0, -(-(start - ranks.start) // ranks.step))
            own = ranks[first : max(first, -(-(end - ranks.start) // ranks.step))]
            found += [(own[0], len(own))] if own else []
            start = end
        return found

    @property
    def slowdown(self) -> float:
        """How many times as long compute takes where all devices compute, against one alone."""
        return max(group.slowdown for group in self.groups)

    def link(self, ranks: tuple[int, ...]) -> LinkLevel:
        """The fastest level that joins all of `ranks`; the one a flat collective is bound by."""
        part, first = self.around(ranks)
        low, high = min(ranks) - first, max(ranks) - first
        for level in part.links:
            if low // level.span == high // level.span:
                return level
        return part.links[-1]

    @property
    def domain(self) -> int:
        """Devices that the fastest links join, in the group where they join the most."""
        own = [group.links[0].span for group in self.groups if group.links]
        return max(own, default=self.links[0].span)

    @property
    def levels(self) -> tuple[LinkLevel, ...]:
        """All levels, from the fastest to the slowest: those inside groups come first."""
        own = {level for group in self.groups for level in group.links}
        inner = sorted(own - set(self.links), key=lambda level: -level.bandwidth_bytes_s)
        return (*inner, *self.links)


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """A named mesh axis: `size` ranks, `stride` apart in the numbering of devices."""

    name: str
    size: int
    stride: int

    def ranks(self, first: int = 0) -> tuple[int, ...]:
        """The ranks along the axis through device `first`."""
        return tuple(first + i * self.stride for i in range(self.size))
