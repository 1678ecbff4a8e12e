"""The ways to use a cluster: orders of its groups, and devices left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.costs.arrangements import arrangements
from autopar.costs.clusters import parse_cluster


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8:h100-sxm", ["8:h100-sxm"]),
        ("64x8:h100-sxm", ["64x8:h100-sxm"]),
        ("7:h100-sxm", ["7:h100-sxm", "6:h100-sxm", "4:h100-sxm"]),
        ("12x8:h100-sxm", ["12x8:h100-sxm", "8x8:h100-sxm"]),
        ("local:7", ["local:7"]),
        (
            "4:h100-sxm+4:a100-80gb",
            [
                "4:h100-sxm+4:a100-80gb",
                "4:a100-80gb+4:h100-sxm",
                "4:h100-sxm",
                "4:a100-80gb",
            ],
        ),
        ("4:h100-sxm+4:h100-sxm@network=5", ["4:h100-sxm+4:h100-sxm@network=5", "4:h100-sxm"]),
    ],
)
def test_offered(text: str, expected: list[str]) -> None:
    assert [each.cluster.spec for each in arrangements(parse_cluster(text))] == expected


def test_every_rank_is_on_the_device_it_is_said_to_be() -> None:
    cluster = parse_cluster("3x2:h100-sxm+2:a100-80gb")
    for each in arrangements(cluster):
        assert len(set(each.devices)) == each.cluster.num_devices
        for rank, device in enumerate(each.devices):
            assert each.cluster.device(rank) == cluster.device(device)
        assert each.cluster.links[-1].span == each.cluster.num_devices
    assert any(each.devices == (6, 7, 0, 1, 2, 3, 4, 5) for each in arrangements(cluster))


def test_devices_do_not_move_against_the_nodes_that_they_share() -> None:
    """Groups without links of their own, two devices of either in each node of four."""
    cluster = parse_cluster("2x4:rtx3090")
    half = replace(cluster.groups[0], nodes=1, devices_per_node=2)
    other = replace(half, device=replace(half.device, memory_bytes=1))
    mixed = replace(cluster, groups=(half, replace(other, devices_per_node=6)))
    offered = [each.devices for each in arrangements(mixed)]
    assert (0, 1) in offered
    assert all(devices[0] == 0 for devices in offered)
