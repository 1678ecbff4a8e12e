from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.costs.clusters import cluster_text, parse_cluster, resized
from autopar.costs.hardware import DEVICES, GIB
from autopar.errors import InputError


@pytest.mark.parametrize(
    ("text", "devices", "levels"),
    [
        ("local:1", 1, [("node", 1)]),
        ("local:4", 4, [("node", 4)]),
        ("8:h100-sxm", 8, [("node", 8)]),
        ("8x8:h100-sxm", 64, [("node", 8), ("network", 64)]),
        ("2048x8:h100-sxm", 16384, [("node", 8), ("network", 16384)]),
        ("4x1:a10g", 4, [("network", 4)]),
        ("4:h100-sxm+4:a100-80gb", 8, [("node", 4), ("network", 8)]),
        ("8:h100-sxm+2x4:a100-80gb", 16, [("node", 4), ("network", 16)]),
        ("18x4:gb200", 72, [("node", 72)]),
        ("36x4:gb200", 144, [("node", 72), ("network", 144)]),
        ("4:gb200+4:b200", 8, [("node", 4), ("network", 8)]),
        ("8x8:h100-sxm@network=12.5", 64, [("node", 8), ("network", 64)]),
        ("8x8:h100-sxm@node=200@network=12.5", 64, [("node", 8), ("network", 64)]),
    ],
)
def test_text_round_trip(text: str, devices: int, levels: list[tuple[str, int]]) -> None:
    cluster = parse_cluster(text)
    assert cluster.num_devices == devices
    assert [(link.name, link.span) for link in cluster.links] == levels
    assert cluster_text(cluster) == cluster.spec == text
    assert parse_cluster(cluster.spec) == cluster


@pytest.mark.parametrize(
    ("text", "same_as"),
    [
        ("1x8:h100-sxm", "8:h100-sxm"),
        (" 8:H100-SXM ", "8:h100-sxm"),
        ("1x4:h100-sxm + 1x4:a100-80gb", "4:h100-sxm+4:a100-80gb"),
        ("4:cpu", "local:4"),
        ("2x8:h100-sxm@node=427", "2x8:h100-sxm"),
        ("2x8:h100-sxm @ network = 10", "2x8:h100-sxm@network=10"),
    ],
)
def test_spellings_of_one_cluster(text: str, same_as: str) -> None:
    assert parse_cluster(text) == parse_cluster(same_as)
    assert parse_cluster(text).spec == same_as


def test_ranks_are_numbered_group_by_group() -> None:
    cluster = parse_cluster("4:h100-sxm+2x2:a100-80gb")
    names = [cluster.device(rank).name for rank in range(8)]
    assert names == ["h100-sxm"] * 4 + ["a100-80gb"] * 4


def test_links_of_mixed_groups_are_the_slowest() -> None:
    node, network = parse_cluster("4:h100-sxm+4:a100-80gb").links
    slow, fast = DEVICES["a100-80gb"].links, DEVICES["h100-sxm"].links
    assert node.bandwidth_bytes_s == slow.node_bandwidth_bytes_s < fast.node_bandwidth_bytes_s
    assert node.latency_s == slow.node_latency_s > fast.node_latency_s
    assert network.bandwidth_bytes_s == slow.network_bandwidth_bytes_s


def test_overrides_set_bandwidth_only() -> None:
    usual, changed = parse_cluster("2x8:h100-sxm"), parse_cluster("2x8:h100-sxm@network=10")
    assert changed.links[0] == usual.links[0]
    assert changed.links[1].bandwidth_bytes_s == 10e9
    assert changed.links[1].latency_s == usual.links[1].latency_s


