"""How long a collective takes.

Alpha-beta per level of links: a collective over n ranks takes 1 + log2(n) steps of the link's
latency (one to start, then a tree) plus what a ring moves over the link's bandwidth (Thakur et al.
2005; the "bus bandwidth" of nccl-tests). Small messages take the latency alone; larger ones are cut
into chunks that have to fill every step's buffers before the last arrives, which takes up to `FILL`
latencies more. Bytes are those of `ir.collective.Collective`: the whole
tensor of an all-reduce, all-gather or reduce-scatter, one rank's buffer of an all-to-all, the
message of a send.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm, log2, prod
from typing import Protocol

from autopar.ir.cluster import Axis, Cluster, LinkLevel
from autopar.ir.collective import CollectiveOp

RING_PASSES: dict[CollectiveOp, int] = {
    CollectiveOp.ALL_REDUCE: 2,
    CollectiveOp.ALL_GATHER: 1,
    CollectiveOp.REDUCE_SCATTER: 1,
    CollectiveOp.ALL_TO_ALL: 1,
}
"""How often (n - 1) / n of the bytes pass each link. A send passes all of its bytes once."""


FILL = 2.5
"""Latencies more that a step takes for a message much longer than `FILL_BYTES`."""

FILL_BYTES = 4e6
"""Bytes of a message for half of them. Both are fitted to nccl-tests: `benchmarks/collectives.py`
lists the sources and how far off the times are."""


class CollectiveModel(Protocol):
    """What the planner asks for: the time of a collective over one mesh axis."""

    def time_s(self, op: CollectiveOp, nbytes: float, axis_name: str) -> float:
        """Seconds that `op` on `nbytes` takes over the axis; 0 for an axis of one rank."""
        ...


def collective_time_s(op: CollectiveOp, nbytes: float, group_size: int, link: LinkLevel) -> float:
    """Seconds of `op` over `group_size` ranks that all communicate through one level of links."""
    if group_size == 1:
        return 0.0
    if op is CollectiveOp.SEND_RECV:
        return step_s(link, nbytes) + nbytes / link.bandwidth_bytes_s
    moved_bytes = RING_PASSES[op] * (group_size - 1) / group_size * nbytes
    return _steps(group_size) * step_s(link, nbytes) + moved_bytes / link.bandwidth_bytes_s


def step_s(link: LinkLevel, nbytes: float) -> float:
    """Seconds of one step of a collective on `nbytes` besides moving them."""
    return link.latency_s * (1 + FILL * nbytes / (nbytes + FILL_BYTES))


def _steps(group_size: int) -> float:
    return 1 + log2(group_size)


class LinkTimes(Protocol):
    """Measured times of collectives; `costs.profiles.Profile` is one."""

    def link_s(
        self, op: CollectiveOp, nbytes: float, ranks: int, level: str, packed: int
    ) -> float | None:
        """Seconds of `op` over a group of `ranks` whose slowest link is `level` and of which
        `packed` at a time share the next faster one; None where it was not measured."""
        ...

    def wait_s(self, ranks: int, level: str, packed: int) -> float:
        """Seconds that such ranks wait for each other where they come to a collective from compute;
        0 where it was not measured."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Hop:
    """One level of a hierarchical collective: `size` parts are joined through `link`."""

    link: LinkLevel
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """How the ranks of one group reach each other.

    `flat` joins all through the slowest level needed; `levels` joins them level by level, fastest
    first (one hop where the ranks do not fall evenly into nodes); `neighbour` is the slowest link
    between two consecutive ranks.
    """

    flat: Hop
    levels: tuple[Hop, ...]
    neighbour: LinkLevel

    @property
    def packed(self) -> int:
        """How many of the ranks at a time share links faster than the slowest needed."""
        return prod(hop.size for hop in self.levels[:-1])

    @property
    def group(self) -> tuple[int, str, int]:
        """What measured times are kept by: the ranks, the slowest level of links, `packed`."""
        return self.flat.size, self.flat.link.name, self.packed

    def time_s(self, op: CollectiveOp, nbytes: float, measured: LinkTimes | None = None) -> float:
        """Seconds of `op`: as measured, else the better of flat and level by level, as NCCL
        chooses."""
        if self.flat.size == 1:
            return 0.0
        sends = op is CollectiveOp.SEND_RECV
        if measured is not None:
            group = (2, self.neighbour.name, 1) if sends else self.group
            if (found := measured.link_s(op, nbytes, *group)) is not None:
                return found
        if sends:
            return collective_time_s(op, nbytes, 2, self.neighbour)
        flat_s = collective_time_s(op, nbytes, self.flat.size, self.flat.link)
        return min(flat_s, hierarchical_time_s(op, nbytes, self.levels))


