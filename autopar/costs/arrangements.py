"""The ways to use a cluster as it is: the order in which its groups take the ranks, and the devices
left out.

Offered are all devices in every order of the groups; the groups that are left where some stay out;
and one group cut to a number of devices, or of nodes where it has several, that is a multiple of a
power of two: of 7 also 6 and 4. More than three groups are taken in the given order and its
reverse. Processes on a processor are never cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations

from autopar.costs.clusters import alone, named, refitted, resized
from autopar.ir.cluster import Cluster, DeviceGroup

_MOST_ORDERED = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrangement:
    """Devices of a cluster in an order, as a cluster; `devices` has the number in the whole cluster
    of each of its ranks."""

    cluster: Cluster
    devices: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """Nodes and devices of a node that are used of a group."""

    group: int
    nodes: int
    devices_per_node: int


def arrangements(cluster: Cluster) -> tuple[Arrangement, ...]:
    """All that are offered, the cluster as it is first, each once."""
    found: dict[object, Arrangement] = {}
    whole = Arrangement(cluster=cluster, devices=tuple(range(cluster.num_devices)))
    found[_key(cluster)] = whole
    for pieces in _selections(cluster):
        if all(_fits_links(cluster, pieces)):
            part = _arranged(cluster, pieces)
            found.setdefault(_key(part.cluster), part)
    return tuple(found.values())


def _key(cluster: Cluster) -> object:
    return cluster.groups, cluster.links


def _selections(cluster: Cluster) -> Iterator[tuple[_Piece, ...]]:
    whole = [_whole(index, group) for index, group in enumerate(cluster.groups)]
    for count in range(len(whole), 0, -1):
        for chosen in combinations(whole, count):
            if len(whole) <= _MOST_ORDERED or count == len(whole):
                yield from _orders(chosen)
    for at, group in enumerate(cluster.groups):
        for cut in _cuts(at, group):
            yield (*whole[:at], cut, *whole[at + 1 :])
            yield (cut,)


def _whole(index: int, group: DeviceGroup) -> _Piece:
    return _Piece(group=index, nodes=group.nodes, devices_per_node=group.devices_per_node)


def _orders(pieces: Sequence[_Piece]) -> Iterator[tuple[_Piece, ...]]:
    if len(pieces) <= _MOST_ORDERED:
        yield from permutations(pieces)
    else:
        yield tuple(pieces)
        yield tuple(reversed(pieces))


def _cuts(index: int, group: DeviceGroup) -> Iterator[_Piece]:
    """A group with fewer devices: the next multiples of powers of two below."""
    if group.device.kind == "cpu":
        return
    piece = _whole(index, group)
    count = group.nodes if group.nodes > 1 else group.devices_per_node
    multiples = {(count >> k) << k for k in range(count.bit_length())} - {count}
    for fewer in sorted(multiples, reverse=True):
        if group.nodes > 1:
            yield replace(piece, nodes=fewer)
        else:
            yield replace(piece, devices_per_node=fewer)


def _fits_links(cluster: Cluster, pieces: Sequence[_Piece]) -> Iterator[bool]:
    """Whether devices stay as near to each other as they are: levels between groups that cover a
    part of the cluster must not shift against its devices."""
    start = 0
    for piece in pieces:
        group = cluster.groups[piece.group]
        first = sum(g.num_devices for g in cluster.groups[: piece.group])
        inner = () if group.links else cluster.links[:-1]
        yield all((first - start) % level.span == 0 for level in inner)
        start += piece.nodes * piece.devices_per_node


def _arranged(cluster: Cluster, pieces: Sequence[_Piece]) -> Arrangement:
    parts, devices = [], list[int]()
    for piece in pieces:
        group = cluster.groups[piece.group]
        first = sum(g.num_devices for g in cluster.groups[: piece.group])
        own = alone(group, cluster)
        if piece != _whole(piece.group, group):
            own = resized(own, nodes=piece.nodes, devices_per_node=piece.devices_per_node)
        parts.append(own)
        for node in range(piece.nodes):
            start = first + node * group.devices_per_node
            devices += range(start, start + piece.devices_per_node)
    if len(parts) == 1:
        group = parts[0].groups[0]
        links = parts[0].links if cluster.groups[pieces[0].group].links else cluster.links
        part = refitted((group,), links)
        return Arrangement(cluster=named(part), devices=tuple(devices))
    groups = tuple(
        replace(part.groups[0], links=part.links if cluster.groups[piece.group].links else ())
        for part, piece in zip(parts, pieces, strict=True)
    )
    return Arrangement(cluster=named(refitted(groups, cluster.links)), devices=tuple(devices))