def test_memory_limit() -> None:
    limit = 10 * GIB
    assert parse_cluster("8:h100-sxm", limit).device(0).memory_bytes == limit
    assert parse_cluster("8:h100-sxm", 100 * GIB).device(0).memory_bytes == 80 * GIB
    assert parse_cluster("local:2").device(1).memory_bytes == 2 * GIB
    assert parse_cluster("local:2", limit).device(1).memory_bytes == limit
    with pytest.raises(InputError, match="more than 0"):
        parse_cluster("local:2", 0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", "has to be resolved"),
        ("", r"expected \[NODESx\]DEVICES:DEVICE"),
        ("h100-sxm", r"expected \[NODESx\]DEVICES:DEVICE"),
        ("8x:h100-sxm", "found '8x:h100-sxm'"),
        ("8x8x8:h100-sxm", "found '8x8x8:h100-sxm'"),
        ("-1:h100-sxm", "found '-1:h100-sxm'"),
        ("8:h100-sxm+", "found ''"),
        ("0:h100-sxm", "at least 1"),
        ("0x8:h100-sxm", "at least 1"),
        ("local:0", "at least 1"),
        ("8:h100-sxn", "did you mean h100-sxm"),
        ("8:h100", "h100-sxm, h100-pcie|h100-pcie, h100-sxm"),
        ("8:qqqq", "devices: a100-40gb"),
        ("8:h100-sxm@network=3", "a link of node, found 'network=3'"),
        ("2x8:h100-sxm@net=3", "a link of node, network, found 'net=3'"),
        ("2x8:h100-sxm@network", "number above 0, found ''"),
        ("2x8:h100-sxm@network=fast", "number above 0, found 'fast'"),
        ("2x8:h100-sxm@network=0", "number above 0, found '0'"),
        ("2x8:h100-sxm@network=nan", "number above 0"),
        ("/nowhere/cluster.yaml", "cannot be read"),
    ],
)
def test_malformed_text(text: str, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        parse_cluster(text)
    if text != "/nowhere/cluster.yaml" and "@" not in text and "at least" not in expected:
        with pytest.raises(InputError, match="example"):
            parse_cluster(text)


GROUPS = [
    {"device": "h100-sxm", "nodes": 4, "devices_per_node": 8},
    {"device": "a100-80gb", "nodes": 4, "devices_per_node": 8, "memory_gib": 70},
]
LINKS = [
    {"name": "node", "span": 8, "bandwidth_gb_s": 300, "latency_us": 10},
    {"name": "rail", "span": 32, "bandwidth_gb_s": 40, "latency_us": 30},
    {"name": "spine", "span": 64, "bandwidth_gb_s": 10, "latency_us": 50},
]


def write(folder: Path, document: object) -> str:
    path = folder / "cluster.json"
    path.write_text(json.dumps(document))
    return str(path)


def test_json_file(tmp_path: Path) -> None:
    cluster = parse_cluster(write(tmp_path, {"groups": GROUPS, "links": LINKS}))
    assert cluster.num_devices == 64
    assert cluster.device(0).memory_bytes == 80 * GIB
    assert cluster.device(63).memory_bytes == 70 * GIB
    assert [link.name for link in cluster.links] == ["node", "rail", "spine"]
    assert cluster.links[1].bandwidth_bytes_s == 40e9
    assert cluster.links[1].latency_s == pytest.approx(30e-6)
    assert cluster.spec.startswith("4x8:h100-sxm+4x8:a100-80gb@node=300@rail=40")
    assert str(tmp_path) not in cluster.spec


def test_yaml_file_without_links_has_the_usual_ones(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("groups:\n  - {device: h100-sxm, nodes: 2, devices_per_node: 8}\n")
    assert parse_cluster(str(path)) == parse_cluster("2x8:h100-sxm")


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ([], "expected the keys groups"),
        ({"group": GROUPS}, r"missing groups; unknown group; expected the keys groups, \[links\]"),
        ({"groups": []}, "groups: expected a list of at least one"),
        ({"groups": ["h100-sxm"]}, r"groups\[0\]: expected the keys device"),
        ({"groups": [GROUPS[0] | {"nodes": 0}]}, r"groups\[0\], nodes: expected a whole number"),
        ({"groups": [GROUPS[0] | {"nodes": True}]}, "expected a whole number"),
        ({"groups": [GROUPS[0] | {"device": "h100-sx"}]}, "did you mean h100-sxm"),
        ({"groups": [GROUPS[0] | {"memory_gib": "much"}]}, "memory_gib: expected a number"),
        ({"groups": GROUPS, "links": LINKS[:2]}, r"all 64 devices; found \[8, 32\]"),
        ({"groups": GROUPS, "links": LINKS[::-1]}, "spans that grow"),
        (
            {"groups": GROUPS, "links": [LINKS[0], LINKS[1] | {"span": 12}, LINKS[2]]},
            "multiple of the one before",
        ),
        ({"groups": GROUPS, "links": [LINKS[2] | {"bandwidth_gb_s": 0}]}, "bandwidth_gb_s"),
        ({"groups": GROUPS, "links": [LINKS[2] | {"latency_us": -1}]}, "latency_us"),
    ],
)
def test_malformed_files(tmp_path: Path, document: object, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        parse_cluster(write(tmp_path, document))


def test_a_file_that_is_no_yaml(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yml"
    path.write_text("groups: [")
    with pytest.raises(InputError, match="neither YAML nor JSON"):
        parse_cluster(str(path))


@pytest.mark.parametrize(
    ("text", "nodes", "per_node", "expected"),
    [
        ("8:h100-sxm", 4, None, "4x8:h100-sxm"),
        ("4x8:h100-sxm@network=25", 2, None, "2x8:h100-sxm@network=25"),
        ("4x8:h100-sxm@network=25", 1, None, "8:h100-sxm"),
        ("4x8:h100-sxm@node=100", 1, 2, "2:h100-sxm@node=100"),
        ("18x4:gb200", 36, None, "36x4:gb200"),
        ("local:4", 1, 2, "local:2"),
    ],
)
def test_resized(text: str, nodes: int, per_node: int | None, expected: str) -> None:
    found = resized(parse_cluster(text), nodes=nodes, devices_per_node=per_node)
    assert found == parse_cluster(expected)


def test_resizing_keeps_the_levels_of_a_file(tmp_path: Path) -> None:
    cluster = parse_cluster(
        str(write(tmp_path, {"groups": [GROUPS[0] | {"nodes": 8}], "links": LINKS}))
    )
    names = [link.name for link in cluster.links]
    whole = cluster.groups[0].nodes
    spans = {n: [link.span for link in resized(cluster, nodes=n).links] for n in (1, whole, 16)}
    assert spans == {1: [8], whole: [8, 32, 64], 16: [8, 32, 128]}
    assert [link.name for link in resized(cluster, nodes=16).links] == names
    assert resized(cluster, nodes=whole) == cluster


def test_resizing_groups_of_several_kinds_is_refused() -> None:
    with pytest.raises(InputError, match=r"expected devices of one kind .* found 2 groups"):
        resized(parse_cluster("4:h100-sxm+4:a100-80gb"), nodes=2)
