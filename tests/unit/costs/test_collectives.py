from __future__ import annotations

import statistics
from itertools import pairwise, product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar.costs.clusters import parse_cluster
from autopar.costs.collectives import (
    FILL,
    FILL_BYTES,
    AlphaBeta,
    ClusterCollectives,
    CollectiveModel,
    axis_collective_time_s,
    axis_route,
    collective_time_s,
    hierarchical_time_s,
    step_s,
)
from autopar.ir.cluster import Axis, Cluster, LinkLevel
from autopar.ir.collective import CollectiveOp

AR, AG = CollectiveOp.ALL_REDUCE, CollectiveOp.ALL_GATHER
RS, A2A = CollectiveOp.REDUCE_SCATTER, CollectiveOp.ALL_TO_ALL
SEND = CollectiveOp.SEND_RECV
GROUP_OPS = (AR, AG, RS, A2A)


def two_level(nodes: int = 2, per_node: int = 8, latency_s: float = 0.0) -> Cluster:
    """Nodes with links of 100 bytes/s inside and 10 outside."""
    size = nodes * per_node
    return Cluster(
        groups=parse_cluster(f"{nodes}x{per_node}:h100-sxm").groups,
        links=(
            LinkLevel(name="node", span=per_node, bandwidth_bytes_s=100, latency_s=latency_s),
            LinkLevel(name="network", span=size, bandwidth_bytes_s=10, latency_s=10 * latency_s),
        ),
    )


def axis(size: int, stride: int = 1, name: str = "a") -> Axis:
    return Axis(name=name, size=size, stride=stride)


def test_alpha_beta_gives_the_closed_forms_of_alpa() -> None:
    """Alpa, playground/auto_sharding_solver: its objectives for 2- and 12-layer MLPs."""
    model = AlphaBeta(alpha={"a": 1}, beta={"a": 1}, sizes={"a": 4})
    one = model.time_s(AR, 128 * 128 * 4, "a")
    assert one == pytest.approx(98305.01)
    assert 2 * one == pytest.approx(196610, rel=1e-3)
    assert model.time_s(AR, 128 * 1024 * 4, "a") == pytest.approx(786433, rel=1e-3)
    gather = 1 + 3 / 4 * 4096 + 0.001
    assert model.time_s(AG, 4096, "a") == pytest.approx(gather)
    assert model.time_s(RS, 4096, "a") == pytest.approx(gather)
    assert model.time_s(A2A, 4096, "a") == pytest.approx(gather)
    assert model.time_s(SEND, 4096, "a") == pytest.approx(4097)


@pytest.mark.parametrize(("n0", "n1", "objective"), [(4, 8, 26872), (8, 4, 58330), (3, 4, 46314)])
def test_alpha_beta_on_two_axes(n0: int, n1: int, objective: float) -> None:
    """Alpa's 2-layer MLP, batch 1024, hidden 128, beta 1 and 0.01, on three meshes."""
    model = AlphaBeta(alpha={"x": 1, "y": 1}, beta={"x": 1, "y": 0.01}, sizes={"x": n0, "y": n1})
    weights = model.time_s(AR, 128 * 128 * 4 / n1, "x")
    activations = model.time_s(AR, 1024 * 128 * 4 / n0, "y")
    assert 2 * weights + activations == pytest.approx(objective, rel=1e-3)


def test_one_level_is_latency_and_ring() -> None:
    link = LinkLevel(name="l", span=8, bandwidth_bytes_s=1000, latency_s=0.5)
    once = 0.5 * (1 + FILL * 800 / (800 + FILL_BYTES))
    assert collective_time_s(AR, 800, 8, link) == pytest.approx(4 * once + 2 * 7 / 8 * 0.8)
    for op in (AG, RS, A2A):
        assert collective_time_s(op, 800, 8, link) == pytest.approx(4 * once + 7 / 8 * 0.8)
    assert collective_time_s(SEND, 800, 2, link) == pytest.approx(once + 0.8)


def test_a_step_takes_longer_once_a_message_fills_its_buffers() -> None:
    link = LinkLevel(name="l", span=8, bandwidth_bytes_s=1000, latency_s=0.5)
    assert step_s(link, 0) == 0.5
    assert step_s(link, FILL_BYTES) == pytest.approx(0.5 * (1 + FILL / 2))
    assert step_s(link, 1e12) == pytest.approx(0.5 * (1 + FILL), rel=1e-4)


