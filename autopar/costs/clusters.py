"""Clusters from text and files.

local:4                            four CPU processes on this host
8:h100-sxm                         one node of eight devices
8x8:h100-sxm                       eight nodes of eight devices
1x4:h100-sxm+1x4:a100-80gb         groups of different devices
8x8:h100-sxm@network=25            bandwidth of a link level set, in GB/s per device
cluster.yaml, cluster.json         a file, see `parse_cluster`
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import yaml

from autopar.costs.hardware import DEVICES, GIB
from autopar.errors import InputError
from autopar.ir.cluster import Cluster, DeviceGroup, DeviceSpec, LinkLevel

_T = TypeVar("_T")

_GROUP = re.compile(r"^(?:(\d+)x)?(\d+):([\w.-]+)$")
_LOCAL = re.compile(r"^local:(\d+)$")
_FILE_SUFFIXES = (".yaml", ".yml", ".json")
_EXAMPLES = (
    "examples: 8x8:h100-sxm (8 nodes of 8), 8:a100-80gb (one node), "
    "1x4:h100-sxm+1x4:a100-80gb, 8x8:h100-sxm@network=25 (GB/s), local:4, cluster.yaml"
)


def parse_cluster(spec: str, memory_limit_bytes: int | None = None) -> Cluster:
    """The cluster that `spec` describes; see the module for the forms of text.

    A file holds `groups`, a list of `device`, `nodes`, `devices_per_node` and optionally
    `memory_gib` and `price_per_hour` of a device; and optionally `links`, from the fastest level to
    the slowest, a list of `name`, `span` (devices), `bandwidth_gb_s` (per device and direction) and
    `latency_us`. A group may have `links` of its own, for its devices among themselves. Without
    `links`, those the devices usually come with are taken: a group's own inside it, and between
    groups the slowest.

    `memory_limit_bytes` caps the memory of each accelerator, and sets that of each CPU process.
    Raises InputError on anything malformed.
    """
    text = spec.strip()
    if text == "auto":
        raise InputError(
            "cluster 'auto' has to be resolved to the devices of this host first; "
            f"give a cluster spec instead; {_EXAMPLES}"
        )
    cluster = _from_file(Path(text)) if text.endswith(_FILE_SUFFIXES) else _from_text(text)
    if memory_limit_bytes is not None:
        cluster = _with_memory_limit(cluster, memory_limit_bytes)
    return cluster


def cluster_text(cluster: Cluster) -> str:
    """The short text of a cluster: groups, and bandwidths that are not the usual ones.

    `parse_cluster` of it gives the cluster back, save for what text cannot say: latencies, levels
    other than `node` and `network`, and memory sizes.
    """
    groups = "+".join(_group_text(group) for group in cluster.groups)
    usual = _with_usual_links(cluster.groups)
    known = {(link.name, link.bandwidth_bytes_s) for link in _all_links(usual)}
    changed = {
        link.name: f"@{link.name}={link.bandwidth_bytes_s / 1e9:.12g}"
        for link in _all_links(cluster)
        if (link.name, link.bandwidth_bytes_s) not in known
    }
    return "".join((groups, *changed.values()))


def _all_links(cluster: Cluster) -> tuple[LinkLevel, ...]:
    return (*cluster.links, *(link for group in cluster.groups for link in group.links))


def _group_text(group: DeviceGroup) -> str:
    if group.device.kind == "cpu" and group.nodes == 1:
        return f"local:{group.devices_per_node}"
    nodes = "" if group.nodes == 1 else f"{group.nodes}x"
    return f"{nodes}{group.devices_per_node}:{group.device.name}"


def _from_text(text: str) -> Cluster:
    groups_text, *overrides = text.split("@")
    groups = tuple(_parse_group(part.strip(), text) for part in groups_text.split("+"))
    cluster = _with_usual_links(groups)
    for override in overrides:
        cluster = _override(cluster, override.strip(), text)
    return named(cluster)


def _parse_group(part: str, text: str) -> DeviceGroup:
    if local := _LOCAL.match(part):
        nodes, per_node, name = 1, int(local.group(1)), "cpu"
    elif match := _GROUP.match(part):
        nodes, per_node, name = int(match.group(1) or 1), int(match.group(2)), match.group(3)
    else:
        raise InputError(
            f"cluster {text!r}: expected [NODESx]DEVICES:DEVICE or local:N, found {part!r}; "
            + _EXAMPLES
        )
    if nodes < 1 or per_node < 1:
        raise InputError(f"cluster {text!r}: expected counts of at least 1, found {part!r}")
    device = _device(name, f"cluster {text!r}")
    return DeviceGroup(device=device, nodes=nodes, devices_per_node=per_node)


def _device(name: str, where: str) -> DeviceSpec:
    row = DEVICES.get(name.lower())
    if row is None:
        near = get_close_matches(name.lower(), DEVICES, n=4, cutoff=0.4)
        hint = f"did you mean {', '.join(near)}" if near else f"devices: {', '.join(DEVICES)}"
        raise InputError(f"{where}: no device {name!r}; {hint}; {_EXAMPLES}")
    return row.device


def _with_usual_links(groups: tuple[DeviceGroup, ...]) -> Cluster:
    """The groups with the links that devices usually come with: where there are several groups,
    each has its own inside it."""
    if len(groups) > 1:
        groups = tuple(replace(group, links=_usual_links((group,))) for group in groups)
    return Cluster(groups=groups, links=_usual_links(groups))


def _usual_links(groups: tuple[DeviceGroup, ...]) -> tuple[LinkLevel, ...]:
    """The levels `node` and `network`, each as slow as its slowest group.

    Where groups have nodes of different sizes, the node level spans their greatest common divisor:
    devices that close are in one node whichever group they are in.
    """
    rows = [DEVICES[group.device.name].links for group in groups]
    num_devices = sum(group.num_devices for group in groups)
    span = math.gcd(*(group.devices_per_node for group in groups))
    if len(groups) == 1:
        span *= max(1, rows[0].scale_up_devices // span)
    one_node = len(groups) == 1 and span >= num_devices
    node = LinkLevel(
        name="node",
        span=num_devices if one_node else span,
        bandwidth_bytes_s=min(row.node_bandwidth_bytes_s for row in rows),
        latency_s=max(row.node_latency_s for row in rows),
    )
    if one_node:
        return (node,)
    network = LinkLevel(
        name="network",
        span=num_devices,
        bandwidth_bytes_s=min(row.network_bandwidth_bytes_s for row in rows),
        latency_s=max(row.network_latency_s for row in rows),
    )
    return (network,) if span == 1 else (node, network)


def _override(cluster: Cluster, override: str, text: str) -> Cluster:
    name, _, value = (part.strip() for part in override.partition("="))
    names = list(dict.fromkeys(link.name for link in _all_links(cluster)))
    where = f"cluster {text!r}"
    if name not in names:
        raise InputError(
            f"{where}: expected @LINK=GB/s with a link of {', '.join(names)}, found {override!r}; "
            + _EXAMPLES
        )
    bandwidth_bytes_s = _number(value, f"{where}, @{name}", positive=True) * 1e9

    def changed(link: LinkLevel) -> LinkLevel:
        return replace(link, bandwidth_bytes_s=bandwidth_bytes_s) if link.name == name else link

    return with_links(cluster, changed)


def with_links(cluster: Cluster, changed: Callable[[LinkLevel], LinkLevel]) -> Cluster:
    """The cluster with every level of links changed, those inside groups too."""
    return replace(
        cluster,
        groups=tuple(
            replace(group, links=tuple(map(changed, group.links))) for group in cluster.groups
        ),
        links=tuple(map(changed, cluster.links)),
    )


def resized(cluster: Cluster, *, nodes: int, devices_per_node: int | None = None) -> Cluster:
    """The same kind of devices and links in another number of nodes; by default as large.

    Links keep their bandwidth and latency. Processes on a CPU stay on one host. A cluster of one
    node has the network its devices usually come with. Raises InputError for a cluster of several
    groups.
    """
    if len(cluster.groups) > 1:
        raise InputError(
            f"cluster {cluster.spec}: expected devices of one kind in nodes of one size, found "
            f"{len(cluster.groups)} groups; give a cluster spec for every size instead"
        )
    group = cluster.groups[0]
    own = devices_per_node or group.devices_per_node
    if group.device.kind == "cpu":
        nodes, own = 1, nodes * own
    return named(refitted((replace(group, nodes=nodes, devices_per_node=own),), cluster.links))


def refitted(groups: tuple[DeviceGroup, ...], known: tuple[LinkLevel, ...]) -> Cluster:
    """The groups with links like those that are known, which span as many devices as there are."""
    total = sum(group.num_devices for group in groups)
    by_name = {link.name: link for link in known}
    usual = _usual_links(groups)
    own = len(groups) == 1 or all(group.links for group in groups)
    if by_name.keys() <= {"node", "network"} and own:
        links = tuple(replace(by_name.get(u.name, u), span=u.span) for u in usual)
    else:
        inner = tuple(link for link in known if link.span < total)
        outer = next((link for link in known if link.span >= total), known[-1])
        links = (*(link for link in inner if link != outer), replace(outer, span=total))
    return Cluster(groups=groups, links=links)


def priced(cluster: Cluster, prices: Mapping[str, float]) -> Cluster:
    """The cluster with prices of a device and hour, by device. Raises InputError for one that it
    has not."""
    has = [group.device.name for group in cluster.groups]
    for name in prices:
        if name not in has:
            raise InputError(
                f"price {name}: cluster {cluster.spec} has no such device; it has {', '.join(has)}"
            )
    return replace(
        cluster,
        groups=tuple(
            replace(
                group,
                device=replace(
                    group.device,
                    price_per_hour=prices.get(group.device.name, group.device.price_per_hour),
                ),
            )
            for group in cluster.groups
        ),
    )


def parts(cluster: Cluster) -> tuple[Cluster, ...]:
    """The parts of a cluster that may be used alone, the fewest devices first: of each kind of
    device 1, 2, 4 and so on of a node, or of whole nodes, up to all; and everything."""
    found = []
    for group in cluster.groups:
        own = alone(group, cluster)
        found += [
            resized(own, nodes=1, devices_per_node=count)
            for count in _doubled(group.devices_per_node)[:-1]
        ]
        found += [resized(own, nodes=count) for count in _doubled(group.nodes)]
    if len(cluster.groups) > 1:
        found.append(cluster)
    return tuple(sorted(found, key=lambda part: part.num_devices))


def alone(group: DeviceGroup, cluster: Cluster) -> Cluster:
    """One group of a cluster as a cluster: with its own links where it has such."""
    return Cluster(groups=(replace(group, links=()),), links=group.links or cluster.links)


def _doubled(most: int) -> list[int]:
    return sorted({*(2**k for k in range(most.bit_length())), most})


def named(cluster: Cluster) -> Cluster:
    """The cluster with the spec that describes it."""
    return replace(cluster, spec=cluster_text(cluster))


def _with_memory_limit(cluster: Cluster, limit_bytes: int) -> Cluster:
    if limit_bytes <= 0:
        raise InputError(f"memory limit: expected more than 0 bytes, found {limit_bytes}")

    def limited(device: DeviceSpec) -> DeviceSpec:
        # what a CPU process may use is the user's choice, not a property of the device
        own = limit_bytes if device.kind == "cpu" else device.memory_bytes
        return replace(device, memory_bytes=min(own, limit_bytes))

    groups = tuple(replace(group, device=limited(group.device)) for group in cluster.groups)
    return replace(cluster, groups=groups)


def _from_file(path: Path) -> Cluster:
    where = f"cluster file {path}"
    try:
        document = yaml.safe_load(path.read_text())  # JSON is YAML
    except OSError as error:
        raise InputError(f"{where}: cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise InputError(f"{where}: neither YAML nor JSON: {error}") from error
    fields = _fields(document, where, required=("groups",), optional=("links",))
    groups = _items(fields["groups"], f"{where}, groups", _file_group)
    if "links" in fields:
        links = _items(fields["links"], f"{where}, links", _file_link)
        _check_spans(links, sum(group.num_devices for group in groups), where)
        return named(Cluster(groups=groups, links=links))
    usual = _with_usual_links(groups)
    kept = (replace(u, links=g.links or u.links) for g, u in zip(groups, usual.groups, strict=True))
    return named(replace(usual, groups=tuple(kept)))


def _file_group(item: object, where: str) -> DeviceGroup:
    required = ("device", "nodes", "devices_per_node")
    optional = ("memory_gib", "price_per_hour", "links")
    fields = _fields(item, where, required=required, optional=optional)
    device = _device(str(fields["device"]), where)
    if "price_per_hour" in fields:
        price = _number(fields["price_per_hour"], f"{where}, price_per_hour", positive=True)
        device = replace(device, price_per_hour=price)
    if "memory_gib" in fields:
        memory_gib = _number(fields["memory_gib"], f"{where}, memory_gib", positive=True)
        device = replace(device, memory_bytes=int(memory_gib * GIB))
    group = DeviceGroup(
        device=device,
        nodes=_count(fields["nodes"], f"{where}, nodes"),
        devices_per_node=_count(fields["devices_per_node"], f"{where}, devices_per_node"),
    )
    if "links" not in fields:
        return group
    links = _items(fields["links"], f"{where}, links", _file_link)
    _check_spans(links, group.num_devices, where)
    return replace(group, links=links)


def _file_link(item: object, where: str) -> LinkLevel:
    required = ("name", "span", "bandwidth_gb_s", "latency_us")
    fields = _fields(item, where, required=required)
    bandwidth_gb_s = _number(fields["bandwidth_gb_s"], f"{where}, bandwidth_gb_s", positive=True)
    return LinkLevel(
        name=str(fields["name"]),
        span=_count(fields["span"], f"{where}, span"),
        bandwidth_bytes_s=bandwidth_gb_s * 1e9,
        latency_s=_number(fields["latency_us"], f"{where}, latency_us") * 1e-6,
    )


def _check_spans(links: tuple[LinkLevel, ...], num_devices: int, where: str) -> None:
    spans = [link.span for link in links]
    grow = all(inner < outer for inner, outer in pairwise(spans))
    nested = all(outer % inner == 0 for inner, outer in pairwise(spans[:-1]))
    if not grow or not nested or spans[-1] != num_devices:
        raise InputError(
            f"{where}, links: expected spans that grow, each but the last a multiple of the one "
            f"before, the last one all {num_devices} devices; found {spans}"
        )


def _items(value: object, where: str, read: Callable[[object, str], _T]) -> tuple[_T, ...]:
    if not isinstance(value, list) or not value:
        raise InputError(f"{where}: expected a list of at least one item, found {value!r}")
    return tuple(read(item, f"{where}[{i}]") for i, item in enumerate(value))


def _fields(
    value: object, where: str, *, required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{where}: expected the keys {', '.join(required)}, found {value!r}")
    missing = [key for key in required if key not in value]
    unknown = [str(key) for key in value if key not in required + optional]
    if missing or unknown:
        problems = [f"missing {', '.join(missing)}"] * bool(missing)
        problems += [f"unknown {', '.join(unknown)}"] * bool(unknown)
        expected = ", ".join((*required, *(f"[{key}]" for key in optional)))
        raise InputError(f"{where}: {'; '.join(problems)}; expected the keys {expected}")
    return value


def _count(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{where}: expected a whole number of at least 1, found {value!r}")
    return value


def _number(value: object, where: str, *, positive: bool = False) -> float:
    try:
        number = float(str(value))
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0 or (positive and number == 0):
        least = "above 0" if positive else "of at least 0"
        raise InputError(f"{where}: expected a number {least}, found {value!r}")
    return number
