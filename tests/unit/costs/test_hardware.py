from __future__ import annotations

import pytest

from autopar.costs.hardware import DEVICES, GIB, HardwareRow
from autopar.ir.graph import DTYPE_BYTES

FLOAT8 = {"float8_e4m3fn", "float8_e5m2"}


@pytest.mark.parametrize("row", DEVICES.values(), ids=DEVICES)
def test_rows_are_complete_and_plausible(row: HardwareRow) -> None:
    device, links = row.device, row.links
    assert DEVICES[device.name] is row
    assert device.name == device.name.lower()
    assert device.source
    assert links.source
    assert device.kind in {"cuda", "cpu"}
    assert 2 * GIB <= device.memory_bytes <= 288 * GIB
    assert 0.5 <= device.matmul_efficiency <= 1
    assert {dtype for dtype, _ in device.peak_flops} <= {*DTYPE_BYTES, *FLOAT8}
    assert device.flops("float32") <= max(rate for _, rate in device.peak_flops)
    assert 1e-6 <= device.kernel_launch_s <= 1e-5
    assert 1 <= row.devices_per_node <= 8
    assert links.node_bandwidth_bytes_s > links.network_bandwidth_bytes_s > 0
    assert links.node_bandwidth_bytes_s < device.memory_bandwidth_bytes_s
    assert 0 < links.node_latency_s < links.network_latency_s < 1e-3


def test_published_figures() -> None:
    h100 = DEVICES["h100-sxm"].device
    assert h100.memory_bytes == 80 * 2**30
    assert h100.flops("bfloat16") == 989e12
    assert h100.matmul_efficiency == pytest.approx(794.5 / 989, abs=1e-3)
    assert h100.memory_bandwidth_bytes_s == 3.35e12
    assert DEVICES["a100-80gb"].device.flops("float16") == 312e12
    assert DEVICES["gb200"].links.scale_up_devices == 72


def test_a_dtype_without_units_runs_at_the_slowest_rate() -> None:
    assert DEVICES["v100-32gb"].device.flops("bfloat16") == 15.7e12
    assert DEVICES["v100-32gb"].device.flops("float16") == 125e12


@pytest.mark.parametrize(
    "name",
    [
        "a100-40gb",
        "a100-80gb",
        "a100-pcie-80gb",
        "h100-sxm",
        "h100-pcie",
        "h200-sxm",
        "b200",
        "b300",
        "gb200",
        "mi300x",
        "mi325x",
        "mi250x",
        "v100-32gb",
        "v100-16gb",
        "l40s",
        "a10g",
        "rtx4090",
        "rtx3090",
        "cpu",
    ],
)
def test_names_that_specs_may_use(name: str) -> None:
    assert name in DEVICES
