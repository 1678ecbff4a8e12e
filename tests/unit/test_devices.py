"""The devices at hand: what is measured is kept, and a plan made with it does not change."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from autopar import devices
from autopar.compiler import PlanOptions, load_source, plan_source
from autopar.costs import measure
from autopar.costs.clusters import parse_cluster
from autopar.costs.hardware import DEVICES
from autopar.errors import InputError
from autopar.plan.fingerprint import check_cluster
from autopar.plan.serialize import to_json

GIB = 2**30


@pytest.fixture
def measured(monkeypatch):
    """Measurements made so far, by number of workers; each finds a machine faster than the last."""
    made = []

    def measure_device(*, workers):
        made.append(workers)
        return replace(
            DEVICES["cpu"].device,
            memory_bytes=6 * GIB,
            peak_flops=(("float32", 1e11 * len(made) / 3), ("float64", 2e10)),
        )

    monkeypatch.setattr(measure, "measure_device", measure_device)
    return made


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_measurement_is_kept(measured, tmp_path):
    said = []
    first = devices.measured_cluster(
        "local:4", cache=tmp_path, progress=lambda what, done: said.append(what)
    )
    again = devices.measured_cluster(
        "local:4", cache=tmp_path, progress=lambda what, done: said.append(what)
    )
    assert first == again
    assert first.device(3).flops("float32") == pytest.approx(1e11 / 3)
    assert (first.spec, first.num_devices) == ("local:4", 4)
    assert first.links == parse_cluster("local:4").links
    assert (measured, said) == ([4], ["measuring this machine"])
    assert len(files(tmp_path)) == 1


def test_processes_share_the_cores_of_this_machine(measured, tmp_path, monkeypatch):
    monkeypatch.setattr(devices.os, "cpu_count", lambda: 2)
    slowdowns = [
        devices.measured_cluster(f"local:{count}", cache=tmp_path).slowdown for count in (1, 2, 3)
    ]
    assert slowdowns == [1.0, 1.0, 1.5]
    assert parse_cluster("local:4").slowdown == parse_cluster("2x8:h100-sxm").slowdown == 1.0


def test_it_holds_for_one_machine_and_number_of_processes(measured, tmp_path, monkeypatch):
    devices.measured_cluster("local:4", cache=tmp_path)
    devices.measured_cluster("local:2", cache=tmp_path)
    monkeypatch.setattr(devices, "_processor", lambda: "another")
    devices.measured_cluster("local:4", cache=tmp_path)
    assert measured == [4, 2, 4]
    assert len(files(tmp_path)) == 3


def _edited(text, **figures):
    data = json.loads(text)
    data["device"] |= figures
    return json.dumps(data)


BROKEN = {
    "empty": lambda text: "",
    "truncated": lambda text: text[: len(text) // 2],
    "no text": lambda text: "\0",
    "a list": lambda text: "[]",
    "deep": lambda text: "[" * 100_000,
    "of another machine": lambda text: text.replace('"workers": 4', '"workers": 3'),
    "no device": lambda text: text.replace('"device"', '"devices"'),
    "unknown field": lambda text: _edited(text, colour=1),
    "wrong kind": lambda text: _edited(text, memory_bytes="much"),
    "no rates": lambda text: _edited(text, peak_flops={}),
    "zero rate": lambda text: _edited(text, peak_flops={"float32": 0.0}),
    "negative bandwidth": lambda text: _edited(text, memory_bandwidth_bytes_s=-1.0),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_file_is_measured_anew(measured, tmp_path, broken):
    devices.measured_cluster("local:4", cache=tmp_path)
    (path,) = files(tmp_path)
    path.write_text(broken(path.read_text()))
    second = devices.measured_cluster("local:4", cache=tmp_path)
    assert measured == [4, 4]
    assert devices.measured_cluster("local:4", cache=tmp_path) == second
    assert measured == [4, 4]


def test_where_nothing_can_be_kept_it_still_measures(measured, tmp_path):
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    cluster = devices.measured_cluster("local:2", cache=in_the_way / "cache")
    assert cluster.device(0).memory_bytes == 6 * GIB


def test_only_local_processes_are_measured(measured, tmp_path):
    for spec in ("2x8:h100-sxm", "local:2+8:h100-sxm", "2x4:cpu"):
        assert devices.measured_cluster(spec, cache=tmp_path) == parse_cluster(spec)
    assert measured == []
    with pytest.raises(InputError, match="no device 'h1000'"):
        devices.measured_cluster("8:h1000", cache=tmp_path)


def test_a_file_may_say_how_much_memory_there_is(measured, tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text("groups: [{device: cpu, nodes: 1, devices_per_node: 2, memory_gib: 3}]")
    cluster = devices.measured_cluster(str(path), cache=tmp_path / "cache")
    assert (measured, cluster.device(1).memory_bytes) == ([2], 3 * GIB)


@pytest.mark.parametrize(
    ("value", "folder"),
    [("/cache", "/cache/autopar"), ("cache", "/home/me/.cache/autopar"), ("", None), (None, None)],
)
def test_the_cache_folder_is_the_users(monkeypatch, value, folder):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if value is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert str(devices._cache_folder()) == (folder or "/home/me/.cache/autopar")


def test_auto_is_the_cores_where_there_is_no_gpu(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(devices.os, "cpu_count", lambda: 6)
    assert devices.resolve(" auto ") == "local:6"
    assert devices.resolve("8:h100-sxm") == "8:h100-sxm"


@pytest.mark.parametrize(
    ("name", "memory_gib", "row"),
    [
        ("NVIDIA H100 80GB HBM3", 79.1, "h100-sxm"),
        ("NVIDIA H100 PCIe", 79.2, "h100-pcie"),
        ("NVIDIA H200", 139.8, "h200-sxm"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", 79.3, "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", 79.3, "a100-pcie-80gb"),
        ("NVIDIA B200", 178.4, "b200"),
        ("NVIDIA GB200", 184.3, "gb200"),
        ("Tesla V100-SXM2-16GB", 15.8, "v100-16gb"),
        ("NVIDIA GeForce RTX 4090", 23.6, "rtx4090"),
        ("AMD Instinct MI300X", 191.7, "mi300x"),
    ],
)
def test_a_gpu_is_found_in_the_table_by_its_own_name(name, memory_gib, row):
    assert devices._table_name(name, int(memory_gib * GIB)) == row


def test_a_gpu_that_the_table_does_not_have():
    with pytest.raises(InputError, match="has Quadro P400, which the table of devices does not"):
        devices._table_name("Quadro P400", 2 * GIB)


def test_a_plan_for_a_measured_machine_stays_the_same(measured, tmp_path):
    source, options = load_source("mlp"), PlanOptions(time_limit_s=300)
    texts = []
    for _ in range(2):
        cluster = devices.measured_cluster("local:2", cache=tmp_path)
        plan = plan_source(source, cluster, options).plan
        texts.append(to_json(plan))
    assert texts[0] == texts[1]
    assert plan.cluster.spec == "local:2"
    assert plan.cluster.device(0).flops("float32") == pytest.approx(1e11 / 3)
    # rates decide how fast a plan is, not whether it can be run
    check_cluster(plan, parse_cluster("local:2"))
    for path in files(tmp_path):
        path.unlink()
    check_cluster(plan, devices.measured_cluster("local:2", cache=tmp_path))