def test_a_group_of_one_costs_nothing() -> None:
    cluster = two_level(latency_s=1)
    alpha_beta = AlphaBeta(alpha={"a": 1}, beta={"a": 1}, sizes={"a": 1})
    for op in CollectiveOp:
        assert collective_time_s(op, 1e9, 1, cluster.links[0]) == 0
        assert axis_collective_time_s(op, 1e9, axis(1), cluster) == 0
        assert alpha_beta.time_s(op, 1e9, "a") == 0


def test_levels_of_an_axis() -> None:
    cluster = two_level(nodes=4, per_node=8)

    def levels(size: int, stride: int, first: int = 0) -> list[tuple[str, int]]:
        route = axis_route(axis(size, stride), cluster, first)
        return [(hop.link.name, hop.size) for hop in route.levels]

    assert levels(8, 1) == [("node", 8)]
    assert levels(8, 1, first=8) == [("node", 8)]
    assert levels(4, 8) == [("network", 4)]
    assert levels(16, 1) == [("node", 8), ("network", 2)]
    assert levels(8, 4) == [("node", 2), ("network", 4)]
    assert levels(4, 4) == [("node", 2), ("network", 2)]
    assert levels(12, 1) == [("network", 12)]  # 8 and 4: uneven, so flat
    assert levels(8, 1, first=4) == [("node", 4), ("network", 2)]


def test_hierarchical_all_reduce_by_hand() -> None:
    """16 ranks, 8 a node: 7/4 of the bytes inside, 2 * 1/2 of an eighth of them outside."""
    cluster = two_level(latency_s=1e-3)
    inside_s, outside_s = 2 * 7 / 8 * 800 / 100, 2 * 1 / 2 * (800 / 8) / 10
    expected = 4 * 1e-3 + 2 * 1e-2 + max(inside_s, outside_s)
    assert axis_collective_time_s(AR, 800, axis(16), cluster) == pytest.approx(expected)
    flat = 5 * 1e-2 + 2 * 15 / 16 * 800 / 10
    assert collective_time_s(AR, 800, 16, cluster.links[1]) == pytest.approx(flat)


def test_hierarchical_all_to_all_by_hand() -> None:
    """Of a buffer of 16 parts, 7 stay in the node and 8 leave it."""
    expected = max(800 * 7 / 16 / 100, 800 * 8 / 16 / 10)
    assert axis_collective_time_s(A2A, 800, axis(16), two_level()) == pytest.approx(expected)


def test_sends_go_over_the_slowest_neighbouring_link() -> None:
    cluster = two_level()
    assert axis_collective_time_s(SEND, 100, axis(8), cluster) == pytest.approx(1)
    assert axis_collective_time_s(SEND, 100, axis(2, 8), cluster) == pytest.approx(10)
    assert axis_collective_time_s(SEND, 100, axis(16), cluster) == pytest.approx(10)


def test_an_axis_is_priced_on_its_slowest_group() -> None:
    cluster = two_level(nodes=2, per_node=6)
    axes = (axis(3, stride=4, name="outer"), axis(4, name="inner"))
    inside = axis_collective_time_s(AR, 800, axes[1], cluster, first_rank=0)
    across = axis_collective_time_s(AR, 800, axes[1], cluster, first_rank=4)
    assert across > inside
    assert ClusterCollectives(cluster, axes).time_s(AR, 800, "inner") == across
    aligned = ClusterCollectives(two_level(nodes=2, per_node=4), (axes[1], axis(2, 4, "outer")))
    assert aligned.time_s(AR, 800, "inner") == inside


def test_both_models_are_collective_models() -> None:
    models: tuple[CollectiveModel, ...] = (
        AlphaBeta(alpha={"a": 1}, beta={"a": 1}, sizes={"a": 2}),
        ClusterCollectives(two_level(), (axis(2),)),
    )
    for model in models:
        assert model.time_s(AR, 1, "a") > 0
        with pytest.raises(KeyError):
            model.time_s(AR, 1, "b")