def hierarchical_time_s(op: CollectiveOp, nbytes: float, levels: Sequence[Hop]) -> float:
    """Seconds of `op` done level by level.

    An all-reduce reduce-scatters in the node, all-reduces across nodes and all-gathers in the node,
    so that each level outward moves its fraction of the bytes; an all-to-all sends every part over
    the level its receiver is behind. Chunks stream through the levels (as in NCCL's rings and
    trees), so that the slowest level sets the pace while latencies add up. Each device is taken to
    have its own share of the slow links, hence concurrent groups do not slow each other.
    """
    ranks = prod(hop.size for hop in levels)
    latency_s, transfer_s, inner = 0.0, 0.0, 1
    for hop in levels:
        if op is CollectiveOp.ALL_TO_ALL:
            moved_bytes = nbytes * inner * (hop.size - 1) / ranks
        else:
            moved_bytes = RING_PASSES[op] * (hop.size - 1) / hop.size * nbytes / inner
        latency_s += _steps(hop.size) * step_s(hop.link, nbytes)
        transfer_s = max(transfer_s, moved_bytes / hop.link.bandwidth_bytes_s)
        inner *= hop.size
    return latency_s + transfer_s


def axis_route(axis: Axis, cluster: Cluster, first_rank: int = 0) -> Route:
    """The route of the group along `axis` through device `first_rank`."""
    cluster, start = cluster.around(axis.ranks(first_rank))
    ranks = axis.ranks(first_rank - start)
    flat = Hop(link=cluster.link(ranks), size=axis.size)
    return Route(
        flat=flat,
        levels=_levels(ranks, cluster) or (flat,),
        neighbour=_slowest_pair(ranks, cluster, flat.link),
    )


def _slowest_pair(ranks: tuple[int, ...], cluster: Cluster, joining: LinkLevel) -> LinkLevel:
    """The slowest link between consecutive ranks: the one `joining` all, unless some pairs have
    links of their own."""
    if _alike_everywhere(cluster):
        return joining
    pairs = (cluster.link(pair) for pair in pairwise(ranks))
    return max(pairs, key=cluster.levels.index, default=joining)


def _alike_everywhere(cluster: Cluster) -> bool:
    """Whether no group has links of its own beside those of others."""
    return len(cluster.groups) == 1 or not any(group.links for group in cluster.groups)