CLUSTERS = ("2x8:h100-sxm", "3x4:a100-80gb", "4x1:a10g", "18x4:gb200", "36x4:gb200", "local:6")


@settings(max_examples=100, deadline=None)
@given(
    spec=st.sampled_from(CLUSTERS),
    op=st.sampled_from(list(CollectiveOp)),
    group=st.builds(Axis, name=st.just("a"), size=st.integers(1, 6), stride=st.integers(1, 4)),
    first=st.integers(0, 3),
    nbytes=st.tuples(st.floats(0, 1e10), st.floats(0, 1e10)),
)
def test_time_grows_with_bytes_and_never_exceeds_flat(
    spec: str, op: CollectiveOp, group: Axis, first: int, nbytes: tuple[float, float]
) -> None:
    cluster = parse_cluster(spec)
    assume(group.ranks(first)[-1] < cluster.num_devices)
    route = axis_route(group, cluster, first)
    time_s = route.time_s(op, min(nbytes))
    assert route.time_s(op, max(nbytes)) >= time_s >= 0
    if op is not SEND and group.size > 1:
        flat_s = collective_time_s(op, min(nbytes), group.size, route.flat.link)
        by_level_s = hierarchical_time_s(op, min(nbytes), route.levels)
        assert time_s == min(flat_s, by_level_s)


@pytest.mark.parametrize("spec", [*CLUSTERS, "2x4:h100-sxm+3x2:a100-80gb"])
def test_a_route_is_made_of_the_links_between_its_ranks(spec: str) -> None:
    cluster = parse_cluster(spec)
    for size, stride, first in product(range(2, 9), range(1, 6), range(4)):
        ranks = axis(size, stride).ranks(first)
        if ranks[-1] >= cluster.num_devices:
            continue
        route = axis_route(axis(size, stride), cluster, first)
        pairs = {cluster.link(pair) for pair in pairwise(ranks)}
        assert route.neighbour == max(pairs, key=cluster.levels.index)
        inside = [{rank // hop.link.span for rank in ranks} for hop in route.levels]
        if len(route.levels) > 1:
            parts = [size, *map(len, inside)]
            assert [hop.size for hop in route.levels] == [a // b for a, b in pairwise(parts)]
            assert route.levels[-1].link == route.flat.link == cluster.link(ranks)


@pytest.mark.parametrize("op", GROUP_OPS)
def test_reduce_scatter_and_all_gather_make_an_all_reduce(op: CollectiveOp) -> None:
    cluster = two_level()
    parts = [axis_collective_time_s(each, 800, axis(16), cluster) for each in (RS, AG)]
    assert sum(parts) == pytest.approx(axis_collective_time_s(AR, 800, axis(16), cluster))
    assert axis_collective_time_s(op, 0, axis(16), cluster) == 0


# Microseconds of an all-reduce of 1, 2, 4, ... 1024 MiB, as nccl-tests all_reduce_perf measured it.
# A100: github.com/stas00/ml-engineering network/README.md; H100: github.com/awslabs/
# awsome-distributed-training micro-benchmarks, p5.48xlarge, one and two nodes.
MEASURED_US = {
    "8:a100-80gb": "101.9 101.4 101.5 133.5 276.6 424.0 684.6 1327.6 2420.6 4218.4 8203.9",
    "8:h100-sxm": "28.56 43.45 55.44 84.29 124.0 198.6 326.6 592.8 1121.4 2165.3 4253.0",
    "2x8:h100-sxm": "123.2 147.2 168.6 204.8 298.1 439.7 601.5 870.3 1468.2 2559.2 4607.6",
}


@pytest.mark.parametrize("spec", MEASURED_US)
def test_close_to_measured_all_reduces(spec: str) -> None:
    cluster = parse_cluster(spec)
    errors = []
    for power, measured_us in enumerate(map(float, MEASURED_US[spec].split())):
        nbytes = 2.0 ** (20 + power)
        time_s = axis_collective_time_s(AR, nbytes, axis(cluster.num_devices), cluster)
        errors.append(abs(time_s * 1e6 - measured_us) / measured_us)
    assert statistics.median(errors) < 0.15
    assert max(errors) < 0.45  # 8 MiB on 8 x A100, which fills its buffers sooner than others