def _levels(ranks: tuple[int, ...], cluster: Cluster) -> tuple[Hop, ...]:
    """Hops of more than one part, fastest first; none where the parts are uneven."""
    hops, parts = [], list(ranks)  # by one rank of each
    for link in cluster.links:
        joined = Counter(rank // link.span for rank in parts)
        sizes = set(joined.values())
        if len(sizes) > 1:
            return ()
        if (size := sizes.pop()) > 1:
            hops.append(Hop(link=link, size=size))
        parts = [place * link.span for place in joined]
    return tuple(hops)


def axis_collective_time_s(
    op: CollectiveOp,
    nbytes: float,
    axis: Axis,
    cluster: Cluster,
    first_rank: int = 0,
    measured: LinkTimes | None = None,
) -> float:
    """Seconds of `op` over the group along `axis` through device `first_rank`.

    For a send: from a rank to the next along the axis, over the slowest such link.
    """
    return axis_route(axis, cluster, first_rank).time_s(op, nbytes, measured)


class ClusterCollectives:
    """Collectives over the axes of a mesh laid out on a cluster.

    The mesh holds the devices `first_rank + sum(i_a * stride_a)`. An axis is priced on the slowest
    of its groups: where nodes are not a multiple of it, some groups cross nodes and some do not.
    `measured` times go before those of the model.
    """

    def __init__(
        self,
        cluster: Cluster,
        axes: Sequence[Axis],
        first_rank: int = 0,
        measured: LinkTimes | None = None,
    ) -> None:
        self._measured = measured
        self._times: dict[tuple[CollectiveOp, float, str], float] = {}
        self._routes = {axis.name: axis_routes(axis, axes, cluster, first_rank) for axis in axes}

    def routes(self, axis_name: str) -> tuple[Route, ...]:
        """The distinct routes of an axis's groups. KeyError for an unknown axis."""
        return self._routes[axis_name]

    def time_s(self, op: CollectiveOp, nbytes: float, axis_name: str) -> float:
        """Seconds of `op` over the slowest group of the axis. KeyError for an unknown axis."""
        key = (op, nbytes, axis_name)
        if key not in self._times:
            routes = self._routes[axis_name]
            self._times[key] = max(route.time_s(op, nbytes, self._measured) for route in routes)
        return self._times[key]

    def wait_s(self, axis_name: str) -> float:
        """Seconds that the ranks of a group wait for each other where they come to a collective
        from compute, as far as it was measured. KeyError for an unknown axis."""
        if self._measured is None:
            return 0.0
        return max(self._measured.wait_s(*route.group) for route in self._routes[axis_name])


def axis_routes(
    axis: Axis, axes: Sequence[Axis], cluster: Cluster, first_rank: int
) -> tuple[Route, ...]:
    """The distinct routes of the groups along `axis`.

    The last level spans everything, so a route depends on its first rank modulo the other spans;
    where groups have links of their own, on the group too.
    """
    period = cluster.num_devices
    if _alike_everywhere(cluster):
        period = lcm(*(link.span for link in cluster.links[:-1]))
    firsts = {first_rank % period}
    for other in axes:
        if other.name != axis.name:
            steps = {i * other.stride % period for i in range(min(other.size, period))}
            firsts = {(first + step) % period for first in firsts for step in steps}
    return tuple(dict.fromkeys(axis_route(axis, cluster, first) for first in sorted(firsts)))


@dataclass(frozen=True, kw_only=True, slots=True)
class AlphaBeta:
    """Collectives with given `alpha` (s) and `beta` (s per byte) for each axis.

    The closed forms of Alpa's solver (Zheng et al. 2022): an all-reduce takes
    `alpha + beta * 2 (n - 1) / n * b + all_reduce_extra_s`; an all-gather or reduce-scatter
    `alpha + beta * (n - 1) / n * b + other_extra_s`; an all-to-all the same on one rank's buffer,
    of which (n - 1) / n leaves the rank; a send `alpha + beta * b`. The extras break ties towards
    fewer collectives.
    """

    alpha: Mapping[str, float]
    beta: Mapping[str, float]
    sizes: Mapping[str, int]
    all_reduce_extra_s: float = 0.01
    other_extra_s: float = 0.001

    def time_s(self, op: CollectiveOp, nbytes: float, axis_name: str) -> float:
        """Seconds of `op` over the axis. KeyError for an unknown axis."""
        size, alpha, beta = self.sizes[axis_name], self.alpha[axis_name], self.beta[axis_name]
        if size == 1:
            return 0.0
        if op is CollectiveOp.SEND_RECV:
            return alpha + beta * nbytes
        extra_s = self.all_reduce_extra_s if op is CollectiveOp.ALL_REDUCE else self.other_extra_s
        return alpha + beta * RING_PASSES[op] * (size - 1) / size * nbytes + extra_s
